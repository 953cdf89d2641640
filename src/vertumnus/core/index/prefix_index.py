"""The global prefix index: what every worker's cache holds, as far as its reports tell, and what is in demand.

The reports decide alone: a replica becomes visible when its `Stored` arrives, and disappears when its `Removed` does.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.index.candidates import paper_candidates
from vertumnus.core.index.holder_sets import slots_of
from vertumnus.core.index.nodes import HASH_BYTES, ROOT
from vertumnus.core.index.parked import ParkedBlocks
from vertumnus.core.index.replication import CopiesInFlight, CopyPlan, PoolLoad, ReplicationSettings, ScanResult
from vertumnus.core.index.reports import (
    CacheReport,
    Chain,
    Cleared,
    Removed,
    ReportOutcome,
    Snapshot,
    Stored,
    ViewState,
)
from vertumnus.core.index.scan import Scan
from vertumnus.core.index.trie import Trie
from vertumnus.errors import ConfigError, InvariantError

FloatArray = NDArray[np.float64]

DEFAULT_MAX_PARKED_BLOCKS = 65_536
_HASH_SIZES = frozenset({HASH_BYTES})


@dataclass(frozen=True, slots=True)
class Match:
    """The longest known part of a chain of block hashes (MatchedPath), whoever holds it; for the index as it is now."""

    nodes: NDArray[np.int32]
    """The row of every matched block; meaningful to the index only."""
    reusable_blocks: NDArray[np.int32]
    """Per worker slot, how many blocks of the path it holds completely from the root on (0 for a vacant slot)."""
    run_starts: list[int]
    """The path as stretches of equal holders: where each starts."""
    run_sets: list[int]
    """The holder set of each stretch; meaningful to the index only."""
    version: int

    @property
    def num_blocks(self) -> int:
        """Matched blocks."""
        return len(self.nodes)


@dataclass(slots=True)
class _View:
    """What the index believes about one worker."""

    worker_id: int
    slot: int
    epoch: int
    next_sequence: int = 0
    """The lowest sequence number that would tell something new."""
    highest_seen: int = -1
    """The highest sequence number of this epoch that has arrived, applied or not."""
    state: ViewState = ViewState.EXACT


class PrefixIndex:
    """The trie of all workers' caches, fed by their reports.

    A gap in a worker's reports degrades its view: what is known stays usable (a wrong hit costs a mispredicted
    prefill, since the pool reuses what is really there), further `Stored` and `Removed` are counted and not applied,
    until a `Snapshot` or `Cleared` that is no older than anything seen makes the view exact again. A report of a newer
    epoch means a restart: all entries go, and the view is exact only if nothing was missed since (sequence 0, or a
    `Snapshot` or `Cleared`).

    Blocks that cannot be represented (not 16 bytes, all zero, or known below another parent) are refused together with
    what follows in their chain, and counted as `rejected`.
    """

    def __init__(
        self,
        *,
        degrees: Sequence[int],
        block_tokens: int,
        max_parked_blocks: int = DEFAULT_MAX_PARKED_BLOCKS,
    ) -> None:
        if not degrees or min(degrees) < 1 or len(set(degrees)) != len(degrees):
            raise ConfigError(f"degrees is {list(degrees)}; accepted: at least one, all different, each 1 or more")
        if block_tokens < 1:
            raise ConfigError(f"block_tokens is {block_tokens}; accepted: 1 or more")
        if max_parked_blocks < 0:
            raise ConfigError(f"max_parked_blocks is {max_parked_blocks}; accepted: 0 or more")
        self.block_tokens = block_tokens
        self.counts: Counter[str] = Counter()
        """What was not taken: `rejected`, `unheld` and `parked_dropped` blocks, and reports by outcome."""
        self.copies = CopiesInFlight()
        self._trie = Trie(degrees)
        self._parked = ParkedBlocks(max_parked_blocks)
        self._views: dict[int, _View] = {}
        self._slots: dict[int, int] = {}
        """Worker -> slot."""
        self._worker_by_slot: list[int | None] = []
        self._vacant_slots: list[int] = []
        self._origin_s: float | None = None

    # Workers

    @property
    def num_slots(self) -> int:
        """Length of the per-slot vectors."""
        return len(self._worker_by_slot)

    @property
    def num_blocks(self) -> int:
        """Blocks in the trie, each counted once however many workers hold it."""
        return self._trie.nodes.num_nodes

    @property
    def num_parked_blocks(self) -> int:
        """Blocks that wait for their parent."""
        return len(self._parked)

    @property
    def num_bytes(self) -> int:
        """Memory of the columns, which is nearly all of it."""
        return self._trie.nodes.num_bytes

    @property
    def resident_blocks_by_slot(self) -> NDArray[np.int64]:
        """Blocks resident at the worker of each slot, parked ones included; at least `num_slots` long. Read only."""
        return self._trie.resident_blocks

    def add_worker(self, worker_id: int, degree: int, epoch: int = 0) -> int:
        """A new, empty worker; returns its slot, a small number that is reused once the worker is removed."""
        if worker_id in self._views:
            raise ConfigError(f"worker_id {worker_id} is in use; accepted: a worker that is not in the index")
        if degree not in self._trie.degree_index:
            known = ", ".join(map(str, self._trie.degrees))
            raise ConfigError(f"degree is {degree}; accepted: {known}")
        if self._vacant_slots:
            slot = self._vacant_slots.pop()
            self._worker_by_slot[slot] = worker_id
        else:
            slot = len(self._worker_by_slot)
            self._worker_by_slot.append(worker_id)
            self._trie.reserve_slot(slot)
        degree_index = self._trie.degree_index[degree]
        self._trie.sets.assign_slot(slot, degree_index)
        self._trie.version += 1
        self._views[worker_id] = _View(worker_id, slot, epoch)
        self._slots[worker_id] = slot
        return slot

    def remove_worker(self, worker_id: int) -> None:
        """The worker leaves and takes all its entries along."""
        view = self._view(worker_id)
        self._clear(view)
        self.copies.forget_worker(worker_id)
        self._trie.sets.vacate_slot(view.slot)
        self._worker_by_slot[view.slot] = None
        self._vacant_slots.append(view.slot)
        del self._views[worker_id], self._slots[worker_id]

    def slot_of(self, worker_id: int) -> int:
        """The worker's place in per-slot vectors."""
        return self._view(worker_id).slot

    def view_state(self, worker_id: int) -> ViewState:
        """Whether all that the worker reported is known."""
        return self._view(worker_id).state

    def degraded_workers(self) -> tuple[int, ...]:
        """The workers to be asked for a Snapshot, by id."""
        return tuple(sorted(w for w, view in self._views.items() if view.state is ViewState.DEGRADED))

    def resident_blocks(self, worker_id: int) -> int:
        """Blocks resident at the worker, parked ones included."""
        return int(self._trie.resident_blocks[self._view(worker_id).slot])

    def holds(self, worker_id: int, block: bytes) -> bool:
        """Whether the block is resident at the worker, as a replica or not."""
        return bool(self._resident_mask(block) >> self._view(worker_id).slot & 1)

    def holders(self, block: bytes) -> tuple[int, ...]:
        """The workers where the block is resident (copy sources), by id."""
        return self._workers_in(self._resident_mask(block))

    def replica_holders(self, block: bytes) -> tuple[int, ...]:
        """The workers that hold the complete prefix that ends at the block, by id."""
        row = self._trie.nodes.find(block)
        return self._workers_in(self._trie.sets.masks[self._trie.nodes.holder_set.cells[row]])

    def replica_count(self, block: bytes, degree: int) -> int:
        """ReplicaCount: workers of this degree that hold the complete prefix that ends at the block."""
        row = self._trie.nodes.find(block)
        return self._trie.sets.count(self._trie.nodes.holder_set.cells[row], self._trie.degree_index[degree])

    # Reports

    def apply(self, report: CacheReport, now_s: float) -> ReportOutcome:
        """Takes a report in. After GAP the caller asks the worker for a Snapshot."""
        if self._origin_s is None:
            self._origin_s = now_s
        outcome = self._apply(report, now_s - self._origin_s)
        if outcome is not ReportOutcome.APPLIED:
            self.counts[outcome.value] += 1
        return outcome

    def _apply(self, report: CacheReport, stored_s: float) -> ReportOutcome:
        view = self._views.get(report.worker_id)
        if view is None:
            return ReportOutcome.UNKNOWN_WORKER
        if report.epoch != view.epoch:
            if report.epoch < view.epoch:
                return ReportOutcome.STALE_EPOCH
            self._clear(view)
            view.epoch, view.next_sequence, view.highest_seen = report.epoch, 0, -1
            view.state = ViewState.EXACT
        sequence = report.sequence
        if sequence < view.next_sequence:
            return ReportOutcome.DUPLICATE
        is_whole = isinstance(report, (Snapshot, Cleared))
        if not is_whole and (sequence > view.next_sequence or view.state is ViewState.DEGRADED):
            view.highest_seen = max(view.highest_seen, sequence)
            view.state = ViewState.DEGRADED
            return ReportOutcome.GAP
        # A whole view that is older than reports already counted and not applied is progress, not exactness.
        is_behind = sequence < view.highest_seen
        view.highest_seen = max(view.highest_seen, sequence)
        view.next_sequence = sequence + 1
        if is_whole:
            view.state = ViewState.DEGRADED if is_behind else ViewState.EXACT
        if isinstance(report, Stored):
            self._store(view, report.parent, report.blocks, stored_s)
            self._trim_parked(None)
        elif isinstance(report, Removed):
            self._remove(view, report.blocks)
        elif isinstance(report, Cleared):
            self._clear(view)
        else:
            self._replace(view, report.chains, stored_s)
        return ReportOutcome.APPLIED if view.state is ViewState.EXACT else ReportOutcome.GAP

    def _store(self, view: _View, parent: bytes | None, blocks: tuple[bytes, ...], stored_s: float) -> None:
        if not _HASH_SIZES.issuperset(map(len, blocks)):
            self.counts["rejected"] += len(blocks)
            return
        trie = self._trie
        row = ROOT if parent is None else trie.nodes.find(parent)
        if parent is not None and not row:
            self._park(view, parent, blocks)
            return
        path = trie.nodes.walk(blocks, row)
        num_known = len(path)
        trie.hold(view.slot, row, path, stored_s)
        if num_known == len(blocks):
            return
        unknown = blocks[num_known:] if num_known else blocks
        if self._parked:
            unknown = self._consistent_with_parked(blocks[num_known - 1] if num_known else parent, unknown)
        num_made = len(trie.extend(view.slot, path[-1] if path else row, unknown, stored_s))
        self.counts["rejected"] += len(blocks) - num_known - num_made
        if self._parked:
            for block in blocks[num_known : num_known + num_made]:
                self._attach_below(block, stored_s)

    def _consistent_with_parked(self, parent: bytes | None, blocks: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The head of a chain that no parked block contradicts."""
        for position, block in enumerate(blocks):
            if block in self._parked and self._parked.parent_of(block) != parent:
                return blocks[:position]
            parent = block
        return blocks

    def _attach_below(self, block: bytes, stored_s: float) -> None:
        """Moves what waited for this block into the trie."""
        nodes = self._trie.nodes
        for parent, child, mask in self._parked.release(block):
            above = nodes.find(parent)
            below = nodes.find(child)
            row = below or nodes.append_chain(above, (child,))[0]
            for slot in slots_of(mask):
                self._trie.resident_blocks[slot] -= 1  # so far counted as parked
                if not self._trie.resident_mask(row) >> slot & 1:
                    self._trie.hold(slot, above, [row], stored_s)

    def _park(self, view: _View, parent: bytes, blocks: tuple[bytes, ...]) -> None:
        for position, block in enumerate(blocks):
            is_usable = any(block) and not self._trie.nodes.find(block)
            is_new = self._parked.add(view.slot, parent, block) if is_usable else None
            if is_new is None:
                self.counts["rejected"] += len(blocks) - position
                return
            self._trie.resident_blocks[view.slot] += is_new
            parent = block

    def _trim_parked(self, restored: _View | None) -> None:
        """Keeps the bound on parked blocks. Whoever loses some is degraded, except a view being `restored`: asking for
        one more snapshot would end the same way, for ever."""
        if len(self._parked) <= self._parked.max_blocks:
            return
        dropped, slots = self._parked.trim()
        self.counts["parked_dropped"] += len(dropped)
        for view in self._views.values():
            bit = 1 << view.slot
            if slots & bit:
                lost = sum(1 for mask in dropped.values() if mask & bit)
                self._trie.resident_blocks[view.slot] -= lost
                if view is not restored:
                    view.state = ViewState.DEGRADED

    def _remove(self, view: _View, blocks: Sequence[bytes]) -> None:
        usable = blocks if _HASH_SIZES.issuperset(map(len, blocks)) else [b for b in blocks if len(b) == HASH_BYTES]
        num_removed = self._trie.drop(view.slot, self._trie.nodes.find_all(usable))
        if num_removed < len(blocks):
            num_parked = sum(self._parked.drop(view.slot, block) for block in usable)
            self._trie.resident_blocks[view.slot] -= num_parked
            self.counts["unheld"] += len(blocks) - num_removed - num_parked

    def _clear(self, view: _View) -> None:
        self._parked.clear(view.slot)
        self._trie.clear(view.slot)

    def _replace(self, view: _View, chains: tuple[Chain, ...], stored_s: float) -> None:
        """Takes a snapshot in. What stays keeps its row, and so its demand; new blocks come before old ones go, so
        that a place in the tree which only the old ones vouch for is not forgotten in between."""
        known = [self._trie.nodes.hash_of(row) for row in self._trie.rows_of(view.slot)]
        known += self._parked.blocks_of(view.slot)
        for parent, blocks in chains:
            self._store(view, parent, blocks, stored_s)
        kept = {block for _, blocks in chains for block in blocks}
        self._remove(view, [block for block in known if block not in kept])
        self._trim_parked(view)

    # Requests

    def match(self, hashes: Iterable[bytes]) -> Match:
        """The longest known prefix of a chain, and how much of it every worker can reuse.

        `hashes` is read lazily (see `NodeTable.walk`), so that hashing may stop soon after the first miss.
        """
        trie = self._trie
        path = trie.nodes.walk(hashes)
        starts, set_ids = trie.set_runs(path)
        reusable = trie.replica_blocks(starts, set_ids, len(path), len(self._worker_by_slot))
        return Match(np.frombuffer(path, dtype=np.int32), reusable, starts, set_ids, trie.version)

    def missing_blocks(self, worker_id: int, match: Match) -> list[int]:
        """The positions of a matched path whose block is not resident at the worker."""
        self._require_valid(match)
        slot = self._view(worker_id).slot
        start = int(match.reusable_blocks[slot])
        # Sets of replicas shrink along a path, so that further on the worker can only have stranded blocks.
        if not self._trie.num_stranded[slot]:
            return list(range(start, match.num_blocks))
        stranded = self._trie.stranded
        rows = match.nodes[start:].tolist()
        return [start + k for k, row in enumerate(rows) if not stranded.get(row, 0) >> slot & 1]

    def record_access(self, hashes: Sequence[bytes], degree: int) -> None:
        """Algorithm 1, line 1: one use, at this degree, of the blocks really reused (a chain from the root)."""
        self._trie.add_access(self._trie.nodes.walk(hashes), self._trie.degree_index[degree])

    def record_missed(self, match: Match, degree: int, marginal_benefit_s: Callable[[int, int], FloatArray]) -> None:
        """Algorithm 1, line 2: charges the matched blocks of which no worker of the preferred degree has a replica.

        A child is replicated at most where its parent is, so these are the end of the path: [start_block, end_block).
        `marginal_benefit_s(start_block, end_block)` returns for each the seconds that reusing it saves at this degree
        once its parent is reused.
        """
        self._require_valid(match)
        degree_index = self._trie.degree_index[degree]
        at_degree = self._trie.sets.degree_masks[degree_index]
        masks = self._trie.sets.masks
        for start, set_id in zip(match.run_starts, match.run_sets, strict=True):
            if not masks[set_id] & at_degree:
                benefit_s = marginal_benefit_s(start, match.num_blocks)
                self._trie.add_missed(match.nodes[start:], degree_index, benefit_s)
                return

    def access(self, block: bytes, degree: int) -> float:
        """access[z, C] of the block, decay applied."""
        row, d = self._trie.nodes.find(block), self._trie.degree_index[degree]
        return float(self._trie.nodes.access[d].cells[row] * self._trie.access_scale[d])

    def missed_s(self, block: bytes, degree: int) -> float:
        """missed[z, C] of the block in seconds, decay applied."""
        row, d = self._trie.nodes.find(block), self._trie.degree_index[degree]
        return float(self._trie.nodes.missed[d].cells[row] * self._trie.missed_scale[d])

    # Replication

    def scan(self, settings: ReplicationSettings, pool: PoolLoad, now_s: float) -> Generator[None, None, ScanResult]:
        """Algorithm 2 in slices of a few milliseconds: iterate to the end, the result is the generator's return value.

        The index may change between slices; plans that no longer hold are left out at the end. Demand decays when the
        scan ends. The index does not change otherwise: start the plans, `copy_started` and `copy_ended` them, and
        their effect arrives with the workers' reports.
        """
        origin_s = now_s if self._origin_s is None else self._origin_s
        return Scan(self._trie, settings, pool, self._slots, self.copies, now_s - origin_s).run()

    def candidates(self, settings: ReplicationSettings) -> dict[str, set[tuple[bytes, int]]]:
        """The `inter`, `intra` and `reclaim` lists of Algorithm 2 as (block, degree), before any practical bound."""
        return paper_candidates(self._trie, settings)

    def copy_started(self, plan: CopyPlan) -> None:
        """The plan is under way: its blocks count as coming replicas, and its source keeps them."""
        self.copies.start(plan)

    def copy_ended(self, plan: CopyPlan) -> None:
        """The plan is over, well or not. What was installed shows in the destination's reports."""
        self.copies.end(plan)

    def _view(self, worker_id: int) -> _View:
        try:
            return self._views[worker_id]
        except KeyError:
            raise ConfigError(f"worker_id is {worker_id}; accepted: a worker in the index") from None

    def _require_valid(self, match: Match) -> None:
        if match.version != self._trie.version:
            raise ConfigError("match is from before the last change of the index; accepted: a fresh one")

    def _resident_mask(self, block: bytes) -> int:
        row = self._trie.nodes.find(block)
        return self._trie.resident_mask(row) if row else self._parked.mask_of(block)

    def _workers_in(self, mask: int) -> tuple[int, ...]:
        workers = (self._worker_by_slot[slot] for slot in slots_of(mask))
        return tuple(sorted(worker_id for worker_id in workers if worker_id is not None))

    def check_invariants(self) -> None:
        """Raises InvariantError if any part contradicts another or keeps what nobody holds. Slow: for tests."""
        parked = [0] * len(self._trie.resident_blocks)
        self._parked.check_invariants()
        for block in self._parked.blocks():
            if self._trie.nodes.find(block):
                raise InvariantError("a parked block is in the trie")
            mask = self._parked.mask_of(block)
            for slot in range(mask.bit_length()):
                parked[slot] += mask >> slot & 1
        self._trie.check_invariants(parked)
        occupied = {view.slot: view.worker_id for view in self._views.values()}
        by_slot = {slot: w for slot, w in enumerate(self._worker_by_slot) if w is not None}
        if occupied != by_slot or self._slots != {w: slot for slot, w in by_slot.items()}:
            raise InvariantError("slots and workers differ")
        if len(occupied) + len(self._vacant_slots) != self.num_slots:
            raise InvariantError("slots and workers differ")
        everyone = sum(1 << slot for slot in occupied)
        if any(mask & ~everyone for mask in self._trie.sets.masks):
            raise InvariantError("a vacant slot holds blocks")
