"""The control plane: one state machine that places requests, forms steps and keeps the pool in shape.

Typed events go in, typed actions come out (`core.events`); the simulator and the live pool drive the very same object.
It owns queues, reservations and the prefix index, and it never acts by itself: time comes in with every event, and
`next_timer_s` says when it next wants a `TimerFired`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vertumnus.core.composition import (
    Composition,
    Layout,
    Operation,
    OperationKind,
    RankGroup,
    Topology,
    plan_towards,
)
from vertumnus.core.controller import Arrivals, Controller, PoolState
from vertumnus.core.cost import CostModel, DegreeCosts, FloatArray, chunked_prefill_s
from vertumnus.core.events import (
    Action,
    ActivateGroups,
    CloseWorker,
    CopyEnded,
    Event,
    OpenWorker,
    RankConfirmed,
    RankFailed,
    RankRecovered,
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
from vertumnus.core.index import Match, PrefixIndex, ReportOutcome
from vertumnus.core.index.reports import CacheReport, Cleared, Removed, Snapshot, Stored
from vertumnus.core.observation import WindowTracker
from vertumnus.core.placement import PlacementPolicy, PlacementView
from vertumnus.core.queueing import Discipline, QueuedRequest
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
    ReconfigurationSettings,
)
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.workers import RunningItem, Worker, WorkerStatus, WorkerTable
from vertumnus.errors import ConfigError, InvariantError

@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlaneSettings:
    """What an operator decides once. Durations in seconds."""

    block_tokens: int
    blocks_per_rank: int
    """KV blocks that one rank stores."""
    discipline: Discipline = Discipline.SHORTEST
    ageing: float = 10.0
    """Seconds of arrival order that one second of predicted service is worth under shortest-first."""
    step_tokens: int | None = None
    """Token budget of a step: longer prompts are chunked, shorter ones packed. None: one whole request a step."""
    max_sequence_tokens: int | None = None
    window_s: float = 20.0
    """Observation window of the controller."""
    long_tokens: int = 32_768
    """Requests above this length count as long."""
    max_switching_ratio: float = 0.5
    """Largest share of the GPUs that may be draining or switching at once."""
    reconfiguration: ReconfigurationSettings = ReconfigurationSettings()

    def __post_init__(self) -> None:
        for name in ("block_tokens", "blocks_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        if self.step_tokens is not None and self.step_tokens < self.block_tokens:
            raise ConfigError(f"step_tokens is {self.step_tokens}; accepted: at least one block ({self.block_tokens})")
        if not 0 <= self.ageing < np.inf:
            raise ConfigError(f"ageing is {self.ageing}; accepted: 0 or more")


@dataclass(frozen=True, slots=True)
class Transition:
    """A split or merge that was carried out: when it committed, and the seconds of its two stages."""

    committed_s: float
    operation: Operation
    drain_s: float
    switch_s: float


@dataclass(slots=True)
class _Handover:
    """Workers whose ranks go over to others, and the others whose caches are not known yet."""

    sources: list[Worker]
    opening: set[int] = field(default_factory=set)
    is_committed: bool = False


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
    ) -> None:
        self.settings = settings
        self.cost_model = cost_model
        self.policy = policy
        self.controller = controller
        self.transitions: list[Transition] = []
        self._reconfiguration = Reconfiguration(
            layout, topology, degrees=cost_model.degrees, settings=settings.reconfiguration
        )
        self._target: Composition | None = None
        self._serving: dict[RankGroup, Worker] = {}
        self._handovers: dict[Operation, _Handover] = {}
        self._windows = WindowTracker(settings.window_s, settings.long_tokens)
        self.index = PrefixIndex(degrees=cost_model.degrees, block_tokens=settings.block_tokens)
        self._workers = WorkerTable(cost_model, settings.discipline, settings.ageing)
        self._waiting: deque[tuple[PrefillRequest, bool]] = deque()
        """Requests without a candidate, each with whether it was placed before."""
        self._location: dict[int, int] = {}
        self._next_worker_id = 0
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
            TimerFired: self._on_timer,
        }

    # Driving it

    def start(self, now_s: float) -> list[Action]:
        """Opens the initial workers; each is a candidate as soon as the pool has sent its cache snapshot."""
        self._windows.start_s = now_s
        return [self._open_worker(group, epoch) for group, epoch in sorted(self._reconfiguration.ready.items())]

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event; returns the actions it causes, in order."""
        return self._handlers[type(event)](event, now_s)

    def next_timer_s(self) -> float | None:
        """The instant at which a `TimerFired` is wanted, or None."""
        due_s = [self._reconfiguration.next_deadline_s]
        if self.controller is not None:
            due_s.append(self._windows.end_s)
        return min((each for each in due_s if each is not None), default=None)

    @property
    def workers(self) -> WorkerTable:
        return self._workers

    @property
    def composition(self) -> Composition:
        """The composition once everything under way has ended well."""
        return Composition.of_layout(self._reconfiguration.planned_layout)

    @property
    def num_waiting(self) -> int:
        """Requests that no worker could take yet."""
        return len(self._waiting)

    # Requests

    def _on_arrival(self, event: RequestArrived, now_s: float) -> list[Action]:
        return self._admit(event.request, now_s, is_redirected=False)

    def _admit(self, request: PrefillRequest, now_s: float, is_redirected: bool) -> list[Action]:
        """Places a request and reserves its work at once; without a candidate it waits for the pool or is rejected."""
        reason = self._reason_to_reject(request)
        if reason is not None:
            return [RequestRejected(request.request_id, reason)]
        match = self.index.match(request.blocks)
        view = self._view(request, match, now_s)
        if view is None:
            self._waiting.append((request, is_redirected))
            return []
        placement = self.policy.place(view)
        worker = self._workers[placement.worker_id]
        prefix_tokens = int(view.reusable_tokens[placement.row])
        item = QueuedRequest(
            request=request, prefix_tokens=prefix_tokens, service_s=float(view.service_s[placement.row])
        )
        worker.queue.push(item)
        worker.queued_tokens += request.input_tokens - prefix_tokens
        self._workers.changed(worker)
        self._location[request.request_id] = worker.worker_id
        if not is_redirected:
            self._windows.record(now_s, request.input_tokens, prefix_tokens, item.service_s)
        actions: list[Action] = [RequestPlaced(request.request_id, worker.worker_id, placement, is_redirected)]
        actions += self._start_step(worker, now_s)
        return actions

    def _reason_to_reject(self, request: PrefillRequest) -> str | None:
        limit = self.settings.max_sequence_tokens
        if limit is not None and request.input_tokens > limit:
            return f"{request.input_tokens} input tokens; the model takes {limit}"
        return None

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
        reusable = np.minimum(match.reusable_blocks[slots], max_reusable) * float(settings.block_tokens)
        suffix = length - reusable
        service = self._service_s(costs, suffix, reusable)
        remaining = np.maximum(table.running_end_s - now_s, 0.0)
        outstanding = remaining + table.queued_s
        wait, delay = self._waits(request, service, remaining, outstanding)
        return PlacementView(
            now_s=now_s,
            request_id=request.request_id,
            input_tokens=length,
            matched_tokens=min(match.num_blocks, max_reusable) * settings.block_tokens,
            worker_ids=table.worker_ids,
            degrees=table.degrees,
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
        if self.settings.discipline is Discipline.FIFO:
            return outstanding, np.zeros_like(outstanding)
        wait = remaining.copy()
        delay = np.zeros_like(wait)
        for row in self._workers.queued_rows:
            service_s = float(service[row])
            ahead_s, num_behind = self._workers.active[row].queue.ahead(request.arrival_s, service_s)
            wait[row] += ahead_s
            delay[row] = num_behind * service_s
        return wait, delay

    def _service_s(self, costs: DegreeCosts, suffix: FloatArray, prefix: FloatArray) -> FloatArray:
        step_tokens = self.settings.step_tokens
        if step_tokens is None:
            return costs.prefill_s(suffix, prefix)
        return chunked_prefill_s(costs, suffix, prefix, step_tokens)

    def _on_cancel(self, event: RequestCancelled, now_s: float) -> list[Action]:
        worker_id = self._location.get(event.request_id)
        if worker_id is None:
            self._waiting = deque(each for each in self._waiting if each[0].request_id != event.request_id)
            return []
        worker = self._workers[worker_id]
        item = worker.queue.remove(event.request_id)
        if item is not None:
            self._location.pop(event.request_id)
            worker.queued_tokens -= item.request.input_tokens - item.prefix_tokens
            self._workers.changed(worker)
        return []

    # Steps

    def _start_step(self, worker: Worker, now_s: float) -> list[Action]:
        """Forms the next step of an idle worker from its queue, in queue order; no action if there is none to run."""
        if worker.running or worker.status not in (WorkerStatus.ACTIVE, WorkerStatus.DRAINING):
            return []
        budget = self.settings.step_tokens
        items: list[StepItem] = []
        duration_s = 0.0
        while (queued := worker.queue.pop_ready()) is not None:
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
        if not items:
            return []
        duration_s -= (len(items) - 1) * self.cost_model.coefficients[worker.degree].d
        worker.running_end_s = now_s + duration_s
        self._workers.changed(worker)
        return [StartStep(worker.worker_id, worker.epoch, tuple(items))]

    def _on_step_started(self, event: StepStarted, now_s: float) -> list[Action]:
        """Corrects the predicted end by the prefixes that were really there."""
        worker = self._workers[event.worker_id]
        fixed_s = self.cost_model.coefficients[worker.degree].d
        duration_s = fixed_s
        for item, reused_tokens in zip(worker.running, event.reused_tokens, strict=True):
            prefix = min(reused_tokens, item.end_tokens)
            duration_s += self.cost_model.prefill_s(item.end_tokens - prefix, prefix, worker.degree) - fixed_s
        worker.running_end_s = now_s + duration_s
        self._workers.changed(worker)
        return []

    def _on_step_finished(self, event: StepFinished, now_s: float) -> list[Action]:
        worker = self._workers[event.worker_id]
        for item in worker.running:
            queued = item.queued
            length = queued.request.input_tokens
            if item.end_tokens == length:
                self._location.pop(queued.request.request_id, None)
            else:
                queued.prefix_tokens = item.end_tokens
                queued.service_s = self._remaining_s(queued, item.end_tokens, worker.degree)
                worker.queue.push_back(queued)
                worker.queued_tokens += length - item.end_tokens
        worker.running = []
        worker.running_tokens = 0
        worker.later_s = 0.0
        actions = self._start_step(worker, now_s)
        self._workers.changed(worker)
        if worker.status is WorkerStatus.DRAINING and not worker.running:
            actions += self._apply(self._reconfiguration.source_drained(worker.group, now_s), now_s)
        return actions

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
        if not isinstance(event, Snapshot):
            return []
        actions = self._finish_handovers(worker)
        if worker.status is WorkerStatus.OPENING:
            self._workers.set_status(worker, WorkerStatus.ACTIVE)
            actions += self._place_waiting(now_s)
        return actions

    def _place_waiting(self, now_s: float) -> list[Action]:
        waiting, self._waiting = self._waiting, deque()
        actions: list[Action] = []
        for request, is_redirected in waiting:
            actions += self._admit(request, now_s, is_redirected)
        return actions

    def _on_copy_ended(self, event: CopyEnded, now_s: float) -> list[Action]:
        return []

    # Composition

    def _on_timer(self, event: TimerFired, now_s: float) -> list[Action]:
        actions: list[Action] = []
        deadline_s = self._reconfiguration.next_deadline_s
        if deadline_s is not None and deadline_s <= now_s:
            actions += self._apply(self._reconfiguration.tick(now_s), now_s)
        if self.controller is not None and self._windows.end_s <= now_s:
            actions += self._end_window(self.controller, now_s)
        return actions

    def _end_window(self, controller: Controller, now_s: float) -> list[Action]:
        window = self._windows.close(sum(worker.outstanding_s(now_s) for worker in self._workers.all()))
        proposal = controller.observe(window, self._pool_state(now_s))
        if proposal is not None:
            self._target = proposal.target
        return self._move_towards_target(now_s)

    def _pool_state(self, now_s: float) -> PoolState:
        queued = [item.request for worker in self._workers.all() for item in worker.queue.items()]
        queued += [request for request, _ in self._waiting]
        return PoolState(
            layout=self._reconfiguration.planned_layout,
            topology=self._reconfiguration.live_topology,
            degrees=self.cost_model.degrees,
            cost=lambda operation: self._operation_cost(operation, now_s),
            held=self._reconfiguration.held,
            in_transition=self._reconfiguration.in_transition,
            queued=Arrivals(
                arrival_s=np.full(len(queued), now_s),
                input_tokens=np.array([request.input_tokens for request in queued], dtype=np.float64),
                prefix_tokens=np.zeros(len(queued)),
            ),
        )

    def _operation_cost(self, operation: Operation, now_s: float) -> tuple[float, float]:
        """(predicted drain in seconds, expected reconciliation traffic in blocks) of an operation that starts now.

        The drain lasts as long as the longest running step. A merge moves no KV; a split leaves about half of every
        prefix at the other child, weighted by how much of the parent's cache was reused recently.
        """
        drain_s = traffic_blocks = 0.0
        for group in operation.sources:
            worker = self._serving.get(group)
            if worker is not None and worker.running:
                drain_s = max(drain_s, worker.running_end_s - now_s, 0.0)
            if worker is not None and operation.kind is OperationKind.SPLIT:
                traffic_blocks += worker.reused_blocks / 2
        return drain_s, traffic_blocks

    def _move_towards_target(self, now_s: float) -> list[Action]:
        """Starts what can be started on the way to the target composition, within the share that may switch."""
        reconfiguration = self._reconfiguration
        if self._target is None:
            return []
        layout = reconfiguration.planned_layout
        if Composition.of_layout(layout) == self._target:
            self._target = None
            return []
        num_live = sum(group.degree for group in layout)
        room = self.settings.max_switching_ratio * num_live - sum(group.degree for group in reconfiguration.held)
        planned = plan_towards(
            layout,
            self._target,
            reconfiguration.live_topology,
            cost=lambda operation: self._operation_cost(operation, now_s),
            max_operations=num_live,
            held=reconfiguration.held,
        )
        started = []
        for operation in planned:
            num_ranks = len(operation.ranks)
            # One operation may always go, or a pool of one node could never change.
            if num_ranks <= room or not (started or reconfiguration.in_transition):
                started.append(operation)
                room -= num_ranks
        return self._begin(started, now_s)

    def _begin(self, operations: Sequence[Operation], now_s: float) -> list[Action]:
        busy = [group for group, worker in self._serving.items() if worker.running]
        return self._apply(self._reconfiguration.start(operations, now_s, busy), now_s)

    def _on_rank_confirmed(self, event: RankConfirmed, now_s: float) -> list[Action]:
        return self._apply(self._reconfiguration.rank_confirmed(event.rank, event.epoch, now_s), now_s)

    def _on_rank_failed(self, event: RankFailed, now_s: float) -> list[Action]:
        return self._apply(self._reconfiguration.rank_failed(event.rank, now_s), now_s)

    def _on_rank_recovered(self, event: RankRecovered, now_s: float) -> list[Action]:
        return self._apply(self._reconfiguration.rank_recovered(event.rank, now_s), now_s)

    def _apply(self, effects: Sequence[Effect], now_s: float) -> list[Action]:
        """Carries the state machine's effects out: statuses first, so that whatever is redirected finds them."""
        actions: list[Action] = []
        orphans: list[PrefillRequest] = []
        for effect in effects:
            match effect:
                case OperationStarted(operation):
                    self._handovers[operation] = _Handover([self._serving[group] for group in operation.sources])
                    for worker in self._handovers[operation].sources:
                        self._workers.set_status(worker, WorkerStatus.DRAINING)
                        orphans += self._empty_queue(worker)
                case Activate(epoch, groups):
                    actions.append(ActivateGroups(epoch, groups))
                    for group in [group for group in self._serving if any(group.overlaps(new) for new in groups)]:
                        worker = self._serving.pop(group)
                        self._workers.set_status(worker, WorkerStatus.PARKED)
                        actions += self._finish_handovers(worker)
                case GroupReady(group, epoch, operation):
                    opened = self._open_worker(group, epoch)
                    actions.append(opened)
                    if operation in self._handovers:
                        self._handovers[operation].opening.add(opened.worker_id)
                case OperationCommitted(operation, _, drain_s, switch_s):
                    self._handovers[operation].is_committed = True
                    self.transitions.append(Transition(now_s, operation, drain_s, switch_s))
                case OperationAborted(operation, restored):
                    handover = self._handovers.pop(operation)
                    for worker in handover.sources:
                        if worker.group in restored:
                            self._workers.set_status(worker, WorkerStatus.ACTIVE)
                        elif worker.status is WorkerStatus.PARKED:
                            actions.append(self._close_worker(worker))
                case GroupLost(group):
                    worker = self._serving.pop(group, None)
                    if worker is not None:
                        orphans += self._lose_worker(worker)
                        actions += [self._close_worker(worker), *self._finish_handovers(worker)]
                case OperationRefused():
                    pass  # the layout changed under the plan; the next window plans anew
        for request in orphans:
            actions += self._admit(request, now_s, is_redirected=True)
        if any(isinstance(effect, OperationAborted) for effect in effects):
            actions += self._place_waiting(now_s)
        if any(isinstance(effect, OperationCommitted | OperationAborted) for effect in effects):
            actions += self._move_towards_target(now_s)
        return actions

    def _finish_handovers(self, opened: Worker) -> list[Action]:
        """Closes the workers whose ranks all serve, with known caches, as other workers now (or have served, and are
        gone or parked again before their caches became known).

        Until then they stay in the index, so that what is known of their blocks does not die in between.
        """
        actions: list[Action] = []
        for operation, handover in list(self._handovers.items()):
            handover.opening.discard(opened.worker_id)
            if handover.is_committed and not handover.opening:
                del self._handovers[operation]
                actions += [self._close_worker(worker) for worker in handover.sources]
        return actions

    def _empty_queue(self, worker: Worker) -> list[PrefillRequest]:
        """Takes what has not started out of a worker's queue, to be placed elsewhere."""
        taken = worker.queue.remove_not_started()
        worker.queued_tokens -= sum(item.request.input_tokens - item.prefix_tokens for item in taken)
        for item in taken:
            del self._location[item.request.request_id]
        self._workers.changed(worker)
        return [item.request for item in taken]

    def _lose_worker(self, worker: Worker) -> list[PrefillRequest]:
        """All requests of a worker that failed; those it was running start again elsewhere."""
        lost = [item.queued.request for item in worker.running]
        lost += [item.request for item in worker.queue.items()]
        for request in lost:
            self._location.pop(request.request_id, None)
        worker.running = []
        return lost

    def _open_worker(self, group: RankGroup, epoch: int) -> OpenWorker:
        worker_id = self._next_worker_id
        self._next_worker_id += 1
        slot = self.index.add_worker(worker_id, group.degree, epoch)
        self._serving[group] = self._workers.open(worker_id, slot, group, epoch)
        return OpenWorker(worker_id, group, epoch)

    def _close_worker(self, worker: Worker) -> Action:
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
        if any(request.request_id in reserved for request, _ in self._waiting):
            raise InvariantError("a request waits for the pool and at a worker")
        parked = {worker.worker_id for handover in self._handovers.values() for worker in handover.sources}
        for worker in self._workers.all():
            is_serving = self._serving.get(worker.group) is worker
            if is_serving is (worker.status is WorkerStatus.PARKED) or not (is_serving or worker.worker_id in parked):
                raise InvariantError(f"worker {worker.worker_id} is {worker.status.value} and nobody will close it")
