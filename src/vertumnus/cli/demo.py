"""`vertumnus demo`: what adapting the composition does for an hour of traffic, against what people run today."""

import os
from typing import TYPE_CHECKING, Any

import click

from vertumnus.cli.options import (
    DEFAULT_NUM_GPUS,
    DEFAULT_PROFILE_NAME,
    TraceOptions,
    force_option,
    json_option,
    trace_options,
)
from vertumnus.cli.output import note, percent, print_json, print_table, progress, seconds, warn

if TYPE_CHECKING:
    from vertumnus.core.profile import Profile
    from vertumnus.sim.compare import Cell
    from vertumnus.workload.trace import Trace

ONE_DEGREE = "10x4"
"""Today's pool: one degree for all, chosen once."""

LOADS = (0.6, 0.8, 1.0, 1.2, 1.4)
"""Rates to play the trace at, relative to what today's pool takes at most."""

MAX_REQUESTS = 12_000
KV_BLOCKS_TOKENS = 1_400 * 512
"""KV memory per GPU, in tokens."""

ADAPTIVE = "vertumnus, adaptive"
BASELINES = (
    ("vertumnus, fixed", "vertumnus", "shortest"),
    ("least TTFT, shortest first", "min-ttft", "shortest"),
    ("least TTFT", "min-ttft", "fifo"),
    ("Preble-like", "preble", "fifo"),
    ("FlexLB", "flexlb", "fifo"),
    ("Dynamo-like", "dynamo", "fifo"),
    ("cache-aware", "cache-aware", "fifo"),
)


@click.command()
@trace_options
@click.option("-j", "--jobs", type=click.IntRange(1), help="Processes (default: one per core).", metavar="N")
@click.option("--plot", help="Write a plot to FILE (.png, .svg or .pdf).", metavar="FILE")
@force_option
@json_option
def command(source: TraceOptions, jobs: int | None, plot: str | None, force: bool, as_json: bool) -> None:
    """Play TRACE at rising rates on 40 GPUs: an adaptive pool against ten workers of degree 4 and today's routers.

    \b
    vertumnus demo synth:conversation --plot demo.png
    """
    from vertumnus.workload.plot_path import check_plot_path

    if plot is not None:
        check_plot_path(plot, force=force)

    from vertumnus.core.profile import load_profile
    from vertumnus.sim.compare import run_cells
    from vertumnus.sim.comparison_files import write_plot

    profile = load_profile(DEFAULT_PROFILE_NAME)
    (trace,) = source.read()
    warn(trace.warnings)
    trace = trace.limited(MAX_REQUESTS)
    rates_per_s = _rates_per_s(trace, profile)
    cells = _cells(trace, rates_per_s, source.seed)
    note(f"{trace.num_requests:,} requests at {len(rates_per_s)} rates through {len(BASELINES) + 1} pools")
    with progress("simulating", len(cells)) as show:
        results = run_cells(cells, [trace], profile, jobs=jobs or os.cpu_count() or 1, on_progress=show)
    entries = [result.to_json() for result in results]
    title = f"{trace.name}, {DEFAULT_NUM_GPUS} GPUs, {profile.name}"
    if plot is not None:
        write_plot(entries, title, plot, force=force)
        note(f"plot: {plot}")
    if as_json:
        print_json({"trace": trace.name, "profile": profile.name, "one_degree": ONE_DEGREE, "results": entries})
        return
    names = [ADAPTIVE, *(label for label, _, _ in BASELINES)]
    by_name = {name: [entry for entry in entries if entry["label"] == name] for name in names}
    headings = ["mean TTFT s / SLO by tokens", *(f"{rate_per_s:.3g} req/s" for rate_per_s in rates_per_s)]
    rows = [[name, *(_both(entry) for entry in of_name)] for name, of_name in by_name.items()]
    print_table(title, headings, rows)
    for line in _sentences(by_name):
        click.echo(line)


def _rates_per_s(trace: "Trace", profile: "Profile") -> list[float]:
    """The loads of the demonstration as rates, by what the one-degree pool takes of this traffic at most."""
    from vertumnus.core.composition import Composition
    from vertumnus.sim.auto import arrivals_between, length_mix
    from vertumnus.sim.headroom import load_ratio

    arrivals = arrivals_between(trace, 0, trace.num_requests, KV_BLOCKS_TOKENS // trace.block_tokens, 8)
    kappa = profile.kappa or dict.fromkeys(profile.degrees, 1.0)
    load = load_ratio(length_mix(arrivals), Composition.parse(ONE_DEGREE), profile.cost_model(), kappa)
    return [float(f"{trace.mean_rate_per_s * relative / load:.2g}") for relative in LOADS]


def _cells(trace: "Trace", rates_per_s: list[float], seed: int) -> "list[Cell]":
    from dataclasses import replace

    from vertumnus.core.composition import Composition
    from vertumnus.core.queueing import Discipline
    from vertumnus.sim.compare import Cell, policy_maker
    from vertumnus.sim.simulate import SimulationSettings

    adaptive = SimulationSettings(
        num_gpus=DEFAULT_NUM_GPUS,
        composition=Composition.parse(ONE_DEGREE),
        blocks_per_rank=max(1, KV_BLOCKS_TOKENS // trace.block_tokens),
        seed=seed,
    )
    cells = []
    for rate_per_s in rates_per_s:
        cells.append(
            Cell(make_policy=policy_maker("vertumnus"), settings=adaptive, rate_per_s=rate_per_s, label=ADAPTIVE)
        )
        for label, policy, queue in BASELINES:
            fixed = replace(adaptive, is_fixed=True, has_replication=False, discipline=Discipline(queue))
            cells.append(Cell(make_policy=policy_maker(policy), settings=fixed, rate_per_s=rate_per_s, label=label))
    return cells


def _both(entry: dict[str, Any]) -> str:
    return f"{seconds(entry['mean_ttft_s'])} / {percent(entry['slo_attainment_ratio'])}"


def _sentences(by_name: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What the table says, whichever way it falls."""
    lines = [
        f"Every pool has {DEFAULT_NUM_GPUS} GPUs; all but the first keep {ONE_DEGREE}, ten workers of CP degree 4. The "
        "first begins like that, and follows the traffic.",
    ]
    today = {name: entries for name, entries in by_name.items() if not name.startswith("vertumnus")}
    for index, ours in enumerate(by_name[ADAPTIVE]):
        name, best = min(
            ((name, entries[index]) for name, entries in today.items()), key=lambda pair: float(pair[1]["mean_ttft_s"])
        )
        saved = 1 - ours["mean_ttft_s"] / best["mean_ttft_s"]
        points = 100 * (ours["slo_attainment_ratio"] - best["slo_attainment_ratio"])
        lines.append(
            f"At {ours['rate_per_s']:.3g} requests/s the best of today's routers ({name}) has a mean TTFT of "
            f"{seconds(best['mean_ttft_s'])} s; adaptive: {seconds(ours['mean_ttft_s'])} s "
            f"({'-' if saved >= 0 else '+'}{abs(saved):.0%}), {points:+.1f} points of SLO attainment, with "
            f"{_counted(ours['num_splits'], 'split')} and {_counted(ours['num_merges'], 'merge')}."
        )
    return lines


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
