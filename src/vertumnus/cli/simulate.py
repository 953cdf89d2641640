"""`vertumnus simulate`: one run."""

import click

from vertumnus.cli.options import PoolOptions, TraceOptions, json_option, pool_options, trace_options
from vertumnus.cli.output import print_json, print_table, progress, warn
from vertumnus.cli.results import HEADINGS, result_row


@click.command()
@trace_options
@pool_options
@click.option(
    "--composition", default="auto", show_default=True, help="COUNTxDEGREE parts such as 8x2,4x4,1x8, or auto."
)
@click.option(
    "--policy",
    default="vertumnus",
    show_default=True,
    help="Placement policy; vertumnus-paper: all of the paper's system, its queue, controller and copies too.",
)
@click.option("--rate", type=float, help="Rescale arrivals to a mean of R requests/s.", metavar="R")
@json_option
def command(
    source: TraceOptions, pool: PoolOptions, composition: str, policy: str, rate: float | None, as_json: bool
) -> None:
    """Replay TRACE through a simulated prefill pool and print what its requests saw.

    \b
    vertumnus simulate trace.jsonl.gz --gpus 40 --rate 18
    vertumnus simulate synth:conversation --composition 8x2,4x4,1x8 --fixed --queue fifo
    """
    from vertumnus.core.policies import PAPER_SYSTEM
    from vertumnus.sim.simulate import as_in_paper, simulate

    settings = pool.settings(composition, source.seed)
    if policy == PAPER_SYSTEM:
        settings = as_in_paper(settings)
    make_policy = pool.policy(policy)
    pool.check_weights([policy])
    pool.check_paper([policy])
    profile = pool.load_profile()
    (trace,) = source.read()
    warn(trace.warnings)
    if rate is not None:
        trace = trace.rescaled(rate)

    with progress("simulating", trace.num_requests) as show:
        result = simulate(trace, profile, make_policy(), settings, on_progress=show)
    entry = result.to_json()
    if result.latency.num_measured == 0:
        warn([f"no request was measured: none arrived after the warm-up of {settings.warmup_s:g} s and was served"])
    if as_json:
        print_json({"trace": trace.name, "profile": profile.name, "settings": settings.to_json(), "results": [entry]})
    else:
        print_table(
            f"{trace.name}, {settings.num_gpus} GPUs, {profile.name}", HEADINGS, [result_row(entry)], num_left=2
        )
