"""Every baseline, and the paper's system, at its best: a small search of parameters on the tuning half."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from vertumnus.core.composition import Composition
from vertumnus.core.policies import PAPER_SYSTEM
from vertumnus.core.profile import Profile
from vertumnus.core.queueing import Discipline
from vertumnus.core.threshold_controller import ThresholdSettings
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.cells import Cell
from vertumnus.reproduction.rows import Row
from vertumnus.reproduction.traffic import TUNING_LOAD, Workload, settings
from vertumnus.sim.compare import PolicyMaker, policy_maker
from vertumnus.sim.simulate import SimulationSettings, as_in_paper

Options = dict[str, float]

BASELINES = (
    "min-ttft", "preble", "length-cache", "flexlb", "dynamo", "cache-aware",
    "length", "least-loaded", "round-robin", "cache-first",
)  # fmt: skip
STRONGEST_BASELINES, STRONG_BASELINES = BASELINES[:3], BASELINES[:6]
"""The strongest ones, and those searched in hindsight too by default; the others are far behind."""

GRIDS: Mapping[str, Sequence[Options]] = {
    PAPER_SYSTEM: [
        {"beta": beta, "lambda_": price} for beta, price in ((1, 0), (1.5, 0.1), (2, 0.1), (2, 0.3), (3, 0.3), (2, 0.6))
    ],
    "preble": [{"exploit_ratio": ratio} for ratio in (0.25, 0.5, 0.75)],
    "length-cache": [{"long_tokens": tokens} for tokens in (4096, 8192, 16384, 32768)],
    "length": [{"long_tokens": tokens} for tokens in (4096, 8192, 16384, 32768)],
    "flexlb": [{"best_ratio": ratio} for ratio in (0.05, 0.15, 0.3)],
    "dynamo": [{"overlap_weight": weight} for weight in (0.5, 1.0, 2.0, 8.0)],
    "cache-aware": [
        {"cache_threshold": threshold, "balance_abs": most, "balance_rel": 1.5}
        for threshold, most in product((0.3, 0.6), (2, 8, 32))
    ],
}
"""What is tried; policies that are missing have nothing to choose."""

THRESHOLDS = tuple(
    ThresholdSettings(lower_ratio=lower, retain_ratio=retain, upper_ratio=upper)
    for lower, retain, upper in ((0.6, 0.75, 0.85), (0.4, 0.6, 0.7), (0.7, 0.85, 0.95))
)
"""Of the paper's controller, its own defaults first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperChoice:
    """`vertumnus-paper` as tuned: the weights of its J and the thresholds of its controller."""

    options: Options
    thresholds: ThresholdSettings

    @property
    def maker(self) -> PolicyMaker:
        """Its placement."""
        return policy_maker(PAPER_SYSTEM, **self.options)

    @property
    def text(self) -> str:
        """As a table shows it."""
        thresholds = self.thresholds
        return f"{options_text(self.options)}, thresholds {thresholds.lower_ratio:g}, {thresholds.upper_ratio:g}"

    def pool(self, base: SimulationSettings) -> SimulationSettings:
        """The pool as the paper has it, adaptive or fixed as the base is."""
        return replace(as_in_paper(base), controller_settings=self.thresholds)


def tuned(
    bench: Bench,
    traffic: Workload,
    profile: Profile,
    composition: Composition,
    policies: Sequence[str],
    *,
    discipline: Discipline = Discipline.SHORTEST,
) -> dict[str, Options]:
    """By policy the parameters of least mean TTFT on the tuning half, at one high load and one composition, with the
    queues that it is to be played with."""
    fixed = replace(settings(bench), composition=composition, is_fixed=True, discipline=discipline)
    tried = [(policy, options) for policy in policies for options in GRIDS.get(policy, ())]
    pools = [(policy_maker(policy, **options), fixed) for policy, options in tried]
    best: dict[str, tuple[float, Options]] = {}
    for (policy, options), mean_s in zip(tried, _means_s(bench, traffic, profile, pools), strict=True):
        if policy not in best or mean_s < best[policy][0]:
            best[policy] = (mean_s, options)
    return {policy: best[policy][1] if policy in best else {} for policy in policies}


def tuned_paper(
    bench: Bench, traffic: Workload, profile: Profile, composition: Composition, *, is_fixed: bool = False
) -> PaperChoice:
    """`vertumnus-paper` tuned as `tuned` does, in a pool of its own kind: first its weights, then its thresholds."""
    base = replace(settings(bench), composition=composition, is_fixed=is_fixed)
    choices = [PaperChoice(options=options, thresholds=THRESHOLDS[0]) for options in GRIDS[PAPER_SYSTEM]]
    means_s = _means_s(bench, traffic, profile, [(each.maker, each.pool(base)) for each in choices])
    best_s, best = min(zip(means_s, choices, strict=True), key=lambda pair: pair[0])
    if is_fixed:
        return best
    others = [replace(best, thresholds=thresholds) for thresholds in THRESHOLDS[1:]]
    means_s = _means_s(bench, traffic, profile, [(each.maker, each.pool(base)) for each in others])
    return min([(best_s, best), *zip(means_s, others, strict=True)], key=lambda pair: pair[0])[1]


def _means_s(
    bench: Bench, traffic: Workload, profile: Profile, pools: Sequence[tuple[PolicyMaker, SimulationSettings]]
) -> list[float]:
    """Mean TTFT of each pool on the tuning half, at the load of tuning."""
    rate_per_s = TUNING_LOAD * traffic.capacity_per_s(profile, bench.scale.num_gpus)
    cells = [
        Cell(columns={}, trace=traffic.tuning, profile=profile, make_policy=maker, settings=pool, rate_per_s=rate_per_s)
        for maker, pool in pools
    ]
    return [mean_ttft_s(row) for row in bench.measure(cells)]


def mean_ttft_s(row: Row) -> float:
    """The mean TTFT of a row; infinite where nothing was measured."""
    value = row["mean_ttft_s"]
    return float("inf") if value is None else float(value)


def options_text(options: Options) -> str:
    """Parameters as a table shows them."""
    return ", ".join(f"{name.rstrip('_')}={value:g}" for name, value in options.items())
