"""A simulated prefill pool: ranks, stores, links and time, driven by the real control plane.

It decides nothing. It executes the control plane's actions as hardware would (steps take E_C(R, P) with the prefix
that is really there, copies occupy their links, ranks confirm an epoch after the switch time) and reports back only
what a real pool could report. Events are ordered by (time, priority, sequence); see `Priority`.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from vertumnus.core.block_store import BlockStore
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
    StepStarted,
    TimerFired,
)
from vertumnus.core.index.reports import CacheReport
from vertumnus.core.profile import Profile
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.worker_caches import BegunCopy, WorkerCaches
from vertumnus.errors import ConfigError, InvariantError
from vertumnus.sim.metrics import RequestRecords
from vertumnus.sim.overheads import LiveOverheads

Placed = Callable[[RequestPlaced, RankGroup], None]
"""Told of every placement, and of the ranks of its worker."""


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
        overheads: LiveOverheads | None = None,
        waits_for_handoffs: bool = False,
        spares_last_copies: bool = False,
        start_s: float = 0.0,
        failures: Sequence[Failure] = (),
        seed: int = 0,
        on_progress: Callable[[int], None] | None = None,
        on_placed: Placed | None = None,
    ) -> None:
        self.control_plane = control_plane
        self.records = RequestRecords()
        self.num_rejected = 0
        self.rejected: list[tuple[float, int, str]] = []
        self.num_copies: dict[str, int] = {}
        self._topology = topology
        self._profile = profile
        self._costs: CostModel = profile.cost_model()
        self._block_tokens = block_tokens
        self._noise_ratio = noise_ratio
        self._noise = np.random.default_rng((seed, 1))
        self._report_delay_s = report_delay_s
        self._overheads = overheads
        self._handoff_end_s: dict[int, float] | None = {} if waits_for_handoffs else None
        """By rank: until when KV of finished prefills is on its way from there; None: nobody waits for it."""
        self._on_progress = on_progress
        self._on_placed = on_placed
        self.now_s = start_s
        self._heap: list[tuple[float, int, int, Callable[[Any], None], Any]] = []
        self._sequence = 0
        self._undone: deque[Action] = deque()
        self._is_performing = False
        self._caches = WorkerCaches(blocks_per_rank, block_tokens, spares_last_copies=spares_last_copies)
        self._started: dict[int, tuple[float, int]] = {}
        self._suspended: dict[int, tuple[float, int]] = {}
        """What was in `_started` of requests that go on elsewhere."""
        """When the first chunk of a request began, and how many tokens it reused."""
        self._link_free_s: dict[object, float] = {}
        self._timer_s: float | None = None
        self._num_open = 0
        self._failed_ranks: set[int] = set()
        self._execute: dict[type, Callable[[Any], None]] = {
            StartStep: self._start_step,
            RequestPlaced: self._placed,
            RequestRejected: self._reject,
            DropRequest: self._drop,
            CopyBlocks: self._start_copy,
            ReclaimBlocks: self._reclaim,
            ActivateGroups: self._activate,
            OpenWorker: self._open_worker,
            CloseWorker: self._close_worker,
            SendSnapshot: self._send_snapshot,
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
                if self._overheads is None:
                    self._perform(handle(RequestArrived(request), self.now_s))
                else:
                    placed_s = self.now_s + self._overheads.placed_after_s(request.input_tokens)
                    self._at(placed_s, Priority.ARRIVAL, self._tell, RequestArrived(request))
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
        if self._num_open and not self._caches.num_workers and all(entry[1] == Priority.TIMER for entry in self._heap):
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
        return self._caches.stores

    def check_invariants(self) -> None:
        """Raises InvariantError where a store lost or doubled a slot, or two stores share a rank. For tests."""
        self._caches.check_invariants()

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
        """In the order in which they were decided: what follows from an action comes after those decided before it."""
        self._undone.extend(actions)
        if self._is_performing:
            return
        self._is_performing = True
        while self._undone:
            action = self._undone.popleft()
            self._execute[type(action)](action)
        self._is_performing = False

    def _report(self, reports: Iterable[CacheReport]) -> None:
        """Hands on what a cache reports, after the report delay."""
        for report in reports:
            if self._report_delay_s:
                self._at(self.now_s + self._report_delay_s, Priority.REPORT, self._tell, report)
            else:
                self._tell(report)

    # Steps

    def _start_step(self, action: StartStep) -> None:
        worker_id = action.worker_id
        degree = self._caches.group(worker_id).degree
        step = self._caches.begin_step(action)
        for begun in step.items:
            if begun.item.is_first:
                request_id = begun.item.request.request_id
                self._started[request_id] = self._suspended.pop(request_id, (self.now_s, begun.prefix_tokens))
        duration_s = self._costs.step_s(step.work, degree)
        if self._noise_ratio:
            duration_s *= float(np.exp(self._noise.normal(0.0, self._noise_ratio)))
        if self._overheads is not None:
            duration_s += self._overheads.step_s
        self._report(step.reports)
        self._at(self.now_s + duration_s, Priority.STEP_FINISHED, self._finish_step, (worker_id, degree))
        self._tell(StepStarted(worker_id, step.reused_tokens))

    def _finish_step(self, step: tuple[int, int]) -> None:
        worker_id, degree = step
        finished = self._caches.finish_step(worker_id)
        if finished is None:  # its ranks failed during the step
            return
        self._report(finished.reports)
        for request in finished.completed:
            self._complete(request, worker_id, degree)
        self._tell(StepFinished(worker_id))

    def _complete(self, request: PrefillRequest, worker_id: int, degree: int) -> None:
        start_s, reused_tokens = self._started.pop(request.request_id)
        profile = self._profile
        transfer_s = (
            profile.decode_latency_s
            + request.input_tokens * profile.kv_bytes_per_token / profile.decode_bytes_per_s
            + profile.first_token_s
        )
        if self._handoff_end_s is not None:
            for rank in self._caches.group(worker_id).ranks:
                self._handoff_end_s[rank] = max(self._handoff_end_s.get(rank, 0.0), self.now_s + transfer_s)
        if self._overheads is not None:
            transfer_s += self._overheads.handover_s
        records = self.records
        records.request_id.append(request.request_id)
        records.arrival_s.append(request.arrival_s)
        records.start_s.append(start_s)
        records.ttft_s.append(self.now_s - request.arrival_s + transfer_s)
        records.input_tokens.append(request.input_tokens)
        records.reused_tokens.append(reused_tokens)
        records.degree.append(degree)
        self._end_request()

    def _placed(self, action: RequestPlaced) -> None:
        if self._on_placed is not None:
            self._on_placed(action, self._caches.group(action.worker_id))

    def _reject(self, action: RequestRejected) -> None:
        self.num_rejected += 1
        self.rejected.append((self.now_s, action.request_id, action.reason))
        self._end_request()

    def _drop(self, action: DropRequest) -> None:
        self._caches.drop(action.worker_id, action.request_id)
        self._suspended[action.request_id] = self._started.pop(action.request_id)

    def _end_request(self) -> None:
        self._num_open -= 1
        if self._on_progress is not None:
            self._on_progress(len(self.records) + self.num_rejected)

    # Copies

    def _start_copy(self, action: CopyBlocks) -> None:
        """Takes its place on the links of both ends; what the source lost in the meantime is not copied."""
        begun = self._caches.begin_copy(action)
        if begun is None:
            self._at(self.now_s, Priority.COPY_ENDED, self._tell, CopyEnded(action.copy_id, False))
            return
        self._report(begun.reports)
        end_s = self._occupy_links(action, begun)
        self._at(end_s, Priority.COPY_ENDED, self._finish_copy, action)

    def _occupy_links(self, action: CopyBlocks, begun: BegunCopy) -> float:
        """When the copy will be done. Inside a node each worker has its own links; between nodes all share."""
        profile = self._profile
        num_bytes = len(begun.blocks) * self._block_tokens * profile.kv_bytes_per_token
        nodes = [self._topology.node_of(ranks[0]) for ranks in (begun.source_ranks, begun.destination_ranks)]
        links: tuple[object, ...]
        if nodes[0] == nodes[1]:
            links = (("worker out", action.source_worker_id), ("worker in", action.destination_worker_id))
            duration_s = num_bytes / profile.intra_node_bytes_per_s
        else:
            links = (("node out", nodes[0]), ("node in", nodes[1]))
            duration_s = num_bytes / profile.inter_node_bytes_per_s
        start_s = max([self.now_s, *(self._link_free_s.get(link, 0.0) for link in links)])
        end_s = start_s + profile.copy_latency_s + duration_s
        for link in links:
            self._link_free_s[link] = end_s
        return end_s

    def _finish_copy(self, action: CopyBlocks) -> None:
        ended = self._caches.end_copy(action.copy_id)
        if ended is None:  # called off
            return
        self._report(ended.reports)
        name = action.reason.value
        self.num_copies[name] = self.num_copies.get(name, 0) + 1
        self._tell(CopyEnded(action.copy_id, ended.is_complete))

    def _call_off(self, copies: Iterable[int]) -> None:
        for copy_id in copies:
            self._caches.call_off(copy_id)
            self._at(self.now_s, Priority.COPY_ENDED, self._tell, CopyEnded(copy_id, False))

    def _reclaim(self, action: ReclaimBlocks) -> None:
        self._report(self._caches.reclaim(action))

    # Reconfiguration and failures

    def _activate(self, action: ActivateGroups) -> None:
        """Copies to and from the parked workers are called off; every live rank confirms after the switch time."""
        ranks = {rank for group in action.groups for rank in group.ranks}
        self._call_off(self._caches.park(ranks))
        start_s = self.now_s
        if self._handoff_end_s is not None:
            start_s = max(start_s, *(self._handoff_end_s.get(rank, start_s) for rank in ranks))
        for rank in sorted(ranks - self._failed_ranks):
            confirmed = RankConfirmed(rank, action.epoch)
            self._at(start_s + self._profile.switch_s, Priority.RANK, self._confirm, confirmed)

    def _confirm(self, event: RankConfirmed) -> None:
        if event.rank not in self._failed_ranks:
            self._tell(event)

    def _open_worker(self, action: OpenWorker) -> None:
        self._report([self._caches.open(action.worker_id, action.group, action.epoch)])

    def _send_snapshot(self, action: SendSnapshot) -> None:
        snapshot = self._caches.snapshot(action.worker_id)
        if snapshot is not None:
            self._report([snapshot])

    def _close_worker(self, action: CloseWorker) -> None:
        self._call_off(self._caches.copies_of(action.worker_id))
        self._caches.close(action.worker_id)

    def _fail_rank(self, rank: int) -> None:
        """The rank's KV is gone and so is the step of its worker; the worker's other ranks keep theirs."""
        if rank in self._failed_ranks:
            return
        self._failed_ranks.add(rank)
        copies, _ = self._caches.fail_rank(rank)
        for copy_id in copies:
            self._at(self.now_s, Priority.COPY_ENDED, self._tell, CopyEnded(copy_id, False))
        self._tell(RankFailed(rank))

    def _recover_rank(self, rank: int) -> None:
        if rank in self._failed_ranks:
            self._failed_ranks.discard(rank)
            self._caches.recover_rank(rank)
            self._tell(RankRecovered(rank))
