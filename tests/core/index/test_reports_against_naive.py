"""The index agrees with a naive dictionary under any stream of reports, whatever is lost, repeated or reordered."""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.core.index.naive_index import NaiveIndex, block_at, chain, chains_of

from vertumnus.core.index import (
    CacheReport,
    Cleared,
    PrefixIndex,
    Removed,
    Snapshot,
    Stored,
    ViewState,
)

DEGREES = (1, 2, 4)
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple)
PICK = st.integers(0, 10_000)


@dataclass
class RealWorker:
    """A cache that reports what happens to it, over a line that may misbehave."""

    epoch: int = 0
    sequence: int = 0
    resident: set[tuple[int, ...]] = field(default_factory=set)
    line: deque[CacheReport] = field(default_factory=deque)


class ReportStreams(RuleBasedStateMachine):
    """Workers store, evict, clear, restart, come and go; their reports come late, twice, in another order or never."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(degrees=DEGREES, block_tokens=16)
        self.naive = NaiveIndex()
        self.workers: dict[int, RealWorker] = {}
        self.next_worker_id = 0
        self.past: list[CacheReport] = []
        for _ in range(3):
            self.join(degree=DEGREES[self.next_worker_id % 3], epoch=0)

    @precondition(lambda self: len(self.workers) < 5)
    @rule(degree=st.sampled_from(DEGREES), epoch=st.integers(0, 2))
    def join(self, degree: int, epoch: int) -> None:
        self.index.add_worker(self.next_worker_id, degree, epoch)
        self.naive.add_worker(self.next_worker_id, degree, epoch)
        self.workers[self.next_worker_id] = RealWorker(epoch=epoch)
        self.next_worker_id += 1

    @precondition(lambda self: len(self.workers) > 1)
    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        worker_id = self._worker_id(pick)
        self.index.remove_worker(worker_id)
        self.naive.remove_worker(worker_id)
        del self.workers[worker_id]

    @rule(pick=PICK, path=PATHS, start=st.integers(0, 6))
    def store(self, pick: int, path: tuple[int, ...], start: int) -> None:
        worker_id, worker = self._worker(pick)
        start = min(start, len(path) - 1)
        worker.resident |= {path[: k + 1] for k in range(start, len(path))}
        parent = block_at(path[:start]) if start else None
        self._report(worker, Stored(**self._header(worker_id), parent=parent, blocks=chain(path, start)))

    @rule(pick=PICK, picks=st.lists(PICK, min_size=1, max_size=4))
    def evict(self, pick: int, picks: list[int]) -> None:
        worker_id, worker = self._worker(pick)
        held = sorted(worker.resident)
        evicted = list(dict.fromkeys(held[p % len(held)] for p in picks)) if held else [(9,)]
        worker.resident -= set(evicted)
        self._report(worker, Removed(**self._header(worker_id), blocks=tuple(map(block_at, evicted))))

    @rule(pick=PICK)
    def clear(self, pick: int) -> None:
        worker_id, worker = self._worker(pick)
        worker.resident.clear()
        self._report(worker, Cleared(**self._header(worker_id)))

    @rule(pick=PICK)
    def snapshot(self, pick: int) -> None:
        worker_id, worker = self._worker(pick)
        chains = chains_of(worker.resident)
        self._report(worker, Snapshot(**self._header(worker_id), chains=chains[::-1] if pick % 2 else chains))

    @rule(pick=PICK)
    def restart(self, pick: int) -> None:
        _, worker = self._worker(pick)
        worker.epoch, worker.sequence = worker.epoch + 1, 0
        worker.resident.clear()

    @rule(pick=PICK)
    def deliver_all(self, pick: int) -> None:
        _, worker = self._worker(pick)
        while worker.line:
            self._deliver(worker.line.popleft())

    @rule(pick=PICK, which=PICK)
    def deliver_out_of_order(self, pick: int, which: int) -> None:
        _, worker = self._worker(pick)
        if worker.line:
            worker.line.rotate(-(which % len(worker.line)))
            self._deliver(worker.line.popleft())

    @rule(pick=PICK)
    def lose_one(self, pick: int) -> None:
        _, worker = self._worker(pick)
        if worker.line:
            worker.line.popleft()

    @precondition(lambda self: self.past)
    @rule(pick=PICK)
    def deliver_again(self, pick: int) -> None:
        self._deliver(self.past[pick % len(self.past)])

    @rule(pick=PICK)
    def recover(self, pick: int) -> None:
        """Whatever happened, once all is delivered and a fresh snapshot with it, the index knows what is there."""
        worker_id, worker = self._worker(pick)
        self.snapshot(pick)
        worker.line = deque(sorted(worker.line, key=lambda report: (report.epoch, report.sequence)))
        self.deliver_all(pick)
        assert self.index.view_state(worker_id) is ViewState.EXACT
        assert self.index.resident_blocks(worker_id) == len(worker.resident)
        assert all(self.index.holds(worker_id, block_at(path)) for path in worker.resident)

    @invariant()
    def agrees(self) -> None:
        index, naive = self.index, self.naive
        index.check_invariants()
        known = naive.known()
        assert index.num_blocks == len(known)
        assert index.num_parked_blocks == len(naive.parent) - len(known)
        for worker_id, worker in naive.workers.items():
            assert index.view_state(worker_id) is worker.state
            assert index.resident_blocks(worker_id) == len(worker.resident)
        for block in naive.parent:
            assert index.holders(block) == naive.holders(block)
            assert index.replica_holders(block) == naive.replica_holders(block)
            for degree in DEGREES:
                assert index.replica_count(block, degree) == naive.replica_count(block, degree)

    @rule(path=PATHS)
    def match(self, path: tuple[int, ...]) -> None:
        hashes = chain(path)
        match, matched = self.index.match(iter(hashes)), self.naive.match(hashes)
        assert match.num_blocks == len(matched)
        expected = [0] * self.index.num_slots
        for worker_id, worker in self.naive.workers.items():
            held = [block in worker.resident for block in matched]
            expected[self.index.slot_of(worker_id)] = held.index(False) if False in held else len(held)
            missing = [k for k, is_held in enumerate(held) if not is_held]
            assert self.index.missing_blocks(worker_id, match) == missing
        assert match.reusable_blocks.tolist() == expected

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        for worker_id in self.workers:
            self.index.remove_worker(worker_id)
        self.index.check_invariants()
        assert self.index.num_blocks == self.index.num_parked_blocks == 0
        assert self.index._trie.sets.num_sets == 0
        assert not self.index._trie.stranded
        assert not self.index.resident_blocks_by_slot.any()

    def _worker_id(self, pick: int) -> int:
        return sorted(self.workers)[pick % len(self.workers)]

    def _worker(self, pick: int) -> tuple[int, RealWorker]:
        worker_id = self._worker_id(pick)
        return worker_id, self.workers[worker_id]

    def _header(self, worker_id: int) -> dict[str, int]:
        worker = self.workers[worker_id]
        worker.sequence += 1
        return {"worker_id": worker_id, "epoch": worker.epoch, "sequence": worker.sequence - 1}

    def _report(self, worker: RealWorker, report: CacheReport) -> None:
        worker.line.append(report)
        if len(worker.line) == 1 and report.sequence % 3:  # most reports simply arrive
            self._deliver(worker.line.popleft())

    def _deliver(self, report: CacheReport) -> None:
        self.past.append(report)
        assert self.index.apply(report, 0.0) is self.naive.apply(report)


TestReportStreams = ReportStreams.TestCase
TestReportStreams.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
