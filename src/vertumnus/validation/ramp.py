"""kappa_C by raising the load on one live worker per degree, as the paper does.

The traffic is cut down to what this degree can serve in time at all and played at rising rates against a pool of one
worker, over HTTP. kappa_C is the largest demand, in predicted service seconds arriving per second, at which the
token-weighted SLO attainment meets its target. It holds all that the program around the ranks takes, and the chance of
a short probe: good to the share of a worker that the last halving leaves.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vertumnus.core.composition import Composition
from vertumnus.core.profile import Profile, write_profile
from vertumnus.core.slo import Slo
from vertumnus.sim.kappa import RampSettings, highest_rate_per_s, largest_demand, served_in_time
from vertumnus.validation.choice import PoolChoice
from vertumnus.validation.live import play_live
from vertumnus.validation.run import as_validated
from vertumnus.validation.side import Side
from vertumnus.workload.trace import Trace

_MIN_REQUESTS, _MOST_PROBES = 10, 4
"""A probe that would hold fewer requests lasts until it holds so many, at most so many times as long."""

Play = Callable[[Trace, Composition], Side]
"""Plays a trace through a live pool of this composition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRampSettings:
    """What is asked of the worker, and how long it is asked."""

    slo: Slo = field(default_factory=Slo)
    target_ratio: float = 0.95
    probe_s: float = 20.0
    """Seconds that one rate is played for; up to four times as long where they would hold too few requests."""
    num_probes: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RealWorkers:
    """Pools of real ranks, set up as those that were measured."""

    model: Path
    profile: Profile
    slo: Slo
    dtype: str | None
    threads: int
    kv_mib_per_rank: int
    seed: int

    def play(self, trace: Trace, composition: Composition) -> Side:
        """As `Play`. Raises LiveSideFailed where the pool does not come up."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "measured.toml"
            write_profile(self.profile, file)
            choice = PoolChoice(profile=str(file), num_ranks=composition.num_gpus, composition=str(composition))
            chosen = choice.real(trace, self.model, dtype=self.dtype, folder=Path(folder), say=lambda text: None)
            assert chosen.config is not None
            served = chosen.config.model_copy(
                update={"threads_per_rank": self.threads, "kv_mib_per_rank": self.kv_mib_per_rank}
            )
            return play_live(trace, served, seed=self.seed, vocab=chosen.vocab, slo=self.slo).side()


def live_kappa(
    trace: Trace,
    profile: Profile,
    play: Play,
    settings: LiveRampSettings = LiveRampSettings(),
    say: Callable[[str], None] = lambda text: None,
) -> dict[int, float]:
    """kappa of every degree of the profile; 0 for one that can serve none of this traffic in time.

    Takes `num_probes` times `probe_s` per degree, up to four times as long at low rates, and as many starts.
    """
    kappa = {}
    for degree in profile.degrees:
        traffic = served_in_time(trace, profile, degree, RampSettings(slo=settings.slo, num_gpus=None))
        if traffic is None:
            kappa[degree] = 0.0
            continue

        def sustained(rate_per_s: float, degree: int = degree, traffic: Trace = traffic) -> float | None:
            probe = _probe(traffic, rate_per_s, settings.probe_s)
            side = play(probe, Composition.of({degree: 1}))
            demand, attainment = demand_and_attainment(probe, side, profile, degree, settings.slo)
            is_enough = attainment >= settings.target_ratio and 0 < demand <= 1
            say(
                f"degree {degree}, {rate_per_s:.2f} requests/s: demand {demand:.2f}, attainment {attainment:.0%}"
                + ("" if is_enough else ", too much")
            )
            return demand if is_enough else None

        kappa[degree] = largest_demand(sustained, highest_rate_per_s(traffic, profile, degree), settings.num_probes)
    return kappa


def _probe(traffic: Trace, rate_per_s: float, probe_s: float) -> Trace:
    """The beginning of the traffic at a rate, of two requests or more."""
    probe = as_validated(traffic, rate_per_s=rate_per_s)
    num_requests, most = (int((probe.arrival_s <= seconds).sum()) for seconds in (probe_s, _MOST_PROBES * probe_s))
    return probe.limited(min(max(num_requests, min(_MIN_REQUESTS, most), 2), probe.num_requests))


def demand_and_attainment(trace: Trace, side: Side, profile: Profile, degree: int, slo: Slo) -> tuple[float, float]:
    """(predicted service seconds that arrived per second, share of the tokens whose request was answered in time).

    A request that failed was not answered in time, and counts as if nothing of it had been cached. The demand is 0
    where all arrived at one instant, which tells of no rate.
    """
    tokens = trace.input_tokens.astype(np.float64)
    cached = np.nan_to_num(side.cached_tokens)
    service_s = profile.cost_model().for_degrees((degree,)).prefill_s(tokens - cached, cached)
    is_in_time = np.nan_to_num(side.ttft_s, nan=np.inf) <= slo.tau_s(tokens)
    return trace.mean_rate_per_s * float(service_s.mean()), float(tokens[is_in_time].sum() / tokens.sum())
