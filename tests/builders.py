"""Builders for tests: requests, views, profiles, and pools, with defaults that are easy to compute with by hand."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vertumnus.core.composition import Composition, Topology, lay_out
from vertumnus.core.control_plane import ControlPlane
from vertumnus.core.controller import Controller
from vertumnus.core.cost import Coefficients, CostModel
from vertumnus.core.events import (
    Action,
    ActivateGroups,
    CloseWorker,
    Event,
    OpenWorker,
    RequestPlaced,
    StartStep,
    StepFinished,
    StepStarted,
)
from vertumnus.core.placement import PlacementPolicy, PlacementView
from vertumnus.core.policies import make_policy
from vertumnus.core.profile import Profile, load_profile
from vertumnus.core.queueing import Discipline, QueuedRequest
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.settings import ControlPlaneSettings
from vertumnus.core.workers import WorkerStatus
from vertumnus.sim.pool import Failure, SimulatedPool

DEGREES = (1, 2, 4, 8)
BLOCK_TOKENS = 10

# One second a step, 10 ms a token shared by the ranks, 1 ms a cached token; no quadratic term: easy sums.
COEFFICIENTS = Coefficients(d=1.0, a=0.0, b=0.001, c=0.01, alpha=0.0)
COST_MODEL = CostModel.uniform(COEFFICIENTS, DEGREES)


def chain(*labels: object, below: bytes | None = None) -> list[bytes]:
    """Chained block hashes, root first: equal labels after equal labels give equal hashes."""
    blocks = []
    parent = below or b""
    for label in labels:
        parent = hashlib.blake2b(parent + repr(label).encode(), digest_size=16).digest()
        blocks.append(parent)
    return blocks


def request(
    request_id: int = 0,
    *,
    arrival_s: float = 0.0,
    input_tokens: int = 100,
    prompt: object = None,
    num_shared: int | None = None,
    priority: int = 0,
) -> PrefillRequest:
    """A request whose full blocks follow from `prompt` (default: the id); different prompts share none. After the first
    `num_shared`, if given, its blocks are its own."""
    own = ("request", request_id)
    label = own if prompt is None else prompt
    num_blocks = input_tokens // BLOCK_TOKENS
    end = num_blocks if num_shared is None else num_shared
    blocks = chain(*[(label if position < end else own, position) for position in range(num_blocks)])
    return PrefillRequest(request_id, arrival_s, input_tokens, blocks, priority)


def queued(
    request_id: int, *, arrival_s: float = 0.0, service_s: float = 1.0, priority: int = 0, **changes: Any
) -> QueuedRequest:
    """A request as it waits in a worker's queue."""
    prompt = request(request_id, arrival_s=arrival_s, priority=priority)
    return QueuedRequest(request=prompt, prefix_tokens=0, service_s=service_s, **changes)


def view(
    *,
    input_tokens: int = 1000,
    degrees: Sequence[int] = (1, 1),
    reusable_tokens: Sequence[float] | None = None,
    outstanding_s: Sequence[float] | None = None,
    delay_s: Sequence[float] | None = None,
    num_outstanding: Sequence[int] | None = None,
    outstanding_tokens: Sequence[int] | None = None,
    resident_blocks: Sequence[int] | None = None,
    worker_ids: Sequence[int] | None = None,
    cost_model: CostModel = COST_MODEL,
) -> PlacementView:
    """A placement view: one entry per worker, idle and empty unless said otherwise, waits as under FIFO."""
    num_workers = len(degrees)

    def column(values: Sequence[float] | None, dtype: type = np.float64) -> Any:
        return np.array(values if values is not None else [0] * num_workers, dtype=dtype)

    reusable = column(reusable_tokens)
    suffix = input_tokens - reusable
    return PlacementView(
        now_s=0.0,
        request_id=0,
        input_tokens=input_tokens,
        matched_tokens=int(reusable.max()),
        worker_ids=column(worker_ids if worker_ids is not None else range(num_workers), np.int64),
        degrees=column(degrees),
        costs=cost_model.for_degrees(degrees),
        smallest_degree=min(degrees),
        smallest_costs=cost_model.for_degrees([min(degrees)]),
        reusable_tokens=reusable,
        suffix_tokens=suffix,
        service_s=cost_model.for_degrees(degrees).prefill_s(suffix, reusable),
        outstanding_s=column(outstanding_s),
        wait_s=column(outstanding_s),
        delay_s=column(delay_s),
        num_outstanding=column(num_outstanding, np.int64),
        outstanding_tokens=column(outstanding_tokens, np.int64),
        resident_blocks=column(resident_blocks, np.int64),
        block_tokens=BLOCK_TOKENS,
    )


