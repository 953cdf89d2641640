"""The KV blocks of one worker: where each lies, which are in use, which goes next.

A block's address is physical, `(rank, slot)`, and never follows from a formula on the degree: a worker may reuse a
block if any of its ranks holds it. Splits and merges therefore move no KV; they only regroup stores.

Eviction order is least recently used, deepest block first: a request touches its path tail to root, so a block is
never older than one that extends it and the leaves of cold prefixes go before their roots.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from vertumnus.core.index.reports import Chain
from vertumnus.errors import InvariantError

Address = tuple[int, int]
_COMPACT_FACTOR = 4
"""The record of uses is rewritten when it is so many times as long as the store has blocks."""


@dataclass(slots=True)
class Allocation:
    """Slots held for one request's (or copy's) blocks until they are produced.

    `path` are the block hashes from the root, of which the first `num_reused` were resident at the start; `slots`
    belong to path[num_reused : num_reused + len(slots)], shorter than the path where the store had no room.
    `parent` is the block that path[0] extends; None for a path that starts at the root. `above` are the resident
    blocks on the way to it, which are in use as long as the path is.
    """

    path: Sequence[bytes]
    parent: bytes | None
    num_reused: int
    slots: list[int]
    evicted: list[bytes]
    above: list[bytes]
    num_produced: int = 0

    @property
    def num_resident(self) -> int:
        """How much of the path, from its start, is in the store by now."""
        return self.num_reused + self.num_produced


class BlockStore:
    """LRU store over the slots of a worker's ranks: free + resident + allocated = capacity, at every moment.

    Most operations run once per request of a simulation, so they move whole runs of blocks instead of single ones. The
    order of use is kept that way too: every use of some blocks is one numbered entry of a queue, and an entry speaks
    for those of its blocks that no later one mentions.
    """

    def __init__(self, ranks: Sequence[int], blocks_per_rank: int) -> None:
        free = {rank: list(range((rank + 1) * blocks_per_rank - 1, rank * blocks_per_rank - 1, -1)) for rank in ranks}
        self._set(tuple(ranks), blocks_per_rank, free)

    def _set(self, ranks: tuple[int, ...], blocks_per_rank: int, free: dict[int, list[int]]) -> None:
        self.ranks = ranks
        self.blocks_per_rank = blocks_per_rank
        self.capacity_blocks = blocks_per_rank * len(ranks)
        self._resident: dict[bytes, int] = {}
        """Slot number over all ranks (rank * blocks_per_rank + slot) by block."""
        self._parents: dict[bytes, bytes | None] = {}
        """The parent block of every resident block, None for a root."""
        self._last_use: dict[bytes, int] = {}
        """Number of the last use of every resident block."""
        self._uses: deque[tuple[int, Sequence[bytes]]] = deque()
        """(number, blocks) of every use, oldest first; in each the next to be evicted first."""
        self._num_uses = 0
        self._num_used = 0
        """Blocks over all entries of `_uses`."""
        self._free = free
        self._num_free = sum(len(slots) for slots in free.values())
        self._pins: dict[bytes, int] = {}
        self._num_allocated = 0

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    def __contains__(self, block: bytes) -> bool:
        return block in self._resident

    def address(self, block: bytes) -> Address | None:
        """(rank, slot) of the block, or None."""
        slot = self._resident.get(block)
        return None if slot is None else divmod(slot, self.blocks_per_rank)

    def in_use(self, block: bytes) -> bool:
        """Whether a running request or a copy holds the block."""
        return block in self._pins

    def blocks(self) -> Iterator[bytes]:
        """Resident blocks, next to be evicted first."""
        last_use = self._last_use
        return (block for number, used in self._uses for block in used if last_use.get(block) == number)

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
        for block in reversed(list(self.blocks())):
            parent = self._parents[block]
            if parent is not None and parent in self._resident and parent not in following:
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
        above = self._path_to(parent)
        self.pin(above)
        self.pin(path[:num_reused])
        wanted = len(path) - num_reused
        evicted = self._make_room(wanted - self._num_free) if wanted > self._num_free else []
        slots = self._take_slots(min(wanted, self._num_free))
        return Allocation(path, parent, num_reused, slots, evicted, above)

    def produce(self, allocation: Allocation, num_blocks: int) -> None:
        """Makes the path's first `num_blocks` blocks resident and pins them, as far as slots were had.

        A block that arrived in the meantime (by a copy) keeps its first slot and the new one goes back.
        """
        blocks = self._install(allocation, num_blocks)
        self.touch(blocks)
        self.pin(blocks)

    def finish(self, allocation: Allocation, num_blocks: int = 0) -> None:
        """Ends an allocation whose first `num_blocks` blocks are produced by now.

        The slots of the others are given back, pins are lifted, and the path becomes the most recent, root last.
        """
        pinned = allocation.path[: allocation.num_resident]
        self._install(allocation, num_blocks)
        unused = allocation.slots[allocation.num_produced :]
        if unused:
            self._num_allocated -= len(unused)
            self._release(unused)
        self.unpin(pinned)
        self.touch(pinned if len(pinned) == allocation.num_resident else allocation.path[: allocation.num_resident])
        if allocation.above:
            self.unpin(allocation.above)
            self.touch(allocation.above)

    def touch(self, path: Sequence[bytes]) -> None:
        """Marks a path of resident blocks as just used, its root most recently."""
        self._use(path[::-1])

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
        freed = [block for block in dict.fromkeys(blocks) if block in self._resident and block not in self._pins]
        self._release(self._forget(freed))
        return freed

    def regroup(self, groups: Sequence[Sequence[int]]) -> list["BlockStore"]:
        """Splits into one store per group of ranks; every block stays where it lies, order of use is kept."""
        if self._pins or self._num_allocated:
            raise InvariantError("a store with blocks in use cannot be regrouped")
        stores = []
        owner = {}
        for ranks in groups:
            store = BlockStore.__new__(BlockStore)
            store._set(tuple(ranks), self.blocks_per_rank, {rank: self._free[rank] for rank in ranks})
            stores.append(store)
            owner.update(dict.fromkeys(ranks, store))
        runs: dict[int, list[bytes]] = {id(store): [] for store in stores}
        for block in self.blocks():
            store = owner[self._resident[block] // self.blocks_per_rank]
            store._adopt(block, self)
            runs[id(store)].append(block)
        for store in stores:
            store._use(runs[id(store)])
        return stores

    @staticmethod
    def merged(stores: Sequence["BlockStore"]) -> "BlockStore":
        """The union of several stores. Of a block held twice, one copy is freed at once; recencies are interleaved.

        The stores share no clock, so their LRU orders are merged by relative position: the oldest tenth of the union
        is made of the oldest tenth of each.
        """
        if any(store._pins or store._num_allocated for store in stores):
            raise InvariantError("a store with blocks in use cannot be merged")
        union = BlockStore.__new__(BlockStore)
        union._set(
            tuple(rank for store in stores for rank in store.ranks),
            stores[0].blocks_per_rank,
            {rank: free for store in stores for rank, free in store._free.items()},
        )
        ordered = sorted(
            ((position + 1) / len(store._resident), index, position, block)
            for index, store in enumerate(stores)
            for position, block in enumerate(store.blocks())
        )
        for _, index, _, block in ordered:
            if block in union._resident:
                union._release([union._resident[block]])
            union._adopt(block, stores[index])
        last = {block: None for _, _, _, block in reversed(ordered)}
        union._use(list(last)[::-1])
        return union

    def check_invariants(self) -> None:
        """Raises InvariantError unless free + resident + allocated = capacity and no slot is owned twice."""
        num_free = sum(len(free) for free in self._free.values())
        if num_free != self._num_free:
            raise InvariantError(f"free count is {self._num_free}, free lists hold {num_free}")
        if self._num_free + len(self._resident) + self._num_allocated != self.capacity_blocks:
            raise InvariantError("free + resident + allocated differs from the capacity")
        owned = [slot for free in self._free.values() for slot in free]
        owned += self._resident.values()
        if len(set(owned)) != len(owned):
            raise InvariantError("a slot is owned twice")
        if any(slot // self.blocks_per_rank not in self._free for slot in owned):
            raise InvariantError("a slot lies on a rank of another worker")
        if any(slot // self.blocks_per_rank != rank for rank, free in self._free.items() for slot in free):
            raise InvariantError("a free slot is listed at another rank")
        if any(block not in self._resident for block in self._pins):
            raise InvariantError("a block in use is not resident")
        if not self._resident.keys() == self._parents.keys() == self._last_use.keys() == set(self.blocks()):
            raise InvariantError("resident blocks, their parents and their uses differ")
        if sum(len(used) for _, used in self._uses) != self._num_used:
            raise InvariantError("uses are miscounted")

    def _path_to(self, block: bytes | None) -> list[bytes]:
        """The resident blocks on the way to a block, that one last, as far up as none is missing."""
        path = []
        while block is not None and block in self._resident:
            path.append(block)
            block = self._parents[block]
        return path[::-1]

    def _adopt(self, block: bytes, other: "BlockStore") -> None:
        """Takes a block over from another store, where it lies; the caller records its use."""
        self._resident[block] = other._resident[block]
        self._parents[block] = other._parents[block]

    def _forget(self, blocks: Sequence[bytes]) -> list[int]:
        """These blocks are not resident any more; returns their slots."""
        parents, last_use = self._parents, self._last_use
        for block in blocks:
            del parents[block], last_use[block]
        return list(map(self._resident.pop, blocks))

    def _use(self, blocks: Sequence[bytes]) -> None:
        """Makes resident blocks the most recent, the last of them most of all."""
        if not blocks:
            return
        number = self._num_uses
        self._num_uses = number + 1
        self._last_use.update(dict.fromkeys(blocks, number))
        self._uses.append((number, blocks))
        self._num_used += len(blocks)
        if self._num_used > _COMPACT_FACTOR * max(len(self._resident), 64):
            self._compact()

    def _compact(self) -> None:
        """Leaves out of the record of uses what later uses have overtaken."""
        last_use = self._last_use
        kept = ((number, [block for block in used if last_use.get(block) == number]) for number, used in self._uses)
        self._uses = deque(entry for entry in kept if entry[1])
        self._num_used = len(self._resident)

    def _install(self, allocation: Allocation, num_blocks: int) -> Sequence[bytes]:
        """Makes the path's next blocks resident up to `num_blocks`; returns them. The caller records their use."""
        start = allocation.num_resident
        end = min(num_blocks, allocation.num_reused + len(allocation.slots))
        if end <= start:
            return ()
        blocks = allocation.path[start:end]
        slots = allocation.slots[allocation.num_produced : end - allocation.num_reused]
        parent = allocation.path[start - 1] if start else allocation.parent
        allocation.num_produced = end - allocation.num_reused
        self._num_allocated -= len(slots)
        resident = self._resident
        if resident.keys().isdisjoint(blocks):
            resident.update(zip(blocks, slots, strict=True))
            self._parents.update(zip(blocks, chain((parent,), blocks)))  # noqa: B905, the last block has no child yet
        else:
            for block, slot in zip(blocks, slots, strict=True):
                if block in resident:
                    self._release([slot])
                else:
                    resident[block] = slot
                    self._parents[block] = parent
                parent = block
        return blocks

    def _make_room(self, num_blocks: int) -> list[bytes]:
        """Evicts the oldest blocks that are not in use, at most `num_blocks`; returns them, oldest first."""
        last_use, pins, uses = self._last_use, self._pins, self._uses
        evicted: list[bytes] = []
        spared: list[bytes] = []
        while uses and len(evicted) < num_blocks:
            number, used = uses.popleft()
            num_seen = 0
            for num_seen, block in enumerate(used, 1):
                if last_use.get(block) == number:
                    if block in pins:
                        spared.append(block)
                    else:
                        evicted.append(block)
                        if len(evicted) == num_blocks:
                            break
            self._num_used -= num_seen
            if num_seen < len(used):
                uses.appendleft((number, used[num_seen:]))
        self._release(self._forget(evicted))
        # A block in use that was met on the way becomes recent: its request will touch it anyway.
        self._use(spared)
        return evicted

    def _take_slots(self, num_blocks: int) -> list[int]:
        self._num_free -= num_blocks
        self._num_allocated += num_blocks
        if len(self.ranks) == 1:
            return _take(self._free[self.ranks[0]], num_blocks)
        if not self._num_free:
            taken = []
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


def _take(free: list[int], count: int) -> list[int]:
    """The last `count` of a free list, removed from it."""
    if count == 0:
        return []
    taken = free[-count:]
    del free[-count:]
    taken.reverse()
    return taken
