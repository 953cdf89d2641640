"""The nodes of the trie as columns, one row per block, found by block hash.

Rows are numbered from 1; row 0 is the root, the empty prefix. Scalars are read and written through memoryviews of the
NumPy columns, which is several times faster than NumPy indexing; whole ranges go through NumPy.

A block is found in one of two places. *Young* rows are in a dictionary, which is fast and takes some 140 bytes a
block; when it is full, all of them move at once into an open hash table over the `words` column, which takes about 10.
"""

from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from struct import Struct, unpack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vertumnus.errors import InvariantError

ROOT = 0
HASH_BYTES = 16
_HASH_TYPE = f"V{HASH_BYTES}"
_FIRST_DEMAND_COLUMN = 7
"""Six columns for a row's place and holders and one for its time come before them."""

_PAIR = Struct("<2Q")
_FIRST_READ_AHEAD_BLOCKS = 8
_MAX_READ_AHEAD_BLOCKS = 64
_SINGLE_BLOCKS = 32
"""So many blocks of a path are walked one by one before it pays to compare whole stretches."""
_MAX_YOUNG = 1 << 17
_YOUNG_BYTES = 140
_SHORT_CHAIN_BLOCKS = 24
"""Below this, a loop over scalars writes faster than NumPy."""
_ZERO_HASH = bytes(HASH_BYTES)


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

    A living row has depth >= 1. A dead row has no hash, links, holders or demand (what is left of its parent and its
    time means nothing) and waits on the free list, last freed first used, so that a
    path that leaves and comes back keeps consecutive rows: `walk` compares those in bulk.
    """

    def __init__(self, num_degrees: int, capacity: int = 1024) -> None:
        self._capacity = capacity
        self.words = Column(np.zeros(2 * capacity, dtype=np.uint64))
        """Two words of hash per row, low half first."""
        self.hash_bytes: memoryview[int] = self.words.cells.cast("B")
        self._cells = np.zeros((_FIRST_DEMAND_COLUMN + 2 * num_degrees, capacity), dtype=np.int32)
        """All other columns; those after the sixth as 32-bit floats."""
        places = [Column(row) for row in self._cells[:6]]
        self.parent, self.depth, self.first_child, self.next_sibling, self.previous_sibling, self.holder_set = places
        """`depth`: blocks from the root, this one included. `holder_set`: the workers of which the block is a replica,
        that is, it and all its ancestors are resident there."""
        demand = [Column(row) for row in self._cells[6:].view(np.float32)]
        self.stored_s = demand[0]
        """When a worker last became a holder, on the owner's time scale."""
        self.access = demand[1 : 1 + num_degrees]
        self.missed = demand[1 + num_degrees :]
        self._columns = [*places, *demand]
        self.has_demand = False
        """Whether a row may have demand; the owner says so before the first."""
        self.num_nodes = 0
        self.end = 1
        """One past the highest row ever used."""
        self._free = array("i")
        self._young: dict[bytes, int] = {_ZERO_HASH: ROOT}
        """Row by block hash. The zero hash, which marks a dead row, is no block and so 'known' from the start."""
        self._table = Column(np.zeros(2048, dtype=np.int32))
        """The rows that are not young, by the low bits of their hash; runs of equal bits follow each other."""
        self._num_old = 0
        self.max_young = _MAX_YOUNG

    @property
    def num_bytes(self) -> int:
        """Memory of all columns, of the hash table, and about that of the dictionary of young rows."""
        arrays = (self.words.values, self._cells, self._table.values)
        return sum(values.nbytes for values in arrays) + 4 * len(self._free) + _YOUNG_BYTES * len(self._young)

    def hash_of(self, node: int) -> bytes:
        """The block hash of a row."""
        return bytes(self.hash_bytes[HASH_BYTES * node : HASH_BYTES * (node + 1)])

    def find(self, block: bytes) -> int:
        """The row of a block, ROOT if there is none."""
        node = self._young.get(block, ROOT)
        if node or not self._num_old or len(block) != HASH_BYTES:
            return node
        return self._find_old(*_PAIR.unpack(block))

    def walk(self, hashes: Iterable[bytes], parent: int = ROOT) -> "array[int]":
        """The rows of the longest known part of a chain below `parent`.

        Reads the chain lazily: never further ahead than a quarter of what it has matched, or a handful of blocks.
        """
        if isinstance(hashes, list) and (run := self._run_of(hashes, parent)):
            return array("i", run)
        nodes = array("i")
        append, get, parents = nodes.append, self._young.get, self.parent.cells
        unread = iter(hashes)
        for block in islice(unread, _SINGLE_BLOCKS):
            node = get(block)
            if not node:
                if self._num_old:
                    self._walk_stretches(nodes, chain((block,), unread), parent)
                return nodes
            if parents[node] != parent:
                return nodes
            append(node)
            parent = node
        if len(nodes) == _SINGLE_BLOCKS:
            self._walk_stretches(nodes, unread, parent)
        return nodes

    def _run_of(self, blocks: Sequence[bytes], parent: int) -> range | None:
        """The rows of a whole chain below `parent` where they follow each other, as those of a path made at once do."""
        start = self.find(blocks[0]) if blocks else ROOT
        end = start + len(blocks)
        if (
            start
            and end <= self.end
            and self.parent.cells[start] == parent
            and self.depth.cells[end - 1] == self.depth.cells[parent] + len(blocks)
            and self.hash_bytes[HASH_BYTES * start : HASH_BYTES * end].tobytes() == b"".join(blocks)
        ):
            return range(start, end)
        return None

    def _walk_stretches(self, nodes: "array[int]", unread: Iterator[bytes], parent: int) -> None:
        """Walks on: each stretch read is first compared as a whole with the rows that follow, then block by block."""
        words, table, hash_bytes = self.words.cells, self._table.cells, self.hash_bytes
        parents, depths, get = self.parent.cells, self.depth.cells, self._young.get
        mask = len(table) - 1
        depth = depths[parent]
        read_ahead = min(max(depth >> 2, _FIRST_READ_AHEAD_BLOCKS), _MAX_READ_AHEAD_BLOCKS)
        while stretch := tuple(islice(unread, read_ahead)):
            size = len(stretch)
            joined = b"".join(stretch)
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
            for block, low, high in zip(stretch, halves, halves, strict=True):
                node = get(block)
                if node is None:
                    probe = low & mask
                    node = table[probe]
                    while node and not (words[2 * node] == low and words[2 * node + 1] == high):
                        probe = (probe + 1) & mask
                        node = table[probe]
                if not node or parents[node] != parent:
                    return
                nodes.append(node)
                parent = node

    def append_chain(self, parent: int, blocks: tuple[bytes, ...], set_id: int = 0, stored_s: float = 0.0) -> list[int]:
        """Creates the rows of a chain below `parent`, with this holder set and time, and returns them. Stops before a
        block that is known already, or all zero, which marks a dead row."""
        young = self._young
        if self._num_old:
            blocks = self._new_part(blocks)
        self._reserve(len(blocks))
        made = self._take_rows(len(blocks))
        found = list(map(young.setdefault, blocks, made))
        if found != made:
            end = next(k for k, row in enumerate(found) if row != made[k])
            for block, row, had in zip(blocks[end:], made[end:], found[end:], strict=True):
                if row == had:
                    del young[block]
            self._free.extend(reversed(made[end:]))
            made, blocks = made[:end], blocks[:end]
        if not made:
            return made
        sibling = self.first_child.cells[parent]
        if sibling:
            self.next_sibling.cells[made[0]] = sibling
            self.previous_sibling.cells[sibling] = made[0]
        self._write_chain(parent, blocks, made, set_id, stored_s)
        self.num_nodes += len(made)
        if len(young) > self.max_young:
            self._age()
        return made

    def _new_part(self, blocks: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """The head of a chain up to the first block that is known."""
        rows = self.find_all(blocks)
        if any(rows):
            return blocks[: next(position for position, row in enumerate(rows) if row)]
        return blocks[: blocks.index(_ZERO_HASH)] if _ZERO_HASH in blocks else blocks

    def _take_rows(self, num_rows: int) -> list[int]:
        """Blank rows, the last freed first, so that a path that leaves and comes back has consecutive ones."""
        free = self._free
        num_reused = min(num_rows, len(free))
        rows = free[len(free) - num_reused :].tolist()
        del free[len(free) - num_reused :]
        rows.reverse()
        if num_reused < num_rows:
            rows.extend(range(self.end, self.end + num_rows - num_reused))
            self.end += num_rows - num_reused
        return rows

    def _write_chain(
        self, parent: int, blocks: tuple[bytes, ...], rows: list[int], set_id: int, stored_s: float
    ) -> None:
        """Writes hash, depth, links, holder set and time of the rows of a chain."""
        depth = self.depth.cells[parent]
        if len(rows) < _SHORT_CHAIN_BLOCKS:
            parents, depths, first_child = self.parent.cells, self.depth.cells, self.first_child.cells
            hash_bytes, holder_set, stored = self.hash_bytes, self.holder_set.cells, self.stored_s.cells
            for block, node in zip(blocks, rows, strict=True):
                depth += 1
                hash_bytes[HASH_BYTES * node : HASH_BYTES * node + HASH_BYTES] = block
                depths[node] = depth
                parents[node] = parent
                first_child[parent] = node
                holder_set[node] = set_id
                stored[node] = stored_s
                parent = node
            return
        numbers = np.array(rows, dtype=np.int32)
        is_run = rows == list(range(rows[0], rows[0] + len(rows)))
        places = slice(rows[0], rows[-1] + 1) if is_run else numbers
        self.words.values.reshape(-1, 2)[places] = np.frombuffer(b"".join(blocks), dtype=np.uint64).reshape(-1, 2)
        self.depth.values[places] = np.arange(depth + 1, depth + 1 + len(rows))
        self.parent.values[places] = np.concatenate(((parent,), numbers[:-1]))
        self.first_child.cells[parent] = rows[0]
        self.first_child.values[places] = np.concatenate((numbers[1:], (ROOT,)))
        self.holder_set.values[places] = set_id
        self.stored_s.values[places] = stored_s

    def find_all(self, blocks: Sequence[bytes]) -> list[int]:
        """The row of every block, ROOT where there is none. Fastest for paths from the deepest block up."""
        young = self._young
        if not self._num_old:
            return list(map(young.get, blocks, repeat(ROOT)))
        words, table = self.words.cells, self._table.cells
        mask = len(table) - 1
        rows: list[int] = []
        node = 1
        halves = iter(unpack(f"<{2 * len(blocks)}Q", b"".join(blocks)))
        for block, low, high in zip(blocks, halves, halves, strict=True):
            node -= 1
            if node > 0 and words[2 * node] == low and words[2 * node + 1] == high:
                rows.append(node)  # the parent of the block before, made just before it
                continue
            node = young.get(block, ROOT)
            if not node:
                probe = low & mask
                node = table[probe]
                while node and not (words[2 * node] == low and words[2 * node + 1] == high):
                    probe = (probe + 1) & mask
                    node = table[probe]
            rows.append(node)
        return rows

    def _find_old(self, low: int, high: int) -> int:
        words, table = self.words.cells, self._table.cells
        mask = len(table) - 1
        probe = low & mask
        node: int = table[probe]
        while node and not (words[2 * node] == low and words[2 * node + 1] == high):
            probe = (probe + 1) & mask
            node = table[probe]
        return node

    def bury(self, rows: Iterable[int], kept: Container[int]) -> None:
        """Deletes those rows that have no child, an empty holder set and are not `kept`; then, as far as the same is
        true of them, their ancestors. Their demand is forgotten."""
        parents, depths = self.parent.cells, self.depth.cells
        first_child, holder_set = self.first_child.cells, self.holder_set.cells
        next_sibling, previous_sibling = self.next_sibling.cells, self.previous_sibling.cells
        dead = array("i")
        for row in rows:
            node = row
            while not (first_child[node] or holder_set[node]) and depths[node] and node not in kept:
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
                depths[node] = 0
                dead.append(node)
                node = parent
        if dead:
            self._blank(dead)

    def _blank(self, dead: "array[int]") -> None:
        """Forgets hash and demand of rows that hang in the tree no more and puts them on the free list."""
        first, last = min(dead), max(dead)
        if last - first + 1 == len(dead):  # mostly a whole path: NumPy takes a run far faster than rows one by one
            rows: Sequence[int] = range(first, last + 1)
            places: slice | NDArray[np.int32] = slice(first, last + 1)
        else:
            rows, places = dead, np.frombuffer(dead, dtype=np.int32)
        words = self.words.values.reshape(-1, 2)
        hashes = words[places].view(_HASH_TYPE).ravel().tolist()
        young = list(map(self._young.pop, hashes, repeat(ROOT)))
        if not all(young):
            self._forget_old([node for node, row in zip(rows, young, strict=True) if not row])
        words[places] = 0
        if self.has_demand:
            self._cells[_FIRST_DEMAND_COLUMN:, places] = 0
        self._free.extend(dead)
        self.num_nodes -= len(dead)

    def _forget_old(self, rows: list[int]) -> None:
        """Takes rows out of the hash table. Later entries of a run move up, so that no tombstones accumulate."""
        words, table = self.words.cells, self._table.cells
        mask = len(table) - 1
        for node in rows:
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
        self._num_old -= len(rows)

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
        """Room for so many more rows, by half at a time."""
        needed = self.end + num_blocks
        if needed > self._capacity:
            self._capacity = max(needed, self._capacity * 3 // 2)
            self.words.adopt(_grown(self.words.values, 2 * self._capacity))
            self.hash_bytes = self.words.cells.cast("B")
            self._cells = _grown(self._cells, self._capacity)
            columns = [*self._cells[:6], *self._cells[6:].view(np.float32)]
            for column, values in zip(self._columns, columns, strict=True):
                column.adopt(values)

    def _age(self) -> None:
        """Moves all young rows into the hash table, which stays at most 5/8 full."""
        size = len(self._table.values)
        if 8 * self.num_nodes > 5 * size:
            while 8 * self.num_nodes > 5 * size:
                size *= 2
            self._table.adopt(np.zeros(size, dtype=np.int32))
            rows = np.flatnonzero(self.depth.values[: self.end]).astype(np.int32)
        else:
            rows = np.fromiter(self._young.values(), dtype=np.int32, count=len(self._young))[1:]
        self._young = {_ZERO_HASH: ROOT}
        self._num_old = self.num_nodes
        values = self._table.values
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
            left = [column.cells[node] for column in self._columns if column not in (self.parent, self.stored_s)]
            if any(left) or self.hash_of(node) != _ZERO_HASH:
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
        num_old = int(np.count_nonzero(self._table.values))
        if reached != len(alive) or num_old != self._num_old or num_old + len(self._young) - 1 != len(alive):
            raise InvariantError(f"{len(alive)} rows live, {reached} hang in the tree")
