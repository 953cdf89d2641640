"""The live pool: real ranks driven by the same control plane that the simulator drives.

It decides nothing. Requests and what the ranks report go into the `ControlPlane`; its actions are carried out on the
ranks, and the tokens that come back go to whoever asked.

    submit -> place, queue -> step(s) -> KV to a decode rank -> tokens      (docs/live-pool.md)
"""

import asyncio
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from vertumnus.core.composition import Composition, RankGroup, lay_out
from vertumnus.core.control_plane import ControlPlane
from vertumnus.core.controller import Window
from vertumnus.core.events import (
    Action,
    ActivateGroups,
    CloseWorker,
    CompositionRequested,
    ControllerPaused,
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
    RequestCancelled,
    RequestPlaced,
    RequestRejected,
    SendSnapshot,
    StartStep,
    StepFinished,
    StepStarted,
    TimerFired,
)
from vertumnus.core.hashing import BlockHasher
from vertumnus.core.index.reports import CacheReport
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.worker_caches import BegunStep, WorkerCaches
from vertumnus.engine.pool import GroupsFormed, PoolGone, RankBack, RankGone
from vertumnus.engine.step import StepOutput, StepRequest
from vertumnus.errors import ConfigError
from vertumnus.serve.decode import DecodeRanks
from vertumnus.serve.errors import (
    DeadlineExceeded,
    Overloaded,
    PlanningFailed,
    PoolFailed,
    RequestTooLarge,
    ServeError,
    ShuttingDown,
)
from vertumnus.serve.generation import FinishReason, Generation, GenerationRequest, Token
from vertumnus.serve.live_request import LiveRequest, Stage, token_of
from vertumnus.serve.live_settings import LiveSettings
from vertumnus.serve.rank_driver import RankDriver
from vertumnus.serve.ranks import Ranks
from vertumnus.serve.telemetry import Telemetry

_MAX_HASHERS = 1024
_MAX_HASHED_BLOCKS = 2048
"""Of prompts that are hashed at once, in a millisecond at most; longer ones chunk by chunk."""
_MIN_RETRY_S = 1.0


