"""Every baseline at its best: a small search of its parameters on the tuning half."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from vertumnus.core.composition import Composition
from vertumnus.core.profile import Profile
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.cells import Cell
from vertumnus.reproduction.rows import Row
from vertumnus.reproduction.traffic import TUNING_LOAD, Workload, settings
from vertumnus.sim.compare import policy_maker

Options = dict[str, float]

BASELINES = (
    "min-ttft", "preble", "length-cache", "flexlb", "dynamo", "cache-aware",
    "length", "least-loaded", "round-robin", "cache-first",
)  # fmt: skip
STRONGEST_BASELINES, STRONG_BASELINES = BASELINES[:3], BASELINES[:6]
"""The strongest ones, and those searched in hindsight too by default; the others are far behind."""

GRIDS: Mapping[str, Sequence[Options]] = {
    "paper": [
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


def tuned(
    bench: Bench, traffic: Workload, profile: Profile, composition: Composition, policies: Sequence[str]
) -> dict[str, Options]:
    """By policy the parameters of least mean TTFT on the tuning half, at one high load and one composition."""
    rate_per_s = TUNING_LOAD * traffic.capacity_per_s(profile, bench.scale.num_gpus)
    fixed = replace(settings(bench), composition=composition, is_fixed=True)
    tried = [(policy, options) for policy in policies for options in GRIDS.get(policy, ())]
    cells = [
        Cell(
            columns={},
            trace=traffic.tuning,
            profile=profile,
            make_policy=policy_maker(policy, **options),
            settings=fixed,
            rate_per_s=rate_per_s,
        )
        for policy, options in tried
    ]
    best: dict[str, tuple[float, Options]] = {}
    for (policy, options), row in zip(tried, bench.measure(cells), strict=True):
        mean_s = mean_ttft_s(row)
        if policy not in best or mean_s < best[policy][0]:
            best[policy] = (mean_s, options)
    return {policy: best[policy][1] if policy in best else {} for policy in policies}


def mean_ttft_s(row: Row) -> float:
    """The mean TTFT of a row; infinite where nothing was measured."""
    value = row["mean_ttft_s"]
    return float("inf") if value is None else float(value)


def options_text(options: Options) -> str:
    """Parameters as a table shows them."""
    return ", ".join(f"{name.rstrip('_')}={value:g}" for name, value in options.items())
