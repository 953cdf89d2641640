"""`vertumnus analyze`: what the traffic of a trace is like."""

import click

from vertumnus.cli.options import TraceOptions, force_option, json_option, trace_options
from vertumnus.cli.output import note, print_json, print_table, warn


@click.command()
@trace_options
@click.option(
    "--window", "window_s", type=float, help="Seconds of a window over time (default: a round 48th).", metavar="S"
)
@click.option("--cache-blocks", type=int, help="Blocks of the finite cache (default: about a node's).", metavar="N")
@click.option(
    "--long", "long_tokens", type=int, help="Longer requests count as long (default 32768).", metavar="TOKENS"
)
@click.option("--plot", help="Write the figure page to FILE (.png, .svg or .pdf).", metavar="FILE")
@force_option
@json_option
def command(
    source: TraceOptions,
    window_s: float | None,
    cache_blocks: int | None,
    long_tokens: int | None,
    plot: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Show what the traffic of TRACE is like: long requests, arrival rate and prefix reuse over time, and lengths.

    \b
    vertumnus analyze trace.jsonl.gz --plot traffic.png
    """
    from vertumnus.workload.analysis import LONG_TOKENS, analyze
    from vertumnus.workload.plot_path import check_plot_path

    if plot is not None:
        check_plot_path(plot, force=force)
    (trace,) = source.read()
    warn(trace.warnings)
    analysis = analyze(
        trace,
        window_s=window_s,
        cache_blocks=cache_blocks,
        long_tokens=LONG_TOKENS if long_tokens is None else long_tokens,
    )
    if plot is not None:
        from vertumnus.workload.analysis_plot import plot as write_page

        write_page(analysis, plot, force=force)
        note(f"plot: {plot}")
    if as_json:
        print_json(analysis.to_json())
    else:
        print_table(trace.name, ("figure", "value"), analysis.rows())
