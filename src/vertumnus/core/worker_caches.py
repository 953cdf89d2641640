"""The KV blocks of all workers of a pool: where each block lies, what is in use, and what the index is told of it.

Both pools drive it, the simulated and the live one, beside the `ControlPlane`: an action of the control plane comes in,
the bookkeeping is done here, and what comes back is the reports to hand to the control plane. Blocks stay where they
lie whatever the workers: a store belongs to ranks, and opening a worker only groups the stores of its ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from vertumnus.core.block_store import Address, Allocation, BlockStore
from vertumnus.core.composition import RankGroup
from vertumnus.core.events import CopyBlocks, ReclaimBlocks, StartStep, StepItem
from vertumnus.core.index.reports import CacheReport, Chain, Removed, Snapshot, Stored
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.slices import Slices
from vertumnus.errors import InvariantError


@dataclass(frozen=True, slots=True)
class BegunItem:
    """One request's share of a step that begins: tokens [prefix_tokens, item.end_tokens) are to be computed, if any,
    and the blocks for them, as for the rest of the request, have slots in `allocation`."""

    item: StepItem
    allocation: Allocation
    prefix_tokens: int

    @property
    def suffix_tokens(self) -> int:
        """R of this step; 0 where more was cached than the cut of the chunks knew."""
        return max(self.item.end_tokens - self.prefix_tokens, 0)


@dataclass(frozen=True, slots=True)
class BegunStep:
    items: tuple[BegunItem, ...]
    reports: tuple[CacheReport, ...]

    @property
    def has_room(self) -> bool:
        """Whether every block has a slot. If not, a pool with real blocks has to withdraw the step and wait."""
        return all(begun.allocation.has_room for begun in self.items)

    @property
    def work(self) -> list[tuple[int, int]]:
        """(R, P) of every request."""
        return [(begun.suffix_tokens, begun.prefix_tokens) for begun in self.items]

    @property
    def reused_tokens(self) -> tuple[int, ...]:
        """What `StepStarted` reports."""
        return tuple(begun.prefix_tokens for begun in self.items)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    completed: tuple[PrefillRequest, ...]
    """Requests whose whole prompt has KV now."""
    reports: tuple[CacheReport, ...]


@dataclass(frozen=True, slots=True)
class BegunCopy:
    """What of a copy can be made: `blocks` are still at the source."""

    blocks: Sequence[bytes]
    source_ranks: tuple[int, ...]
    destination_ranks: tuple[int, ...]
    reports: tuple[CacheReport, ...]


@dataclass(frozen=True, slots=True)
class EndedCopy:
    num_installed: int
    is_complete: bool
    """Whether all that the control plane asked for was installed."""
    reports: tuple[CacheReport, ...]


@dataclass(slots=True)
class _Worker:
    worker_id: int
    group: RankGroup
    epoch: int
    store: BlockStore
    next_sequence: int = 0
    running: list[BegunItem] = field(default_factory=list)
    partial: dict[int, Allocation] = field(default_factory=dict)
    """Of requests whose first chunk has begun and whose last has not finished, by request id."""
    held: dict[int, Allocation] = field(default_factory=dict)
    """Of requests that are done but whose KV somebody still reads."""
    copies: set[int] = field(default_factory=set)
    """Of which it is source or destination."""
    is_parked: bool = False
    """Its ranks were told to serve as other workers: it has no say over their blocks any more."""


@dataclass(slots=True)
class _Copy:
    action: CopyBlocks
    blocks: Sequence[bytes]
    allocation: Allocation
    is_void: bool = False
    """Called off, but its slots at the destination may still be written to."""


class WorkerCaches:
    """`blocks_per_rank` slots of `block_tokens` tokens on every rank of every worker that is opened.

    is_real: whether there is KV that has to lie somewhere. The last block of a prompt then takes a slot too where it is
    not full, though to the cache it means nothing; and a copy that is called off goes on writing for a while, so that
    its slots at a destination that lives on stay taken until `end_copy`.

    spares_last_copies: whether blocks that other workers hold are evicted before older ones that nobody else does.
    """

    def __init__(
        self, blocks_per_rank: int, block_tokens: int, *, is_real: bool = False, spares_last_copies: bool = False
    ) -> None:
        self.blocks_per_rank = blocks_per_rank
        self.block_tokens = block_tokens
        self._spares_last_copies = spares_last_copies
        self._is_real = is_real
        self._workers: dict[int, _Worker] = {}
        self._rank_store: dict[int, BlockStore] = {}
        self._copies: dict[int, _Copy] = {}
        self._failed_ranks: set[int] = set()
        self._prepared: dict[tuple[int, ...], tuple[list[BlockStore], BlockStore, tuple[Chain, ...]]] = {}
        """By the ranks that a worker is to have: the stores that it will be made of, and what becomes of them."""

    @property
    def stores(self) -> dict[int, BlockStore]:
        """The KV blocks of every worker that serves, by worker id; a parked worker has none any more."""
        return {worker.worker_id: worker.store for worker in self._workers.values() if not worker.is_parked}

    @property
    def num_workers(self) -> int:
        """Workers that are open, parked ones included."""
        return len(self._workers)

    @property
    def num_in_use(self) -> int:
        """Requests between their chunks or held, and copies: what keeps blocks from being evicted."""
        return len(self._copies) + sum(len(each.partial) + len(each.held) for each in self._workers.values())

    def group(self, worker_id: int) -> RankGroup:
        return self._workers[worker_id].group

    # Workers

    def restore(self, rank: int, blocks: Sequence[tuple[int, bytes, bytes | None]]) -> None:
        """What a rank holds already, as (slot, block, parent), least recently used first; before it serves."""
        self._rank_store[rank] = BlockStore.restored(rank, self.blocks_per_rank, blocks)

    def num_restored(self, rank: int) -> int:
        """Blocks that a rank held when it was restored and nobody has opened it yet."""
        return self._rank_store[rank].num_resident

    def prepare(self, ranks: Sequence[int]) -> Slices[None]:
        """Does the long part of opening a worker beforehand, in slices: the store of ranks that merge. In between these
        ranks must have nothing to do."""
        stores = self._stores_of(ranks)
        is_merge = len(stores) > 1 and all(rank in self._rank_store for rank in ranks)
        if is_merge and all(rank in ranks for store in stores for rank in store.ranks):
            union = yield from BlockStore.merging(stores)
            self._prepared[tuple(ranks)] = stores, union, (yield from union.chaining())

    def open(self, worker_id: int, group: RankGroup, epoch: int) -> Snapshot:
        """Groups the ranks' stores, whichever workers they served before; returns what they hold.

        No allocation may be left in them: a parked worker's copies and held requests have to be ended first.
        """
        ranks = group.ranks
        stores = self._stores_of(ranks)
        sources, store, chains = self._prepared.pop(tuple(ranks), (None, None, None))
        if store is None or sources != stores:
            store, chains = self._composed(ranks, stores), None
        self._forget_prepared(ranks)
        for rank in ranks:
            self._rank_store[rank] = store
        worker = self._workers[worker_id] = _Worker(worker_id, group, epoch, store)
        return self._snapshot(worker, store.chains() if chains is None else chains)

    def _forget_prepared(self, ranks: Iterable[int]) -> None:
        """These ranks are not what they were any more."""
        changed = set(ranks)
        self._prepared = {key: each for key, each in self._prepared.items() if changed.isdisjoint(key)}

    def _composed(self, ranks: Sequence[int], stores: Sequence[BlockStore]) -> BlockStore:
        pieces = [self._cut_out(store, ranks) for store in stores]
        new = [rank for rank in ranks if rank not in self._rank_store]
        if new:
            pieces.append(BlockStore(new, self.blocks_per_rank))
        return pieces[0] if len(pieces) == 1 else BlockStore.merged(pieces)

    def snapshot(self, worker_id: int) -> Snapshot | None:
        """All that a worker holds, as its next report; None if it is gone."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        return self._snapshot(worker, worker.store.chains())

    @staticmethod
    def _snapshot(worker: _Worker, chains: tuple[Chain, ...]) -> Snapshot:
        return Snapshot(worker_id=worker.worker_id, epoch=worker.epoch, sequence=_next(worker), chains=chains)

    def workers_on(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The workers with any of these ranks."""
        wanted = set(ranks)
        return tuple(worker.worker_id for worker in self._workers.values() if not wanted.isdisjoint(worker.group.ranks))

    def park(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The workers with any of these ranks have no say over their blocks any more; returns their copies."""
        wanted = set(ranks)
        copies: set[int] = set()
        for worker in self._workers.values():
            if not wanted.isdisjoint(worker.group.ranks):
                worker.is_parked = True
                copies |= worker.copies
        return tuple(sorted(copies))

    def copies_of(self, worker_id: int) -> tuple[int, ...]:
        """The copies under way from and to a worker."""
        return tuple(sorted(self._workers[worker_id].copies))

    def close(self, worker_id: int) -> tuple[int, ...]:
        """Forgets a worker, whose ranks failed or serve as other workers. Its copies are called off.

        Returns the requests that it held: nobody keeps their blocks any more. Where these are read still, its ranks
        must not be opened as other workers before that has ended, and neither where they are still written.
        """
        for copy_id in self.copies_of(worker_id):
            self._call_off(copy_id, leaving=worker_id)
        worker = self._workers.pop(worker_id)
        if worker.running or worker.partial:
            raise InvariantError(f"worker {worker_id} was closed while it ran a step")
        for allocation in worker.held.values():
            worker.store.finish(allocation)
        return tuple(worker.held)

    def fail_rank(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rank's KV is gone and so is the step of its worker; the worker's other ranks keep theirs.

        Returns the copies from and to the worker, which are called off, and the requests that it held.
        """
        self._failed_ranks.add(rank)
        self._forget_prepared([rank])
        copies: list[int] = []
        held: list[int] = []
        for worker in self._workers.values():
            if rank not in worker.group.ranks:
                continue
            copies += sorted(worker.copies)
            for copy_id in sorted(worker.copies):
                self._call_off(copy_id, leaving=worker.worker_id)
            held += worker.held
            for allocation in [*worker.partial.values(), *worker.held.values()]:
                worker.store.finish(allocation)
            worker.partial.clear()
            worker.held.clear()
            worker.running = []
        store = self._rank_store.get(rank)
        if store is not None:
            self._cut_out(store, (rank,))
            del self._rank_store[rank]
        return tuple(copies), tuple(held)

    def recover_rank(self, rank: int) -> None:
        """The rank is back, empty."""
        self._failed_ranks.discard(rank)

    # Steps

    def begin_step(self, action: StartStep) -> BegunStep:
        """Looks up what is really cached of each request that begins, and takes slots for the rest of it.

        Raises InvariantError for a step of another epoch, or a second one at the same time.
        """
        worker = self._workers[action.worker_id]
        if action.epoch != worker.epoch or worker.running:
            raise InvariantError(f"a step of epoch {action.epoch} was sent to worker {worker.worker_id} out of turn")
        block_tokens, store = self.block_tokens, worker.store
        evicted: list[bytes] = []
        for item in action.items:
            request = item.request
            if item.is_first:
                limit = (request.input_tokens - 1) // block_tokens
                num_reused = store.num_reusable(request.blocks, limit)
                num_tails = int(self._is_real and request.input_tokens % block_tokens > 0)
                allocation = store.allocate(
                    request.blocks, num_reused, num_extra=num_tails, is_elsewhere=self._elsewhere(store)
                )
                evicted += allocation.evicted
                worker.partial[request.request_id] = allocation
                prefix_tokens = num_reused * block_tokens
            else:
                allocation = worker.partial[request.request_id]
                # More may be there than the prediction, and so the cut of the chunks, knew.
                prefix_tokens = max(item.start_tokens, allocation.num_reused * block_tokens)
            worker.running.append(BegunItem(item, allocation, prefix_tokens))
        return BegunStep(tuple(worker.running), self._removed(worker, evicted))

    def _elsewhere(self, store: BlockStore) -> Callable[[bytes], bool] | None:
        """Whether any other store has a block; None: eviction doesn't ask."""
        if not self._spares_last_copies:
            return None
        return lambda block: any(
            block in each.store for each in self._workers.values() if each.store is not store and not each.is_parked
        )

    def addresses(self, worker_id: int, request_id: int) -> list[Address]:
        """Where the blocks of a request that has begun, or is held, lie or will lie, in order. With `is_real` the
        last is the one that is not full, if any."""
        worker = self._workers[worker_id]
        allocation = worker.partial.get(request_id) or worker.held[request_id]
        return worker.store.addresses(allocation)

    def withdraw_step(self, worker_id: int) -> None:
        """Undoes `begin_step`, for a pool that lacks the room to run it; it may be begun again later."""
        worker = self._workers[worker_id]
        for begun in worker.running:
            if begun.item.is_first:
                worker.store.finish(worker.partial.pop(begun.item.request.request_id))
        worker.running = []

    def finish_step(self, worker_id: int, *, holds: bool = False) -> FinishedStep | None:
        """Installs what the running step produced; None if there is none, as the worker has failed meanwhile.

        With `holds`, the blocks of requests that are done stay in use until `release`.
        """
        worker = self._workers.get(worker_id)
        if worker is None or not worker.running:
            return None
        completed: list[PrefillRequest] = []
        reports: list[CacheReport] = []
        for begun in worker.running:
            item, allocation = begun.item, begun.allocation
            request = item.request
            start = allocation.num_resident
            is_last = item.end_tokens == request.input_tokens
            install = worker.store.finish if is_last and not holds else worker.store.produce
            install(allocation, item.end_tokens // self.block_tokens)
            end = allocation.num_resident
            if end > start:
                parent = request.blocks[start - 1] if start else allocation.parent
                reports.append(self._stored(worker, parent, request.blocks[start:end]))
            if is_last:
                del worker.partial[request.request_id]
                completed.append(request)
                if holds:
                    worker.held[request.request_id] = allocation
        worker.running = []
        return FinishedStep(tuple(completed), tuple(reports))

    def drop(self, worker_id: int, request_id: int) -> None:
        """Ends a request of which some chunks have run: what they produced stays cached."""
        worker = self._workers[worker_id]
        worker.store.finish(worker.partial.pop(request_id))

    def release(self, worker_id: int, request_id: int) -> None:
        """Nobody reads a held request's blocks any more. Harmless if its worker has failed meanwhile."""
        worker = self._workers.get(worker_id)
        allocation = worker.held.pop(request_id, None) if worker is not None else None
        if worker is not None and allocation is not None:
            worker.store.finish(allocation)

    # Copies

    def begin_copy(self, action: CopyBlocks) -> BegunCopy | None:
        """What is still at the source gets slots at the destination; None if nothing is, or an end is gone."""
        source = self._workers.get(action.source_worker_id)
        destination = self._workers.get(action.destination_worker_id)
        if source is None or destination is None or source.is_parked or destination.is_parked:
            return None
        blocks: list[bytes] = []
        for block in action.blocks:
            if block not in source.store:
                break
            blocks.append(block)
        if not blocks:
            return None
        source.store.pin(blocks)
        store = destination.store
        allocation = store.allocate(blocks, 0, action.parent, is_elsewhere=self._elsewhere(store))
        self._copies[action.copy_id] = _Copy(action, blocks, allocation)
        source.copies.add(action.copy_id)
        destination.copies.add(action.copy_id)
        return BegunCopy(
            blocks,
            tuple(source.group.ranks),
            tuple(destination.group.ranks),
            self._removed(destination, allocation.evicted),
        )

    def copy_addresses(self, copy_id: int) -> tuple[list[Address], list[Address]]:
        """Where the blocks of a copy that has begun lie at its source, and are to lie at its destination: as many as
        the destination had slots for."""
        copy = self._copies[copy_id]
        source = self._workers[copy.action.source_worker_id].store
        destination = self._workers[copy.action.destination_worker_id].store
        blocks = copy.blocks[: len(copy.allocation.slots)]
        return (
            [address for block in blocks if (address := source.address(block)) is not None],
            destination.addresses(copy.allocation),
        )

    def end_copy(self, copy_id: int, num_copied: int | None = None) -> EndedCopy | None:
        """Installs the first `num_copied` blocks (all by default); None if the copy was called off."""
        copy = self._copies.pop(copy_id, None)
        if copy is None:
            return None
        action = copy.action
        destination = self._workers[action.destination_worker_id]
        if copy.is_void:
            destination.copies.discard(copy_id)
            destination.store.finish(copy.allocation)
            return None
        source = self._workers[action.source_worker_id]
        source.copies.discard(copy_id)
        destination.copies.discard(copy_id)
        source.store.unpin(copy.blocks)
        destination.store.finish(copy.allocation, len(copy.blocks) if num_copied is None else num_copied)
        num_installed = copy.allocation.num_produced
        reports: tuple[CacheReport, ...] = ()
        if num_installed:
            reports = (self._stored(destination, action.parent, copy.blocks[:num_installed]),)
        return EndedCopy(num_installed, num_installed == len(action.blocks), reports)

    def call_off(self, copy_id: int) -> None:
        """Ends a copy without effect. Harmless if it has ended."""
        self._call_off(copy_id, leaving=None)

    def _call_off(self, copy_id: int, *, leaving: int | None) -> None:
        """`leaving`: a worker whose store nobody will take slots from again before the copy's writing has ended."""
        copy = self._copies.get(copy_id)
        if copy is None:
            return
        if not copy.is_void:
            source = self._workers[copy.action.source_worker_id]
            source.copies.discard(copy_id)
            source.store.unpin(copy.blocks)
            copy.is_void = True
        if not self._is_real or copy.action.destination_worker_id == leaving:
            destination = self._workers[copy.action.destination_worker_id]
            destination.copies.discard(copy_id)
            destination.store.finish(copy.allocation)
            del self._copies[copy_id]

    def reclaim(self, action: ReclaimBlocks) -> tuple[Removed, ...]:
        """Frees the blocks that are not in use."""
        worker = self._workers.get(action.worker_id)
        if worker is None or worker.is_parked:
            return ()
        return self._removed(worker, worker.store.reclaim(action.blocks))

    def check_invariants(self) -> None:
        """Raises InvariantError where a store lost or doubled a slot, or two stores share a rank. For tests."""
        stores = {id(store): store for store in self._rank_store.values()}
        for store in stores.values():
            store.check_invariants()
            if any(self._rank_store.get(rank) is not store for rank in store.ranks):
                raise InvariantError(f"ranks {store.ranks} belong to two stores")
        if self._failed_ranks & self._rank_store.keys():
            raise InvariantError("a failed rank has KV blocks")
        for worker in self._workers.values():
            for copy_id in worker.copies:
                if copy_id not in self._copies:
                    raise InvariantError(f"worker {worker.worker_id} has copy {copy_id}, which has ended")

    def _stores_of(self, ranks: Sequence[int]) -> list[BlockStore]:
        """The distinct stores that these ranks belong to, in rank order."""
        stores = {id(store): store for rank in ranks if (store := self._rank_store.get(rank)) is not None}
        return list(stores.values())

    def _cut_out(self, store: BlockStore, ranks: Sequence[int]) -> BlockStore:
        """The part of a store that lies on `ranks`; the other ranks keep the rest in a store of their own."""
        inside = [rank for rank in store.ranks if rank in ranks]
        outside = [rank for rank in store.ranks if rank not in ranks]
        if not outside:
            return store
        kept, rest = store.regroup((inside, outside))
        for rank in outside:
            self._rank_store[rank] = rest
        return kept

    def _stored(self, worker: _Worker, parent: bytes | None, blocks: Sequence[bytes]) -> Stored:
        return Stored(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            sequence=_next(worker),
            parent=parent,
            blocks=tuple(blocks),
        )

    def _removed(self, worker: _Worker, blocks: Sequence[bytes]) -> tuple[Removed, ...]:
        if not blocks:
            return ()
        return (Removed(worker_id=worker.worker_id, epoch=worker.epoch, sequence=_next(worker), blocks=tuple(blocks)),)


def _next(worker: _Worker) -> int:
    """The number of the worker's next report."""
    sequence = worker.next_sequence
    worker.next_sequence += 1
    return sequence
