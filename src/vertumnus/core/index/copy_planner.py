"""Source, destination and footprint of a replication."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.index.candidates import Rows
from vertumnus.core.index.holder_sets import slots_of
from vertumnus.core.index.replication import (
    CopiesInFlight,
    CopyKind,
    CopyPlan,
    PoolLoad,
    ReplicationSettings,
    WorkerLoad,
)
from vertumnus.core.index.trie import Trie


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutline:
    """Who copies which stretch of a path to whom."""

    source_worker_id: int
    destination_worker_id: int
    start: int
    """Blocks of the path that the destination holds completely, or that are on their way to it."""
    end: int
    """One past the last block copied: the whole path, or what the link may take."""
    missing_blocks: int
    """Blocks of the stretch that the destination lacks."""
    score: float


@dataclass(frozen=True, slots=True)
class _Destination:
    worker_id: int
    slot: int
    start: int
    missing_blocks: int


class _Receivers:
    """The workers of one degree that may be the destination of a copy, as vectors."""

    def __init__(self, workers: list[tuple[int, int, WorkerLoad]]) -> None:
        self.pairs = [(worker_id, slot) for worker_id, slot, _ in workers]
        self.worker_ids = np.array([worker_id for worker_id, _, _ in workers], dtype=np.int64)
        self.slots = np.array([slot for _, slot, _ in workers], dtype=np.intp)
        self.queue_s = np.array([load.queue_s for _, _, load in workers])
        self.capacity_blocks = np.array([load.capacity_blocks for _, _, load in workers], dtype=np.int64)
        self.intake_blocks = np.zeros(len(workers), dtype=np.int64)
        """What this scan already sends there."""


class CopyPlanner:
    """Turns a candidate into a plan, against the state of the trie at that moment and the plans made before it.

    Destination: among workers of the degree that may receive, do not hold the prefix and are not about to, and can
    take the copy within `max_intake_ratio`: the smallest footprint (the longest ancestor path held), then room without
    evictions, then the shortest queue, then the lowest id; with `min_relief_s` one more replica goes where the queue is
    shortest. Source: among holders of the complete prefix (of the same
    degree for an intra-degree copy) with room left on the link: the shortest queue, then the lowest id.
    """

    def __init__(self, trie: Trie, settings: ReplicationSettings, pool: PoolLoad, workers: Mapping[int, int]) -> None:
        self._trie = trie
        self._settings = settings
        self._loads: dict[int, WorkerLoad] = {worker_id: pool.workers[worker_id] for worker_id in workers}
        self._slots = dict(workers)
        self._worker_by_slot = {slot: worker_id for worker_id, slot in workers.items()}
        self._num_slots = max(workers.values(), default=0) + 1
        self._receivers = [
            _Receivers(
                [
                    (worker_id, slot, self._loads[worker_id])
                    for worker_id, slot in workers.items()
                    if degree_mask >> slot & 1 and self._loads[worker_id].can_receive
                ]
            )
            for degree_mask in trie.sets.degree_masks
        ]
        """Per degree index, who may be a destination."""
        self.work_per_plan = 128 + len(workers) // 4
        """What planning costs beside the length of the path, in the time that one block of it takes."""
        self._copies = CopiesInFlight()
        self._link_blocks: dict[tuple[int, int], int] = {}

    def begin(self, copies: CopiesInFlight) -> None:
        """Starts planning on top of the copies under way; `copies` becomes the planner's own."""
        self._copies = copies

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

    def promise(self, kind: CopyKind, rows: Rows, degree_index: int) -> NDArray[np.float64]:
        """`demand`, times the seconds that a replica could relieve at best where queues are looked at."""
        demand = self.demand(kind, rows, degree_index)
        if kind is CopyKind.INTER or not self._settings.min_relief_s:
            return demand
        least_s = float(self._receivers[degree_index].queue_s.min(initial=np.inf))
        sets, set_of_row = np.unique(self._trie.nodes.holder_set.values[rows], return_inverse=True)
        relief_s = [max(0.0, self._holders_queue_s(each, degree_index) - least_s) for each in sets.tolist()]
        promised: NDArray[np.float64] = demand * np.array(relief_s)[set_of_row]
        return promised

    def outline(self, kind: CopyKind, path: list[int], degree_index: int) -> CopyOutline | None:
        """How to copy the prefix that a path ends in; None if it is no candidate (any more) or nobody can take or
        give it."""
        if not path or not self._is_candidate(kind, path[-1], degree_index):
            return None
        destination = self._choose_destination(kind, path, degree_index)
        source = self._choose_source(kind, path, degree_index, destination) if destination else None
        if destination is None or source is None:
            return None
        source_id, end, missing_blocks = source
        if kind is CopyKind.INTER:
            missed = self._trie.nodes.missed[degree_index].cells
            benefit = sum(missed[row] for row in path[destination.start : end])
            score = benefit * self._trie.missed_scale[degree_index] / missing_blocks
        else:
            score = float(self.demand(kind, np.array([path[-1]], dtype=np.int32), degree_index)[0])
            if self._settings.min_relief_s:
                holders_s = self._holders_queue_s(self._trie.nodes.holder_set.cells[path[-1]], degree_index)
                relief_s = holders_s - self._loads[destination.worker_id].queue_s
                if relief_s < self._settings.min_relief_s:
                    return None
                score *= relief_s
        return CopyOutline(
            source_worker_id=source_id,
            destination_worker_id=destination.worker_id,
            start=destination.start,
            end=end,
            missing_blocks=missing_blocks,
            score=score,
        )

    def commit(self, kind: CopyKind, path: list[int], degree_index: int, outline: CopyOutline) -> CopyPlan:
        """The plan in full; it is counted in: what is planned later sees it as under way."""
        nodes = self._trie.nodes
        blocks = tuple(nodes.hash_of(row) for row in path[outline.start : outline.end])
        plan = CopyPlan(
            kind=kind,
            degree=self._trie.degrees[degree_index],
            block=blocks[-1],
            source_worker_id=outline.source_worker_id,
            destination_worker_id=outline.destination_worker_id,
            parent=nodes.hash_of(path[outline.start - 1]) if outline.start else None,
            blocks=blocks,
            missing_blocks=outline.missing_blocks,
            score=outline.score,
        )
        self._copies.start(plan)
        link = (plan.source_worker_id, plan.destination_worker_id)
        self._link_blocks[link] = self._link_blocks.get(link, 0) + plan.missing_blocks
        receivers = self._receivers[degree_index]
        receivers.intake_blocks[receivers.worker_ids == plan.destination_worker_id] += plan.missing_blocks
        return plan

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
        return plan.destination_worker_id in copies.coming_to(plan.parent)

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

    def _choose_destination(self, kind: CopyKind, path: list[int], degree_index: int) -> _Destination | None:
        trie, settings, receivers = self._trie, self._settings, self._receivers[degree_index]
        starts, set_ids = trie.set_runs(path)
        slots = receivers.slots
        held = trie.replica_blocks(starts, set_ids, len(path), self._num_slots)[slots].astype(np.int64)
        missing = len(path) - held
        for row in self._unusual_rows(degree_index):
            worker_id, slot = int(receivers.worker_ids[row]), int(slots[row])
            held[row] = start = self._with_coming(path, int(held[row]), worker_id)
            missing[row] = sum(1 for node in path[start:] if not trie.resident_mask(node) >> slot & 1)
        intake = receivers.intake_blocks + np.minimum(missing, settings.max_blocks_per_copy)
        feasible = np.flatnonzero(
            (held < len(path)) & (missing > 0) & (intake <= settings.max_intake_ratio * receivers.capacity_blocks)
        )
        if not len(feasible):
            return None
        evicts = trie.resident_blocks[slots[feasible]] + intake[feasible] > receivers.capacity_blocks[feasible]
        keys = [receivers.worker_ids[feasible], receivers.queue_s[feasible], evicts, missing[feasible]]
        if kind is CopyKind.INTRA and settings.min_relief_s:
            keys.append(receivers.queue_s[feasible])
        order = np.lexsort(keys)
        row = int(feasible[order[0]])
        return _Destination(int(receivers.worker_ids[row]), int(slots[row]), int(held[row]), int(missing[row]))

    def _unusual_rows(self, degree_index: int) -> list[int]:
        """The receivers that copies are on their way to, or that have stranded blocks."""
        receivers, copies = self._receivers[degree_index], self._copies
        return [
            row
            for row, (worker_id, slot) in enumerate(receivers.pairs)
            if self._trie.num_stranded[slot] or copies.is_destination(worker_id)
        ]

    def _with_coming(self, path: list[int], start: int, worker_id: int) -> int:
        """How far the path is held, blocks on their way to the worker included."""
        if self._copies.is_destination(worker_id):
            while start < len(path) and worker_id in self._copies.coming_to(self._trie.nodes.hash_of(path[start])):
                start += 1
        return start

    def _holders_queue_s(self, set_id: int, degree_index: int) -> float:
        """Of the least busy worker of the degree in a set of holders; 0 if none is known."""
        sets = self._trie.sets
        holders = self._workers_of(sets.masks[set_id] & sets.degree_masks[degree_index])
        return min((self._loads[worker_id].queue_s for worker_id in holders), default=0.0)

    def _workers_of(self, slots: int) -> list[int]:
        """The known workers of a mask of slots."""
        return [self._worker_by_slot[slot] for slot in slots_of(slots) if slot in self._worker_by_slot]

    def _choose_source(
        self, kind: CopyKind, path: list[int], degree_index: int, destination: _Destination
    ) -> tuple[int, int, int] | None:
        """(worker, end of the path to copy, blocks missing until there); the path is cut to what the link may take."""
        trie = self._trie
        holders = trie.sets.masks[trie.nodes.holder_set.cells[path[-1]]]
        if kind is CopyKind.INTRA:
            holders &= trie.sets.degree_masks[degree_index]
        sources = self._workers_of(holders)
        for worker_id in sorted(sources, key=lambda worker_id: (self._loads[worker_id].queue_s, worker_id)):
            if not self._loads[worker_id].can_send:
                continue
            used = self._link_blocks.get((worker_id, destination.worker_id), 0)
            room = self._settings.max_blocks_per_copy - used
            if room <= 0:
                continue
            end, missing = len(path), destination.missing_blocks
            while missing > room:
                end -= 1
                missing -= not trie.resident_mask(path[end]) >> destination.slot & 1
            return worker_id, end, missing
        return None
