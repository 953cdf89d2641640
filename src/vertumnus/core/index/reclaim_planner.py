"""Which replicas a worker under cache pressure can give up."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.index.candidates import Rows, reclaim_limits
from vertumnus.core.index.replication import CopiesInFlight, PoolLoad, ReclaimPlan, ReplicationSettings
from vertumnus.core.index.trie import Trie

_LAST_COPY = 1e30
"""Added to the key of a row of which only one replica is left."""


class ReclaimPlanner:
    """Turns a candidate row into a reclaim of a cold end of a path, at one worker.

    Only at workers whose cache is filled to `pressure_ratio`, and down to that, most filled first. Never a block that
    was stored within the grace period, is in use, is needed by a copy, or is followed by a longer prefix there. Last
    copies go after all others.
    """

    def __init__(
        self,
        trie: Trie,
        settings: ReplicationSettings,
        pool: PoolLoad,
        workers: Mapping[int, int],
        now_s: float,
    ) -> None:
        self._trie = trie
        self._settings = settings
        self._in_use = pool.in_use
        self._copies = CopiesInFlight()
        self._now_s = now_s
        self._slots = dict(workers)
        self._capacity = {worker_id: pool.workers[worker_id].capacity_blocks for worker_id in workers}
        self._planned_blocks: dict[int, int] = {}
        self._planned: dict[int, int] = {}
        """Row -> mask of the slots where it is planned to go."""
        self.last_work = 0
        """Rows and workers that the last call of `plan` looked at."""
        self._pressed = [worker_id for worker_id in self._slots if self._pressure(worker_id) is not None]
        self._pressed_slots = sum(1 << self._slots[worker_id] for worker_id in self._pressed)
        self._limits: dict[int, tuple[int, NDArray[np.float32]]] = {}

    def begin(self, copies: CopiesInFlight) -> None:
        """Starts planning around these copies, under way or planned."""
        self._copies = copies

    def path_ends(self, start: int, end: int) -> Rows:
        """The rows in [start, end), past their grace period, that may end a path at some worker.

        A child with the same holders as its parent leaves no worker where the parent ends a path. Looking at one child
        is a filter only: `plan` looks at all.
        """
        nodes = self._trie.nodes
        if not self._pressed or not self._settings.max_reclaim:
            return np.zeros(0, dtype=np.int32)
        sets = nodes.holder_set.values
        ends = sets[nodes.first_child.values[start:end]] != sets[start:end]
        ends &= nodes.stored_s.values[start:end] <= self._now_s - self._settings.grace_s
        rows: Rows = np.flatnonzero(ends).astype(np.int32) + np.int32(start)
        return rows

    def cold(self, rows: Rows, degree_index: int) -> tuple[NDArray[np.float64], Rows]:
        """Of these rows, those that the paper would reclaim at a degree, with their ranking keys (rising).

        Only rows with a holder under cache pressure when the scan began.
        """
        trie, nodes = self._trie, self._trie.nodes
        counts = trie.sets.counts[degree_index]
        limits = self._limits_of(degree_index)
        sets = nodes.holder_set.values[rows]
        access = nodes.access[degree_index].values[rows]
        # A child replicated as often at this degree is replicated at the same workers of this degree.
        children = nodes.holder_set.values[nodes.first_child.values[rows]]
        chosen = (access < limits[sets]) & (counts[children] < counts[sets])
        sets = sets[chosen]
        keys = access[chosen] * (trie.access_scale[degree_index] / counts[sets])
        keys[trie.sets.totals[sets] == 1] += _LAST_COPY
        return keys, rows[chosen]

    def _limits_of(self, degree_index: int) -> NDArray[np.float32]:
        version, limits = self._limits.get(degree_index, (-1, np.zeros(0, dtype=np.float32)))
        if version != self._trie.sets.version:
            pressed = self._pressed_slots & self._trie.sets.degree_masks[degree_index]
            limits = reclaim_limits(self._trie, self._settings.theta_reclaim, degree_index, pressed)
            self._limits[degree_index] = self._trie.sets.version, limits
        return limits

    def plan(self, row: int, degree_index: int, may_be_last_copy: bool) -> ReclaimPlan | None:
        """A plan for the path end at a row; None if there is none (any more), or only by giving up the last copy."""
        trie = self._trie
        self.last_work = 64 + len(self._pressed)
        if not self._is_cold(row, degree_index, may_be_last_copy):
            return None
        holders = trie.sets.masks[trie.nodes.holder_set.cells[row]] & trie.sets.degree_masks[degree_index]
        holders &= ~self._planned.get(row, 0)
        pressed = []
        for worker_id in self._pressed:
            slot = self._slots[worker_id]
            if holders >> slot & 1 and (pressure := self._pressure(worker_id)) is not None:
                pressed.append((-pressure, worker_id, slot))
        for _, worker_id, slot in sorted(pressed):
            run, blocks = self._path_end(row, worker_id, slot, degree_index, may_be_last_copy)
            if run:
                replicas = trie.sets.count(trie.nodes.holder_set.cells[row], degree_index)
                access = trie.nodes.access[degree_index].cells[row] * trie.access_scale[degree_index]
                for reclaimed in run:
                    self._planned[reclaimed] = self._planned.get(reclaimed, 0) | 1 << slot
                self._planned_blocks[worker_id] = self._planned_blocks.get(worker_id, 0) + len(run)
                return ReclaimPlan(worker_id, tuple(blocks), access / replicas)
        return None

    def is_valid(self, plan: ReclaimPlan) -> bool:
        """Whether a plan still holds: all is there, in use by nobody, and no longer prefix hangs below it."""
        slot = self._slots[plan.worker_id]
        below = 0
        for block in plan.blocks:
            row = self._trie.nodes.find(block)
            if not row or not self._may_go(row, block, below, plan.worker_id, slot):
                return False
            below = row
        return True

    def _pressure(self, worker_id: int) -> float | None:
        """Filled share of the worker's cache if that is enough for reclaiming, else None."""
        resident = int(self._trie.resident_blocks[self._slots[worker_id]]) - self._planned_blocks.get(worker_id, 0)
        capacity = self._capacity[worker_id]
        if resident <= 0 or resident < self._settings.pressure_ratio * capacity:
            return None
        return resident / capacity if capacity else float("inf")

    def _is_cold(self, row: int, degree_index: int, may_be_last_copy: bool) -> bool:
        """The paper's criterion and the grace period, for the present moment."""
        trie = self._trie
        set_id = trie.nodes.holder_set.cells[row]
        replicas = trie.sets.count(set_id, degree_index)
        access = trie.nodes.access[degree_index].cells[row] * trie.access_scale[degree_index]
        if not access < replicas * self._settings.theta_reclaim:
            return False
        if trie.nodes.stored_s.cells[row] > self._now_s - self._settings.grace_s:
            return False
        left = trie.sets.masks[set_id] & ~self._planned.get(row, 0)
        return may_be_last_copy or left.bit_count() > 1

    def _path_end(
        self, row: int, worker_id: int, slot: int, degree_index: int, may_be_last_copy: bool
    ) -> tuple[list[int], list[bytes]]:
        """The cold end of the path through `row` at a worker, deepest first, as rows and as blocks; empty if `row`
        does not end the path there."""
        run: list[int] = []
        blocks: list[bytes] = []
        below = 0
        while row and len(run) < self._settings.max_blocks_per_reclaim:
            if run and not self._is_cold(row, degree_index, may_be_last_copy):
                break
            block = self._trie.nodes.hash_of(row)
            if self._planned.get(row, 0) >> slot & 1 or not self._may_go(row, block, below, worker_id, slot):
                break
            run.append(row)
            blocks.append(block)
            below, row = row, self._trie.nodes.parent.cells[row]
        self.last_work += 8 * len(run)
        return run, blocks

    def _may_go(self, row: int, block: bytes, below: int, worker_id: int, slot: int) -> bool:
        """Whether the worker has the row and can give it up once it has given up the row `below` (0: nothing)."""
        trie = self._trie
        if not trie.is_replica(row, slot):
            return False
        if self._in_use(worker_id, block) or self._copies.is_leased(worker_id, block):
            return False
        following, child = trie.nodes.next_sibling.cells, trie.nodes.first_child.cells[row]
        while child:
            self.last_work += 1
            if child != below and trie.is_replica(child, slot) and not self._planned.get(child, 0) >> slot & 1:
                return False
            child = following[child]
        return True
