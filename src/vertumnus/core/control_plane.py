"""The control plane: one state machine that places requests, forms steps and keeps the pool in shape.

Typed events go in, typed actions come out (`core.events`); the simulator and the live pool drive the very same object.
It owns queues, reservations and the prefix index, and it never acts by itself: time comes in with every event, and
`next_timer_s` says when it next wants a `TimerFired`.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vertumnus.core.awaited import AwaitedPrefixes, WaitSettings
from vertumnus.core.composition import (
    Composition,
    Layout,
    Operation,
    OperationKind,
    RankGroup,
    Topology,
)
from vertumnus.core.controller import Controller, HoldingController, Proposal, Window
from vertumnus.core.copies import CopyLedger
from vertumnus.core.cost import CostModel, DegreeCosts, FloatArray, chunked_prefill_s
from vertumnus.core.drift import Drift
from vertumnus.core.events import (
    Action,
    ActivateGroups,
    CloseWorker,
    CompositionRequested,
    ControllerPaused,
    CopyBlocks,
    CopyEnded,
    CopyReason,
    DropRequest,
    Event,
    OpenWorker,
    RankConfirmed,
    RankFailed,
    RankRecovered,
    ReclaimBlocks,
    RequestArrived,
    RequestCancelled,
    RequestPlaced,
    RequestRejected,
    SendSnapshot,
    StartStep,
    StepFinished,
    StepItem,
    StepStarted,
    TimerFired,
)
from vertumnus.core.handovers import Handover, Handovers
from vertumnus.core.index import Match, PrefixIndex, ReportOutcome
from vertumnus.core.index.replication import CopyKind, PoolLoad, WorkerLoad
from vertumnus.core.index.reports import CacheReport, Cleared, Removed, Snapshot, Stored
from vertumnus.core.long_threshold import LongThreshold
from vertumnus.core.moves import MoveSettings, best_move
from vertumnus.core.observation import WindowTracker
from vertumnus.core.placement import Placement, PlacementPolicy, PlacementView
from vertumnus.core.pulls import Puller, PullSettings
from vertumnus.core.queueing import Discipline, QueuedRequest, ServiceOrder
from vertumnus.core.reconciliation import PendingBlocks, assign_prefixes
from vertumnus.core.reconfiguration import (
    Activate,
    Effect,
    GroupLost,
    GroupReady,
    OperationAborted,
    OperationCommitted,
    OperationRefused,
    OperationStarted,
    Reconfiguration,
)
from vertumnus.core.replicator import Replicator, record_missed
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.settings import ControlPlaneSettings
from vertumnus.core.steering import Steering
from vertumnus.core.workers import RunningItem, Worker, WorkerStatus, WorkerTable
from vertumnus.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Transition:
    """A split or merge that was carried out: when it committed, and the seconds of its two stages."""

    committed_s: float
    operation: Operation
    drain_s: float
    switch_s: float


_ZERO = np.array(0.0)  # of no dimension, as NumPy takes Python numbers more slowly


class ControlPlane:
    """Decides for one prefill pool. `handle` is the only way in; it returns what the pool must do, in order."""

    def __init__(
        self,
        *,
        layout: Layout,
        topology: Topology,
        cost_model: CostModel,
        policy: PlacementPolicy,
        settings: ControlPlaneSettings,
        controller: Controller | None = None,
        epoch: int = 0,
    ) -> None:
        """`epoch`: under which the groups of `layout` are active already."""
        self.settings = settings
        self.cost_model = cost_model
        self.policy = policy
        self.drift = Drift(cost_model, settings.refit)
        self.transitions: list[Transition] = []
        self._reconfiguration = Reconfiguration(
            layout, topology, degrees=cost_model.degrees, settings=settings.reconfiguration, epoch=epoch
        )
        self._replicator = Replicator(settings.replication, settings.scan_interval_s) if settings.replication else None
        self._pending = PendingBlocks()
        self._copies = CopyLedger()
        self.num_copies: Counter[CopyReason] = Counter()
        self._serving: dict[RankGroup, Worker] = {}
        self._handovers = Handovers()
        self.index = PrefixIndex(degrees=cost_model.degrees, block_tokens=settings.block_tokens)
        self._workers = WorkerTable(
            cost_model, ServiceOrder(settings.discipline, settings.ageing), settings.block_tokens
        )
        self._puller = self._make_puller(settings.pull, topology) if settings.pull is not None else None
        self._waiting: deque[tuple[PrefillRequest, bool]] = deque()
        """Requests without a candidate, each with whether it was placed before."""
        self._location: dict[int, int] = {}
        self._cancelled: set[int] = set()
        self._awaited = self._make_awaited(settings.waits) if settings.waits is not None else None
        self._stranded: deque[QueuedRequest] = deque()
        """Requests that wait for one which has left, to be placed anew before `handle` returns."""
        self._next_worker_id = 0
        self._has_priorities = False
        """Whether any request has come with a priority: only then FIFO has to look who would go first."""
        self._steering = self._make_steering(controller) if controller is not None else None
        self._handlers: dict[type, Callable[[Any, float], list[Action]]] = {
            RequestArrived: self._on_arrival,
            RequestCancelled: self._on_cancel,
            StepStarted: self._on_step_started,
            StepFinished: self._on_step_finished,
            Stored: self._on_report,
            Removed: self._on_report,
            Cleared: self._on_report,
            Snapshot: self._on_report,
            CopyEnded: self._on_copy_ended,
            RankConfirmed: self._on_rank_confirmed,
            RankFailed: self._on_rank_failed,
            RankRecovered: self._on_rank_recovered,
            CompositionRequested: self._on_composition_requested,
            ControllerPaused: self._on_controller_paused,
            TimerFired: self._on_timer,
        }

    def _make_puller(self, settings: PullSettings, topology: Topology) -> Puller:
        return Puller(
            settings,
            index=self.index,
            workers=self._workers,
            topology=topology,
            pending=self._pending,
            copies=self._copies,
            service_s=self._service_s,
        )

    def _make_awaited(self, waits: WaitSettings) -> AwaitedPrefixes:
        settings = self.settings
        return AwaitedPrefixes(
            waits,
            workers=self._workers,
            block_tokens=settings.block_tokens,
            step_tokens=settings.step_tokens,
            pull=settings.pull,
            cancelled=self._cancelled,
            service_s=self._service_s,
            waits=self._waits,
        )

    def _make_steering(self, controller: Controller) -> Steering:
        settings = self.settings
        return Steering(
            controller,
            windows=WindowTracker(
                settings.window_s,
                LongThreshold(fixed_tokens=settings.long_tokens, quantile_ratio=settings.long_quantile_ratio),
            ),
            reconfiguration=self._reconfiguration,
            workers=self._workers,
            serving=self._serving,
            blocks_per_rank=settings.blocks_per_rank,
            max_switching_ratio=settings.max_switching_ratio,
            outlives_faults=settings.outlives_controller_faults,
        )

    # Driving it

    def start(self, now_s: float) -> list[Action]:
        """Opens the initial workers; each is a candidate as soon as the pool has sent its cache snapshot."""
        if self._steering is not None:
            self._steering.windows.start_s = now_s
        if self._replicator is not None:
            self._replicator.due_s = now_s + self._replicator.interval_s
        return [self._open_worker(group, epoch) for group, epoch in sorted(self._reconfiguration.ready.items())]

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event; returns the actions it causes, in order."""
        actions = self._handlers[type(event)](event, now_s)
        while self._stranded:
            actions += self._place_stranded(self._stranded.popleft(), now_s)
        return actions

    def next_timer_s(self) -> float | None:
        """The instant at which a `TimerFired` is wanted, or None."""
        due_s = self._reconfiguration.next_deadline_s if self._reconfiguration.in_transition else None
        if self._steering is not None:
            steering_due_s = self._steering.due_s
            due_s = steering_due_s if due_s is None else min(due_s, steering_due_s)
        if self._replicator is not None:
            slice_due_s = self._replicator.due_s
            due_s = slice_due_s if due_s is None else min(due_s, slice_due_s)
        return due_s

    @property
    def workers(self) -> WorkerTable:
        return self._workers

    @property
    def composition(self) -> Composition:
        """The composition once everything under way has ended well."""
        return Composition.of_layout(self._reconfiguration.planned_layout)

    @property
    def target(self) -> Composition | None:
        """The composition that the pool is on its way to; None if it is where it should be."""
        return self._steering.target if self._steering is not None else None

    @property
    def planned_layout(self) -> Layout:
        """The groups of `composition`, in rank order; live ranks outside are spare."""
        return self._reconfiguration.planned_layout

    @property
    def controller(self) -> Controller | None:
        """Who proposes compositions."""
        return self._steering.controller if self._steering is not None else None

    @property
    def long_tokens(self) -> int:
        """Requests above this length count as long now."""
        return self._steering.windows.long_threshold.tokens if self._steering is not None else self.settings.long_tokens

    @property
    def last_window(self) -> Window | None:
        """The observation window that ended last."""
        return self._steering.last_window if self._steering is not None else None

    @property
    def last_proposal(self) -> Proposal | None:
        """What the controller proposed at the end of that window."""
        return self._steering.last_proposal if self._steering is not None else None

    @property
    def last_controller_fault(self) -> Exception | None:
        """What the controller has raised last, where the settings say that this is outlived."""
        return self._steering.last_fault if self._steering is not None else None

    @property
    def is_controller_paused(self) -> bool:
        return self._steering is not None and self._steering.is_paused

    @property
    def topology(self) -> Topology:
        """Nodes and GPUs, lost ones included."""
        return self._reconfiguration.topology

    @property
    def lost_ranks(self) -> frozenset[int]:
        """The ranks out of service, because they failed or did not confirm an epoch in time."""
        return self._reconfiguration.lost_ranks

    @property
    def epoch(self) -> int:
        """The newest epoch that was given out."""
        return self._reconfiguration.epoch

    @property
    def num_waiting(self) -> int:
        """Requests that no worker could take yet."""
        return len(self._waiting) + len(self._handovers.suspended)

    # Requests

    def _on_arrival(self, event: RequestArrived, now_s: float) -> list[Action]:
        return self._admit(event.request, now_s, is_redirected=False)

    def _admit(self, request: PrefillRequest, now_s: float, is_redirected: bool) -> list[Action]:
        """Places a request and reserves its work at once; without a candidate it waits for the pool or is rejected."""
        if request.priority:
            self._has_priorities = True
        reason = self._reason_to_reject(request)
        if reason is not None:
            return [RequestRejected(request.request_id, reason)]
        match = self.index.match(request.blocks)
        view = self._view(request, match, now_s)
        needed, per_rank = self._num_blocks(request), self.settings.blocks_per_rank
        if view is not None and self._awaited is not None:
            view = self._awaited.with_waits(request, match, view)
        if view is not None and needed > self._workers.smallest_degree * per_rank:
            view = view.restricted(view.degrees * per_rank >= needed)
        if view is None:
            self._waiting.append((request, is_redirected))
            return []
        placement = self.policy.place(view)
        worker = self._workers[placement.worker_id]
        item, actions = self._reserve(request, worker, match, view, placement, is_redirected)
        if not is_redirected:
            if self._steering is not None:
                self._steering.windows.record(now_s, request.input_tokens, item.prefix_tokens, item.service_s)
            if self._replicator is not None and placement.preferred_degree is not None:
                record_missed(self.index, match, request.input_tokens, placement.preferred_degree, self.cost_model)
        return [*actions, *self._start_step(worker, now_s)]

    def _reserve(
        self,
        request: PrefillRequest,
        worker: Worker,
        match: Match,
        view: PlacementView,
        placement: Placement,
        is_redirected: bool,
    ) -> tuple[QueuedRequest, list[Action]]:
        """Queues a request where it was placed, and asks for the blocks that this counts on."""
        prefix_tokens = int(view.reusable_tokens[placement.row])
        item = QueuedRequest(
            request=request, prefix_tokens=prefix_tokens, service_s=float(view.service_s[placement.row])
        )
        if self._awaited is not None:
            self._awaited.begin(item, worker, match.num_blocks, view, placement.row)
        pulls = [] if item.is_held else self._ask(item, worker, match)
        worker.queue.push(item)
        worker.queued_tokens += request.input_tokens - prefix_tokens
        self._location[request.request_id] = worker.worker_id
        return item, [RequestPlaced(request.request_id, worker.worker_id, placement, is_redirected), *pulls]

    def _ask(self, item: QueuedRequest, worker: Worker, match: Match) -> list[CopyBlocks]:
        """Asks for the blocks that a reservation counts on and its worker lacks."""
        num_blocks = item.prefix_tokens // self.settings.block_tokens
        return self._puller.ask(item, worker, match, num_blocks) if self._puller is not None else []

    def _leave(self, request_id: int) -> None:
        """A request is reserved nowhere any more; who waited for it will be placed anew."""
        self._location.pop(request_id, None)
        if self._awaited is not None:
            self._stranded += self._awaited.left(request_id)

    def _place_stranded(self, item: QueuedRequest, now_s: float) -> list[Action]:
        assert self._awaited is not None
        if not self._awaited.is_current(item):
            return []
        request = item.request
        worker = self._workers[self._location[request.request_id]]
        worker.queue.remove(request.request_id)
        self._leave(request.request_id)
        self._were_taken(worker, [item])
        return self._admit(request, now_s, is_redirected=True)

    def _computed(self, request: PrefillRequest, end_tokens: int, now_s: float) -> list[Action]:
        """The beginning of a request has KV; those who waited for it may go on, once they have it too."""
        if self._awaited is None:
            return []
        actions: list[Action] = []
        num_blocks = end_tokens // self.settings.block_tokens
        for item, worker in self._awaited.computed(request.request_id, num_blocks):
            actions += self._ask(item, worker, self.index.match(item.request.blocks))
            actions += self._start_step(worker, now_s)
        return actions

    def _move_to(self, idle: Worker, moves: MoveSettings, now_s: float) -> list[Action]:
        """Gives a worker with nothing to do the queued request of another that gains most by it, if any does."""

        def look_at(request: PrefillRequest) -> tuple[Match, PlacementView] | None:
            match = self.index.match(request.blocks)
            view = self._view(request, match, now_s)
            return None if view is None else (match, view)

        max_tokens = idle.degree * self.settings.blocks_per_rank * self.settings.block_tokens
        move = best_move(moves, self._workers, idle, now_s, max_tokens, look_at)
        if move is None:
            return []
        taken = move.worker.queue.remove(move.request.request_id)
        assert taken is not None
        self._were_taken(move.worker, [taken])
        self._leave(move.request.request_id)
        _, actions = self._reserve(move.request, idle, move.match, move.view, move.placement, True)
        return [*actions, *self._start_step(idle, now_s)]

    def _reason_to_reject(self, request: PrefillRequest) -> str | None:
        limit = self.settings.max_sequence_tokens
        if limit is not None and request.input_tokens > limit:
            return f"{request.input_tokens} input tokens; the model takes {limit}"
        needed = self._num_blocks(request)
        if self._steering is not None:
            self._steering.most_blocks = max(self._steering.most_blocks, needed)
        if needed <= self._workers.smallest_degree * self.settings.blocks_per_rank:
            return None
        # While all ranks are lost, requests wait: one may come back.
        largest = max((group.degree for group in self._reconfiguration.planned_layout), default=None)
        if largest is not None and needed > largest * self.settings.blocks_per_rank:
            held = largest * self.settings.blocks_per_rank
            return f"{request.input_tokens} input tokens take {needed} KV blocks; the largest worker holds {held}"
        return None

    def _num_blocks(self, request: PrefillRequest) -> int:
        """KV blocks that the whole prompt takes, a partial last one included."""
        return -(-request.input_tokens // self.settings.block_tokens)

    def _view(self, request: PrefillRequest, match: Match, now_s: float) -> PlacementView | None:
        """The candidates as vectors; None if no worker is active that can hold the request."""
        table = self._workers
        if not table.active:
            return None
        settings = self.settings
        length = request.input_tokens
        costs, slots = table.costs, table.slots
        # P is block-aligned and below L: at least one token is always computed.
        max_reusable = (length - 1) // settings.block_tokens
        reusable = match.reusable_blocks[slots] * table.block_tokens
        if match.num_blocks > max_reusable:
            reusable = np.minimum(reusable, float(max_reusable * settings.block_tokens))
        suffix = np.array(float(length)) - reusable
        service = self._service_s(costs, suffix, reusable)
        if self._puller is not None:
            reusable, suffix, service = self._puller.with_pulls(request, match, reusable, suffix, service)
        remaining = np.maximum(table.running_end_s - np.array(now_s), _ZERO)
        outstanding = remaining + table.queued_s
        wait, delay = self._waits(request, service, remaining, outstanding)
        return PlacementView(
            now_s=now_s,
            request_id=request.request_id,
            input_tokens=length,
            matched_tokens=min(match.num_blocks, max_reusable) * settings.block_tokens,
            worker_ids=table.worker_ids,
            degrees=table.degrees,
            costs=costs,
            smallest_degree=table.smallest_degree,
            smallest_costs=table.smallest_costs,
            reusable_tokens=reusable,
            suffix_tokens=suffix,
            service_s=service,
            outstanding_s=outstanding,
            wait_s=wait,
            delay_s=delay,
            num_outstanding=table.num_outstanding,
            outstanding_tokens=table.outstanding_tokens,
            resident_blocks=self.index.resident_blocks_by_slot[slots],
            block_tokens=settings.block_tokens,
        )

    def _waits(
        self, request: PrefillRequest, service: FloatArray, remaining: FloatArray, outstanding: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """(what the request would wait, what longer queued requests would wait for it), per candidate."""
        if self.settings.discipline is Discipline.FIFO and not self._has_priorities:
            return outstanding, np.zeros(len(outstanding))
        ahead, delay = self._workers.queues.around(request, service)
        return remaining + ahead, delay

    def _service_s(self, costs: DegreeCosts, suffix: FloatArray, prefix: FloatArray) -> FloatArray:
        step_tokens = self.settings.step_tokens
        if step_tokens is None:
            return costs.prefill_s(suffix, prefix)
        return chunked_prefill_s(costs, suffix, prefix, step_tokens)

    def _on_cancel(self, event: RequestCancelled, now_s: float) -> list[Action]:
        worker_id = self._location.get(event.request_id)
        if worker_id is None:
            self._waiting = deque(each for each in self._waiting if each[0].request_id != event.request_id)
            self._handovers.forget_suspended(event.request_id)
            return []
        worker = self._workers[worker_id]
        item = worker.queue.remove(event.request_id)
        if item is None:
            self._cancelled.add(event.request_id)  # it runs: dropped when its step ends
            return []
        self._leave(event.request_id)
        worker.queued_tokens -= item.request.input_tokens - item.prefix_tokens
        self._workers.changed(worker)
        return [DropRequest(worker_id, event.request_id)] if item.started else []

    # Steps

    def _start_step(self, worker: Worker, now_s: float) -> list[Action]:
        """Forms the next step of an idle worker from its queue, in queue order; no action if there is none to run.

        Brings the worker's row up to date either way.
        """
        items = self._take_step(worker, now_s)
        self._workers.changed(worker)
        return [StartStep(worker.worker_id, worker.epoch, items)] if items else []

    def _take_step(self, worker: Worker, now_s: float) -> tuple[StepItem, ...]:
        if worker.running or worker.status not in (WorkerStatus.ACTIVE, WorkerStatus.DRAINING):
            return ()
        step_tokens = budget = self.settings.step_tokens
        items: list[StepItem] = []
        duration_s = 0.0
        has_room = None if budget is None else self._room_at(worker)
        fixed_s = self.cost_model.coefficients[worker.degree].d

        def pays_to_join(queued: QueuedRequest) -> bool:
            """All in a step end together: one more makes those before it wait for its work. It spares itself and all
            that could run behind it the fixed cost of a step, unless what is cut off takes as many steps as the whole.
            """
            if not items or budget is None or step_tokens is None:
                return True
            left = queued.request.input_tokens - queued.prefix_tokens
            num_tokens = min(budget, left)
            if -(-(left - num_tokens) // step_tokens) == -(-left // step_tokens):
                return False
            work_s = self.cost_model.prefill_s(num_tokens, queued.prefix_tokens, worker.degree) - fixed_s
            return len(items) * work_s <= worker.queue.num_ready * fixed_s

        while (queued := worker.queue.pop_ready(has_room, pays_to_join)) is not None:
            length = queued.request.input_tokens
            end = length if budget is None else min(length, queued.prefix_tokens + budget)
            num_tokens = end - queued.prefix_tokens
            items.append(StepItem(queued.request, queued.prefix_tokens, end, not queued.started))
            worker.running.append(RunningItem(queued, queued.prefix_tokens, end))
            worker.queued_tokens -= length - queued.prefix_tokens
            worker.running_tokens += num_tokens
            # A whole request takes the seconds it was reserved with; a chunk is predicted by itself.
            if end == length and budget is None:
                duration_s += queued.service_s
            else:
                duration_s += self.cost_model.prefill_s(num_tokens, queued.prefix_tokens, worker.degree)
                worker.later_s += self._remaining_s(queued, end, worker.degree)
            queued.started = True
            if budget is None:
                break
            budget -= num_tokens
            if budget < self.settings.block_tokens:
                break
        if items:
            worker.running_end_s = now_s + duration_s - (len(items) - 1) * fixed_s
        return tuple(items)

    def _room_at(self, worker: Worker) -> Callable[[PrefillRequest], bool]:
        """Whether a further request can begin: those that have begun keep the KV blocks of their whole prompts."""
        capacity = worker.degree * self.settings.blocks_per_rank

        def has_room(request: PrefillRequest) -> bool:
            begun = [item.request for item in worker.queue.items() if item.started]
            begun += [running.queued.request for running in worker.running]
            return sum(map(self._num_blocks, begun)) + self._num_blocks(request) <= capacity

        return has_room

    def _on_step_started(self, event: StepStarted, now_s: float) -> list[Action]:
        """Corrects the predicted end by the prefixes that were really there."""
        worker = self._workers.get(event.worker_id)
        if worker is None or not worker.running:  # lost meanwhile: its requests run elsewhere
            return []
        work: list[tuple[int, int]] = []
        for item, reused_tokens in zip(worker.running, event.reused_tokens, strict=True):
            prefix = min(reused_tokens, item.end_tokens)
            if not item.queued.is_access_recorded:
                item.queued.is_access_recorded = True
                if self._steering is not None:
                    self._steering.windows.record_start(item.queued.request.arrival_s, now_s)
                num_reused = reused_tokens // self.settings.block_tokens
                worker.reused_blocks += num_reused
                if self._replicator is not None and num_reused:
                    self.index.record_access(item.queued.request.blocks[:num_reused], worker.degree)
            work.append((item.end_tokens - prefix, prefix))
        worker.step_started_s = now_s
        worker.step_predicted_s = self.cost_model.step_s(work, worker.degree)
        worker.running_end_s = now_s + worker.step_predicted_s
        self._workers.changed(worker)
        return []

    def _on_step_finished(self, event: StepFinished, now_s: float) -> list[Action]:
        worker = self._workers.get(event.worker_id)
        if worker is None:  # lost meanwhile: its requests run elsewhere
            return []
        actions: list[Action] = []
        released: list[Action] = []
        self._note_step(worker, now_s)
        merging = self._handovers.merging(worker)
        for item in worker.running:
            queued = item.queued
            request_id, length = queued.request.request_id, queued.request.input_tokens
            is_cancelled = request_id in self._cancelled
            self._cancelled.discard(request_id)
            released += self._computed(queued.request, item.end_tokens, now_s)
            if item.end_tokens == length or is_cancelled:
                self._leave(request_id)
                if item.end_tokens < length:
                    actions.append(DropRequest(worker.worker_id, request_id))
            elif merging is not None:
                actions.append(self._suspend(worker, queued, merging))
            else:
                queued.prefix_tokens = item.end_tokens
                queued.service_s = self._remaining_s(queued, item.end_tokens, worker.degree)
                worker.queue.push_back(queued)
                worker.queued_tokens += length - item.end_tokens
        worker.running = []
        worker.running_tokens = 0
        worker.later_s = 0.0
        actions += released
        actions += self._go_on(worker, now_s)
        if worker.status is WorkerStatus.DRAINING and not worker.running:
            actions += self._apply(self._reconfiguration.source_drained(worker.group, now_s), now_s)
        return actions

    def _note_step(self, worker: Worker, now_s: float) -> None:
        """Compares a finished step with its prediction, and corrects the cost model where that is wanted."""
        if worker.step_predicted_s <= 0:
            return
        degree = worker.degree
        self.drift.record(degree, worker.step_predicted_s, now_s - worker.step_started_s)
        worker.step_predicted_s = 0.0
        corrected = self.drift.corrected(degree) if self.settings.refit is not None else None
        if corrected is not None:
            self.cost_model = corrected
            self._workers.use_costs(corrected)
            if self._steering is not None:
                self._steering.use_costs(corrected)

    def _go_on(self, worker: Worker, now_s: float) -> list[Action]:
        """The next step of a worker that is free: of its own queue, or else of what waits elsewhere."""
        steps: list[Action] = self._start_step(worker, now_s)
        if steps:
            return steps
        moves = self.settings.moves
        if moves is None or worker.status is not WorkerStatus.ACTIVE:
            return []
        if any(not item.is_held for item in worker.queue.items()):
            return []
        return self._move_to(worker, moves, now_s)

    def _suspend(self, worker: Worker, queued: QueuedRequest, merging: Handover) -> DropRequest:
        request = queued.request
        self._leave(request.request_id)
        merging.suspended.append(request)
        return DropRequest(worker.worker_id, request.request_id)

    def _remaining_s(self, queued: QueuedRequest, start_tokens: int, degree: int) -> float:
        """Predicted seconds of what is left of a request once its first `start_tokens` tokens have KV."""
        if start_tokens == queued.request.input_tokens:
            return 0.0
        suffix = np.array([float(queued.request.input_tokens - start_tokens)])
        costs = self.cost_model.for_degrees((degree,))
        return float(self._service_s(costs, suffix, np.array([float(start_tokens)]))[0])

    # Cache

    def _on_report(self, event: CacheReport, now_s: float) -> list[Action]:
        outcome = self.index.apply(event, now_s)
        worker = self._workers.get(event.worker_id)
        if worker is None:
            return []
        if outcome is ReportOutcome.GAP:
            return [SendSnapshot(event.worker_id)]
        if isinstance(event, Stored):
            self._pending.settle(event.worker_id, event.blocks)  # computed there by now, or copied
        if not isinstance(event, Snapshot):
            return []
        self._handovers.cache_known(worker.worker_id, event.chains)
        actions = self._finish_handovers(worker)
        if worker.status is WorkerStatus.OPENING:
            self._workers.set_status(worker, WorkerStatus.ACTIVE)
            actions += self._place_waiting(now_s)
            if not worker.running:
                actions += self._go_on(worker, now_s)
        return actions

    def _place_waiting(self, now_s: float) -> list[Action]:
        waiting, self._waiting = self._waiting, deque()
        actions: list[Action] = []
        for request, is_redirected in waiting:
            actions += self._admit(request, now_s, is_redirected)
        return actions

    def _on_copy_ended(self, event: CopyEnded, now_s: float) -> list[Action]:
        ended = self._copies.end(event.copy_id)
        if ended is None:
            return []
        action, plan = ended
        if plan is not None:
            self.index.copy_ended(plan)
        if event.ok:
            self.num_copies[action.reason] += 1
        # Arrived or not, these blocks are not worth a second try: what is still missing is an ordinary miss.
        self._pending.settle(action.destination_worker_id, action.blocks)
        worker = self._workers.get(action.destination_worker_id)
        return [] if worker is None else self._start_step(worker, now_s)

    def _advance_scan(self, replicator: Replicator, now_s: float) -> list[Action]:
        """Runs one slice of the replication scan; its last slice starts copies and reclaims."""
        result = replicator.advance(self.index, lambda: self._pool_load(now_s), now_s)
        if result is None:
            return []
        actions: list[Action] = []
        for plan in result.replications:
            copy = CopyBlocks(
                copy_id=self._copies.next_id(),
                reason=CopyReason.INTER_DEGREE if plan.kind is CopyKind.INTER else CopyReason.INTRA_DEGREE,
                source_worker_id=plan.source_worker_id,
                destination_worker_id=plan.destination_worker_id,
                parent=plan.parent,
                blocks=plan.blocks,
            )
            source = self._workers[plan.source_worker_id]
            self._copies.begin(copy, source_node=self.topology.node_of(source.group.first_rank), plan=plan)
            self.index.copy_started(plan)
            actions.append(copy)
        actions += [ReclaimBlocks(plan.worker_id, plan.blocks) for plan in result.reclaims]
        return actions

    def _pool_load(self, now_s: float) -> PoolLoad:
        return PoolLoad(
            {
                worker.worker_id: WorkerLoad(
                    queue_s=worker.outstanding_s(now_s),
                    capacity_blocks=worker.degree * self.settings.blocks_per_rank,
                    can_receive=worker.status is WorkerStatus.ACTIVE,
                    can_send=worker.status in (WorkerStatus.ACTIVE, WorkerStatus.DRAINING),
                )
                for worker in self._workers.all()
            }
        )

    # Composition

    def _on_timer(self, event: TimerFired, now_s: float) -> list[Action]:
        actions: list[Action] = []
        deadline_s = self._reconfiguration.next_deadline_s
        if deadline_s is not None and deadline_s <= now_s:
            actions += self._apply(self._reconfiguration.tick(now_s), now_s)
        steering = self._steering
        if steering is not None and steering.due_s <= now_s and steering.advance(self._without_worker, now_s):
            actions += self._move_towards_target(now_s)
        if self._replicator is not None and self._replicator.due_s <= now_s:
            actions += self._advance_scan(self._replicator, now_s)
        return actions

    def _without_worker(self) -> list[PrefillRequest]:
        return [*(request for request, _ in self._waiting), *self._handovers.suspended]

    def _move_towards_target(self, now_s: float) -> list[Action]:
        return self._begin(self._steering.operations(now_s), now_s) if self._steering is not None else []

    def _begin(self, operations: Sequence[Operation], now_s: float) -> list[Action]:
        busy = [group for group, worker in self._serving.items() if worker.running]
        return self._apply(self._reconfiguration.start(operations, now_s, busy), now_s)

    def _on_composition_requested(self, event: CompositionRequested, now_s: float) -> list[Action]:
        steering = self._ensure_steering(now_s)
        steering.pause(True)
        steering.target = event.composition
        return self._move_towards_target(now_s)

    def _on_controller_paused(self, event: ControllerPaused, now_s: float) -> list[Action]:
        self._ensure_steering(now_s).pause(event.is_paused)
        return []

    def _ensure_steering(self, now_s: float) -> Steering:
        if self._steering is None:
            self._steering = self._make_steering(HoldingController())
            self._steering.windows.start_s = now_s
        return self._steering

    def _on_rank_confirmed(self, event: RankConfirmed, now_s: float) -> list[Action]:
        return self._apply(self._reconfiguration.rank_confirmed(event.rank, event.epoch, now_s), now_s)

    def _on_rank_failed(self, event: RankFailed, now_s: float) -> list[Action]:
        return self._apply(self._reconfiguration.rank_failed(event.rank, now_s), now_s)

    def _on_rank_recovered(self, event: RankRecovered, now_s: float) -> list[Action]:
        if self._steering is not None:
            self._steering.stop_thinking()
        return self._apply(self._reconfiguration.rank_recovered(event.rank, now_s), now_s)

    def _apply(self, effects: Sequence[Effect], now_s: float) -> list[Action]:
        """Carries the state machine's effects out: statuses first, so that whatever is redirected finds them."""
        actions: list[Action] = []
        orphans: list[PrefillRequest] = []
        for effect in effects:
            match effect:
                case OperationStarted(operation):
                    handover = self._handovers.begin(operation, [self._serving[each] for each in operation.sources])
                    for worker in handover.sources:
                        self._workers.set_status(worker, WorkerStatus.DRAINING)
                        if self._awaited is not None:
                            self._stranded += self._awaited.drains(worker)
                        orphans += self._empty_queue(worker)
                        if self._handovers.merging(worker) is handover:
                            actions += [self._suspend(worker, each, handover) for each in self._take_started(worker)]
                case Activate(epoch, groups):
                    actions.append(ActivateGroups(epoch, groups))
                    for group in [group for group in self._serving if any(group.overlaps(new) for new in groups)]:
                        worker = self._serving.pop(group)
                        self._workers.set_status(worker, WorkerStatus.PARKED)
                        actions += self._finish_handovers(worker)
                case GroupReady(group, epoch, operation):
                    opened = self._open_worker(group, epoch)
                    actions.append(opened)
                    self._handovers.opened(operation, opened.worker_id)
                case OperationCommitted(operation, _, drain_s, switch_s):
                    self._handovers.committed(operation)
                    self.transitions.append(Transition(now_s, operation, drain_s, switch_s))
                case OperationAborted(operation, restored):
                    if self._steering is not None:
                        # What stood in the way may still be there: the next window decides anew.
                        self._steering.stop_thinking()
                        self._steering.target = None
                    handover = self._handovers.end(operation)
                    self._resume(handover)
                    for worker in handover.sources:
                        if worker.group in restored:
                            self._workers.set_status(worker, WorkerStatus.ACTIVE)
                        elif worker.status is WorkerStatus.PARKED:
                            actions.append(self._close_worker(worker))
                case GroupLost(group):
                    if self._steering is not None:
                        self._steering.stop_thinking()
                    lost = self._serving.pop(group, None)
                    if lost is not None:
                        orphans += self._lose_worker(lost)
                        actions += [self._close_worker(lost), *self._finish_handovers(lost)]
                case OperationRefused():
                    pass  # the layout changed under the plan; the next window plans anew
        for request in orphans:
            actions += self._admit(request, now_s, is_redirected=True)
        if any(isinstance(effect, OperationAborted | GroupLost) for effect in effects):
            actions += self._place_waiting(now_s)
        if any(isinstance(effect, OperationCommitted | OperationAborted) for effect in effects):
            actions += self._move_towards_target(now_s)
        return actions

    def _finish_handovers(self, opened: Worker) -> list[Action]:
        """Closes the workers whose ranks all serve, with known caches, as other workers now."""
        actions: list[Action] = []
        for handover in self._handovers.done_with(opened.worker_id):
            self._resume(handover)
            if handover.operation.kind is OperationKind.SPLIT and self.settings.pull is not None:
                self._assign_prefixes(handover)
            actions += [self._close_worker(worker) for worker in handover.sources]
        return actions

    def _resume(self, handover: Handover) -> None:
        """What was suspended is placed next, before whatever else waits: mostly where its KV is."""
        self._waiting.extendleft((request, True) for request in reversed(handover.suspended))
        handover.suspended = []

    def _assign_prefixes(self, handover: Handover) -> None:
        """Gives each prefix that a split worker retained to one of its children, which fetches what it lacks."""
        children = [worker_id for worker_id in handover.held if self._workers.get(worker_id) is not None]
        degree = handover.sources[0].degree
        pending = assign_prefixes(
            [handover.held[worker_id] for worker_id in children], lambda block: self.index.access(block, degree)
        )
        for worker_id, blocks in zip(children, pending, strict=True):
            self._pending.add(worker_id, blocks)

    def _empty_queue(self, worker: Worker) -> list[PrefillRequest]:
        """Takes what has not started out of a worker's queue, to be placed elsewhere."""
        taken = worker.queue.remove_not_started()
        for item in taken:
            self._leave(item.request.request_id)
        self._were_taken(worker, taken)
        return [item.request for item in taken]

    def _take_started(self, worker: Worker) -> list[QueuedRequest]:
        taken = worker.queue.remove_started()
        self._were_taken(worker, taken)
        return taken

    def _were_taken(self, worker: Worker, items: Sequence[QueuedRequest]) -> None:
        worker.queued_tokens -= sum(item.request.input_tokens - item.prefix_tokens for item in items)
        self._workers.changed(worker)

    def _lose_worker(self, worker: Worker) -> list[PrefillRequest]:
        """All requests of a worker that failed, but the cancelled; those it was running start again elsewhere."""
        lost = [item.queued.request for item in worker.running]
        lost += [item.request for item in worker.queue.items()]
        for request in lost:
            self._leave(request.request_id)
        worker.running = []
        worker.later_s = 0.0
        kept = [request for request in lost if request.request_id not in self._cancelled]
        self._cancelled.difference_update(request.request_id for request in lost)
        return kept

    def _open_worker(self, group: RankGroup, epoch: int) -> OpenWorker:
        worker_id = self._next_worker_id
        self._next_worker_id += 1
        slot = self.index.add_worker(worker_id, group.degree, epoch)
        self._serving[group] = self._workers.open(worker_id, slot, group, epoch)
        return OpenWorker(worker_id, group, epoch)

    def _close_worker(self, worker: Worker) -> Action:
        self._pending.forget_worker(worker.worker_id)
        self.index.remove_worker(worker.worker_id)
        self._workers.close(worker)
        return CloseWorker(worker.worker_id)

    def check_invariants(self) -> None:
        """Raises InvariantError where the parts contradict each other: queues, rows, index, groups. Slow: for tests."""
        self._workers.check_invariants()
        self._reconfiguration.check_invariants()
        self.index.check_invariants()
        reserved: dict[int, int] = {}
        for worker in self._workers.all():
            items = [*worker.queue.items(), *(running.queued for running in worker.running)]
            for request_id in (item.request.request_id for item in items):
                if request_id in reserved:
                    raise InvariantError(f"request {request_id} is reserved twice")
                reserved[request_id] = worker.worker_id
        if reserved != self._location:
            raise InvariantError("the reservations differ from what is known of the requests' places")
        if self._awaited is not None:
            self._awaited.check_invariants(self._location)
        waiting = [*(request for request, _ in self._waiting), *self._handovers.suspended]
        if any(request.request_id in reserved for request in waiting):
            raise InvariantError("a request waits for the pool and at a worker")
        parked = self._handovers.sources
        for worker in self._workers.all():
            is_serving = self._serving.get(worker.group) is worker
            if is_serving is (worker.status is WorkerStatus.PARKED) or not (is_serving or worker.worker_id in parked):
                raise InvariantError(f"worker {worker.worker_id} is {worker.status.value} and nobody will close it")