class LivePool:
    """All methods belong to the event loop that it was made in."""

    def __init__(
        self,
        *,
        ranks: Ranks,
        control_plane: ControlPlane,
        settings: LiveSettings,
        hash_key: bytes,
        telemetry: Telemetry | None = None,
        caches: WorkerCaches | None = None,
    ) -> None:
        """`control_plane` has a layout over the prefill ranks and an epoch above every one that the ranks have had.
        `caches`: what the ranks hold already."""
        self.control_plane = control_plane
        self.settings = settings
        self.telemetry = telemetry or Telemetry()
        if caches is None:
            caches = WorkerCaches(settings.blocks_per_rank, settings.block_tokens, is_real=True)
        self.caches = caches
        self._loop = asyncio.get_running_loop()
        self.ranks = ranks
        self._driver = RankDriver(ranks, settings, self.telemetry)
        self._decode = DecodeRanks(ranks, self._driver, settings, self.telemetry, self)
        self._hash_key = hash_key
        self._hashers: OrderedDict[bytes, BlockHasher] = OrderedDict()
        self._attempts: dict[int, LiveRequest] = {}
        """Requests that the control plane knows, by the id that it knows them by."""
        self._num_open = 0
        self._num_unanswered = 0
        self._next_id = 0
        self._steps: dict[int, StartStep] = {}
        """The step of every worker that has one, begun or waiting for room."""
        self._stalled: dict[int, StartStep] = {}
        self._copies: dict[int, tuple[asyncio.Task[None], frozenset[int]]] = {}
        """Copies between workers under way, with the ranks that they read and write."""
        self._num_switches = 0
        self._gone: set[int] = set()
        self._undone: deque[Action] = deque()
        self._is_performing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        """When it goes off."""
        self._window: Window | None = None
        """The one that was told of last."""
        self._controller_fault: Exception | None = None
        """The same."""
        self._num_transitions = 0
        self._is_draining = False
        self._failure: PoolFailed | None = None
        self.failed = asyncio.Event()
        """Set with `failure`."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._execute: dict[type, Callable[[Any], None]] = {
            StartStep: self._start_step,
            RequestPlaced: self._placed,
            RequestRejected: self._rejected,
            DropRequest: self._drop,
            CopyBlocks: self._start_copy,
            ReclaimBlocks: self._reclaim,
            ActivateGroups: self._activate,
            OpenWorker: self._open_worker,
            CloseWorker: self._close_worker,
            SendSnapshot: self._send_snapshot,
        }

    async def start(self) -> None:
        """Takes up the initial groups on the ranks; requests can be submitted then. Raises PoolError or RankError."""
        epoch = self.control_plane.epoch
        await self._driver.activate(epoch, self.control_plane.planned_layout)
        await self._decode.start(epoch)
        self.spawn(self._watch_ranks())
        # Only now, so that windows and scans begin when requests can come.
        self._perform(self.control_plane.start(self._loop.time()))
        self._arm_timer()

    async def close(self) -> None:
        """Ends everything; requests that are open fail."""
        self._fail(PoolFailed("the server is shutting down"), is_told=False)
        self._decode.close()
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.ranks.close()

    async def drain(self, timeout_s: float) -> bool:
        """Takes nothing new and waits for what is open; whether all of it has ended in time."""
        self._set_draining(True)
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            return False
        return True

    def resume(self) -> None:
        """Takes requests again after `drain`."""
        self._set_draining(False)

    def _set_draining(self, is_draining: bool) -> None:
        if self._is_draining != is_draining:
            self._is_draining = is_draining
            self.telemetry.pool_drained(self._loop.time(), is_draining)

    @property
    def is_draining(self) -> bool:
        """Whether an operator has it take nothing new."""
        return self._is_draining

    @property
    def is_ready(self) -> bool:
        """Whether a request could be placed now."""
        is_serving = bool(self.control_plane.workers.active)
        return is_serving and not self._is_draining and self._failure is None

    @property
    def failure(self) -> PoolFailed | None:
        """Why the pool cannot go on."""
        return self._failure

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self._num_open

    @property
    def num_unanswered(self) -> int:
        """Requests without a first token."""
        return self._num_unanswered

    @property
    def num_attempts(self) -> int:
        """Requests that the control plane knows, or will be told of in a moment."""
        return len(self._attempts)

    @property
    def num_steps(self) -> int:
        """Prefill steps under way, or waiting for room."""
        return len(self._steps)

    @property
    def num_copies(self) -> int:
        """Copies between workers under way."""
        return len(self._copies)

    @property
    def num_switches(self) -> int:
        """Groups that ranks are being told to take up."""
        return self._num_switches

    @property
    def decode(self) -> DecodeRanks:
        return self._decode

    # Requests

    def submit(self, asked: GenerationRequest) -> Generation:
        """Places a request at once. Raises ServeError if it cannot be taken; nothing is reserved then."""
        now_s = self._loop.time()
        try:
            self._check(asked, now_s)
        except ServeError as error:
            self.telemetry.request_refused(now_s, type(error).__name__, len(asked.token_ids))
            raise
        tokens = array("I", asked.token_ids)
        generation = Generation(asked, lambda: self._cancel(request))
        request = LiveRequest(
            generation=generation,
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            attempt=self._new_attempt(asked, tokens, now_s),
            arrival_s=now_s,
        )
        self._num_open += 1
        self._idle.clear()
        self._num_unanswered += 1
        self._attempts[request.request_id] = request
        self.telemetry.request_accepted(now_s, request)
        self._tell(RequestArrived(request.attempt))
        if generation.has_ended:
            generation.raise_if_failed()
        elif asked.deadline_s is not None:
            request.deadline = self._loop.call_later(asked.deadline_s, self._expire, request)
        return generation

    def _check(self, asked: GenerationRequest, now_s: float) -> None:
        settings = self.settings
        num_tokens = len(asked.token_ids)
        if self._failure is not None:
            raise self._failure
        if self._is_draining:
            raise ShuttingDown("the server takes no new requests")
        if num_tokens == 0 or asked.max_tokens < 1:
            raise ConfigError(
                f"{num_tokens} prompt tokens and {asked.max_tokens} to generate; accepted: 1 or more each"
            )
        if num_tokens + asked.max_tokens > settings.max_tokens:
            raise RequestTooLarge(
                f"{num_tokens} prompt tokens and {asked.max_tokens} to generate are more than the "
                f"{settings.max_tokens} that fit"
            )
        if self._num_unanswered >= settings.max_queued_requests:
            raise Overloaded(
                f"{self._num_unanswered} requests are waiting already", max(self._least_wait_s(now_s), _MIN_RETRY_S)
            )
        if settings.max_wait_s is not None and (wait_s := self._least_wait_s(now_s)) > settings.max_wait_s:
            raise Overloaded(f"the wait would be {wait_s:.1f} s", max(wait_s - settings.max_wait_s, _MIN_RETRY_S))

    def _least_wait_s(self, now_s: float) -> float:
        return min((worker.outstanding_s(now_s) for worker in self.control_plane.workers.active), default=0.0)

    def _new_attempt(self, asked: GenerationRequest, tokens: "array[int]", arrival_s: float) -> PrefillRequest:
        # A long chain reads its tokens when it comes to them, and they grow: a buffer of its own.
        chain = self._hasher(asked.tenant).chain(array("I", tokens))
        blocks = chain.finish() if len(chain) <= _MAX_HASHED_BLOCKS else chain
        self._next_id += 1
        return PrefillRequest(self._next_id, arrival_s, len(tokens), blocks, asked.priority)

    def _hasher(self, tenant: bytes) -> BlockHasher:
        hasher = self._hashers.get(tenant)
        if hasher is None:
            hasher = self._hashers[tenant] = BlockHasher(self._hash_key, self.settings.block_tokens, tenant)
            if len(self._hashers) > _MAX_HASHERS:
                self._hashers.popitem(last=False)
        else:
            self._hashers.move_to_end(tenant)
        return hasher

    def _cancel(self, request: LiveRequest, outcome: str = "cancelled") -> None:
        if request.is_over:
            return
        stage = request.stage
        self._close_request(request, outcome)
        if stage is Stage.PREFILL:
            self._tell(RequestCancelled(request.request_id))
            if not self._is_in_step(request.request_id):
                self._attempts.pop(request.request_id, None)
        else:
            self._decode.cancel(request)

    def _is_in_step(self, request_id: int) -> bool:
        return any(item.request.request_id == request_id for step in self._steps.values() for item in step.items)

    def _expire(self, request: LiveRequest) -> None:
        request.generation.end(DeadlineExceeded("the request's deadline has passed"))
        self._cancel(request, "deadline")

    def _close_request(self, request: LiveRequest, outcome: str) -> None:
        """The bookkeeping of a request's end, whatever it was."""
        request.is_over = True
        self._num_open -= 1
        if request.first_token_s is None:
            self._num_unanswered -= 1
        if request.deadline is not None:
            request.deadline.cancel()
        request.ended_s = self._loop.time()
        self.telemetry.request_ended(request.ended_s, request, outcome)
        if not self._num_open:
            self._idle.set()

    # What the decode ranks tell (DecodeOwner)

    def release(self, request: LiveRequest) -> None:
        self.caches.release(request.worker_id, request.request_id)
        self._retry_stalled()

    def restart(self, request: LiveRequest, reason: str) -> None:
        now_s = self._loop.time()
        if request.num_attempts >= self.settings.max_attempts:
            self.end(request, PoolFailed(f"the request was lost {request.num_attempts} times, the last time: {reason}"))
            return
        self.telemetry.request_restarted(now_s, request, reason)
        request.num_attempts += 1
        request.stage = Stage.PREFILL
        request.held_token = None
        request.attempt = self._new_attempt(request.generation.request, request.tokens, request.arrival_s)
        self._attempts[request.request_id] = request
        # Not at once: whoever calls is in the middle of something.
        self._loop.call_soon(self._resubmit, request)

    def _resubmit(self, request: LiveRequest) -> None:
        if request.is_over or self._failure is not None:
            self._attempts.pop(request.request_id, None)
        else:
            self._tell(RequestArrived(request.attempt))

    def first_token(self, request: LiveRequest) -> FinishReason | None:
        token, request.held_token = request.held_token, None
        assert token is not None
        now_s = self._loop.time()
        if request.first_token_s is None:
            request.first_token_s = now_s
            self._num_unanswered -= 1
            self.telemetry.first_token(now_s, request)
        reason = request.take(token)
        if reason is not None:
            self.end(request, reason)
        return reason

    def end(self, request: LiveRequest, outcome: FinishReason | Exception) -> None:
        if not request.is_over:
            told = "refused" if isinstance(outcome, RequestTooLarge) else "failed"
            self._close_request(request, outcome.value if isinstance(outcome, FinishReason) else told)
            request.generation.end(outcome)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException, *, is_told: bool = True) -> None:
        """Nothing can be served any more: everybody who waits gets to know, and the telemetry unless it is no news."""
        if self._failure is None:
            self._failure = error if isinstance(error, PoolFailed) else PoolFailed(f"the pool has failed: {error}")
            self._failure.__cause__ = error if error is not self._failure else None
            self.failed.set()
            if is_told:
                self.telemetry.pool_failed(self._loop.time(), self._failure)
        for request in list(self._attempts.values()):
            self.end(request, self._failure)
        self._attempts.clear()
        for request in self._decode.requests():
            self.end(request, self._failure)

    # Talking to the control plane

    def _tell(self, event: Event) -> None:
        try:
            actions = self.control_plane.handle(event, self._loop.time())
            self._note_changes()
            self._perform(actions)
            self._arm_timer()
        except Exception as error:  # who comes from the loop itself would otherwise leave everybody waiting
            self._fail(error)
            raise

    def _note_changes(self) -> None:
        """Tells of what the control plane says in no action, before what follows from it."""
        window = self.control_plane.last_window
        if window is not None and window is not self._window:
            self._window = window
            self.telemetry.window_ended(self._loop.time(), window, self.control_plane.last_proposal)
        fault = self.control_plane.last_controller_fault
        if fault is not None and fault is not self._controller_fault:
            self._controller_fault = fault
            self.telemetry.controller_failed(self._loop.time(), fault)
        transitions = self.control_plane.transitions
        while self._num_transitions < len(transitions):
            self._num_transitions += 1
            self.telemetry.transition_committed(self._loop.time(), transitions[self._num_transitions - 1])

    def _perform(self, actions: Iterable[Action]) -> None:
        """In the order in which they were decided: what follows from an action comes after those decided before it."""
        self._undone.extend(actions)
        if self._is_performing:
            return
        self._is_performing = True
        try:
            while self._undone:
                action = self._undone.popleft()
                self._execute[type(action)](action)
        finally:
            self._is_performing = False
            self._undone.clear()

    def _report(self, reports: Iterable[CacheReport]) -> None:
        for report in reports:
            self._tell(report)

    def _arm_timer(self) -> None:
        due_s = self.control_plane.next_timer_s()
        if due_s is None or self._failure is not None:
            return
        if self._timer is None or due_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_s = self._loop.call_at(due_s, self._fire_timer), due_s

    def _fire_timer(self) -> None:
        self._timer = None
        self._tell(TimerFired())
        # Ranks that did not confirm an epoch in time count as lost: they come back as new ones.
        for rank in sorted(self.control_plane.lost_ranks - self._gone):
            self.ranks.kill(rank)

    # Requests, as the control plane sees them

    def _placed(self, action: RequestPlaced) -> None:
        request = self._attempts[action.request_id]
        request.worker_id = action.worker_id
        request.degree = self.caches.group(action.worker_id).degree
        if not action.is_redirected and request.num_attempts == 1:
            placement = action.placement
            request.reachable_tokens = placement.matched_tokens
            request.predicted_s = float(placement.service_s[placement.row])
        self.telemetry.request_placed(self._loop.time(), request, action)

    def _rejected(self, action: RequestRejected) -> None:
        request = self._attempts.pop(action.request_id)
        self.telemetry.request_refused(self._loop.time(), RequestTooLarge.__name__, request.num_tokens)
        self.end(request, RequestTooLarge(action.reason))

    def _drop(self, action: DropRequest) -> None:
        self.caches.drop(action.worker_id, action.request_id)
        request = self._attempts.get(action.request_id)
        if request is not None and request.is_over:
            del self._attempts[action.request_id]
        self._retry_stalled()

    # Steps

    def _start_step(self, action: StartStep) -> None:
        worker_id = action.worker_id
        self._steps[worker_id] = action
        begun = self.caches.begin_step(action)
        self._report(begun.reports)
        if not begun.has_room:
            # Handoffs and copies hold too much of the store; they end by themselves.
            self.caches.withdraw_step(worker_id)
            self._stalled[worker_id] = action
            return
        self._stalled.pop(worker_id, None)
        self.spawn(self._run_step(action, begun, self.caches.group(worker_id), self._step_requests(action, begun)))
        self._tell(StepStarted(worker_id, begun.reused_tokens))

    def _retry_stalled(self) -> None:
        for worker_id in list(self._stalled):
            action = self._stalled.get(worker_id)
            if action is not None:  # what was started before it may have closed its worker
                self._start_step(action)

    def _step_requests(self, action: StartStep, begun: BegunStep) -> list[StepRequest]:
        """What is left to compute of each of the step's requests."""
        worker_id, now_s = action.worker_id, self._loop.time()
        requests = []
        for each in begun.items:
            item = each.item
            request = self._attempts[item.request.request_id]
            if item.is_first:
                request.note_start(now_s, each.prefix_tokens)
            if each.suffix_tokens:
                blocks = self.caches.addresses(worker_id, request.request_id)
                is_last = item.end_tokens == item.request.input_tokens
                requests.append(
                    request.prefill_share(
                        each.prefix_tokens, item.end_tokens, blocks, self.settings.block_tokens, is_last=is_last
                    )
                )
        return requests

    async def _run_step(
        self, action: StartStep, begun: BegunStep, group: RankGroup, requests: list[StepRequest]
    ) -> None:
        worker_id, started_s = action.worker_id, self._loop.time()
        outputs: list[StepOutput] = []
        if requests:
            found = await self._driver.step(group, action.epoch, requests, lambda: self._steps.get(worker_id) is action)
            if found is None:  # ranks are lost: what ran here is placed elsewhere
                return
            outputs = found
        tokens = {output.request_id: token_of(output) for each in outputs for output in each.outputs}
        finished = self.caches.finish_step(worker_id, holds=True)
        if finished is None:
            return
        del self._steps[worker_id]
        if requests:
            self._note_step(begun, worker_id, group.degree, started_s, outputs)
        self._report(finished.reports)
        for prefilled in finished.completed:
            self._prefilled(self._attempts.pop(prefilled.request_id), tokens[prefilled.request_id])
        self._tell(StepFinished(worker_id))
        self._retry_stalled()

    def _note_step(
        self, begun: BegunStep, worker_id: int, degree: int, started_s: float, outputs: list[StepOutput]
    ) -> None:
        self.telemetry.step_ended(
            self._loop.time(),
            worker_id=worker_id,
            degree=degree,
            started_s=started_s,
            predicted_s=self.control_plane.cost_model.step_s(begun.work, degree),
            num_tokens=sum(each.suffix_tokens for each in begun.items),
            num_prefix_tokens=sum(each.prefix_tokens for each in begun.items),
            outputs=outputs,
        )

    def _prefilled(self, request: LiveRequest, token: Token) -> None:
        if request.is_over:
            self.release(request)
            return
        now_s = self._loop.time()
        request.prefilled_s = now_s
        request.held_token = token
        self.telemetry.prefill_ended(now_s, request)
        if request.would_end_with(token):
            self.release(request)
            self.first_token(request)
        else:
            self._decode.offer(request, self.caches.addresses(request.worker_id, request.request_id))

    # Copies between workers

    def _start_copy(self, action: CopyBlocks) -> None:
        self.telemetry.copy_started(self._loop.time(), action)
        begun = self.caches.begin_copy(action)
        if begun is None:
            self._loop.call_soon(self._tell, CopyEnded(action.copy_id, False))
            return
        source, destination = self.caches.copy_addresses(action.copy_id)
        self._report(begun.reports)
        task = self.spawn(self._copy(action, source, destination))
        self._copies[action.copy_id] = task, frozenset(rank for rank, _ in [*source, *destination])

    async def _copy(
        self, action: CopyBlocks, source: list[tuple[int, int]], destination: list[tuple[int, int]]
    ) -> None:
        started_s = self._loop.time()
        try:
            num_copied = await self._driver.copy(source, destination)
        finally:
            del self._copies[action.copy_id]
        ended = self.caches.end_copy(action.copy_id, num_copied)
        if ended is None:  # an end was lost; the control plane was told
            self._retry_stalled()
            return
        self._report(ended.reports)
        now_s = self._loop.time()
        self.telemetry.copy_ended(now_s, action, started_s=started_s, num_installed=ended.num_installed)
        self._tell(CopyEnded(action.copy_id, ended.is_complete))
        self._retry_stalled()

    def _reclaim(self, action: ReclaimBlocks) -> None:
        self.telemetry.reclaim_started(self._loop.time(), action)
        for report in self.caches.reclaim(action):
            self.telemetry.blocks_reclaimed(self._loop.time(), len(report.blocks))
            self._tell(report)

    # Composition

    def set_composition(self, composition: Composition) -> None:
        """Splits and merges towards a composition and pauses the controller. Raises ConfigError if it cannot be, and
        PlanningFailed if the way there is not found over a fault of this program."""
        topology = self.control_plane.topology
        lay_out(composition, topology)
        unsupported = set(composition.degrees) - set(self.control_plane.cost_model.degrees)
        if unsupported:
            known = ", ".join(map(str, self.control_plane.cost_model.degrees))
            raise ConfigError(f"composition is {composition}; accepted: degrees of the profile ({known})")
        if composition.num_gpus != topology.num_gpus:
            raise ConfigError(
                f"composition is {composition}, of {composition.num_gpus} ranks; accepted: all {topology.num_gpus}"
            )
        self.telemetry.composition_requested(self._loop.time(), composition)
        before = self._controller_fault
        self._tell(CompositionRequested(composition))
        if self._controller_fault is not before:
            raise PlanningFailed(
                f"composition is {composition}, to which no way was planned: {self._controller_fault!r}"
            )

    def pause_controller(self, is_paused: bool) -> None:
        """While it is paused the composition stays what it is, or what `set_composition` makes it."""
        self.telemetry.controller_paused(self._loop.time(), is_paused)
        self._tell(ControllerPaused(is_paused))

    def _activate(self, action: ActivateGroups) -> None:
        self.telemetry.switch_started(self._loop.time(), action)
        self.spawn(self._switch(action))

    async def _switch(self, action: ActivateGroups) -> None:
        self._num_switches += 1
        try:
            await self._take_up(action)
        finally:
            self._num_switches -= 1

    async def _take_up(self, action: ActivateGroups) -> None:
        """Once nothing reads or writes the blocks of the ranks, they take up the new groups, each group on its own."""
        started_s = self._loop.time()
        ranks = sorted(rank for group in action.groups for rank in group.ranks)
        self.caches.park(ranks)
        while True:
            # A handoff that fails for want of a decode rank waits again.
            self._decode.give_up_waiting(self.caches.workers_on(ranks), "its ranks changed their workers")
            busy = [task for task, touched in self._copies.values() if not touched.isdisjoint(ranks)]
            busy += self._decode.handoffs_from(ranks)
            if not busy:
                break
            await asyncio.wait(busy)
        has_taken = await asyncio.gather(*(self._take_up_group(action.epoch, group) for group in action.groups))
        self.telemetry.switch_ended(
            self._loop.time(), epoch=action.epoch, num_ranks=len(ranks), started_s=started_s, is_ok=all(has_taken)
        )

    async def _take_up_group(self, epoch: int, group: RankGroup) -> bool:
        is_ok = await self._driver.try_activate(epoch, [group])
        if is_ok:
            for _ in self.caches.prepare(group.ranks):
                await asyncio.sleep(0)
            for rank in group.ranks:
                self._tell(RankConfirmed(rank, epoch))
        return is_ok

    def _open_worker(self, action: OpenWorker) -> None:
        snapshot = self.caches.open(action.worker_id, action.group, action.epoch)
        self.telemetry.worker_opened(self._loop.time(), action)
        self._tell(snapshot)

    def _send_snapshot(self, action: SendSnapshot) -> None:
        snapshot = self.caches.snapshot(action.worker_id)
        if snapshot is not None:
            self._tell(snapshot)

    def _close_worker(self, action: CloseWorker) -> None:
        for copy_id in self.caches.copies_of(action.worker_id):
            self._loop.call_soon(self._tell, CopyEnded(copy_id, False))
        step = self._steps.pop(action.worker_id, None)
        has_begun = self._stalled.pop(action.worker_id, None) is None
        for item in step.items if step is not None else ():
            request = self._attempts.get(item.request.request_id)
            if request is not None and request.is_over:  # the control plane forgets it with its worker
                del self._attempts[item.request.request_id]
            elif request is not None and has_begun:
                self._lost_step(request)
        self._decode.source_gone(self.caches.close(action.worker_id))
        self.telemetry.worker_closed(self._loop.time(), action.worker_id)

    def _lost_step(self, request: LiveRequest) -> None:
        """The control plane places it elsewhere; but what kills one worker after another must end some time."""
        self.telemetry.request_restarted(self._loop.time(), request, "its worker was lost in a step")
        request.num_lost_steps += 1
        if request.num_lost_steps >= self.settings.max_attempts:
            # Not at once: its new place has been decided already, and is heard of next.
            self._loop.call_soon(self._give_up, request)

    def _give_up(self, request: LiveRequest) -> None:
        lost = PoolFailed(f"the request was lost {request.num_lost_steps} times, each time with its worker")
        request.generation.end(lost)
        self._cancel(request, "failed")

    # Ranks

    async def _watch_ranks(self) -> None:
        while True:
            match await self.ranks.events.get():
                case RankGone(rank, reason):
                    self._rank_gone(rank, reason)
                case RankBack(rank, _):
                    self._rank_back(rank)
                case GroupsFormed():
                    self._driver.groups_formed()
                case PoolGone(reason):
                    self._fail(PoolFailed(reason))

    def _rank_gone(self, rank: int, reason: str) -> None:
        self.telemetry.rank_gone(self._loop.time(), rank, reason)
        if rank >= self.settings.num_prefill_ranks:
            self._decode.rank_gone(rank)
            return
        self._gone.add(rank)
        copies, held = self.caches.fail_rank(rank)
        for copy_id in copies:
            self._loop.call_soon(self._tell, CopyEnded(copy_id, False))
        self._decode.source_gone(held)
        self._tell(RankFailed(rank))
        self._retry_stalled()

    def _rank_back(self, rank: int) -> None:
        self.telemetry.rank_back(self._loop.time(), rank)
        self._driver.groups_formed()
        if rank >= self.settings.num_prefill_ranks:
            self._decode.rank_back(rank)
            return
        self._gone.discard(rank)
        self.caches.recover_rank(rank)
        self._tell(RankRecovered(rank))

    def check_invariants(self) -> None:
        """Raises InvariantError where the parts contradict each other. Slow: for tests."""
        self.control_plane.check_invariants()
        self.caches.check_invariants()
        self._decode.check_invariants()
