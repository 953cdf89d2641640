"""One run: a trace, a profile, a pool and a policy in; the figures of `docs/metrics.md` out."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from vertumnus.core.composition import Composition, OperationKind, Topology, lay_out
from vertumnus.core.control_plane import ControlPlane, ControlPlaneSettings
from vertumnus.core.placement import PlacementPolicy
from vertumnus.core.policies import make_policy
from vertumnus.core.profile import Profile
from vertumnus.core.queueing import Discipline
from vertumnus.core.requests import PrefillRequest
from vertumnus.errors import ConfigError
from vertumnus.sim.metrics import LatencySummary, RequestRecords, Slo, summarise
from vertumnus.sim.pool import Failure, SimulatedPool
from vertumnus.workload.trace import Trace


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
    discipline: Discipline = Discipline.SHORTEST
    step_tokens: int | None = None
    blocks_per_rank: int | None = None
    """KV blocks per GPU; None: the profile's capacity."""
    warmup_s: float = 0.0
    slo: Slo = Slo()
    noise_ratio: float = 0.0
    report_delay_s: float = 0.0
    failures: tuple[Failure, ...] = ()
    seed: int = 0


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
    wall_s: float
    records: RequestRecords = field(repr=False)


def prefill_requests(trace: Trace) -> Iterator[PrefillRequest]:
    """The trace's requests as the decision core sees them, full blocks only, ids in order of arrival.

    A block id becomes a 16-byte hash by two odd multipliers: unequal ids give unequal hashes, and the low bits vary.
    """
    ids = trace.block_ids.astype(np.uint64) + np.uint64(1)
    pairs = np.stack((ids * np.uint64(0x9E3779B97F4A7C15), ids * np.uint64(0xC2B2AE3D27D4EB4F)), axis=1)
    hashes = memoryview(np.ascontiguousarray(pairs)).cast("B")
    starts = trace.block_offsets[:-1].tolist()
    num_full = np.minimum(trace.input_tokens // trace.block_tokens, np.diff(trace.block_offsets)).tolist()
    columns = zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), starts, num_full, strict=True)
    for request_id, (arrival_s, input_tokens, start, count) in enumerate(columns):
        raw = bytes(hashes[16 * start : 16 * (start + count)])
        blocks = [raw[position : position + 16] for position in range(0, 16 * count, 16)]
        yield PrefillRequest(request_id, arrival_s, input_tokens, blocks)


def simulate(
    trace: Trace,
    profile: Profile,
    policy: PlacementPolicy | str = "vertumnus",
    settings: SimulationSettings | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Replays a trace through a simulated pool of `settings.num_gpus` GPUs.

    Raises ConfigError for settings that contradict each other or the profile.
    """
    settings = settings or SimulationSettings()
    if isinstance(policy, str):
        policy = make_policy(policy)
    topology = Topology(settings.num_gpus, settings.node_gpus)
    composition = settings.composition
    if composition is None:
        raise ConfigError("composition is auto; not yet")
    layout = lay_out(composition, topology)
    for degree in composition.degrees:
        if degree not in profile.degrees:
            known = ", ".join(map(str, profile.degrees))
            raise ConfigError(f"composition is {composition}; accepted: degrees of profile {profile.name} ({known})")
    blocks_per_rank = settings.blocks_per_rank or profile.kv_capacity_blocks(trace.block_tokens)
    control_plane = ControlPlane(
        layout=layout,
        topology=topology,
        cost_model=profile.cost_model(),
        policy=policy,
        settings=ControlPlaneSettings(
            block_tokens=trace.block_tokens,
            blocks_per_rank=blocks_per_rank,
            discipline=settings.discipline,
            step_tokens=settings.step_tokens,
            max_sequence_tokens=profile.max_sequence_tokens,
        ),
    )
    pool = SimulatedPool(
        control_plane=control_plane,
        topology=topology,
        profile=profile,
        blocks_per_rank=blocks_per_rank,
        block_tokens=trace.block_tokens,
        noise_ratio=settings.noise_ratio,
        report_delay_s=settings.report_delay_s,
        failures=settings.failures,
        seed=settings.seed,
        on_progress=on_progress,
    )
    started = time.perf_counter()
    pool.run(prefill_requests(trace))
    wall_s = time.perf_counter() - started
    kinds = [transition.operation.kind for transition in control_plane.transitions]
    return SimulationResult(
        policy=policy.name,
        composition=str(composition),
        final_composition=str(control_plane.composition),
        rate_per_s=trace.mean_rate_per_s,
        num_requests=trace.num_requests,
        num_completed=len(pool.records),
        num_rejected=pool.num_rejected,
        latency=summarise(pool.records, 0, settings.slo, settings.warmup_s),
        num_splits=kinds.count(OperationKind.SPLIT),
        num_merges=kinds.count(OperationKind.MERGE),
        num_replications=sum(pool.num_copies.values()),
        wall_s=wall_s,
        records=pool.records,
    )
