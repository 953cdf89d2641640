"""A simulated prefill pool: ranks, stores, links and time, driven by the real control plane.

It decides nothing. It executes the control plane's actions as hardware would (steps take E_C(R, P) with the prefix
that is really there, copies occupy their links, ranks confirm an epoch after the switch time) and reports back only
what a real pool could report. Events are ordered by (time, priority, sequence); see `Priority`.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from vertumnus.core.block_store import Allocation, BlockStore
from vertumnus.core.composition import RankGroup, Topology
from vertumnus.core.control_plane import ControlPlane
from vertumnus.core.cost import CostModel
from vertumnus.core.events import (
    Action,
    ActivateGroups,
    CloseWorker,
    CopyBlocks,
    CopyEnded,
    DropRequest,
    Event,
    OpenWorker,
    RankConfirmed,
    RankFailed,
    RankRecovered,
    ReclaimBlocks,
    RequestArrived,
    RequestPlaced,
    RequestRejected,
    SendSnapshot,
    StartStep,
    StepFinished,
    StepItem,
    StepStarted,
    TimerFired,
)
from vertumnus.core.index.reports import CacheReport, Removed, Snapshot, Stored
from vertumnus.core.profile import Profile
from vertumnus.core.requests import PrefillRequest
from vertumnus.errors import ConfigError, InvariantError
from vertumnus.sim.metrics import RequestRecords


class Priority(IntEnum):
    """Order of events at one instant: what the hardware did comes before what is asked of it."""

    REPORT = 0
    COPY_ENDED = 1
    STEP_FINISHED = 2
    RANK = 3
    ARRIVAL = 4
    TIMER = 5


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank lost at `at_s` and, if given, back, empty, at `recovers_s`."""

    rank: int
    at_s: float
    recovers_s: float | None = None


@dataclass(slots=True)
class _Running:
    """One item of the step that a worker runs."""

    item: StepItem
    allocation: Allocation


@dataclass(slots=True)
class _SimWorker:
    worker_id: int
    group: RankGroup
    epoch: int
    store: BlockStore
    next_sequence: int = 0
    running: list[_Running] = field(default_factory=list)
    partial: dict[int, tuple[Allocation, float, int]] = field(default_factory=dict)
    """Requests between two chunks: allocation, start of the first chunk, tokens reused."""
    copies: set[int] = field(default_factory=set)
    is_parked: bool = False
    """Its ranks were told to serve as other workers: it has no say over their blocks any more."""


@dataclass(slots=True)
class _Copy:
    action: CopyBlocks
    blocks: Sequence[bytes]
    allocation: Allocation


