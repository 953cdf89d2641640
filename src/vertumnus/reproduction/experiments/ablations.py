"""Ablations that the paper lacks: one thing changed at a time, at one high load."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from vertumnus.core.lookahead_controller import LookaheadSettings
from vertumnus.core.placement import Placement, PlacementView, VertumnusPolicy, choose
from vertumnus.core.profile import Profile, load_profile
from vertumnus.reproduction import figures
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.cells import Cell
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.rows import Outcome, Row
from vertumnus.reproduction.traffic import planned, settings, workload
from vertumnus.reproduction.tuning import THRESHOLDS, mean_ttft_s
from vertumnus.sim.compare import PolicyMaker, policy_maker
from vertumnus.sim.simulate import Pulls, SimulationSettings
from vertumnus.workload.trace import Trace

LOAD = 0.85
WORKLOADS = ("conversation", "toolagent")
TERMS = ("wait", "delay", "service", "gpu_time", "miss")
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class WithoutTerm(VertumnusPolicy):
    """J without one of its terms."""

    term: str = "wait"

    def place(self, view: PlacementView) -> Placement:
        whole = VertumnusPolicy.place(self, view)
        placement = choose(view, whole.cost - whole.terms[self.term], f"least J without {self.term}")
        placement.preferred_degree = whole.preferred_degree
        return placement


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes policies without a term, in any process."""

    term: str

    def __call__(self) -> WithoutTerm:
        return WithoutTerm(term=self.term)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One thing changed."""

    group: str
    name: str
    make_policy: PolicyMaker = VertumnusPolicy
    settings: SimulationSettings
    block_factor: int = 1


def _variants(base: SimulationSettings, profile: Profile, block_tokens: int) -> Iterator[Variant]:
    yield Variant(group=DEFAULT, name=DEFAULT, settings=base)
    for term in TERMS:
        yield Variant(group="a term of J off", name=f"without {term}", make_policy=_Maker(term), settings=base)
    for name, values in (("beta", (1.0, 2.0, 5.0)), ("lambda_", (0.0, 0.1, 1.0)), ("mu", (1.0, 8.0))):
        for value in values:
            maker = policy_maker("vertumnus", **{name: value})
            yield Variant(group="weights", name=f"{name.rstrip('_')} {value:g}", make_policy=maker, settings=base)
    yield from _controllers(base)
    for window_s in (5.0, 10.0, 60.0):
        yield Variant(group="window", name=f"window {window_s:g} s", settings=replace(base, window_s=window_s))
    for delay_s in (0.1, 1.0, 5.0):
        changed = replace(base, report_delay_s=delay_s)
        yield Variant(group="report delay", name=f"reports after {delay_s:g} s", settings=changed)
    for name, factors in wrong_costs(profile).items():
        yield Variant(group="profile error", name=name, settings=replace(base, cost_factors=factors))
    for factor in (2, 4):
        name = f"blocks of {factor * block_tokens:,} tokens"
        yield Variant(group="block size", name=name, settings=base, block_factor=factor)
    for blocks in (50, 150, 500):
        changed = replace(base, blocks_per_rank=blocks)
        yield Variant(group="cache capacity", name=f"{blocks} blocks per GPU", settings=changed)
    for blocks in (150, 500):
        changed = replace(base, blocks_per_rank=blocks, spares_last_copies=True)
        yield Variant(group="eviction", name=f"{blocks} blocks, last copies spared", settings=changed)
    for relief_s in (0.05, 0.5):
        changed = replace(base, replication=replace(base.replication, min_relief_s=relief_s))
        yield Variant(group="replication", name=f"replicas that relieve {relief_s:g} s", settings=changed)
    for pulls, what in (
        (Pulls.NONE, "no copies: pending blocks are misses"),
        (Pulls.PENDING, "copies of pending blocks alone"),
    ):
        yield Variant(group="copies", name=what, settings=replace(base, pulls=pulls))
    without = replace(base, has_replication=False, pulls=Pulls.ANY)
    yield Variant(group="replication", name="copies on demand alone", settings=without)
    for node_gpus in (4, base.num_gpus):
        # The planned composition may not fit into other nodes: chosen anew.
        changed = replace(base, node_gpus=node_gpus, composition=None)
        yield Variant(group="node size", name=f"nodes of {node_gpus} GPUs", settings=changed)


def _controllers(base: SimulationSettings) -> Iterator[Variant]:
    yield Variant(group="controller", name="no controller", settings=replace(base, is_fixed=True))
    for gain in (0.02, 0.15):
        changed = replace(base, controller_settings=LookaheadSettings(min_gain_ratio=gain))
        yield Variant(group="controller", name=f"lookahead, gain of {gain:.0%}", settings=changed)
    for thresholds in THRESHOLDS:
        changed = replace(base, controller="threshold", controller_settings=thresholds)
        name = f"threshold {thresholds.lower_ratio:g} to {thresholds.upper_ratio:g}"
        yield Variant(group="controller", name=name, settings=changed)


def wrong_costs(profile: Profile) -> dict[str, tuple[tuple[int, float], ...]]:
    """What a control plane might wrongly believe, by name: degrees, and how many times their costs it takes."""
    wrong = {
        f"all costs {factor:g} times": tuple((degree, factor) for degree in profile.degrees) for factor in (0.5, 2.0)
    }
    wrong |= {f"degree {degree} twice as slow": ((degree, 2.0),) for degree in profile.degrees}
    largest = profile.degrees[-1]
    return wrong | {f"degree {largest} twice as fast": ((largest, 0.5),)}


def coarser(trace: Trace, factor: int) -> Trace:
    """The trace in blocks so many times as large; a block takes the id of its last part, which names all before it."""
    if factor == 1:
        return trace
    full = np.diff(trace.block_offsets) // factor
    offsets = np.concatenate(([0], np.cumsum(full)))
    depth = np.arange(offsets[-1]) - np.repeat(offsets[:-1], full)
    last = np.repeat(trace.block_offsets[:-1], full) + (depth + 1) * factor - 1
    return replace(
        trace, block_tokens=factor * trace.block_tokens, block_ids=trace.block_ids[last], block_offsets=offsets
    )


def _run(bench: Bench) -> Outcome:
    profile = load_profile()
    cells = []
    for name in WORKLOADS:
        traffic = workload(bench, name)
        base = replace(settings(bench), composition=planned(bench, traffic, profile))
        rate_per_s = LOAD * traffic.capacity_per_s(profile, bench.scale.num_gpus)
        loads = (rate_per_s, 0.5 * rate_per_s) if bench.scale.has_full_grids else (rate_per_s,)
        for each in _variants(base, profile, traffic.held_out.block_tokens):
            trace = coarser(traffic.held_out, each.block_factor)
            cells += [
                Cell(
                    columns={"group": each.group, "variant": each.name, "workload": name},
                    trace=trace,
                    profile=profile,
                    make_policy=each.make_policy,
                    settings=each.settings,
                    rate_per_s=rate,
                )
                for rate in loads
            ]
    rows = bench.measure(cells)
    for row in rows:
        reference = next(
            each
            for each in rows
            if (each["variant"], each["workload"], each["rate_per_s"]) == (DEFAULT, row["workload"], row["rate_per_s"])
        )
        row["over_default_ratio"] = mean_ttft_s(row) / mean_ttft_s(reference)
    return Outcome(rows=rows, notes=[f"at load {LOAD}, one seed: differences of a few per cent are noise"])


def _draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    highest = {name: max(row["rate_per_s"] for row in rows if row["workload"] == name) for name in WORKLOADS}
    return {
        f"Ablations, {name}": figures.bars(
            f"{name}: mean TTFT over that of the default",
            {
                row["variant"]: row["over_default_ratio"]
                for row in rows
                if row["workload"] == name and row["rate_per_s"] == highest[name]
            },
            "ratio",
            reference=1.0,
        )
        for name in WORKLOADS
    }


EXPERIMENTS = (
    Experiment(
        name="ablations",
        title="Ablations",
        paper="None but Figure 14.",
        ours=(
            "One thing changed at a time, the rest as by default (adaptive, from the composition that plan "
            "recommends): terms of J, weights, controllers and thresholds, window, delay of cache reports, a "
            "wrong profile given to the control plane, block size, cache capacity, eviction that spares last copies, "
            "replication that looks at queues, node size."
        ),
        budget_s=180,
        run=_run,
        draw=_draw,
    ),
)
