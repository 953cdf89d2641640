"""The prefix index as a handful of dictionaries: slow, obvious, and the oracle of the tests."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from vertumnus.core.index import (
    CacheReport,
    Cleared,
    Removed,
    ReplicationSettings,
    ReportOutcome,
    Stored,
    ViewState,
)


def block_at(path: Sequence[int]) -> bytes:
    """The chained hash of a path of a tree whose children are numbered."""
    return blake2b(bytes(path), digest_size=16).digest()


def chain(path: Sequence[int], start: int = 0) -> tuple[bytes, ...]:
    """The blocks of a path below its first `start` ones."""
    return tuple(block_at(path[: k + 1]) for k in range(start, len(path)))


def chains_of(paths: Iterable[tuple[int, ...]]) -> tuple[tuple[bytes | None, tuple[bytes, ...]], ...]:
    """A set of blocks, given as paths, as one chain of one block each."""
    return tuple((block_at(path[:-1]) if len(path) > 1 else None, (block_at(path),)) for path in sorted(paths))


@dataclass
class NaiveWorker:
    degree: int
    epoch: int
    next_sequence: int = 0
    highest_seen: int = -1
    state: ViewState = ViewState.EXACT
    resident: set[bytes] = field(default_factory=set)


class NaiveIndex:
    """Residency per worker and one parent per block; everything else is worked out from scratch when asked."""

    def __init__(self) -> None:
        self.workers: dict[int, NaiveWorker] = {}
        self.parent: dict[bytes, bytes | None] = {}
        self.access: dict[tuple[bytes, int], float] = {}
        self.missed: dict[tuple[bytes, int], float] = {}

    def add_worker(self, worker_id: int, degree: int, epoch: int) -> None:
        self.workers[worker_id] = NaiveWorker(degree, epoch)

    def remove_worker(self, worker_id: int) -> None:
        del self.workers[worker_id]
        self._forget_dead()

    def apply(self, report: CacheReport) -> ReportOutcome:
        worker = self.workers.get(report.worker_id)
        if worker is None:
            return ReportOutcome.UNKNOWN_WORKER
        if report.epoch < worker.epoch:
            return ReportOutcome.STALE_EPOCH
        if report.epoch > worker.epoch:
            worker.__init__(worker.degree, report.epoch)  # type: ignore[misc]
            self._forget_dead()
        if report.sequence < worker.next_sequence:
            return ReportOutcome.DUPLICATE
        seen = max(worker.highest_seen, report.sequence)
        if isinstance(report, (Stored, Removed)) and (
            worker.state is ViewState.DEGRADED or report.sequence != worker.next_sequence
        ):
            worker.highest_seen, worker.state = seen, ViewState.DEGRADED
            return ReportOutcome.GAP
        is_latest = report.sequence == seen
        worker.highest_seen, worker.next_sequence = seen, report.sequence + 1
        worker.state = ViewState.EXACT if is_latest else ViewState.DEGRADED
        if isinstance(report, Stored):
            self._store(worker, report.parent, report.blocks)
        elif isinstance(report, Removed):
            worker.resident -= set(report.blocks)
        elif isinstance(report, Cleared):
            worker.resident.clear()
        else:
            worker.resident.clear()
            for parent, blocks in report.chains:
                self._store(worker, parent, blocks)
        self._forget_dead()
        return ReportOutcome.APPLIED if is_latest else ReportOutcome.GAP

    def _store(self, worker: NaiveWorker, parent: bytes | None, blocks: Iterable[bytes]) -> None:
        for block in blocks:
            assert self.parent.setdefault(block, parent) == parent
            worker.resident.add(block)
            parent = block

    def _forget_dead(self) -> None:
        alive: set[bytes] = set()
        for worker in self.workers.values():
            for block in worker.resident:
                above: bytes | None = block
                while above is not None and above in self.parent and above not in alive:
                    alive.add(above)
                    above = self.parent[above]
        self.parent = {block: parent for block, parent in self.parent.items() if block in alive}
        known = self.known()
        self.access = {key: value for key, value in self.access.items() if key[0] in known}
        self.missed = {key: value for key, value in self.missed.items() if key[0] in known}

    def path(self, block: bytes) -> list[bytes] | None:
        """The blocks from the root to this one; None if the way up is not known."""
        path = [block]
        while True:
            if path[-1] not in self.parent:
                return None
            above = self.parent[path[-1]]
            if above is None:
                return path[::-1]
            path.append(above)

    def known(self) -> set[bytes]:
        """The blocks whose place in the trie is known."""
        return {block for block in self.parent if self.path(block) is not None}

    def match(self, hashes: Iterable[bytes]) -> list[bytes]:
        matched: list[bytes] = []
        known = self.known()
        for block in hashes:
            if block not in known or self.parent[block] != (matched[-1] if matched else None):
                break
            matched.append(block)
        return matched

    def holders(self, block: bytes) -> tuple[int, ...]:
        return tuple(sorted(w for w, worker in self.workers.items() if block in worker.resident))

    def replica_holders(self, block: bytes) -> tuple[int, ...]:
        path = self.path(block)
        if path is None:
            return ()
        return tuple(sorted(w for w, worker in self.workers.items() if worker.resident.issuperset(path)))

    def replica_count(self, block: bytes, degree: int) -> int:
        return sum(1 for w in self.replica_holders(block) if self.workers[w].degree == degree)

    def record_access(self, hashes: Iterable[bytes], degree: int) -> None:
        """Algorithm 1, line 1, transcribed."""
        for block in self.match(hashes):
            self.access[block, degree] = self.access.get((block, degree), 0.0) + 1.0

    def record_missed(self, hashes: Iterable[bytes], degree: int, benefit_s: Sequence[float]) -> None:
        """Algorithm 1, line 2, transcribed; benefit_s[k] is the marginal benefit of block k of the path."""
        for k, block in enumerate(self.match(hashes)):
            if self.replica_count(block, degree) == 0:
                self.missed[block, degree] = self.missed.get((block, degree), 0.0) + benefit_s[k]

    def candidates(self, settings: ReplicationSettings, degrees: Iterable[int]) -> dict[str, set[tuple[bytes, int]]]:
        """Algorithm 2's candidate lists, transcribed."""
        lists: dict[str, set[tuple[bytes, int]]] = {"inter": set(), "intra": set(), "reclaim": set()}
        for block in self.known():
            for degree in degrees:
                replicas = self.replica_count(block, degree)
                access = self.access.get((block, degree), 0.0)
                if replicas == 0:
                    if self.missed.get((block, degree), 0.0) > settings.theta_inter_s:
                        lists["inter"].add((block, degree))
                elif access > replicas * settings.theta_intra:
                    lists["intra"].add((block, degree))
                elif access < replicas * settings.theta_reclaim:
                    lists["reclaim"].add((block, degree))
        return lists

    def decay(self, factor: float) -> None:
        self.access = {key: value * factor for key, value in self.access.items()}
        self.missed = {key: value * factor for key, value in self.missed.items()}
