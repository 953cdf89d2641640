"""The KV blocks of one worker: where each lies, which are in use, which goes next.

A block's address is physical, `(rank, slot)`, and never follows from a formula on the degree: a worker may reuse a
block if any of its ranks holds it. Splits and merges therefore move no KV; they only regroup stores.

Eviction order is least recently used, deepest block first: a request touches its path tail to root, so a block is
never older than one that extends it and the leaves of cold prefixes go before their roots.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vertumnus.core.index.reports import Chain
from vertumnus.errors import InvariantError

Address = tuple[int, int]
Resident = tuple[int, int, bytes | None]
"""Rank, slot, and the hash of the parent block (None for a root)."""


@dataclass(slots=True)
class Allocation:
    """Slots held for one request's (or copy's) blocks until they are produced.

    `path` are the block hashes from the root, of which the first `num_reused` were resident at the start; `slots` are
    the addresses of path[num_reused : num_reused + len(slots)], shorter than the path where the store had no room.
    `parent` is the block that path[0] extends; None for a path that starts at the root.
    """

    path: Sequence[bytes]
    parent: bytes | None
    num_reused: int
    slots: list[Address]
    evicted: list[bytes]
    num_produced: int = field(default=0)


class BlockStore:
    """LRU store over the slots of a worker's ranks: free + resident + allocated = capacity, at every moment."""

    def __init__(self, ranks: Sequence[int], blocks_per_rank: int) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.blocks_per_rank = blocks_per_rank
        self._resident: OrderedDict[bytes, Resident] = OrderedDict()
        self._free: dict[int, list[int]] = {rank: list(range(blocks_per_rank - 1, -1, -1)) for rank in self.ranks}
        self._num_free = blocks_per_rank * len(self.ranks)
        self._pins: dict[bytes, int] = {}
        self._num_allocated = 0

    @property
    def capacity_blocks(self) -> int:
        return self.blocks_per_rank * len(self.ranks)

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    def __contains__(self, block: bytes) -> bool:
        return block in self._resident

    def address(self, block: bytes) -> Address | None:
        """Where the block lies, or None."""
        held = self._resident.get(block)
        return None if held is None else held[:2]

    def in_use(self, block: bytes) -> bool:
        """Whether a running request or a copy holds the block."""
        return block in self._pins

    def blocks(self) -> Iterable[bytes]:
        """Resident blocks, next to be evicted first."""
        return self._resident.keys()

    def num_reusable(self, path: Sequence[bytes], limit: int) -> int:
        """How many leading blocks of `path`, at most `limit`, are resident."""
        resident = self._resident
        count = 0
        for block in path:
            if count == limit or block not in resident:
                break
            count += 1
        return count

    def chains(self) -> tuple[Chain, ...]:
        """All resident blocks as chains, most recently used first: what a cache snapshot reports."""
        following: dict[bytes, bytes] = {}
        starts = []
        for block, (_, _, parent) in reversed(self._resident.items()):
            if parent in self._resident and parent not in following:
                following[parent] = block
            else:
                starts.append((parent, block))
        chains = []
        for parent, first in starts:
            run = [first]
            while (block_after := following.get(run[-1])) is not None:
                run.append(block_after)
            chains.append((parent, tuple(run)))
        return tuple(chains)

    def allocate(self, path: Sequence[bytes], num_reused: int, parent: bytes | None = None) -> Allocation:
        """Pins the first `num_reused` blocks of `path` and takes slots for the rest, evicting where needed.

        New blocks lie in contiguous runs, evenly over the ranks as far as their free slots allow, so that each half
        of a later split keeps a usable run.
        """
        self.pin(path[:num_reused])
        wanted = len(path) - num_reused
        evicted = self._make_room(wanted)
        slots = self._take_slots(min(wanted, self._num_free))
        return Allocation(path, parent, num_reused, slots, evicted)

    def produce(self, allocation: Allocation, num_blocks: int) -> list[bytes]:
        """Makes the path's first `num_blocks` blocks resident as far as slots were had; returns the new ones.

        A block that arrived in the meantime (by a copy) keeps its first address and the slot goes back.
        """
        start = allocation.num_reused + allocation.num_produced
        end = min(num_blocks, allocation.num_reused + len(allocation.slots))
        new = []
        for position in range(start, end):
            block = allocation.path[position]
            address = allocation.slots[position - allocation.num_reused]
            self._num_allocated -= 1
            if block in self._resident:
                self._release(address)
            else:
                parent = allocation.path[position - 1] if position else allocation.parent
                self._resident[block] = (*address, parent)
                new.append(block)
            self._pins[block] = self._pins.get(block, 0) + 1
        allocation.num_produced = max(allocation.num_produced, end - allocation.num_reused)
        return new

    def finish(self, allocation: Allocation) -> None:
        """Ends an allocation: slots never produced are given back, pins are lifted, the path becomes most recent."""
        for address in allocation.slots[allocation.num_produced :]:
            self._num_allocated -= 1
            self._release(address)
        held = allocation.path[: allocation.num_reused + allocation.num_produced]
        self.unpin(held)
        self.touch(held)

    def touch(self, path: Sequence[bytes]) -> None:
        """Marks a path as just used, its root most recently."""
        move = self._resident.move_to_end
        for block in reversed(path):
            move(block)

    def pin(self, blocks: Iterable[bytes]) -> None:
        """Protects resident blocks from eviction until the same number of `unpin`s."""
        pins = self._pins
        for block in blocks:
            pins[block] = pins.get(block, 0) + 1

    def unpin(self, blocks: Iterable[bytes]) -> None:
        pins = self._pins
        for block in blocks:
            count = pins[block] - 1
            if count:
                pins[block] = count
            else:
                del pins[block]

    def reclaim(self, blocks: Iterable[bytes]) -> list[bytes]:
        """Frees those of `blocks` that are resident and not in use; returns them."""
        freed = []
        for block in blocks:
            if block in self._resident and block not in self._pins:
                self._release(self._resident.pop(block))
                freed.append(block)
        return freed

    def regroup(self, groups: Sequence[Sequence[int]]) -> list["BlockStore"]:
        """Splits into one store per group of ranks; every block stays where it lies, order of use is kept."""
        if self._pins or self._num_allocated:
            raise InvariantError("a store with blocks in use cannot be regrouped")
        owner = {}
        stores = []
        for ranks in groups:
            store = BlockStore.__new__(BlockStore)
            store.ranks = tuple(ranks)
            store.blocks_per_rank = self.blocks_per_rank
            store._resident = OrderedDict()
            store._free = {rank: self._free[rank] for rank in ranks}
            store._num_free = sum(len(free) for free in store._free.values())
            store._pins = {}
            store._num_allocated = 0
            stores.append(store)
            owner.update(dict.fromkeys(ranks, store))
        for block, held in self._resident.items():
            owner[held[0]]._resident[block] = held
        return stores

    @staticmethod
    def merged(stores: Sequence["BlockStore"]) -> "BlockStore":
        """The union of several stores. Of a block held twice, one copy is freed at once; recencies are interleaved.

        The stores share no clock, so their LRU orders are merged by relative position: the oldest tenth of the union
        is made of the oldest tenth of each.
        """
        union = BlockStore.__new__(BlockStore)
        union.ranks = tuple(rank for store in stores for rank in store.ranks)
        union.blocks_per_rank = stores[0].blocks_per_rank
        union._resident = OrderedDict()
        union._free = {rank: free for store in stores for rank, free in store._free.items()}
        union._num_free = sum(store._num_free for store in stores)
        union._pins = {}
        union._num_allocated = 0
        if any(store._pins or store._num_allocated for store in stores):
            raise InvariantError("a store with blocks in use cannot be merged")
        ordered = sorted(
            ((position + 1) / len(store._resident), index, position, block)
            for index, store in enumerate(stores)
            for position, block in enumerate(store._resident)
        )
        for _, index, _, block in ordered:
            if block in union._resident:
                union._release(union._resident.pop(block))
            union._resident[block] = stores[index]._resident[block]
        return union

    def check_invariants(self) -> None:
        """Raises InvariantError unless free + resident + allocated = capacity and no slot is owned twice."""
        num_free = sum(len(free) for free in self._free.values())
        if num_free != self._num_free:
            raise InvariantError(f"free count is {self._num_free}, free lists hold {num_free}")
        if self._num_free + len(self._resident) + self._num_allocated != self.capacity_blocks:
            raise InvariantError("free + resident + allocated differs from the capacity")
        owned = [(rank, slot) for rank, free in self._free.items() for slot in free]
        owned += [held[:2] for held in self._resident.values()]
        if len(set(owned)) != len(owned):
            raise InvariantError("a slot is owned twice")
        if any(rank not in self._free for rank, _ in owned):
            raise InvariantError("a slot lies on a rank of another worker")
        if any(block not in self._resident for block in self._pins):
            raise InvariantError("a block in use is not resident")

    def _make_room(self, num_blocks: int) -> list[bytes]:
        evicted: list[bytes] = []
        missing = num_blocks - self._num_free
        if missing <= 0:
            return evicted
        for block in self._resident:
            if block not in self._pins:
                evicted.append(block)
                if len(evicted) == missing:
                    break
        for block in evicted:
            self._release(self._resident.pop(block))
        return evicted

    def _take_slots(self, num_blocks: int) -> list[Address]:
        slots: list[Address] = []
        left = num_blocks
        self._num_free -= num_blocks
        self._num_allocated += num_blocks
        # Ranks with the least room first, so that what they cannot take is shared by the others.
        quota: dict[int, int] = {}
        by_room = sorted(self.ranks, key=lambda rank: len(self._free[rank])) if len(self.ranks) > 1 else self.ranks
        for position, rank in enumerate(by_room):
            share = -(-left // (len(by_room) - position))
            quota[rank] = min(share, len(self._free[rank]))
            left -= quota[rank]
        for rank in self.ranks:
            free = self._free[rank]
            slots += [(rank, free.pop()) for _ in range(quota[rank])]
        return slots

    def _release(self, address: Address | Resident) -> None:
        self._free[address[0]].append(address[1])
        self._num_free += 1
