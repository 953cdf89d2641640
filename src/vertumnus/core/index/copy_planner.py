"""Source, destination and footprint of a replication."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.index.candidates import Rows
from vertumnus.core.index.replication import (
    CopiesInFlight,
    CopyKind,
    CopyPlan,
    PoolLoad,
    ReplicationSettings,
    WorkerLoad,
)
from vertumnus.core.index.trie import Trie


@dataclass(frozen=True, slots=True)
class _Destination:
    worker_id: int
    start: int
    """Blocks of the path that it holds completely, or that are on their way to it."""
    missing_blocks: int


class CopyPlanner:
    """Turns a candidate into a plan, against the state of the trie at that moment and the plans made before it.

    Destination: among workers of the degree that may receive, do not hold the prefix and are not about to, and can
    take the copy within `max_intake_ratio`: the smallest footprint (the longest ancestor path held), then room without
    evictions, then the shortest queue, then the lowest id. Source: among holders of the complete prefix (of the same
    degree for an intra-degree copy) with room left on the link: the shortest queue, then the lowest id.
    """

    def __init__(
        self, trie: Trie, settings: ReplicationSettings, pool: PoolLoad, workers: Mapping[int, int]
    ) -> None:
        self._trie = trie
        self._settings = settings
        self._loads: dict[int, WorkerLoad] = {worker_id: pool.workers[worker_id] for worker_id in workers}
        self._slots = dict(workers)
        self.work_per_plan = 64 + 2 * len(workers)
        """What planning costs beside the length of the path, in the time that one block of it takes."""
        self._copies = CopiesInFlight()
        self._link_blocks: dict[tuple[int, int], int] = {}
        self._intake_blocks: dict[int, int] = {}

    def begin(self, copies: CopiesInFlight) -> None:
        """Starts planning on top of the copies under way; `copies` becomes the planner's own."""
        self._copies = copies

    def commit(self, plan: CopyPlan) -> None:
        """Counts a plan in: later plans see it as under way."""
        self._copies.start(plan)
        link = (plan.source_worker_id, plan.destination_worker_id)
        self._link_blocks[link] = self._link_blocks.get(link, 0) + plan.missing_blocks
        self._intake_blocks[link[1]] = self._intake_blocks.get(link[1], 0) + plan.missing_blocks

    def demand(self, kind: CopyKind, rows: Rows, degree_index: int) -> NDArray[np.float64]:
        """What a first ranking goes by: missed seconds of the rows themselves, or uses per replica."""
        trie = self._trie
        if kind is CopyKind.INTER:
            missed = trie.nodes.missed[degree_index].values[rows].astype(np.float64)
            missed *= trie.missed_scale[degree_index]
            return missed
        replicas = trie.sets.counts[degree_index][trie.nodes.holder_set.values[rows]]
        access = trie.nodes.access[degree_index].values[rows].astype(np.float64)
        per_replica: NDArray[np.float64] = access * trie.access_scale[degree_index] / np.maximum(replicas, 1)
        return per_replica

    def plan(self, kind: CopyKind, path: list[int], degree_index: int) -> CopyPlan | None:
        """A plan for the prefix that ends a path; None if it is no candidate (any more) or nobody can take or give."""
        if not path or not self._is_candidate(kind, path[-1], degree_index):
            return None
        destination = self._choose_destination(path, degree_index)
        if destination is None:
            return None
        source = self._choose_source(kind, path, degree_index, destination)
        if source is None:
            return None
        source_id, end, missing_blocks = source
        nodes = self._trie.nodes
        copied = path[destination.start : end]
        if kind is CopyKind.INTER:
            missed = nodes.missed[degree_index].cells
            benefit = sum(missed[row] for row in copied) * self._trie.missed_scale[degree_index]
            score = benefit / missing_blocks
        else:
            score = float(self.demand(kind, np.array([path[-1]], dtype=np.int32), degree_index)[0])
        blocks = tuple(nodes.hash_of(row) for row in copied)
        return CopyPlan(
            kind=kind,
            degree=self._trie.degrees[degree_index],
            block=blocks[-1],
            source_worker_id=source_id,
            destination_worker_id=destination.worker_id,
            parent=nodes.hash_of(path[destination.start - 1]) if destination.start else None,
            blocks=blocks,
            missing_blocks=missing_blocks,
            score=score,
        )

    def is_valid(self, plan: CopyPlan, copies: CopiesInFlight) -> bool:
        """Whether a plan still holds: its source has the prefix, its destination neither has it nor is getting it,
        and has what comes above it or is getting that."""
        trie, nodes = self._trie, self._trie.nodes
        source, destination = self._slots[plan.source_worker_id], self._slots[plan.destination_worker_id]
        row = nodes.find(plan.block)
        if not row or not trie.is_replica(row, source) or trie.is_replica(row, destination):
            return False
        if plan.destination_worker_id in copies.coming_to(plan.block):
            return False
        if plan.parent is None:
            return True
        above = nodes.find(plan.parent)
        if above and trie.is_replica(above, destination):
            return True
        return plan.destination_worker_id in self._copies.coming_to(plan.parent)

    def _is_candidate(self, kind: CopyKind, row: int, degree_index: int) -> bool:
        """The paper's criterion for the present moment, coming replicas counted."""
        trie, settings = self._trie, self._settings
        replicas = trie.sets.count(trie.nodes.holder_set.cells[row], degree_index)
        coming = sum(
            1
            for worker_id in self._copies.coming_to(trie.nodes.hash_of(row))
            if self._is_degree(worker_id, degree_index) and not trie.is_replica(row, self._slots[worker_id])
        )
        if kind is CopyKind.INTER:
            missed = trie.nodes.missed[degree_index].cells[row] * trie.missed_scale[degree_index]
            return replicas == 0 and coming == 0 and missed > settings.theta_inter_s
        access = trie.nodes.access[degree_index].cells[row] * trie.access_scale[degree_index]
        return replicas > 0 and access > (replicas + coming) * settings.theta_intra

    def _is_degree(self, worker_id: int, degree_index: int) -> bool:
        slot = self._slots.get(worker_id)
        return slot is not None and bool(self._trie.sets.degree_masks[degree_index] >> slot & 1)

    def _choose_destination(self, path: list[int], degree_index: int) -> _Destination | None:
        trie, settings = self._trie, self._settings
        rows = np.array(path, dtype=np.int32)
        starts, set_ids = trie.set_runs(rows)
        held = trie.replica_blocks(starts, set_ids, len(path), max(self._slots.values(), default=0) + 1)
        best: tuple[tuple[int, bool, float, int], _Destination] | None = None
        for worker_id, slot in self._slots.items():
            load = self._loads[worker_id]
            if not load.can_receive or not self._is_degree(worker_id, degree_index):
                continue
            start = self._with_coming(path, int(held[slot]), worker_id)
            if start == len(path):
                continue
            missing = self._num_missing(path[start:], slot)
            intake = self._intake_blocks.get(worker_id, 0) + min(missing, settings.max_blocks_per_copy)
            if not missing or intake > settings.max_intake_ratio * load.capacity_blocks:
                continue
            evicts = int(trie.resident_blocks[slot]) + intake > load.capacity_blocks
            order = (missing, evicts, load.queue_s, worker_id)
            if best is None or order < best[0]:
                best = order, _Destination(worker_id, start, missing)
        return best[1] if best else None

    def _with_coming(self, path: list[int], start: int, worker_id: int) -> int:
        """How far the path is held, blocks on their way to the worker included."""
        if len(self._copies):
            while start < len(path) and worker_id in self._copies.coming_to(self._trie.nodes.hash_of(path[start])):
                start += 1
        return start

    def _num_missing(self, rows: list[int], slot: int) -> int:
        if not self._trie.num_stranded[slot]:
            return len(rows)
        return sum(1 for row in rows if not self._trie.resident_mask(row) >> slot & 1)

    def _choose_source(
        self, kind: CopyKind, path: list[int], degree_index: int, destination: _Destination
    ) -> tuple[int, int, int] | None:
        """(worker, end of the path to copy, blocks missing until there); the path is cut to what the link may take."""
        trie = self._trie
        holders = trie.sets.masks[trie.nodes.holder_set.cells[path[-1]]]
        if kind is CopyKind.INTRA:
            holders &= trie.sets.degree_masks[degree_index]
        slot = self._slots[destination.worker_id]
        for _, worker_id in sorted(
            (self._loads[worker_id].queue_s, worker_id)
            for worker_id, source_slot in self._slots.items()
            if holders >> source_slot & 1 and self._loads[worker_id].can_send and worker_id != destination.worker_id
        ):
            used = self._link_blocks.get((worker_id, destination.worker_id), 0)
            room = self._settings.max_blocks_per_copy - used
            if room <= 0:
                continue
            end, missing = len(path), destination.missing_blocks
            while missing > room:
                end -= 1
                missing -= not trie.resident_mask(path[end]) >> slot & 1
            return worker_id, end, missing
        return None
