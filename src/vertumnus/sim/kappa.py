"""kappa_C by a load ramp: how much of this traffic a worker of degree C sustains.

The traffic is cut down to the requests that this degree can serve in time at all (E_C(L, 0) <= tau) and played at
rising rates through a pool of workers of this degree alone. kappa_C is the largest demand per worker, in predicted
service seconds arriving per second, at which the token-weighted SLO attainment over those requests meets its target.

How many workers share the load matters more than anything else. A worker that has nobody to share with misses the
target at a small load, since some requests take nearly their whole tau to serve and cannot wait at all (0.15 to 0.45
for the conversation trace on H20-3e, against 0.8 to 1.0 in a pool of 40 GPUs). The sum of kappa over the workers of a
pool means its capacity only if kappa comes from a pool, so that is the default; `num_gpus=None` measures one worker.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vertumnus.core.composition import RankGroup, Topology
from vertumnus.core.control_plane import ControlPlane
from vertumnus.core.policies import make_policy
from vertumnus.core.profile import Profile
from vertumnus.core.queueing import Discipline
from vertumnus.core.settings import ControlPlaneSettings
from vertumnus.core.slo import Slo
from vertumnus.errors import ConfigError
from vertumnus.sim.pool import SimulatedPool
from vertumnus.sim.requests import prefill_requests
from vertumnus.workload.trace import Trace

NUM_REQUESTS = 6000
"""Requests of one probe: so many that a pool which falls behind is found out before they end."""

NUM_PROBES = 7
"""Halvings of the rate's range: good to about a hundredth of a worker that is never idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RampSettings:
    """What a ramp asks of the worker, and how the worker is set up."""

    slo: Slo = field(default_factory=Slo)
    target_ratio: float = 0.95
    discipline: Discipline = Discipline.SHORTEST
    step_tokens: int | None = None
    blocks_per_rank: int | None = None
    """None: the profile's capacity."""
    num_gpus: int | None = 40
    """GPUs that the workers share, each degree in its turn; None: one worker by itself."""
    num_requests: int = NUM_REQUESTS

    def num_workers(self, degree: int) -> int:
        """Workers of this degree in its ramp."""
        return 1 if self.num_gpus is None else max(1, self.num_gpus // degree)

    def __post_init__(self) -> None:
        if not 0 < self.target_ratio <= 1:
            raise ConfigError(f"target is {self.target_ratio}; accepted: above 0, at most 1")


def measured_kappa(
    trace: Trace,
    profile: Profile,
    settings: RampSettings = RampSettings(),
    on_progress: Callable[[int], None] | None = None,
) -> dict[int, float]:
    """kappa of every degree of the profile for this traffic; 0 for a degree that can serve none of it in time.

    Seven probes of some thousand requests per degree: seconds in all. Same input, same result.
    """
    kappa = {}
    for num_done, degree in enumerate(profile.degrees, 1):
        kappa[degree] = ramp(trace, profile, degree, settings)
        if on_progress is not None:
            on_progress(num_done)
    return kappa


def ramp(trace: Trace, profile: Profile, degree: int, settings: RampSettings = RampSettings()) -> float:
    """kappa of one degree, by bisection on the arrival rate."""
    traffic = served_in_time(trace, profile, degree, settings)
    if traffic is None:
        return 0.0
    high_per_s = settings.num_workers(degree) * highest_rate_per_s(traffic, profile, degree)

    def sustained(rate_per_s: float) -> float | None:
        return _sustained(traffic.rescaled(rate_per_s), profile, degree, settings)

    return largest_demand(sustained, high_per_s, NUM_PROBES)


def highest_rate_per_s(traffic: Trace, profile: Profile, degree: int) -> float:
    """One and a half times what a worker could do if no prompt were ever cached: where a ramp ends."""
    cold_s = profile.cost_model().for_degrees((degree,)).prefill_s(traffic.input_tokens.astype(np.float64), 0.0)
    return 1.5 / float(np.mean(cold_s))


def largest_demand(sustained: Callable[[float], float | None], high_per_s: float, num_probes: int) -> float:
    """The demand at the highest rate, between nothing and `high_per_s`, that was sustained; 0 if none was.

    `sustained` gives the demand at a rate, None where it was too much. Each probe halves what is left of the range.
    """
    low_per_s = best = 0.0
    for _ in range(num_probes):
        rate_per_s = (low_per_s + high_per_s) / 2
        demand = sustained(rate_per_s)
        if demand is None:
            high_per_s = rate_per_s
        else:
            low_per_s, best = rate_per_s, demand
    return best


def served_in_time(trace: Trace, profile: Profile, degree: int, settings: RampSettings) -> Trace | None:
    """The first requests that a cold worker of this degree could serve in time; None if there are too few."""
    tokens = trace.input_tokens.astype(np.float64)
    cold_s = profile.cost_model().for_degrees((degree,)).prefill_s(tokens, 0.0)
    kept = np.flatnonzero(cold_s <= settings.slo.tau_s(tokens))[: settings.num_requests]
    if len(kept) < 2 or trace.arrival_s[kept[-1]] <= trace.arrival_s[kept[0]]:
        return None
    return trace.selected(kept)


class _TargetMissed(Exception):
    """Ends a probe as soon as its outcome is certain; never leaves this module."""


def _sustained(traffic: Trace, profile: Profile, degree: int, settings: RampSettings) -> float | None:
    """Demand per worker, in service seconds per second, that workers of one degree took; None if it was too much."""
    num_workers = settings.num_workers(degree)
    topology = Topology(degree * num_workers, degree)
    blocks_per_rank = settings.blocks_per_rank or profile.kv_capacity_blocks(traffic.block_tokens)
    control_plane = ControlPlane(
        layout=tuple(RankGroup(degree * index, degree) for index in range(num_workers)),
        topology=topology,
        cost_model=profile.cost_model(),
        policy=make_policy("vertumnus"),
        settings=ControlPlaneSettings(
            block_tokens=traffic.block_tokens,
            blocks_per_rank=blocks_per_rank,
            discipline=settings.discipline,
            step_tokens=settings.step_tokens,
            max_sequence_tokens=profile.max_sequence_tokens,
        ),
    )
    missable_tokens = (1 - settings.target_ratio) * float(traffic.input_tokens.sum())
    base_s, per_token_s = settings.slo.base_s, settings.slo.per_token_s
    missed_tokens = 0

    def count_missed(num_done: int) -> None:
        nonlocal missed_tokens
        if len(records) and records.ttft_s[-1] > base_s + per_token_s * records.input_tokens[-1]:
            missed_tokens += records.input_tokens[-1]
            if missed_tokens > missable_tokens:
                raise _TargetMissed

    pool = SimulatedPool(
        control_plane=control_plane,
        topology=topology,
        profile=profile,
        blocks_per_rank=blocks_per_rank,
        block_tokens=traffic.block_tokens,
        on_progress=count_missed,
    )
    records = pool.records
    try:
        pool.run(prefill_requests(traffic))
    except _TargetMissed:
        return None
    if len(records) < traffic.num_requests:  # some were rejected: too long for the model or the memory
        return None
    reused = np.array(records.reused_tokens, dtype=np.float64)
    suffix = np.array(records.input_tokens, dtype=np.float64) - reused
    service_s = float(profile.cost_model().for_degrees((degree,)).prefill_s(suffix, reused).sum())
    demand = service_s / traffic.duration_s / num_workers
    return demand if demand <= 1 else None  # above 1 it only had not fallen behind far enough yet
