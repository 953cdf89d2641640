"""Where the composition should go, and what can start now on the way there.

The controller proposes a target at the end of a window; `Steering` remembers it, shows the controller the pool, and
plans operations towards the target until it is reached, given up or replaced.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vertumnus.core.composition import Composition, Operation, OperationKind, RankGroup, plan_towards
from vertumnus.core.controller import Arrivals, Controller, PoolState, Proposal, Window, observing
from vertumnus.core.cost import CostModel
from vertumnus.core.lookahead_controller import LookaheadController
from vertumnus.core.observation import WindowTracker
from vertumnus.core.reconfiguration import Reconfiguration
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.slices import Slices, finish
from vertumnus.core.workers import Worker, WorkerTable

_REUSE_DECAY = 0.8
"""Per window, so that reuse of some five windows counts, recent ones weighing more."""


class Steering:
    """One controller, its windows and its target. It plans; the control plane starts what is planned."""

    def __init__(
        self,
        controller: Controller,
        *,
        windows: WindowTracker,
        reconfiguration: Reconfiguration,
        workers: WorkerTable,
        serving: Mapping[RankGroup, Worker],
        blocks_per_rank: int,
        max_switching_ratio: float,
        outlives_faults: bool,
    ) -> None:
        self.controller = controller
        self.windows = windows
        self.target: Composition | None = None
        self.is_paused = False
        self.last_window: Window | None = None
        """The last one that the controller is done with."""
        self.last_proposal: Proposal | None = None
        """Of the last window; None if the controller wanted nothing or was not asked."""
        self.last_fault: Exception | None = None
        """What the controller or the way to its target has raised last, where that is outlived."""
        self.most_blocks = 0
        """KV blocks of the longest request seen: a pool that can hold it stays able to."""
        self._reconfiguration = reconfiguration
        self._workers = workers
        self._serving = serving
        self._blocks_per_rank = blocks_per_rank
        self._max_switching_ratio = max_switching_ratio
        self._outlives_faults = outlives_faults
        self._asked: tuple[Window, Slices[Proposal | None]] | None = None
        self._asked_s = 0.0

    @property
    def due_s(self) -> float:
        """When a window ends, or a controller that takes its time is to go on."""
        return self.windows.end_s if self._asked is None else min(self._asked_s, self.windows.end_s)

    def advance(self, waiting: Callable[[], Sequence[PrefillRequest]], now_s: float) -> bool:
        """Ends a window that is over and asks the controller, or lets it think on; whether it is through.

        `waiting` are the requests without a worker.
        """
        if self.windows.end_s <= now_s:
            if self._asked is not None:  # it has taken a whole window: no more of that
                window, answer = self._asked
                self._take(window, finish(answer))
            self._end_window(waiting(), now_s)
        if self._asked is not None:
            window, answer = self._asked
            self._asked_s = now_s
            try:
                next(answer)
            except StopIteration as finished:
                self._take(window, finished.value)
        return self._asked is None

    def stop_thinking(self) -> None:
        """Gives up what the controller is thinking about: what it was asked of is no more. The target stays."""
        if self._asked is not None:
            window, answer = self._asked
            answer.close()
            self._take(window, None)

    def pause(self, is_paused: bool) -> None:
        """An operator's word: a paused controller is not asked, and what it is thinking about comes to nothing."""
        if is_paused:
            self.stop_thinking()
        self.is_paused = is_paused

    def _take(self, window: Window, proposal: Proposal | None) -> None:
        self._asked = None
        self.last_window, self.last_proposal = window, proposal
        if proposal is not None:
            self.target = proposal.target

    def _end_window(self, waiting: Sequence[PrefillRequest], now_s: float) -> None:
        workers = self._workers.all()
        items = [item for worker in workers for item in worker.queue.items()]
        not_started = [*(item.request for item in items if not item.started), *waiting]
        backlog_s = sum(worker.outstanding_s(now_s) for worker in workers)
        window = self.windows.close(backlog_s, [request.arrival_s for request in not_started])
        for worker in workers:
            worker.reused_blocks *= _REUSE_DECAY
        if not self._reconfiguration.planned_layout:  # every rank is lost: there is nothing to compose
            self.target = None
            self._take(window, None)
        elif self.is_paused:
            self._take(window, None)
        else:
            state = self._pool_state([*(item.request for item in items), *waiting], now_s)
            self._asked = window, self._observing(window, state)

    def _observing(self, window: Window, state: PoolState) -> Slices[Proposal | None]:
        try:
            return (yield from observing(self.controller, window, state))
        except Exception as fault:
            self._outlive(fault)
            return None

    def _outlive(self, fault: Exception) -> None:
        if not self._outlives_faults:
            raise fault
        self.last_fault = fault

    def use_costs(self, cost_model: CostModel) -> None:
        """For a controller that predicts times itself; what it is thinking about goes by the old ones."""
        self.stop_thinking()
        if isinstance(self.controller, LookaheadController):
            self.controller.use_costs(cost_model)

    def operations(self, now_s: float) -> list[Operation]:
        """What can start now on the way to the target, within the share of GPUs that may switch at once."""
        if self.target is None:
            return []
        try:
            return self._operations_to(self.target, now_s)
        except Exception as fault:
            self._outlive(fault)
            self.target = None
            return []

    def _operations_to(self, target: Composition, now_s: float) -> list[Operation]:
        reconfiguration = self._reconfiguration
        layout = reconfiguration.planned_layout
        if Composition.of_layout(layout) == target:
            self.target = None
            return []
        num_live = sum(group.degree for group in layout)
        room = self._max_switching_ratio * num_live - sum(group.degree for group in reconfiguration.held)
        planned = plan_towards(
            layout,
            target,
            reconfiguration.live_topology,
            cost=lambda operation: self._operation_cost(operation, now_s),
            max_operations=num_live,
            held=reconfiguration.held,
        )
        started: list[Operation] = []
        for operation in planned:
            num_ranks = len(operation.ranks)
            # One operation may always go, or a pool of one node could never change.
            if num_ranks <= room or not (started or reconfiguration.in_transition):
                started.append(operation)
                room -= num_ranks
        return started

    def _pool_state(self, queued: Sequence[PrefillRequest], now_s: float) -> PoolState:
        reconfiguration = self._reconfiguration
        layout = reconfiguration.planned_layout
        # What even the present workers could not hold was rejected, and asks nothing of other compositions.
        most_blocks = min(self.most_blocks, max(group.degree for group in layout) * self._blocks_per_rank)
        return PoolState(
            layout=layout,
            topology=reconfiguration.live_topology,
            degrees=reconfiguration.degrees,
            cost=lambda operation: self._operation_cost(operation, now_s),
            held=reconfiguration.held,
            in_transition=reconfiguration.in_transition,
            admits=lambda composition: composition.degrees[-1] * self._blocks_per_rank >= most_blocks,
            queued=Arrivals(
                arrival_s=np.full(len(queued), now_s),
                input_tokens=np.array([request.input_tokens for request in queued], dtype=np.float64),
                prefix_tokens=np.zeros(len(queued)),
            ),
        )

    def _operation_cost(self, operation: Operation, now_s: float) -> tuple[float, float]:
        """(predicted drain in seconds, expected reconciliation traffic in blocks) of an operation that starts now.

        A merge drains until the running step ends, and moves no KV. A split drains until the requests that have begun
        have ended, chunks to come included, and leaves about half of every prefix at the other child, weighted by how
        much of the parent's cache was reused recently.
        """
        drain_s = traffic_blocks = 0.0
        for group in operation.sources:
            worker = self._serving.get(group)
            if worker is not None and worker.running:
                worker_s = max(worker.running_end_s - now_s, 0.0)
                if operation.kind is OperationKind.SPLIT:
                    begun_s = sum(item.service_s for item in worker.queue.items() if item.started)
                    worker_s += worker.later_s + begun_s
                drain_s = max(drain_s, worker_s)
            if worker is not None and operation.kind is OperationKind.SPLIT:
                traffic_blocks += worker.reused_blocks / 2
        return drain_s, traffic_blocks
