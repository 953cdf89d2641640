"""Algorithm 2 as a resumable scan: collect candidates, rank them, choose sources and destinations.

The practical form: an ancestor's demand is never below its descendant's, so candidates are coalesced to the deepest
row of their path (a copy brings the whole path), transfers are bounded per link and per destination, and reclaiming
works from the ends of paths at workers under cache pressure.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.index.candidates import Rows, inter_candidates, intra_candidates
from vertumnus.core.index.copy_planner import CopyOutline, CopyPlanner
from vertumnus.core.index.reclaim_planner import ReclaimPlanner
from vertumnus.core.index.replication import (
    CopiesInFlight,
    CopyKind,
    CopyPlan,
    PoolLoad,
    ReclaimPlan,
    ReplicationSettings,
    ScanResult,
)
from vertumnus.core.index.trie import Trie

SLICE_ROWS = 65_536
SLICE_WORK = 4_000
"""Path blocks that one slice of planning may handle."""
_EVALUATED_PER_PLAN = 4
"""Candidates that are looked at in detail for every plan that a scan may make."""
_SIMILAR_RATIO = 1.1
"""Uses per replica are similar within this factor: the smaller copy goes first."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    row: int
    degree_index: int


class _DeepestRows:
    """Collects candidate rows, and keeps of every stretch of a path the deepest one."""

    def __init__(self, end: int) -> None:
        self.num_rows = 0
        self._end = end
        self._has_candidate_below: NDArray[np.bool_] | None = None
        self._parts: list[Rows] = []

    def add(self, rows: Rows, trie: Trie) -> None:
        """More rows, each below `end`."""
        if not len(rows):
            return
        self.num_rows += len(rows)
        if self._has_candidate_below is None:
            self._has_candidate_below = np.zeros(self._end, dtype=np.bool_)
        parents = trie.nodes.parent.values[rows]
        self._has_candidate_below[parents[parents < self._end]] = True
        self._parts.append(rows[~self._has_candidate_below[rows]])

    def rows(self) -> Rows:
        """The deepest rows."""
        if self._has_candidate_below is None:
            return np.zeros(0, dtype=np.int32)
        rows = np.concatenate(self._parts)
        deepest: Rows = rows[~self._has_candidate_below[rows]]
        return deepest


