"""The nodes of the trie as columns, one row per block, with a hash table from block hash to row.

Rows are numbered from 1; row 0 is the root, the empty prefix. Scalars are read and written through memoryviews of the
NumPy columns, which is several times faster than NumPy indexing; whole ranges go through NumPy.
"""

from array import array
from collections.abc import Container, Iterable, Sequence
from itertools import islice
from struct import Struct, unpack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vertumnus.errors import InvariantError

ROOT = 0
HASH_BYTES = 16

_PAIR = Struct("<2Q")
_FIRST_READ_AHEAD_BLOCKS = 8
_MAX_READ_AHEAD_BLOCKS = 64


class Column:
    """One growing column: `values` for NumPy, `cells` (a view of the same memory) for scalar access."""

    __slots__ = ("cells", "values")

    def __init__(self, values: NDArray[Any]) -> None:
        self.adopt(values)

    def adopt(self, values: NDArray[Any]) -> None:
        """Lives in this memory from now on."""
        self.values = values
        self.cells: memoryview[Any] = values.data


def _grown(values: NDArray[Any], capacity: int) -> NDArray[Any]:
    """A copy with room for `capacity` rows (the last axis); new rows are zero."""
    grown = np.zeros((*values.shape[:-1], capacity), dtype=values.dtype)
    grown[..., : values.shape[-1]] = values
    return grown


