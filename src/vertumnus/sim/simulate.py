"""One run: a trace, a profile, a pool and a policy in; the figures of `docs/metrics.md` out."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from vertumnus.core.awaited import WaitSettings
from vertumnus.core.composition import Composition, OperationKind, Topology, lay_out
from vertumnus.core.control_plane import ControlPlane, Transition
from vertumnus.core.controllers import ControllerSettings, make_controller
from vertumnus.core.drift import RefitSettings, scaled
from vertumnus.core.events import CopyReason
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.moves import MoveSettings
from vertumnus.core.placement import PlacementPolicy, VertumnusPolicy, names_preferred_degrees
from vertumnus.core.policies import PAPER_SETTINGS, PAPER_SYSTEM, make_policy
from vertumnus.core.profile import Profile
from vertumnus.core.pulls import PullSettings
from vertumnus.core.queueing import Discipline, ServiceOrder
from vertumnus.core.reconfiguration import ReconfigurationSettings
from vertumnus.core.settings import ControlPlaneSettings
from vertumnus.core.slo import Slo
from vertumnus.core.threshold_controller import ThresholdSettings
from vertumnus.errors import ConfigError
from vertumnus.sim.auto import auto_composition
from vertumnus.sim.metrics import LatencySummary, RequestRecords, summarise
from vertumnus.sim.overheads import LiveOverheads
from vertumnus.sim.pool import Failure, Placed, SimulatedPool
from vertumnus.sim.requests import prefill_requests
from vertumnus.sim.several_routers import RouterSettings, SeveralRouters
from vertumnus.workload.trace import Trace

MAX_DURATION_S = 366 * 86_400
"""Windows and scans go on while nothing arrives, so an absurd stamp would keep the simulator busy for ever."""


class Pulls(Enum):
    """Which blocks of other workers a request may have copied in before it is served."""

    NONE = "none"
    """None: what a split took away is a miss, as the paper counts it."""
    PENDING = "pending"
    """Those that a split took away."""
    ANY = "any"
    """Whatever any worker holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """Everything about a run but the trace, the profile and the policy."""

    num_gpus: int = 40
    node_gpus: int = 8
    composition: Composition | None = None
    """None: chosen from the trace (`auto`)."""
    is_fixed: bool = False
    """No controller: the composition stays."""
    has_replication: bool = True
    """Algorithms 1 and 2 for policies that know a preferred degree."""
    pulls: Pulls | None = None
    """None: `any` for our policies with replication, else `pending`."""
    has_moves: bool | None = None
    """Whether queued work moves to workers that run dry; None: for our policy (`vertumnus`) only."""
    has_waits: bool | None = None
    """Whether a request may wait for a prefix that another is computing; None: for our policy only."""
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)
    """Thresholds of Algorithm 2, where it runs."""
    spares_last_copies: bool = False
    """Whether blocks that other workers hold are evicted before older ones that nobody else does."""
    controller: str = "lookahead"
    controller_settings: ControllerSettings | None = None
    """None: the controller's own."""
    cost_factors: tuple[tuple[int, float], ...] = ()
    """Degrees whose coefficients the control plane believes to be other than the profile's, and how many times."""
    has_refit: bool = False
    """Whether the control plane's cost model follows what steps really take."""
    window_s: float = 20.0
    """Observation window of the controller."""
    discipline: Discipline = Discipline.SHORTEST
    step_tokens: int | None = None
    blocks_per_rank: int | None = None
    """KV blocks per GPU; None: the profile's capacity."""
    warmup_s: float = 0.0
    slo: Slo = field(default_factory=Slo)
    noise_ratio: float = 0.0
    report_delay_s: float = 0.0
    routers: RouterSettings = field(default_factory=RouterSettings)
    """Several routers may share the workers."""
    overheads: LiveOverheads | None = None
    """What a live pool's program adds to the time of its hardware; None: nothing."""
    waits_for_handoffs: bool = False
    """A split or merge waits until the KV of what its ranks have prefilled has left them, as a live one does."""
    lead_s: float = 0.0
    """How long the pool has stood idle when the first request arrives: windows and scans begin so much earlier."""
    failures: tuple[Failure, ...] = ()
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values, under the names of the fields."""
        document = {name: getattr(self, name) for name in self.__slots__}
        document |= {
            "composition": "auto" if self.composition is None else str(self.composition),
            "discipline": self.discipline.value,
            "pulls": self.pulls.value if self.pulls else "auto",
            "slo": str(self.slo),
            "overheads": None if self.overheads is None else self.overheads.to_json(),
            "cost_factors": {str(degree): factor for degree, factor in self.cost_factors},
            "failures": [asdict(failure) for failure in self.failures],
            "replication": asdict(self.replication),
            "routers": asdict(self.routers),
            "controller_settings": asdict(self.controller_settings) if self.controller_settings else "auto",
        }
        return document


def as_in_paper(settings: SimulationSettings) -> SimulationSettings:
    """The pool as the paper has it (`PAPER_SETTINGS`): what a run with the policy `vertumnus-paper` is set up by.

    Thresholds stay; the settings of another controller do not.
    """
    thresholds = settings.controller_settings
    return replace(
        settings,
        discipline=Discipline(PAPER_SETTINGS.queue),
        controller=PAPER_SETTINGS.controller,
        controller_settings=thresholds if isinstance(thresholds, ThresholdSettings) else None,
        pulls=Pulls(PAPER_SETTINGS.pulls),
        has_moves=PAPER_SETTINGS.moves,
        has_waits=PAPER_SETTINGS.waits,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """What a run gave. `wall_s` is the only figure that differs between two runs with the same input and seed."""

    policy: str
    composition: str
    """The composition at the start."""
    final_composition: str
    rate_per_s: float
    num_requests: int
    num_completed: int
    num_rejected: int
    latency: LatencySummary
    num_splits: int
    num_merges: int
    num_replications: int
    num_pulls: int
    """Copies made for one request: of pending blocks after a split, or on demand."""
    wall_s: float
    records: RequestRecords = field(repr=False)
    transitions: tuple[Transition, ...] = field(repr=False)
    """The splits and merges, in order."""

    def to_json(self) -> dict[str, Any]:
        """One entry of `results`: every figure under its name, without the records and transitions."""
        left_out = ("latency", "records", "transitions", "wall_s")
        document = {name: getattr(self, name) for name in self.__slots__ if name not in left_out}
        return document | {"rate_per_s": round(self.rate_per_s, 6)} | asdict(self.latency) | {"wall_s": self.wall_s}


def _pull_settings(pulls: Pulls, profile: Profile) -> PullSettings | None:
    if pulls is Pulls.NONE:
        return None
    return PullSettings.of_profile(profile, from_any_worker=pulls is Pulls.ANY)


def _is_on(switch: bool | None, policy: PlacementPolicy) -> bool:
    """A switch that is on for our policy unless it is set."""
    return isinstance(policy, VertumnusPolicy) if switch is None else switch


@contextmanager
def _without_cycle_collection() -> Iterator[None]:
    """Suspends the search for reference cycles: a run makes millions of objects and hardly any cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(
    trace: Trace,
    profile: Profile,
    policy: PlacementPolicy | str = "vertumnus",
    settings: SimulationSettings | None = None,
    on_progress: Callable[[int], None] | None = None,
    on_placed: Placed | None = None,
) -> SimulationResult:
    """Replays a trace through a simulated pool of `settings.num_gpus` GPUs; ids of requests are their rows.

    Raises ConfigError for settings that contradict each other or the profile.
    """
    settings = settings or SimulationSettings()
    if trace.duration_s > MAX_DURATION_S:
        raise ConfigError(
            f"trace lasts {trace.duration_s:g} s as played; accepted: at most {MAX_DURATION_S} s, a year "
            "(a higher rate, or no absurd stamps)"
        )
    if isinstance(policy, str):
        policy = make_policy(policy)
    if policy.name == PAPER_SYSTEM:
        settings = as_in_paper(settings)
    topology = Topology(settings.num_gpus, settings.node_gpus)
    blocks_per_rank = settings.blocks_per_rank or profile.kv_capacity_blocks(trace.block_tokens)
    composition = chosen_composition(trace, profile, settings)
    has_replication = settings.has_replication and names_preferred_degrees(policy)
    layout = lay_out(composition, topology)
    for degree in composition.degrees:
        if degree not in profile.degrees:
            known = ", ".join(map(str, profile.degrees))
            raise ConfigError(f"composition is {composition}; accepted: degrees of profile {profile.name} ({known})")
    believed = (
        scaled(profile.cost_model(), dict(settings.cost_factors)) if settings.cost_factors else profile.cost_model()
    )
    control_plane = ControlPlane(
        layout=layout,
        topology=topology,
        cost_model=believed,
        policy=policy,
        settings=ControlPlaneSettings(
            block_tokens=trace.block_tokens,
            blocks_per_rank=blocks_per_rank,
            discipline=settings.discipline,
            step_tokens=settings.step_tokens,
            max_sequence_tokens=profile.max_sequence_tokens,
            window_s=settings.window_s,
            refit=RefitSettings() if settings.has_refit else None,
            reconfiguration=ReconfigurationSettings(switch_timeout_s=max(10.0, 5 * profile.switch_s)),
            replication=settings.replication if has_replication else None,
            moves=MoveSettings() if _is_on(settings.has_moves, policy) else None,
            waits=WaitSettings() if _is_on(settings.has_waits, policy) else None,
            pull=_pull_settings(settings.pulls or (Pulls.ANY if has_replication else Pulls.PENDING), profile),
        ),
        controller=None
        if settings.is_fixed
        else make_controller(settings.controller, believed, profile.kappa, settings.controller_settings),
    )
    if settings.routers.num_routers > 1:
        if settings.step_tokens is not None:
            raise ConfigError(f"step_tokens is {settings.step_tokens}; accepted: none with several routers")
        control_plane.policy = SeveralRouters(
            policy,
            settings.routers,
            workers=control_plane.workers,
            order=ServiceOrder(settings.discipline, control_plane.settings.ageing),
            arrival_s=trace.arrival_s,
        )
    pool = SimulatedPool(
        control_plane=control_plane,
        topology=topology,
        profile=profile,
        blocks_per_rank=blocks_per_rank,
        block_tokens=trace.block_tokens,
        noise_ratio=settings.noise_ratio,
        report_delay_s=settings.report_delay_s,
        overheads=settings.overheads,
        waits_for_handoffs=settings.waits_for_handoffs,
        spares_last_copies=settings.spares_last_copies,
        start_s=-settings.lead_s,
        failures=settings.failures,
        seed=settings.seed,
        on_progress=on_progress,
        on_placed=on_placed,
    )
    started = time.perf_counter()
    with _without_cycle_collection():
        pool.run(prefill_requests(trace))
    wall_s = time.perf_counter() - started
    copies = control_plane.num_copies
    kinds = [transition.operation.kind for transition in control_plane.transitions]
    return SimulationResult(
        policy=policy.name,
        composition=str(composition),
        final_composition=str(control_plane.composition),
        rate_per_s=trace.mean_rate_per_s,
        num_requests=trace.num_requests,
        num_completed=len(pool.records),
        num_rejected=pool.num_rejected,
        latency=summarise(pool.records, _rejected_tokens(pool, trace, settings), settings.slo, settings.warmup_s),
        num_splits=kinds.count(OperationKind.SPLIT),
        num_merges=kinds.count(OperationKind.MERGE),
        num_replications=copies[CopyReason.INTER_DEGREE] + copies[CopyReason.INTRA_DEGREE],
        num_pulls=copies[CopyReason.RECONCILIATION] + copies[CopyReason.PULL],
        wall_s=wall_s,
        records=pool.records,
        transitions=tuple(control_plane.transitions),
    )


def chosen_composition(trace: Trace, profile: Profile, settings: SimulationSettings) -> Composition:
    """The composition that a run starts with: the one given, or what `auto` makes of the trace."""
    if settings.composition is not None:
        return settings.composition
    return auto_composition(
        trace,
        profile,
        Topology(settings.num_gpus, settings.node_gpus),
        slo=settings.slo,
        blocks_per_rank=settings.blocks_per_rank or profile.kv_capacity_blocks(trace.block_tokens),
    )


def _rejected_tokens(pool: SimulatedPool, trace: Trace, settings: SimulationSettings) -> int:
    """Input tokens of the rejected requests that arrived after the warm-up."""
    rows = [request_id for _, request_id, _ in pool.rejected if trace.arrival_s[request_id] >= settings.warmup_s]
    return int(trace.input_tokens[rows].sum()) if rows else 0
