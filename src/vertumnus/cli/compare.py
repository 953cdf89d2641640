"""`vertumnus compare`: the same trace through several pools, in one table."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vertumnus.cli.options import (
    PoolOptions,
    TraceOptions,
    force_option,
    json_option,
    parse_numbers,
    pool_options,
    trace_options,
)
from vertumnus.cli.output import note, print_json, print_table, progress, warn
from vertumnus.cli.results import HEADINGS, result_row
from vertumnus.errors import ConfigError

if TYPE_CHECKING:
    from vertumnus.sim.simulate import SimulationSettings

DEFAULT_POLICIES = "vertumnus,min-ttft,flexlb,dynamo,preble,cache-aware,length-cache"


@click.command()
@trace_options
@pool_options
@click.option(
    "--policies",
    default=DEFAULT_POLICIES,
    show_default=True,
    help="Placement policies a,b,c, or all; vertumnus-paper: the paper's system.",
    metavar="A,B,C",
)
@click.option("--rate", type=float, help="Rescale arrivals to a mean of R requests/s.", metavar="R")
@click.option("--rates", help="Several such rates x,y,z.", metavar="X,Y,Z")
@click.option(
    "--composition",
    "compositions",
    multiple=True,
    default=("auto",),
    show_default=True,
    help="COUNTxDEGREE parts such as 8x2,4x4,1x8, or auto. Repeatable.",
)
@click.option("--seeds", type=click.IntRange(1), default=1, help="Average over N seeds, from --seed on.", metavar="N")
@click.option("-j", "--jobs", type=click.IntRange(1), help="Processes (default: one per core).", metavar="N")
@click.option("--plot", help="Write a plot to FILE (.png, .svg or .pdf).", metavar="FILE")
@click.option("--csv", help="Write the table to FILE as CSV.", metavar="FILE")
@force_option
@json_option
def command(
    source: TraceOptions,
    pool: PoolOptions,
    policies: str,
    rate: float | None,
    rates: str | None,
    compositions: tuple[str, ...],
    seeds: int,
    jobs: int | None,
    plot: str | None,
    csv: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Replay TRACE under every policy, composition and rate given, and print one line for each.

    \b
    vertumnus compare trace.jsonl.gz --policies vertumnus,min-ttft,preble --rates 12,15,18,20
    vertumnus compare trace.jsonl.gz --policies all --composition 10x4 --fixed --plot ttft.png --csv ttft.csv
    """
    from vertumnus.workload.output import check_writable
    from vertumnus.workload.plot_path import check_plot_path

    if rate is not None and rates is not None:
        raise ConfigError(f"rate is {rate} beside rates {rates!r}; accepted: one of the two")
    rates_per_s = [rate] if rates is None else [*parse_numbers("rates", rates)]
    settings = [pool.settings(composition, source.seed) for composition in compositions]
    names = policy_names(policies)
    makers = [pool.policy(name) for name in names]
    pool.check_weights(names)
    pool.check_paper(names)
    if plot is not None:
        check_plot_path(plot, force=force)
    if csv is not None:
        check_writable(csv, force=force)
    if plot is not None and csv is not None and Path(plot).resolve() == Path(csv).resolve():
        raise ConfigError(f"csv is {csv!r} beside plot {plot!r}; accepted: two different files")
    if len(set(compositions)) < len(compositions):
        raise ConfigError(f"composition is {', '.join(compositions)}; accepted: each composition once")
    profile = pool.load_profile()
    traces = source.read(seeds)
    warn(traces[0].warnings)

    from vertumnus.sim.compare import compare

    num_runs = len(rates_per_s) * len(settings) * len(makers) * seeds
    with progress("comparing", num_runs) as show:
        cells = compare(
            traces,
            profile,
            makers,
            settings,
            rates_per_s=rates_per_s,
            jobs=jobs or os.cpu_count() or 1,
            on_progress=show,
        )
    from vertumnus.sim.comparison_files import write_csv, write_plot

    entries = [cell.to_json() for cell in cells]
    title = f"{traces[0].name}, {settings[0].num_gpus} GPUs, {profile.name}" + (f", {seeds} seeds" * (seeds > 1))
    if plot is not None:
        write_plot(entries, title, plot, force=force)
        note(f"plot: {plot}")
    if csv is not None:
        write_csv(entries, csv, force=force)
        note(f"table: {csv}")
    if as_json:
        shared = _shared_settings(settings[0], names) | {"composition": list(compositions), "num_seeds": seeds}
        print_json({"trace": traces[0].name, "profile": profile.name, "settings": shared, "results": entries})
    else:
        print_table(title, HEADINGS, [result_row(entry) for entry in entries], num_left=2)


def _shared_settings(settings: "SimulationSettings", policies: Sequence[str]) -> dict[str, Any]:
    """What all policies share and, as `by_policy`, what the paper's system settles for itself instead."""
    from vertumnus.core.policies import PAPER_SYSTEM
    from vertumnus.sim.simulate import as_in_paper

    shared = settings.to_json()
    if PAPER_SYSTEM not in policies:
        return shared
    papers = as_in_paper(settings).to_json()
    return shared | {"by_policy": {PAPER_SYSTEM: {key: papers[key] for key in papers if papers[key] != shared[key]}}}


def policy_names(text: str) -> list[str]:
    """Reads `a,b,c` or `all`."""
    from vertumnus.core.policies import POLICIES

    names = list(POLICIES) if text == "all" else [name.strip() for name in text.split(",")]
    if all(names) and len(set(names)) < len(names):
        raise ConfigError(f"policies is {text!r}; accepted: each policy once")
    return names