class NodeTable:
    """Rows of the trie: hash, place in the tree, holder set, time and demand.

    A living row has depth >= 1. A dead row is all zero and waits on the free list, last freed first used, so that a
    path that leaves and comes back keeps consecutive rows: `walk` compares those in bulk.
    """

    def __init__(self, num_degrees: int, capacity: int = 1024) -> None:
        self._capacity = capacity
        self.words = Column(np.zeros(2 * capacity, dtype=np.uint64))
        """Two words of hash per row, low half first."""
        self.hash_bytes: memoryview[int] = self.words.cells.cast("B")
        self._places = np.zeros((6, capacity), dtype=np.int32)
        places = [Column(row) for row in self._places]
        self.parent, self.depth, self.first_child, self.next_sibling, self.previous_sibling, self.holder_set = places
        """`depth`: blocks from the root, this one included. `holder_set`: the workers of which the block is a replica,
        that is, it and all its ancestors are resident there."""
        self._demand = np.zeros((1 + 2 * num_degrees, capacity), dtype=np.float32)
        demand = [Column(row) for row in self._demand]
        self.stored_s = demand[0]
        """When a worker last became a holder, on the owner's time scale."""
        self.access = demand[1 : 1 + num_degrees]
        self.missed = demand[1 + num_degrees :]
        self._columns = [*places, *demand]
        self.num_nodes = 0
        self.end = 1
        """One past the highest row ever used."""
        self._free = array("i")
        self._table = Column(np.zeros(2048, dtype=np.int32))

    @property
    def num_bytes(self) -> int:
        """Memory of all columns and of the hash table."""
        arrays = (self.words.values, self._places, self._demand, self._table.values)
        return sum(values.nbytes for values in arrays) + 4 * len(self._free)

    def hash_of(self, node: int) -> bytes:
        """The block hash of a row."""
        return bytes(self.hash_bytes[HASH_BYTES * node : HASH_BYTES * (node + 1)])

    def find(self, block: bytes) -> int:
        """The row of a block, ROOT if there is none."""
        if len(block) != HASH_BYTES:
            return ROOT
        low, high = _PAIR.unpack(block)
        words, table = self.words.cells, self._table.cells
        mask = len(table) - 1
        probe = low & mask
        node: int = table[probe]
        while node and not (words[2 * node] == low and words[2 * node + 1] == high):
            probe = (probe + 1) & mask
            node = table[probe]
        return node

    def walk(self, hashes: Iterable[bytes], parent: int = ROOT) -> "array[int]":
        """The rows of the longest known part of a chain below `parent`.

        Reads the chain lazily: never further ahead than a quarter of what it has matched, or a handful of blocks.
        Each stretch read is first compared as a whole with the rows that follow, then block by block.
        """
        nodes = array("i")
        words, table, hash_bytes = self.words.cells, self._table.cells, self.hash_bytes
        parents, depths = self.parent.cells, self.depth.cells
        mask = len(table) - 1
        depth = depths[parent]
        unread = iter(hashes)
        read_ahead = _FIRST_READ_AHEAD_BLOCKS
        while chunk := tuple(islice(unread, read_ahead)):
            size = len(chunk)
            joined = b"".join(chunk)
            start, end = parent + 1, parent + 1 + size
            depth += size
            if (
                end <= self.end
                and depths[end - 1] == depth
                and parents[start] == parent
                and hash_bytes[HASH_BYTES * start : HASH_BYTES * end].tobytes() == joined
            ):
                nodes.extend(range(start, end))
                parent = end - 1
                read_ahead = min(max(depth >> 2, _FIRST_READ_AHEAD_BLOCKS), _MAX_READ_AHEAD_BLOCKS)
                continue
            halves = iter(unpack(f"<{2 * size}Q", joined))
            for low, high in zip(halves, halves, strict=True):
                probe = low & mask
                node = table[probe]
                while node and not (words[2 * node] == low and words[2 * node + 1] == high):
                    probe = (probe + 1) & mask
                    node = table[probe]
                if not node or parents[node] != parent:
                    return nodes
                nodes.append(node)
                parent = node
        return nodes

    def append_chain(self, parent: int, blocks: tuple[bytes, ...]) -> list[int]:
        """Creates the rows of a chain below `parent` and returns them. Stops before a block that is known already, or
        all zero, which marks a dead row."""
        self._reserve(len(blocks))
        words, table = self.words.cells, self._table.cells
        parents, depths, first_child = self.parent.cells, self.depth.cells, self.first_child.cells
        mask = len(table) - 1
        free, end = self._free, self.end
        depth = depths[parent]
        sibling = first_child[parent]
        made: list[int] = []
        halves = iter(unpack(f"<{2 * len(blocks)}Q", b"".join(blocks)))
        for low, high in zip(halves, halves, strict=True):
            probe = low & mask
            while node := table[probe]:
                if words[2 * node] == low and words[2 * node + 1] == high:
                    break
                probe = (probe + 1) & mask
            if node or not (low or high):
                break
            if free:
                node = free.pop()
            else:
                node = end
                end += 1
            table[probe] = node
            words[2 * node] = low
            words[2 * node + 1] = high
            depth += 1
            depths[node] = depth
            parents[node] = parent
            first_child[parent] = node
            made.append(node)
            parent = node
        if made and sibling:
            self.next_sibling.cells[made[0]] = sibling
            self.previous_sibling.cells[sibling] = made[0]
        self.end = end
        self.num_nodes += len(made)
        return made

    def find_all(self, blocks: Sequence[bytes]) -> list[int]:
        """The row of every block, ROOT where there is none. Fastest for paths from the deepest block up."""
        words, table = self.words.cells, self._table.cells
        mask = len(table) - 1
        rows: list[int] = []
        node = 1
        halves = iter(unpack(f"<{2 * len(blocks)}Q", b"".join(blocks)))
        for low, high in zip(halves, halves, strict=True):
            node -= 1
            if node > 0 and words[2 * node] == low and words[2 * node + 1] == high:
                rows.append(node)  # the parent of the block before, made just before it
                continue
            probe = low & mask
            node = table[probe]
            while node and not (words[2 * node] == low and words[2 * node + 1] == high):
                probe = (probe + 1) & mask
                node = table[probe]
            rows.append(node)
        return rows

    def bury(self, rows: Iterable[int], kept: Container[int]) -> None:
        """Deletes those rows that have no child, an empty holder set and are not `kept`; then, as far as the same is
        true of them, their ancestors. Their demand is forgotten."""
        parents, depths = self.parent.cells, self.depth.cells
        first_child, holder_set = self.first_child.cells, self.holder_set.cells
        next_sibling, previous_sibling = self.next_sibling.cells, self.previous_sibling.cells
        words, table = self.words.cells, self._table.cells
        mask = len(table) - 1
        freed = array("i")
        for row in rows:
            node = row
            while depths[node] and not first_child[node] and not holder_set[node] and node not in kept:
                parent = parents[node]
                sibling, previous = next_sibling[node], previous_sibling[node]
                if previous:
                    next_sibling[previous] = sibling
                    previous_sibling[node] = 0
                else:
                    first_child[parent] = sibling
                if sibling:
                    previous_sibling[sibling] = previous
                    next_sibling[node] = 0
                # Out of the hash table: later entries of its run move up, so that no tombstones accumulate.
                hole = words[2 * node] & mask
                while table[hole] != node:
                    hole = (hole + 1) & mask
                probe = (hole + 1) & mask
                while follower := table[probe]:
                    if (probe - words[2 * follower]) & mask >= (probe - hole) & mask:
                        table[hole] = follower
                        hole = probe
                    probe = (probe + 1) & mask
                table[hole] = 0
                words[2 * node] = words[2 * node + 1] = 0
                parents[node] = depths[node] = 0
                freed.append(node)
                node = parent
        if not freed:
            return
        dead = np.frombuffer(freed, dtype=np.int32)
        self._demand[:, dead] = 0.0
        self._free.extend(freed)
        self.num_nodes -= len(freed)

    def children(self, node: int) -> list[int]:
        """The children of a row, last created first."""
        following = self.next_sibling.cells
        child = self.first_child.cells[node]
        found = []
        while child:
            found.append(child)
            child = following[child]
        return found

    def path_to(self, node: int) -> list[int]:
        """The rows from the root's child down to `node`."""
        parents = self.parent.cells
        path = []
        while node:
            path.append(node)
            node = parents[node]
        path.reverse()
        return path

    def _reserve(self, num_blocks: int) -> None:
        """Room for so many more rows, by half at a time; the hash table stays at most 5/8 full."""
        needed = self.end + num_blocks
        if needed > self._capacity:
            self._capacity = max(needed, self._capacity * 3 // 2)
            self.words.adopt(_grown(self.words.values, 2 * self._capacity))
            self.hash_bytes = self.words.cells.cast("B")
            self._places = _grown(self._places, self._capacity)
            self._demand = _grown(self._demand, self._capacity)
            for column, values in zip(self._columns, [*self._places, *self._demand], strict=True):
                column.adopt(values)
        size = len(self._table.values)
        if 8 * (self.num_nodes + num_blocks) > 5 * size:
            while 8 * (self.num_nodes + num_blocks) > 5 * size:
                size *= 2
            self._rehash(size)

    def _rehash(self, size: int) -> None:
        self._table.adopt(np.zeros(size, dtype=np.int32))
        values = self._table.values
        rows = np.flatnonzero(self.depth.values[: self.end]).astype(np.int32)
        probes = (self.words.values[2 * rows.astype(np.int64)] & np.uint64(size - 1)).astype(np.int64)
        while len(rows):
            empty = values[probes] == 0
            values[probes[empty]] = rows[empty]
            unplaced = values[probes] != rows
            rows, probes = rows[unplaced], (probes[unplaced] + 1) & (size - 1)

    def check_invariants(self) -> None:
        """Raises InvariantError unless tree, hash table and free list agree."""
        alive = np.flatnonzero(self.depth.values[: self.end]).tolist()
        if len(alive) != self.num_nodes or self.num_nodes + len(self._free) != self.end - 1:
            raise InvariantError(f"{len(alive)} living rows, {self.num_nodes} counted, {len(self._free)} free")
        if len(set(self._free)) != len(self._free):
            raise InvariantError("a row is free twice")
        for node in self._free:
            if any(column.cells[node] for column in self._columns) or self.hash_of(node) != bytes(HASH_BYTES):
                raise InvariantError(f"free row {node} is not blank")
        reached = 0
        stack = [ROOT]
        while stack:
            node = stack.pop()
            previous = 0
            for child in self.children(node):
                reached += 1
                if self.parent.cells[child] != node or self.depth.cells[child] != self.depth.cells[node] + 1:
                    raise InvariantError(f"row {child} does not hang below row {node}")
                if self.previous_sibling.cells[child] != previous:
                    raise InvariantError(f"row {child} has a wrong sibling")
                previous = child
                stack.append(child)
                if self.find(self.hash_of(child)) != child:
                    raise InvariantError(f"row {child} is not found by its hash")
        if reached != len(alive) or int(np.count_nonzero(self._table.values)) != len(alive):
            raise InvariantError(f"{len(alive)} rows live, {reached} hang in the tree")