def profile(**changes: Any) -> Profile:
    """A profile with round numbers: T_ext is 3 s whatever the length, a switch takes half a second."""
    figures: dict[str, Any] = {
        "degrees": DEGREES,
        "coefficients": dict.fromkeys(DEGREES, COEFFICIENTS),
        "kv_bytes_per_token": 1,
        "intra_node_bytes_per_s": 100.0,
        "inter_node_bytes_per_s": 10.0,
        "copy_latency_s": 0.5,
        "decode_bytes_per_s": 1e30,
        "decode_latency_s": 1.0,
        "first_token_s": 2.0,
        "switch_s": 0.5,
    }
    known = load_profile()
    figures["kappa"] = None
    figures["provenance"] = {key: known.provenance[key] for key in known.provenance if not key.startswith("kappa")}
    return replace(known, **(figures | changes))


T_EXT_S = 3.0


class ObservedControlPlane(ControlPlane):
    """The real control plane, which also fails the test when the stream of its events and actions breaks a law.

    - the clock never goes back;
    - a worker runs one step at a time, under the epoch that it was opened with, and only while that is the last epoch
      that its ranks were told (no step mixes two geometries);
    - chunks of a request follow each other without gap or overlap, and a request is in one step at a time;
    - only the first placement of a request is not a redirection, and it waits at a worker that takes new requests;
    - who waits for a prefix that another computes waits for one that is there, and starts once it has been computed.
    """

    is_thorough = True
    """Whether every event is followed by `check_invariants`."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.last_event_s = 0.0
        self.placements: dict[int, list[RequestPlaced]] = {}
        self.opened: dict[int, OpenWorker] = {}
        self.steps: list[StartStep] = []
        self.num_computed_tokens = 0
        """Of all steps that began, with the prefixes that were really there."""
        self._first_epoch = self.epoch
        self._rank_epoch: dict[int, int] = {}
        self._step_of_worker: dict[int, StartStep] = {}
        self._progress_tokens: dict[int, int] = {}
        self._waits_for: dict[int, tuple[int, int]] = {}
        """By request: the one that it waits for, and up to which token."""

    def start(self, now_s: float) -> list[Action]:
        actions = super().start(now_s)
        self._observe(actions)
        return actions

    def handle(self, event: Event, now_s: float) -> list[Action]:
        assert now_s >= self.last_event_s, "the clock went back"
        self.last_event_s = now_s
        if isinstance(event, StepFinished):
            for item in self._step_of_worker.pop(event.worker_id).items:
                self._waits_for = {
                    waiter: (awaited, num_tokens)
                    for waiter, (awaited, num_tokens) in self._waits_for.items()
                    if awaited != item.request.request_id or num_tokens > item.end_tokens
                }
        elif isinstance(event, StepStarted):
            items = self._step_of_worker[event.worker_id].items
            self.num_computed_tokens += sum(
                max(item.end_tokens - reused, 0) for item, reused in zip(items, event.reused_tokens, strict=True)
            )
        actions = super().handle(event, now_s)
        self._observe(actions)
        for worker in self.workers.all():
            if worker.status is not WorkerStatus.ACTIVE:
                assert all(item.started for item in worker.queue.items()), "queued where no new request is taken"
        if self.is_thorough:
            self.check_invariants()
        return actions

    def _observe(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case OpenWorker(worker_id, group, epoch):
                    assert worker_id not in self.opened, "a worker id was used twice"
                    assert all(self._rank_epoch.get(rank, self._first_epoch) == epoch for rank in group.ranks)
                    self.opened[worker_id] = action
                case ActivateGroups(epoch, groups):
                    for rank in [rank for group in groups for rank in group.ranks]:
                        assert epoch > self._rank_epoch.get(rank, self._first_epoch), "epochs only grow"
                        self._rank_epoch[rank] = epoch
                    self._assert_nobody_runs_on({rank for group in groups for rank in group.ranks})
                case CloseWorker(worker_id):
                    self._step_of_worker.pop(worker_id, None)
                case RequestPlaced(request_id, _, _, is_redirected):
                    before = self.placements.setdefault(request_id, [])
                    assert is_redirected == bool(before), "only the first placement is no redirection"
                    before.append(action)
                    self._progress_tokens.pop(request_id, None)
                    self._waits_for.pop(request_id, None)
                    placement = action.placement
                    if placement.awaited_request_id is not None and placement.awaited_tokens is not None:
                        assert placement.awaited_request_id in self.placements
                        num_tokens = int(placement.awaited_tokens[placement.row])
                        self._waits_for[request_id] = placement.awaited_request_id, num_tokens
                case StartStep(worker_id, epoch, items):
                    worker = self.opened[worker_id]
                    assert epoch == worker.epoch
                    assert all(self._rank_epoch.get(rank, self._first_epoch) == epoch for rank in worker.group.ranks)
                    assert worker_id not in self._step_of_worker, "two steps at once"
                    for item in items:
                        request_id = item.request.request_id
                        done_tokens = self._progress_tokens.get(request_id)
                        assert item.is_first == (done_tokens is None)
                        assert item.is_first or item.start_tokens == done_tokens, "chunks must follow each other"
                        assert item.start_tokens < item.end_tokens <= item.request.input_tokens
                        assert self.placements[request_id][-1].worker_id == worker_id
                        assert request_id not in self._waits_for, "started before what it waits for is there"
                        self._progress_tokens[request_id] = item.end_tokens
                    self._step_of_worker[worker_id] = action
                    self.steps.append(action)
                case _:
                    pass

    def _assert_nobody_runs_on(self, ranks: set[int]) -> None:
        for worker_id in self._step_of_worker:
            assert ranks.isdisjoint(self.opened[worker_id].group.ranks), "ranks were switched during a step"


def control_plane(
    composition: str = "2x1",
    *,
    num_gpus: int | None = None,
    node_gpus: int = 8,
    policy: PlacementPolicy | str = "vertumnus",
    controller: Controller | None = None,
    cost_model: CostModel = COST_MODEL,
    blocks_per_rank: int = 100,
    epoch: int = 0,
    **settings: Any,
) -> ObservedControlPlane:
    """A control plane that checks itself. FIFO unless said otherwise."""
    parsed = Composition.parse(composition)
    topology = Topology(num_gpus or parsed.num_gpus, node_gpus)
    return ObservedControlPlane(
        layout=lay_out(parsed, topology),
        topology=topology,
        cost_model=cost_model,
        policy=make_policy(policy) if isinstance(policy, str) else policy,
        controller=controller,
        epoch=epoch,
        settings=ControlPlaneSettings(
            block_tokens=BLOCK_TOKENS,
            blocks_per_rank=blocks_per_rank,
            **({"discipline": Discipline.FIFO} | settings),
        ),
    )


def simulated_pool(
    composition: str = "2x1",
    *,
    node_gpus: int = 8,
    profile_changes: dict[str, Any] | None = None,
    failures: Sequence[Failure] = (),
    blocks_per_rank: int = 100,
    noise_ratio: float = 0.0,
    report_delay_s: float = 0.0,
    seed: int = 0,
    **control: Any,
) -> SimulatedPool:
    """A simulated pool with an `ObservedControlPlane`; keyword arguments of both."""
    hardware = profile(**(profile_changes or {}))
    plane = control_plane(
        composition,
        node_gpus=node_gpus,
        cost_model=hardware.cost_model(),
        blocks_per_rank=blocks_per_rank,
        **control,
    )
    return SimulatedPool(
        control_plane=plane,
        topology=Topology(Composition.parse(composition).num_gpus, node_gpus),
        profile=hardware,
        blocks_per_rank=blocks_per_rank,
        block_tokens=BLOCK_TOKENS,
        noise_ratio=noise_ratio,
        report_delay_s=report_delay_s,
        failures=failures,
        seed=seed,
    )


def ttft_by_request(pool: SimulatedPool) -> dict[int, float]:
    """TTFT of every completed request, in seconds."""
    return dict(zip(pool.records.request_id, pool.records.ttft_s, strict=True))


def play(pool: SimulatedPool, requests: Iterable[PrefillRequest]) -> SimulatedPool:
    """Runs the requests in order of arrival, then lets what is under way end."""
    pool.run(iter(sorted(requests, key=lambda each: (each.arrival_s, each.request_id))))
    pool.settle()
    pool.check_invariants()
    return pool
