"""`vertumnus plan`: composition, capacity and headroom for given traffic."""

import os

import click

from vertumnus.cli.options import PoolOptions, TraceOptions, force_option, json_option, pool_options, trace_options
from vertumnus.cli.output import note, percent, print_json, print_table, seconds, warn


@click.command()
@trace_options
@pool_options
@click.option("--rate", type=float, help="Rescale arrivals to a mean of R requests/s.", metavar="R")
@click.option(
    "--target",
    type=float,
    default=0.95,
    show_default=True,
    help="Token-weighted SLO attainment that the pool must meet.",
)
@click.option("-j", "--jobs", type=click.IntRange(1), help="Processes (default: one per core).", metavar="N")
@click.option("--plot", help="Write a plot to FILE (.png, .svg or .pdf).", metavar="FILE")
@force_option
@json_option
def command(
    source: TraceOptions,
    pool: PoolOptions,
    rate: float | None,
    target: float,
    jobs: int | None,
    plot: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Recommend a composition for the traffic of TRACE, with its capacity and headroom over time.

    Without --gpus: the fewest GPUs, in whole nodes and then halves, that meet the target.

    \b
    vertumnus plan trace.jsonl.gz --gpus 40 --rate 15 --plot plan.png
    vertumnus plan trace.jsonl.gz --rate 15 --target 0.99
    """
    from vertumnus.workload.plot_path import check_plot_path

    if plot is not None:
        check_plot_path(plot, force=force)
    settings = pool.settings("auto", source.seed)
    make_policy = pool.policy("vertumnus")
    profile = pool.load_profile()
    (trace,) = source.read()
    warn(trace.warnings)
    if rate is not None:
        trace = trace.rescaled(rate)

    from vertumnus.sim.plan import Planner

    planner = Planner(
        trace=trace,
        profile=profile,
        settings=settings,
        make_policy=make_policy,
        target_ratio=target,
        jobs=jobs or os.cpu_count() or 1,
        report=note,
    )
    plan = planner.plan(pool.gpus)
    if plot is not None:
        from vertumnus.sim.plan_plot import write_plan_plot

        write_plan_plot(plan, f"{trace.name}, {profile.name}", plot, force=force)
        note(f"plot: {plot}")
    document = plan.to_json()
    if as_json:
        used = settings.to_json() | {"num_gpus": plan.num_gpus}
        print_json({"trace": trace.name, "profile": profile.name, "settings": used} | document)
        return
    print_table(
        f"{trace.name}, {profile.name}: {plan.composition} on {plan.num_gpus} GPUs",
        ("pool", "GPUs", "composition", "least headroom", "mean TTFT s", "P90", "P99", "SLO (by tokens)", "token hit"),
        [
            [
                entry["role"],
                f"{entry['num_gpus']}",
                entry["composition"],
                percent(entry["min_headroom_ratio"]),
                *(seconds(entry[name]) for name in ("mean_ttft_s", "p90_ttft_s", "p99_ttft_s")),
                percent(entry["slo_attainment_ratio"]),
                percent(entry["token_hit_ratio"]),
            ]
            for entry in document["results"]
        ],
    )
    print_table(
        f"headroom over time (kappa: {plan.kappa_source})",
        ("from s", "req/s", "demand s/s", "headroom", "best composition then"),
        [
            [
                f"{window.start_s:,.0f}",
                f"{window.rate_per_s:.2f}",
                f"{window.demand_s_per_s:.2f}",
                percent(window.headroom_ratio),
                window.best_composition,
            ]
            for window in plan.windows
        ],
    )