class Scan:
    """One scan; `run` is the generator to iterate."""

    def __init__(
        self,
        trie: Trie,
        settings: ReplicationSettings,
        pool: PoolLoad,
        slots: Mapping[int, int],
        copies: CopiesInFlight,
        now_s: float,
    ) -> None:
        """`slots`: the slot of every worker, kept up to date by the owner."""
        self._trie = trie
        self._settings = settings
        self._copies = copies
        self._planned = copies
        """The copies under way, and this scan's own once it plans."""
        self._slots = slots
        self._version = trie.version
        self._workers = workers = {
            worker_id: slots[worker_id] for worker_id in sorted(pool.workers) if worker_id in slots
        }
        self._end = trie.nodes.end
        self._copy_planner = CopyPlanner(trie, settings, pool, workers)
        self._reclaim_planner = ReclaimPlanner(trie, settings, pool, workers, now_s)
        degrees = range(len(trie.degrees))
        self._inter = [_DeepestRows(self._end) for _ in degrees]
        self._intra = [_DeepestRows(self._end) for _ in degrees]
        self._num_reclaim_candidates = 0
        self._reclaim_parts: list[tuple[NDArray[np.float64], Rows, NDArray[np.int64]]] = []
        """Path ends that may be reclaimed: (ranking keys, rows, degree indexes)."""

    def run(self) -> Generator[None, None, ScanResult]:
        """Bounded work between yields; see `PrefixIndex.scan`."""
        num_nodes = self._trie.nodes.num_nodes
        for start in range(1, self._end, SLICE_ROWS):
            self._collect(start, min(start + SLICE_ROWS, self._end))
            yield
        self._planned = self._copies.copy()
        self._copy_planner.begin(self._planned)
        inter = yield from self._plan_copies(CopyKind.INTER, self._inter, self._settings.max_inter)
        intra = yield from self._plan_copies(CopyKind.INTRA, self._intra, self._settings.max_intra)
        self._reclaim_planner.begin(self._planned)
        reclaims = yield from self._plan_reclaims()
        plans = inter + intra
        if self._trie.version != self._version:
            plans, reclaims = self._still_valid(plans, reclaims)
        self._trie.decay(self._settings.decay)
        for degree_index in range(len(self._trie.degrees)):
            if self._trie.renormalise(degree_index):
                yield
        return ScanResult(
            replications=tuple(plans),
            reclaims=tuple(reclaims),
            num_nodes=num_nodes,
            num_inter_candidates=sum(found.num_rows for found in self._inter),
            num_intra_candidates=sum(found.num_rows for found in self._intra),
            num_reclaim_candidates=self._num_reclaim_candidates,
        )

    def _still_valid(
        self, plans: list[CopyPlan], reclaims: list[ReclaimPlan]
    ) -> tuple[list[CopyPlan], list[ReclaimPlan]]:
        """The plans that hold in the index as it is now, in which copies may have started and ended meanwhile."""
        present = {worker_id for worker_id, slot in self._workers.items() if self._slots.get(worker_id) == slot}
        copies = self._copies.copy()
        valid: list[CopyPlan] = []
        for plan in plans:
            is_staffed = present.issuperset((plan.source_worker_id, plan.destination_worker_id))
            if is_staffed and self._copy_planner.is_valid(plan, copies):
                copies.start(plan)
                valid.append(plan)
        self._reclaim_planner.begin(copies)
        return valid, [plan for plan in reclaims if plan.worker_id in present and self._reclaim_planner.is_valid(plan)]

    def _collect(self, start: int, end: int) -> None:
        trie, settings = self._trie, self._settings
        path_ends = self._reclaim_planner.path_ends(start, end)
        for d in range(len(trie.degrees)):
            if settings.max_inter:
                self._inter[d].add(inter_candidates(trie, settings.theta_inter_s, d, start, end), trie)
            if settings.max_intra:
                self._intra[d].add(intra_candidates(trie, settings.theta_intra, d, start, end), trie)
            if len(path_ends):
                keys, rows = self._reclaim_planner.cold(path_ends, d)
                self._num_reclaim_candidates += len(rows)
                best = _smallest(keys, _EVALUATED_PER_PLAN * settings.max_reclaim)
                self._reclaim_parts.append((keys[best], rows[best], np.full(len(best), d)))

    def _plan_copies(
        self, kind: CopyKind, found: list[_DeepestRows], max_plans: int
    ) -> Generator[None, None, list[CopyPlan]]:
        planner, trie = self._copy_planner, self._trie
        shortlist: list[tuple[float, bytes, _Candidate]] = []
        for d, deepest in enumerate(found):
            rows = deepest.rows()
            promise = planner.promise(kind, rows, d)
            for k in _smallest(-promise, _EVALUATED_PER_PLAN * max_plans).tolist():
                row = int(rows[k])
                shortlist.append((-float(promise[k]), trie.nodes.hash_of(row), _Candidate(row, d)))
        shortlist.sort(key=lambda entry: (entry[0], entry[1], entry[2].degree_index))
        shortlist = shortlist[: _EVALUATED_PER_PLAN * max_plans]

        ranked: list[tuple[tuple[float, float, bytes, int], _Candidate]] = []
        interior: set[tuple[int, int]] = set()
        work = 0
        for _, block, candidate in shortlist:
            path = trie.nodes.path_to(candidate.row)
            interior |= {(row, candidate.degree_index) for row in path[:-1]}
            outline = planner.outline(kind, path, candidate.degree_index)
            if outline is not None:
                ranked.append(((*_rank(kind, outline), block, candidate.degree_index), candidate))
            work += len(path) + planner.work_per_plan
            if work > SLICE_WORK:
                work = 0
                yield
        ranked.sort(key=lambda entry: entry[0])
        yield

        plans: list[CopyPlan] = []
        for _, candidate in ranked:
            if len(plans) == max_plans:
                break
            if (candidate.row, candidate.degree_index) in interior:
                continue  # a deeper block of its path is a candidate too, and brings it along
            path = trie.nodes.path_to(candidate.row)
            outline = planner.outline(kind, path, candidate.degree_index)
            if outline is not None:
                plans.append(planner.commit(kind, path, candidate.degree_index, outline))
            work += len(path) + planner.work_per_plan
            if work > SLICE_WORK:
                work = 0
                yield
        yield
        return plans

    def _plan_reclaims(self) -> Generator[None, None, list[ReclaimPlan]]:
        planner, nodes = self._reclaim_planner, self._trie.nodes
        plans: list[ReclaimPlan] = []
        if not self._reclaim_parts:
            return plans
        keys, rows, degrees = (np.concatenate(column) for column in zip(*self._reclaim_parts, strict=True))
        best = _smallest(keys, _EVALUATED_PER_PLAN * self._settings.max_reclaim)
        order: list[tuple[float, int, bytes, int, _Candidate]] = []
        for key, row, d in zip(keys[best].tolist(), rows[best].tolist(), degrees[best].tolist(), strict=True):
            order.append((key, -nodes.depth.cells[row], nodes.hash_of(row), d, _Candidate(row, d)))
        order.sort(key=lambda entry: entry[:4])
        waiting = [entry[4] for entry in order]
        work = 0
        for may_be_last_copy in (False, True):
            remaining: list[_Candidate] = []
            for candidate in waiting:
                if len(plans) == self._settings.max_reclaim:
                    break
                plan = planner.plan(candidate.row, candidate.degree_index, may_be_last_copy)
                if plan is None:
                    remaining.append(candidate)
                else:
                    plans.append(plan)
                work += planner.last_work
                if work > SLICE_WORK:
                    work = 0
                    yield
            waiting = remaining
        return plans


def _rank(kind: CopyKind, outline: CopyOutline) -> tuple[float, float]:
    """Sorts copies of one kind, best first."""
    if kind is CopyKind.INTER:
        return -outline.score, outline.missing_blocks
    return -math.floor(math.log(outline.score) / math.log(_SIMILAR_RATIO)), outline.missing_blocks


def _smallest(keys: NDArray[np.floating], num: int) -> NDArray[np.intp]:
    """Positions of the `num` smallest keys, in no particular order."""
    if len(keys) <= num:
        return np.arange(len(keys))
    return np.argpartition(keys, num)[:num]
