"""The KV blocks of one worker: where each lies, which are in use, which goes next.

A block's address is physical, `(rank, slot)`, and never follows from a formula on the degree: a worker may reuse a
block if any of its ranks holds it. Splits and merges therefore move no KV; they only regroup stores.

Eviction order is least recently used, deepest block first: a request touches its path tail to root, so a block is
never older than one that extends it and the leaves of cold prefixes go before their roots.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from vertumnus.core.index.reports import Chain
from vertumnus.core.slices import Slices, finish
from vertumnus.errors import InvariantError

Address = tuple[int, int]
_Held = tuple[int, bytes | None]
"""Slot number over all ranks (rank * blocks_per_rank + slot), and the hash of the parent block (None for a root)."""

_SPARED_BLOCKS = 256
"""Last copies at most that are passed over for blocks that other workers hold too."""

SLICE_BLOCKS = 2000
"""Blocks between two yields of sliced work: a few milliseconds."""


@dataclass(slots=True)
class Allocation:
    """Slots held for one request's (or copy's) blocks until they are produced.

    `path` are the block hashes from the root, of which the first `num_reused` were resident at the start; `slots`
    belong to path[num_reused : num_reused + len(slots)], shorter than the path where the store had no room.
    `num_extra` further slots, the last ones, hold what never becomes a block of the cache.
    `parent` is the block that path[0] extends; None for a path that starts at the root. `above` are the resident
    blocks on the way to it, which are in use as long as the path is.
    """

    path: Sequence[bytes]
    parent: bytes | None
    num_reused: int
    slots: list[int]
    evicted: list[bytes]
    above: list[bytes]
    num_extra: int = 0
    num_produced: int = 0
    addresses: list[Address] | None = None
    """Of all blocks, once somebody has asked."""

    @property
    def has_room(self) -> bool:
        """Whether every block has a slot; where too much of the store is in use, some have none."""
        return len(self.slots) == len(self.path) - self.num_reused + self.num_extra

    @property
    def num_resident(self) -> int:
        """How much of the path, from its start, is in the store by now."""
        return self.num_reused + self.num_produced


class BlockStore:
    """LRU store over the slots of a worker's ranks: free + resident + allocated = capacity, at every moment.

    Most operations run once per request of a simulation, so they move whole runs of blocks instead of single ones.
    """

    def __init__(self, ranks: Sequence[int], blocks_per_rank: int) -> None:
        free = {rank: list(range((rank + 1) * blocks_per_rank - 1, rank * blocks_per_rank - 1, -1)) for rank in ranks}
        self._set(tuple(ranks), blocks_per_rank, OrderedDict(), free)

    def _set(
        self,
        ranks: tuple[int, ...],
        blocks_per_rank: int,
        resident: OrderedDict[bytes, _Held],
        free: dict[int, list[int]],
    ) -> None:
        self.ranks = ranks
        self.blocks_per_rank = blocks_per_rank
        self.capacity_blocks = blocks_per_rank * len(ranks)
        self._resident = resident
        self._free = free
        self._num_free = sum(len(slots) for slots in free.values())
        self._pins: dict[bytes, int] = {}
        self._num_allocated = 0

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    @property
    def num_free(self) -> int:
        """Slots that hold nothing; what is resident and not in use can be evicted besides."""
        return self._num_free

    @property
    def num_allocated(self) -> int:
        """Slots that are neither free nor hold a block of the cache."""
        return self._num_allocated

    def __contains__(self, block: bytes) -> bool:
        return block in self._resident

    def address(self, block: bytes) -> Address | None:
        """(rank, slot) of the block, or None."""
        held = self._resident.get(block)
        return None if held is None else divmod(held[0], self.blocks_per_rank)

    def addresses(self, allocation: Allocation) -> list[Address]:
        """Where every block of an allocation that has room lies or will lie, its extra slots last. Not to be changed:
        whoever asks again gets the same list."""
        if allocation.addresses is None:
            resident, per_rank = self._resident, self.blocks_per_rank
            slots = [resident[block][0] for block in allocation.path[: allocation.num_resident]]
            slots += allocation.slots[allocation.num_produced :]
            allocation.addresses = [(slot // per_rank, slot % per_rank) for slot in slots]
        return allocation.addresses

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
        for block in path[:limit]:
            if block not in resident:
                break
            count += 1
        return count

    def chains(self) -> tuple[Chain, ...]:
        """All resident blocks as chains, most recently used first: what a cache snapshot reports."""
        return finish(self.chaining())

    def chaining(self) -> Slices[tuple[Chain, ...]]:
        """`chains` in slices; the store must not change in between."""
        resident = self._resident
        following: dict[bytes, bytes] = {}
        starts = []
        for number, (block, (_, parent)) in enumerate(reversed(resident.items()), 1):
            if parent is not None and parent in resident and parent not in following:
                following[parent] = block
            else:
                starts.append((parent, block))
            if not number % SLICE_BLOCKS:
                yield
        chains = []
        num_left = SLICE_BLOCKS
        for parent, first in starts:
            run = [first]
            while (block_after := following.get(run[-1])) is not None:
                run.append(block_after)
            chains.append((parent, tuple(run)))
            num_left -= len(run)
            if num_left <= 0:
                num_left = SLICE_BLOCKS
                yield
        return tuple(chains)

    def allocate(
        self,
        path: Sequence[bytes],
        num_reused: int,
        parent: bytes | None = None,
        num_extra: int = 0,
        is_elsewhere: Callable[[bytes], bool] | None = None,
    ) -> Allocation:
        """Pins the first `num_reused` blocks of `path`; takes slots for the rest and `num_extra` more, evicting where
        needed: the oldest, or with `is_elsewhere` first those old ones of which it says that another worker holds them.

        New blocks lie in contiguous runs, evenly over the ranks as far as their free slots allow, so that each half
        of a later split keeps a usable run.
        """
        above: list[bytes] = []
        if parent is not None:
            above = _path_to(self._resident, parent)
            self.pin(above)
        if num_reused:
            self.pin(path[:num_reused])
        wanted = len(path) - num_reused + num_extra
        evicted: list[bytes] = []
        if wanted > self._num_free:
            num_short = wanted - self._num_free
            evicted = self._make_room(num_short) if is_elsewhere is None else self._thin_out(num_short, is_elsewhere)
        slots = self._take_slots(min(wanted, self._num_free))
        return Allocation(path, parent, num_reused, slots, evicted, above, num_extra)

    def produce(self, allocation: Allocation, num_blocks: int) -> None:
        """Makes the path's first `num_blocks` blocks resident and pins them, as far as slots were had.

        A block that arrived in the meantime (by a copy) keeps its first slot and the new one goes back.
        """
        start = allocation.num_resident
        self._install(allocation, num_blocks)
        self.pin(allocation.path[start : allocation.num_resident])

    def finish(self, allocation: Allocation, num_blocks: int = 0) -> None:
        """Ends an allocation whose first `num_blocks` blocks are produced by now.

        The slots of the others are given back, pins are lifted, and the path becomes the most recent, root last.
        """
        pinned = allocation.path[: allocation.num_resident]
        self._install(allocation, num_blocks)
        if allocation.num_produced < len(allocation.slots):
            unused = allocation.slots[allocation.num_produced :]
            self._num_allocated -= len(unused)
            self._release(unused)
        if pinned:
            self.unpin(pinned)
            self.touch(pinned)
        if allocation.above:
            self.unpin(allocation.above)
            self.touch(allocation.above)

    def touch(self, path: Sequence[bytes]) -> None:
        """Marks a path as just used, its root most recently."""
        move = self._resident.move_to_end
        for block in reversed(path):
            move(block)

    def pin(self, blocks: Iterable[bytes]) -> None:
        """Protects resident blocks from eviction until the same number of `unpin`s."""
        pins = self._pins
        if not pins:
            pins.update(dict.fromkeys(blocks, 1))
            return
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
        freed = [block for block in blocks if block in self._resident and block not in self._pins]
        self._release([self._resident.pop(block)[0] for block in freed])
        return freed

    def regroup(self, groups: Sequence[Sequence[int]]) -> list["BlockStore"]:
        """Splits into one store per group of ranks; every block stays where it lies, order of use is kept."""
        if self._pins or self._num_allocated:
            raise InvariantError("a store with blocks in use cannot be regrouped")
        residents: list[OrderedDict[bytes, _Held]] = [OrderedDict() for _ in groups]
        owner = {rank: resident for ranks, resident in zip(groups, residents, strict=True) for rank in ranks}
        for block, held in self._resident.items():
            owner[held[0] // self.blocks_per_rank][block] = held
        stores = []
        for ranks, resident in zip(groups, residents, strict=True):
            store = BlockStore.__new__(BlockStore)
            store._set(tuple(ranks), self.blocks_per_rank, resident, {rank: self._free[rank] for rank in ranks})
            stores.append(store)
        return stores

    @staticmethod
    def merged(stores: Sequence["BlockStore"]) -> "BlockStore":
        """The union of several stores. Of a block held twice, one copy is freed at once; recencies are interleaved.

        The stores share no clock, so their LRU orders are merged by relative position: the oldest tenth of the union
        is made of the oldest tenth of each, but for blocks that another store's blocks extend: those stay younger.
        """
        return finish(BlockStore.merging(stores))

    @staticmethod
    def merging(stores: Sequence["BlockStore"]) -> "Slices[BlockStore]":
        """`merged` in slices. The stores must not change in between, and are left as they are."""
        if any(store._pins or store._num_allocated for store in stores):
            raise InvariantError("a store with blocks in use cannot be merged")
        blocks = [block for store in stores for block in store._resident]
        entries = [held for store in stores for held in store._resident.values()]
        yield
        positions = [np.arange(1, len(store._resident) + 1) / len(store._resident) for store in stores]
        newest_first = np.argsort(np.concatenate(positions), kind="stable")[::-1].tolist()
        held: dict[bytes, _Held] = {}
        """What is kept of each block: its newest copy."""
        last_met: dict[bytes, int] = {}
        freed: list[tuple[int, int]] = []
        """When the next newer copy was met, and the slot."""
        for number, index in enumerate(newest_first):
            block = blocks[index]
            if block in held:
                freed.append((last_met[block], entries[index][0]))
            else:
                held[block] = entries[index]
            last_met[block] = number
            if not number % SLICE_BLOCKS:
                yield
        kept: dict[bytes, None] = {}
        for number, (newest, (_, parent)) in enumerate(held.items()):
            if parent is not None and parent in held and parent not in kept:
                # What it extends came from another store: it stays the more recent.
                kept.update(dict.fromkeys(_path_to(held, parent, kept)))
            kept[newest] = None
            if not number % SLICE_BLOCKS:
                yield
        resident: OrderedDict[bytes, _Held] = OrderedDict()
        for number, block in enumerate(reversed(kept)):
            resident[block] = held[block]
            if not number % SLICE_BLOCKS:
                yield
        union = BlockStore.__new__(BlockStore)
        union._set(
            tuple(rank for store in stores for rank in store.ranks),
            stores[0].blocks_per_rank,
            resident,
            {rank: free.copy() for store in stores for rank, free in store._free.items()},
        )
        union._release([slot for _, slot in sorted(freed, reverse=True)])
        return union

    @staticmethod
    def restored(rank: int, blocks_per_rank: int, blocks: Sequence[tuple[int, bytes, bytes | None]]) -> "BlockStore":
        """A rank's store with (slot, block, parent) resident, the first to be evicted first. Of a block that is named
        twice, the later one counts."""
        store = BlockStore([rank], blocks_per_rank)
        resident = store._resident
        for slot, block, parent in blocks:
            resident[block] = (rank * blocks_per_rank + slot, parent)
            resident.move_to_end(block)
        taken = {slot for slot, _ in resident.values()}
        store._free[rank] = [slot for slot in store._free[rank] if slot not in taken]
        store._num_free = len(store._free[rank])
        return store

    def check_invariants(self) -> None:
        """Raises InvariantError unless free + resident + allocated = capacity and no slot is owned twice."""
        num_free = sum(len(free) for free in self._free.values())
        if num_free != self._num_free:
            raise InvariantError(f"free count is {self._num_free}, free lists hold {num_free}")
        if self._num_free + len(self._resident) + self._num_allocated != self.capacity_blocks:
            raise InvariantError("free + resident + allocated differs from the capacity")
        owned = [slot for free in self._free.values() for slot in free]
        owned += [slot for slot, _ in self._resident.values()]
        if len(set(owned)) != len(owned):
            raise InvariantError("a slot is owned twice")
        if any(slot // self.blocks_per_rank not in self._free for slot in owned):
            raise InvariantError("a slot lies on a rank of another worker")
        if any(slot // self.blocks_per_rank != rank for rank, free in self._free.items() for slot in free):
            raise InvariantError("a free slot is listed at another rank")
        if any(block not in self._resident for block in self._pins):
            raise InvariantError("a block in use is not resident")

    def _install(self, allocation: Allocation, num_blocks: int) -> None:
        start = allocation.num_resident
        end = min(num_blocks, allocation.num_reused + len(allocation.slots), len(allocation.path))
        if end <= start:
            return
        blocks = allocation.path[start:end]
        slots = allocation.slots[allocation.num_produced : end - allocation.num_reused]
        parents = [allocation.path[start - 1] if start else allocation.parent, *blocks[:-1]]
        allocation.num_produced = end - allocation.num_reused
        self._num_allocated -= len(slots)
        resident = self._resident
        if resident.keys().isdisjoint(blocks):
            # Deepest first, as the oldest goes first.
            entries = zip(reversed(slots), reversed(parents), strict=True)
            for block, entry in zip(reversed(blocks), entries, strict=True):
                resident[block] = entry  # twice as fast as `update`, which an OrderedDict does pair by pair
            return
        allocation.addresses = None  # of the block that has come meanwhile, another slot counts
        for block, slot, parent in zip(reversed(blocks), reversed(slots), reversed(parents), strict=True):
            if block in resident:
                self._release([slot])
                resident.move_to_end(block)
            else:
                resident[block] = (slot, parent)

    def _make_room(self, num_blocks: int) -> list[bytes]:
        """Evicts the oldest blocks that are not in use, at most `num_blocks`; returns them, oldest first."""
        resident, pins = self._resident, self._pins
        evicted: list[bytes] = []
        slots: list[int] = []
        num_left = len(resident)
        while num_left and len(evicted) < num_blocks:
            num_oldest = min(num_blocks - len(evicted), num_left)
            num_left -= num_oldest
            oldest = [resident.popitem(False) for _ in range(num_oldest)]
            if not pins.keys().isdisjoint([block for block, _ in oldest]):
                # A block in use that is met on the way becomes recent: its request will touch it anyway.
                resident.update(entry for entry in oldest if entry[0] in pins)
                oldest = [entry for entry in oldest if entry[0] not in pins]
            evicted += [block for block, _ in oldest]
            slots += [held[0] for _, held in oldest]
        self._release(slots)
        return evicted

    def _thin_out(self, num_blocks: int, is_elsewhere: Callable[[bytes], bool]) -> list[bytes]:
        """`_make_room`, but what other workers hold goes before what is a last copy and up to `_SPARED_BLOCKS` older.

        A block that others hold goes only if none that extends it stays; the others, as ever, by age.
        """
        resident, pins = self._resident, self._pins
        oldest = list(islice((block for block in resident if block not in pins), num_blocks + _SPARED_BLOCKS))
        num_children = Counter(resident[block][1] for block in (*oldest, *pins))
        evicted: dict[bytes, None] = {}
        for block in oldest:
            if len(evicted) < num_blocks and not num_children[block] and is_elsewhere(block):
                evicted[block] = None
                num_children[resident[block][1]] -= 1
        for block in oldest:
            if len(evicted) < num_blocks:
                evicted.setdefault(block)
        self._release([resident.pop(block)[0] for block in evicted])
        return list(evicted)

    def _take_slots(self, num_blocks: int) -> list[int]:
        self._num_free -= num_blocks
        self._num_allocated += num_blocks
        if len(self.ranks) == 1:
            return _take(self._free[self.ranks[0]], num_blocks)
        if not self._num_free:
            taken: list[int] = []
            for rank in self.ranks:
                taken += reversed(self._free[rank])
                self._free[rank].clear()
            return taken
        # Ranks with the least room first, so that what they cannot take is shared by the others.
        left = num_blocks
        quota: dict[int, int] = {}
        for position, rank in enumerate(sorted(self.ranks, key=lambda rank: len(self._free[rank]))):
            share = -(-left // (len(self.ranks) - position))
            quota[rank] = min(share, len(self._free[rank]))
            left -= quota[rank]
        return [slot for rank in self.ranks for slot in _take(self._free[rank], quota[rank])]

    def _release(self, slots: Sequence[int]) -> None:
        self._num_free += len(slots)
        if len(self.ranks) == 1:
            self._free[self.ranks[0]] += slots
            return
        free, blocks_per_rank = self._free, self.blocks_per_rank
        for slot in slots:
            free[slot // blocks_per_rank].append(slot)


def _path_to(held: Mapping[bytes, _Held], block: bytes | None, end: Container[bytes] = ()) -> list[bytes]:
    """The blocks that are held on the way to a block, that one last, as far up as none is missing or in `end`."""
    path = []
    while block is not None and block in held and block not in end:
        path.append(block)
        block = held[block][1]
    return path[::-1]


def _take(free: list[int], count: int) -> list[int]:
    """The last `count` of a free list, removed from it."""
    if count == 0:
        return []
    taken = free[-count:]
    del free[-count:]
    taken.reverse()
    return taken