class SimulatedPool:
    """Runs requests through a control plane on simulated hardware; `run` returns when all have ended."""

    def __init__(
        self,
        *,
        control_plane: ControlPlane,
        topology: Topology,
        profile: Profile,
        blocks_per_rank: int,
        block_tokens: int,
        noise_ratio: float = 0.0,
        report_delay_s: float = 0.0,
        failures: Sequence[Failure] = (),
        seed: int = 0,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.control_plane = control_plane
        self.records = RequestRecords()
        self.num_rejected = 0
        self.rejected: list[tuple[float, int, str]] = []
        self.num_copies: dict[str, int] = {}
        self._topology = topology
        self._profile = profile
        self._costs: CostModel = profile.cost_model()
        self._blocks_per_rank = blocks_per_rank
        self._block_tokens = block_tokens
        self._noise_ratio = noise_ratio
        self._noise = np.random.default_rng((seed, 1))
        self._report_delay_s = report_delay_s
        self._on_progress = on_progress
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._sequence = 0
        self._workers: dict[int, _SimWorker] = {}
        self._rank_store: dict[int, BlockStore] = {}
        self._start_s: dict[int, tuple[float, int]] = {}
        self._copies: dict[int, _Copy] = {}
        self._link_free_s: dict[object, float] = {}
        self._timer_s: float | None = None
        self._num_open = 0
        self._failed_ranks: set[int] = set()
        self._execute: dict[type, Callable[[Any], None]] = {
            StartStep: self._start_step,
            RequestPlaced: lambda action: None,
            RequestRejected: self._reject,
            DropRequest: self._drop,
            CopyBlocks: self._start_copy,
            ReclaimBlocks: self._reclaim,
            ActivateGroups: self._activate,
            OpenWorker: self._open_worker,
            CloseWorker: self._close_worker,
            SendSnapshot: lambda action: self._send_snapshot(action.worker_id),
        }
        for failure in failures:
            self._at(failure.at_s, Priority.RANK, self._fail_rank, failure.rank)
            if failure.recovers_s is not None:
                self._at(failure.recovers_s, Priority.RANK, self._recover_rank, failure.rank)

    def run(self, requests: Iterator[PrefillRequest]) -> None:
        """Plays the requests, in order of arrival, until every one has ended.

        Raises ConfigError when the failures leave nothing to serve them.
        """
        self._perform(self.control_plane.start(self.now_s))
        self._arm_timer()
        heap = self._heap
        request = next(requests, None)
        handle = self.control_plane.handle
        while request is not None or self._num_open:
            # An arrival goes after everything of its instant but timers.
            if request is not None and (not heap or (request.arrival_s, Priority.ARRIVAL) < heap[0]):
                self._advance(request.arrival_s)
                self._num_open += 1
                self._perform(handle(RequestArrived(request), self.now_s))
                request = next(requests, None)
            elif heap:
                time_s, priority, _, call, argument = heapq.heappop(heap)
                self._advance(time_s)
                call(argument)
                if priority == Priority.TIMER and request is None:
                    self._check_alive()
            else:
                self._check_alive()
                raise InvariantError(f"{self._num_open} requests are open and nothing is left to happen")
            self._arm_timer()

    def _check_alive(self) -> None:
        """Timers go on for ever, so a pool without workers that waits for nothing else has to be told apart."""
        if self._num_open and not self._workers and all(entry[1] == Priority.TIMER for entry in self._heap):
            raise ConfigError(
                f"failures leave no GPU at {self.now_s:g} s, with {self._num_open} requests open; "
                "accepted: failures that spare or give back at least one"
            )

    def settle(self) -> None:
        """Lets end what is still under way after `run`: steps, copies, switches, reports; no timers."""
        while self._heap:
            time_s, priority, _, call, argument = heapq.heappop(self._heap)
            if priority != Priority.TIMER:
                self._advance(time_s)
                call(argument)

    @property
    def stores(self) -> dict[int, BlockStore]:
        """The KV blocks of every worker that serves, by worker id; a parked worker has none any more."""
        return {worker.worker_id: worker.store for worker in self._workers.values() if not worker.is_parked}

    def check_invariants(self) -> None:
        """Raises InvariantError where a store lost or doubled a slot, or two stores share a rank. For tests."""
        stores = {id(store): store for store in self._rank_store.values()}
        for store in stores.values():
            store.check_invariants()
            if any(self._rank_store.get(rank) is not store for rank in store.ranks):
                raise InvariantError(f"ranks {store.ranks} belong to two stores")
        if self._failed_ranks & self._rank_store.keys():
            raise InvariantError("a failed rank has KV blocks")

    # Time

    def _advance(self, time_s: float) -> None:
        if time_s < self.now_s:
            raise InvariantError(f"the clock would go back from {self.now_s} to {time_s}")
        self.now_s = time_s

    def _at(self, time_s: float, priority: Priority, call: Callable[[Any], None], argument: Any) -> None:
        heapq.heappush(self._heap, (time_s, priority, self._sequence, call, argument))
        self._sequence += 1

    def _arm_timer(self) -> None:
        due_s = self.control_plane.next_timer_s()
        if due_s is not None and (self._timer_s is None or due_s < self._timer_s):
            self._timer_s = due_s
            self._at(max(due_s, self.now_s), Priority.TIMER, self._fire_timer, due_s)

    def _fire_timer(self, due_s: float) -> None:
        if self._timer_s == due_s:
            self._timer_s = None
            self._tell(TimerFired())

    # Talking to the control plane

    def _tell(self, event: Event) -> None:
        self._perform(self.control_plane.handle(event, self.now_s))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            self._execute[type(action)](action)

    def _report_stored(self, worker: _SimWorker, parent: bytes | None, blocks: Sequence[bytes]) -> None:
        self._report(
            worker,
            Stored(
                worker_id=worker.worker_id,
                epoch=worker.epoch,
                sequence=worker.next_sequence,
                parent=parent,
                blocks=tuple(blocks),
            ),
        )

    def _report_removed(self, worker: _SimWorker, blocks: Sequence[bytes]) -> None:
        self._report(
            worker,
            Removed(
                worker_id=worker.worker_id, epoch=worker.epoch, sequence=worker.next_sequence, blocks=tuple(blocks)
            ),
        )

    def _report(self, worker: _SimWorker, report: CacheReport) -> None:
        """Sends the worker's next cache report, which arrives after the report delay."""
        worker.next_sequence += 1
        if self._report_delay_s:
            self._at(self.now_s + self._report_delay_s, Priority.REPORT, self._tell, report)
        else:
            self._tell(report)

    # Steps

    def _start_step(self, action: StartStep) -> None:
        worker = self._workers[action.worker_id]
        if action.epoch != worker.epoch or worker.running:
            raise InvariantError(f"a step of epoch {action.epoch} was sent to worker {worker.worker_id} out of turn")
        degree = worker.group.degree
        fixed_s = self._costs.coefficients[degree].d
        duration_s = 0.0
        evicted: list[bytes] = []
        reused_tokens = []
        for item in action.items:
            request = item.request
            if item.is_first:
                limit = (request.input_tokens - 1) // self._block_tokens
                num_reused = worker.store.num_reusable(request.blocks, limit)
                allocation = worker.store.allocate(request.blocks, num_reused)
                evicted += allocation.evicted
                prefix = num_reused * self._block_tokens
                worker.partial[request.request_id] = (allocation, self.now_s, prefix)
            else:
                allocation = worker.partial[request.request_id][0]
                # More may be there than the prediction, and so the cut of the chunks, knew.
                prefix = max(item.start_tokens, allocation.num_reused * self._block_tokens)
            reused_tokens.append(prefix)
            suffix = max(item.end_tokens - prefix, 0)
            # Requests packed into one step share its fixed cost.
            duration_s += self._costs.prefill_s(suffix, min(prefix, item.end_tokens), degree) - fixed_s
            worker.running.append(_Running(item, allocation))
        duration_s += fixed_s
        if self._noise_ratio:
            duration_s *= float(np.exp(self._noise.normal(0.0, self._noise_ratio)))
        if evicted:
            self._report_removed(worker, evicted)
        self._at(self.now_s + duration_s, Priority.STEP_FINISHED, self._finish_step, worker)
        self._tell(StepStarted(worker.worker_id, tuple(reused_tokens)))

    def _finish_step(self, worker: _SimWorker) -> None:
        if not worker.running:  # its ranks failed during the step
            return
        for running in worker.running:
            item, allocation = running.item, running.allocation
            request = item.request
            start = allocation.num_resident
            is_last = item.end_tokens == request.input_tokens
            install = worker.store.finish if is_last else worker.store.produce
            install(allocation, item.end_tokens // self._block_tokens)
            end = allocation.num_resident
            if end > start:
                parent = request.blocks[start - 1] if start else None
                self._report_stored(worker, parent, request.blocks[start:end])
            if is_last:
                _, start_s, reused = worker.partial.pop(request.request_id)
                self._complete(request, start_s, reused, worker.group.degree)
        worker.running = []
        self._tell(StepFinished(worker.worker_id))

    def _complete(self, request: PrefillRequest, start_s: float, reused_tokens: int, degree: int) -> None:
        profile = self._profile
        transfer_s = (
            profile.decode_latency_s
            + request.input_tokens * profile.kv_bytes_per_token / profile.decode_bytes_per_s
            + profile.first_token_s
        )
        records = self.records
        records.request_id.append(request.request_id)
        records.arrival_s.append(request.arrival_s)
        records.start_s.append(start_s)
        records.ttft_s.append(self.now_s - request.arrival_s + transfer_s)
        records.input_tokens.append(request.input_tokens)
        records.reused_tokens.append(reused_tokens)
        records.degree.append(degree)
        self._end_request()

    def _reject(self, action: RequestRejected) -> None:
        self.num_rejected += 1
        self.rejected.append((self.now_s, action.request_id, action.reason))
        self._end_request()

    def _drop(self, action: DropRequest) -> None:
        worker = self._workers[action.worker_id]
        worker.store.finish(worker.partial.pop(action.request_id)[0])

    def _end_request(self) -> None:
        self._num_open -= 1
        if self._on_progress is not None:
            self._on_progress(len(self.records) + self.num_rejected)

    # Copies

    def _start_copy(self, action: CopyBlocks) -> None:
        """Takes its place on the links of both ends; what the source lost in the meantime is not copied."""
        source = self._workers.get(action.source_worker_id)
        destination = self._workers.get(action.destination_worker_id)
        blocks: list[bytes] = []
        if source is not None and destination is not None and not (source.is_parked or destination.is_parked):
            for block in action.blocks:
                if block not in source.store:
                    break
                blocks.append(block)
        if not blocks or source is None or destination is None:
            self._at(self.now_s, Priority.COPY_ENDED, self._tell, CopyEnded(action.copy_id, False))
            return
        source.store.pin(blocks)
        allocation = destination.store.allocate(blocks, 0, action.parent)
        if allocation.evicted:
            self._report_removed(destination, allocation.evicted)
        self._copies[action.copy_id] = _Copy(action, blocks, allocation)
        source.copies.add(action.copy_id)
        destination.copies.add(action.copy_id)
        end_s = self._occupy_links(source, destination, len(blocks))
        self._at(end_s, Priority.COPY_ENDED, self._finish_copy, action.copy_id)

    def _occupy_links(self, source: _SimWorker, destination: _SimWorker, num_blocks: int) -> float:
        """When the copy will be done. Inside a node each worker has its own links; between nodes all share."""
        profile = self._profile
        num_bytes = num_blocks * self._block_tokens * profile.kv_bytes_per_token
        nodes = [self._topology.node_of(worker.group.first_rank) for worker in (source, destination)]
        links: tuple[object, ...]
        if nodes[0] == nodes[1]:
            links = (("worker out", source.worker_id), ("worker in", destination.worker_id))
            duration_s = num_bytes / profile.intra_node_bytes_per_s
        else:
            links = (("node out", nodes[0]), ("node in", nodes[1]))
            duration_s = num_bytes / profile.inter_node_bytes_per_s
        start_s = max([self.now_s, *(self._link_free_s.get(link, 0.0) for link in links)])
        end_s = start_s + profile.copy_latency_s + duration_s
        for link in links:
            self._link_free_s[link] = end_s
        return end_s

    def _finish_copy(self, copy_id: int) -> None:
        copy = self._copies.pop(copy_id, None)
        if copy is None:  # called off
            return
        action = copy.action
        source, destination = self._workers[action.source_worker_id], self._workers[action.destination_worker_id]
        source.copies.discard(copy_id)
        destination.copies.discard(copy_id)
        source.store.unpin(copy.blocks)
        destination.store.finish(copy.allocation, len(copy.blocks))
        num_installed = copy.allocation.num_produced
        if num_installed:
            self._report_stored(destination, action.parent, copy.blocks[:num_installed])
        name = action.reason.value
        self.num_copies[name] = self.num_copies.get(name, 0) + 1
        self._tell(CopyEnded(copy_id, num_installed == len(action.blocks)))

    def _call_off_copies(self, worker: _SimWorker) -> None:
        for copy_id in sorted(worker.copies):
            copy = self._copies.pop(copy_id)
            for end_id in (copy.action.source_worker_id, copy.action.destination_worker_id):
                self._workers[end_id].copies.discard(copy_id)
            self._workers[copy.action.source_worker_id].store.unpin(copy.blocks)
            self._workers[copy.action.destination_worker_id].store.finish(copy.allocation)
            self._at(self.now_s, Priority.COPY_ENDED, self._tell, CopyEnded(copy_id, False))

    def _reclaim(self, action: ReclaimBlocks) -> None:
        worker = self._workers.get(action.worker_id)
        if worker is None or worker.is_parked:
            return
        freed = worker.store.reclaim(action.blocks)
        if freed:
            self._report_removed(worker, freed)

    # Reconfiguration and failures

    def _activate(self, action: ActivateGroups) -> None:
        """Copies to and from the parked workers are called off; every live rank confirms after the switch time."""
        ranks = {rank for group in action.groups for rank in group.ranks}
        for worker in self._workers.values():
            if not ranks.isdisjoint(worker.group.ranks):
                worker.is_parked = True
                self._call_off_copies(worker)
        for rank in sorted(ranks - self._failed_ranks):
            confirmed = RankConfirmed(rank, action.epoch)
            self._at(self.now_s + self._profile.switch_s, Priority.RANK, self._confirm, confirmed)

    def _confirm(self, event: RankConfirmed) -> None:
        if event.rank not in self._failed_ranks:
            self._tell(event)

    def _open_worker(self, action: OpenWorker) -> None:
        """Groups the ranks' stores, whichever workers they served before, and sends what they hold."""
        ranks = action.group.ranks
        pieces = [self._cut_out(store, ranks) for store in self._stores_of(ranks)]
        new = [rank for rank in ranks if rank not in self._rank_store]
        if new:
            pieces.append(BlockStore(new, self._blocks_per_rank))
        store = pieces[0] if len(pieces) == 1 else BlockStore.merged(pieces)
        for rank in ranks:
            self._rank_store[rank] = store
        self._workers[action.worker_id] = _SimWorker(action.worker_id, action.group, action.epoch, store)
        self._send_snapshot(action.worker_id)

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

    def _send_snapshot(self, worker_id: int) -> None:
        worker = self._workers.get(worker_id)
        if worker is not None:
            snapshot = Snapshot(
                worker_id=worker_id, epoch=worker.epoch, sequence=worker.next_sequence, chains=worker.store.chains()
            )
            self._report(worker, snapshot)

    def _close_worker(self, action: CloseWorker) -> None:
        worker = self._workers[action.worker_id]
        if worker.running or worker.partial:
            raise InvariantError(f"worker {action.worker_id} was closed while it ran a step")
        self._call_off_copies(worker)
        del self._workers[action.worker_id]

    def _fail_rank(self, rank: int) -> None:
        """The rank's KV is gone and so is the step of its worker; the worker's other ranks keep theirs."""
        if rank in self._failed_ranks:
            return
        self._failed_ranks.add(rank)
        for worker in self._workers.values():
            if rank in worker.group.ranks:
                self._call_off_copies(worker)
                for allocation, _, _ in worker.partial.values():
                    worker.store.finish(allocation)
                worker.partial.clear()
                worker.running = []
        store = self._rank_store.get(rank)
        if store is not None:
            self._cut_out(store, (rank,))
            del self._rank_store[rank]
        self._tell(RankFailed(rank))

    def _recover_rank(self, rank: int) -> None:
        if rank in self._failed_ranks:
            self._failed_ranks.discard(rank)
            self._tell(RankRecovered(rank))
