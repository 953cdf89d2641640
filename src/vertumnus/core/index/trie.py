"""The trie proper: which slot holds which block, as replica or stranded, and the demand statistics.

A worker's resident block is a *replica* (of the prefix that ends there) if all its ancestors are resident there too,
else it is *stranded*: good as a copy source, of no use to a request. Replicas are kept per row as an interned set;
a child's set is always within its parent's. Stranded blocks are few (LRU evicts a path from its end), so they are
kept in a dictionary.
"""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.index.holder_sets import EMPTY_SET, HolderSets, slot_array
from vertumnus.core.index.nodes import Column, NodeTable
from vertumnus.errors import InvariantError

_SHORT_PATH_BLOCKS = 32
"""Below this, a loop over scalars is faster than NumPy."""
_MIN_SCALE = 1e-9
_NEGLIGIBLE = 1e-12


class Trie:
    """Rows, holders and demand. The owner says what is resident; rows come and go by themselves.

    A row lives while its block is resident somewhere or a living row hangs below it.
    """

    def __init__(self, degrees: Sequence[int]) -> None:
        self.degrees = tuple(degrees)
        self.degree_index = {degree: i for i, degree in enumerate(self.degrees)}
        self.nodes = NodeTable(len(self.degrees))
        self.sets = HolderSets(len(self.degrees))
        self.stranded: dict[int, int] = {}
        """Row -> mask of the slots where the block is resident without all its ancestors."""
        self.resident_blocks = np.zeros(64, dtype=np.int64)
        """Per slot; the owner may count blocks of its own in."""
        self.num_stranded = [0] * 64
        """Per slot."""
        self.version = 0
        """Changes with every change of rows or holders."""
        self.access_scale = [1.0] * len(self.degrees)
        self.missed_scale = [1.0] * len(self.degrees)

    # Holders

    def reserve_slot(self, slot: int) -> None:
        """Makes room for a slot number."""
        while slot >= len(self.resident_blocks):
            self.resident_blocks = np.concatenate([self.resident_blocks, np.zeros_like(self.resident_blocks)])
            self.num_stranded += [0] * len(self.num_stranded)

    def is_replica(self, node: int, slot: int) -> bool:
        """Whether the slot holds the complete prefix that ends at this row; true of the root."""
        return not node or bool(self.sets.masks[self.nodes.holder_set.cells[node]] >> slot & 1)

    def resident_mask(self, node: int) -> int:
        """The slots where the block is resident, complete prefix or not."""
        replicas: int = self.sets.masks[self.nodes.holder_set.cells[node]]
        return replicas | self.stranded.get(node, 0)

    def hold(self, slot: int, parent: int, path: Sequence[int], stored_s: float) -> None:
        """The slot now has these rows, a path below `parent`."""
        if not path:
            return
        if not self.is_replica(parent, slot):
            self._strand(slot, path, stored_s)
            return
        bit = 1 << slot
        num_added = 0
        sets = self.sets
        starts, set_ids = self.set_runs(path)
        for start, end, set_id in zip(starts, [*starts[1:], len(path)], set_ids, strict=True):
            mask = sets.masks[set_id]
            if mask & bit:
                continue
            grown = sets.intern(mask | bit)
            self._mark(path[start:end] if len(starts) > 1 else path, grown, stored_s)
            sets.move(set_id, grown, end - start)
            num_added += end - start
        self.resident_blocks[slot] += num_added
        self.version += 1
        if self.num_stranded[slot]:
            stranded = self.stranded
            for node in path:
                if node in stranded and self._unstrand(node, slot):
                    self.resident_blocks[slot] -= 1
            first_child, next_sibling = self.nodes.first_child.cells, self.nodes.next_sibling.cells
            for node in path:
                child = first_child[node]
                while child:
                    if child in stranded:
                        self._promote_children(node, slot)
                        break
                    child = next_sibling[child]

    def extend(self, slot: int, parent: int, blocks: tuple[bytes, ...], stored_s: float) -> list[int]:
        """The slot now has a chain below `parent` that is in no row yet; its rows (see `NodeTable.append_chain`)."""
        if not self.is_replica(parent, slot):
            rows = self.nodes.append_chain(parent, blocks)
            self._strand(slot, rows, stored_s)
            return rows
        set_id = self.sets.intern(1 << slot)
        rows = self.nodes.append_chain(parent, blocks, set_id, stored_s)
        self.sets.move(EMPTY_SET, set_id, len(rows))
        if not rows:
            self.sets.move(set_id, EMPTY_SET, 0)  # dies again, unless others refer to it
        self.resident_blocks[slot] += len(rows)
        self.version += 1
        return rows

    def drop(self, slot: int, rows: Sequence[int]) -> int:
        """The slot no longer has these rows; returns how many of them it had. Longer prefixes there become stranded."""
        bit = 1 << slot
        sets, masks = self.sets, self.sets.masks
        holder_set, next_sibling = self.nodes.holder_set.cells, self.nodes.next_sibling.cells
        first_child = self.nodes.first_child.cells
        run_old = run_new = -1
        run_blocks = num_dropped = 0
        for node in rows:
            old = holder_set[node]
            if old != run_old:
                if run_blocks:
                    sets.move(run_old, run_new, run_blocks)
                    run_blocks = 0
                run_old, mask = old, masks[old]
                run_new = sets.intern(mask ^ bit) if mask & bit else old
            if run_new == old:
                num_dropped += self._unstrand(node, slot)
                continue
            holder_set[node] = run_new
            run_blocks += 1
            num_dropped += 1
            child = first_child[node]
            while child:
                if masks[holder_set[child]] & bit:
                    sets.move(run_old, run_new, run_blocks)
                    run_old, run_blocks = -1, 0
                    self._demote_children(node, slot)
                    break
                child = next_sibling[child]
        if run_blocks:
            sets.move(run_old, run_new, run_blocks)
        self.resident_blocks[slot] -= num_dropped
        self.version += 1
        self.nodes.bury(rows, self.stranded)
        return num_dropped

    def rows_of(self, slot: int) -> list[int]:
        """All rows whose block is resident at the slot, replicas first."""
        ids = self.sets.ids_with(slot)
        has_slot = np.zeros(len(self.sets.masks), dtype=np.bool_)
        has_slot[ids] = True
        rows: list[int] = np.flatnonzero(has_slot[self.nodes.holder_set.values[: self.nodes.end]]).tolist()
        if self.num_stranded[slot]:
            rows += sorted(node for node, mask in self.stranded.items() if mask >> slot & 1)
        return rows

    def clear(self, slot: int) -> None:
        """The slot has nothing any more. One pass over all rows, whatever the number held."""
        rows = self.rows_of(slot)
        bit = 1 << slot
        moves = [(set_id, self.sets.intern(self.sets.masks[set_id] ^ bit)) for set_id in self.sets.ids_with(slot)]
        remaining = np.arange(len(self.sets.masks), dtype=np.int32)
        holder_set = self.nodes.holder_set.values[: self.nodes.end]
        counts = np.bincount(holder_set, minlength=len(self.sets.masks))
        for old, new in moves:
            remaining[old] = new
        holder_set[:] = remaining[holder_set]
        for old, new in moves:
            self.sets.move(old, new, int(counts[old]))
        for node in rows:
            self._unstrand(node, slot)
        self.nodes.bury(rows, self.stranded)
        self.resident_blocks[slot] = 0
        self.version += 1

    def _mark(self, rows: Sequence[int], set_id: int, stored_s: float) -> None:
        """Writes holder set and time of some rows."""
        if len(rows) > _SHORT_PATH_BLOCKS:
            places = np.asarray(rows, dtype=np.int32)
            self.nodes.holder_set.values[places] = set_id
            self.nodes.stored_s.values[places] = stored_s
            return
        holder_set, stored = self.nodes.holder_set.cells, self.nodes.stored_s.cells
        for node in rows:
            holder_set[node] = set_id
            stored[node] = stored_s

    def _strand(self, slot: int, path: Iterable[int], stored_s: float) -> None:
        bit = 1 << slot
        for node in path:
            mask = self.stranded.get(node, 0)
            if not mask & bit:
                self.stranded[node] = mask | bit
                self.nodes.stored_s.cells[node] = stored_s
                self.num_stranded[slot] += 1
                self.resident_blocks[slot] += 1
        self.version += 1

    def _unstrand(self, node: int, slot: int) -> bool:
        mask = self.stranded.get(node, 0)
        if not mask >> slot & 1:
            return False
        mask ^= 1 << slot
        if mask:
            self.stranded[node] = mask
        else:
            del self.stranded[node]
        self.num_stranded[slot] -= 1
        return True

    def _promote_children(self, node: int, slot: int) -> None:
        """Stranded blocks below a row that has become a replica at the slot become replicas too."""
        stack = [node]
        while stack and self.num_stranded[slot]:
            for child in self.nodes.children(stack.pop()):
                if self._unstrand(child, slot):
                    self._exchange(child, self.sets.masks[self.nodes.holder_set.cells[child]] | 1 << slot)
                    stack.append(child)

    def _demote_children(self, node: int, slot: int) -> None:
        """Replicas below a row that has left the slot become stranded."""
        bit = 1 << slot
        stack = [node]
        while stack:
            for child in self.nodes.children(stack.pop()):
                mask = self.sets.masks[self.nodes.holder_set.cells[child]]
                if mask & bit:
                    self._exchange(child, mask ^ bit)
                    self.stranded[child] = self.stranded.get(child, 0) | bit
                    self.num_stranded[slot] += 1
                    stack.append(child)

    def _exchange(self, node: int, mask: int) -> None:
        old, new = self.nodes.holder_set.cells[node], self.sets.intern(mask)
        self.nodes.holder_set.cells[node] = new
        self.sets.move(old, new, 1)

    # Paths

    def set_runs(self, path: Sequence[int]) -> tuple[list[int], list[int]]:
        """The path as stretches of equal holder set: (where each starts, its set id).

        Sets only shrink along a path, so that a stretch lies between two equal sets: its end is found by bisection.
        """
        starts: list[int] = []
        ids: list[int] = []
        if not path:
            return starts, ids
        cells = self.nodes.holder_set.cells
        last_id = cells[path[-1]]
        start = 0
        while (set_id := cells[path[start]]) != last_id:
            starts.append(start)
            ids.append(set_id)
            low, high = start + 1, len(path) - 1
            while low < high:
                middle = (low + high) // 2
                if cells[path[middle]] == set_id:
                    low = middle + 1
                else:
                    high = middle
            start = low
        starts.append(start)
        ids.append(last_id)
        return starts, ids

    def replica_blocks(
        self, starts: Sequence[int], ids: Sequence[int], num_blocks: int, num_slots: int
    ) -> NDArray[np.int32]:
        """Per slot, how long a prefix of a path (given as `set_runs`) it holds completely.

        At least `num_slots` long; longer where a slot beyond holds something (a scan may know fewer than there are).
        """
        if not ids:
            return np.zeros(num_slots, dtype=np.int32)
        masks = self.sets.masks
        # Sets shrink along a path: the first has all slots, and whoever holds a later stretch is written again.
        blocks = np.zeros(max(num_slots, masks[ids[0]].bit_length()), dtype=np.int32)
        for end, set_id in zip([*starts[1:], num_blocks], ids, strict=True):
            mask = masks[set_id]
            if mask:
                blocks[slot_array(mask)] = end
        return blocks

    # Demand

    def add_access(self, path: "array[int]", degree_index: int) -> None:
        """One more use of every row of a path at a degree."""
        self.nodes.has_demand = True
        _add(self.nodes.access[degree_index], path, 1.0 / self.access_scale[degree_index])

    def add_missed(self, path: NDArray[np.int32], degree_index: int, benefit_s: NDArray[np.float64]) -> None:
        """So many seconds, per row, that a replica at this degree would have saved."""
        self.nodes.has_demand = True
        column = self.nodes.missed[degree_index].values
        column[path] += benefit_s / self.missed_scale[degree_index]

    def decay(self, factor: float) -> None:
        """Multiplies all demand by `factor`, at no cost: the common scale of each column is multiplied instead.

        What is added later is divided by the scale and what is read multiplied by it, so that this equals the
        multiplication of every value. `renormalise` keeps the scale in range.
        """
        self.access_scale = [scale * factor for scale in self.access_scale]
        self.missed_scale = [scale * factor for scale in self.missed_scale]

    def renormalise(self, degree_index: int) -> bool:
        """Brings the scales of one degree back to 1 if they have become small; says whether there was work to do."""
        done = False
        for scales, columns in ((self.access_scale, self.nodes.access), (self.missed_scale, self.nodes.missed)):
            if scales[degree_index] < _MIN_SCALE:
                values = columns[degree_index].values[: self.nodes.end]
                values *= scales[degree_index]
                values[values < _NEGLIGIBLE] = 0.0  # else they sink into slow denormal numbers
                scales[degree_index] = 1.0
                done = True
        return done

    def check_invariants(self, num_parked: Sequence[int]) -> None:
        """Raises InvariantError unless rows, sets and counters agree and nothing dead is kept.

        `num_parked`: per slot, the blocks that the owner has counted as resident beside those of the trie.
        """
        nodes, sets = self.nodes, self.sets
        nodes.check_invariants()
        holder_set = nodes.holder_set.values[: nodes.end]
        sets.check_invariants(np.bincount(holder_set, minlength=len(sets.masks)).tolist())
        residents = list(num_parked)
        stranded = [0] * len(self.resident_blocks)
        for node in np.flatnonzero(nodes.depth.values[: nodes.end]).tolist():
            replicas, lonely = sets.masks[holder_set[node]], self.stranded.get(node, 0)
            parent = nodes.parent.cells[node]
            above = sets.masks[holder_set[parent]]
            if parent and replicas & ~above:
                raise InvariantError(f"row {node} is a replica where its parent is not")
            if replicas & lonely or (not parent and lonely) or lonely & above:
                raise InvariantError(f"row {node} is stranded where its prefix is complete")
            if not (replicas or lonely or nodes.first_child.cells[node]):
                raise InvariantError(f"row {node} is kept alive by nothing")
            for slot in range(max(replicas | lonely, 1).bit_length()):
                residents[slot] += (replicas | lonely) >> slot & 1
                stranded[slot] += lonely >> slot & 1
        if any(not nodes.depth.cells[node] or not mask for node, mask in self.stranded.items()):
            raise InvariantError("a dead row is stranded")
        if residents != self.resident_blocks.tolist() or stranded != self.num_stranded:
            raise InvariantError("resident or stranded blocks are miscounted")


def _add(column: Column, path: "array[int]", amount: float) -> None:
    if len(path) <= _SHORT_PATH_BLOCKS:
        cells = column.cells
        for node in path:
            cells[node] += amount
    elif path:
        column.values[np.frombuffer(path, dtype=np.int32)] += amount
