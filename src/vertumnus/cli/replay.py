"""`vertumnus replay`: load for a live endpoint."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vertumnus.cli.options import FiniteRange, TraceOptions, force_option, json_option, trace_options
from vertumnus.cli.output import note, percent, print_json, print_table, seconds, warn
from vertumnus.errors import ConfigError

if TYPE_CHECKING:
    from vertumnus.replay.load import Progress

INTERRUPTED_STATUS = 130

HEADINGS = (
    "model",
    "req/s asked",
    "achieved",
    "mean TTFT s",
    "P50",
    "P90",
    "P99",
    "mean TPOT ms",
    "P99 TPOT",
    "SLO (by tokens)",
    "token hit",
    "done",
    "failed",
    "tokens/s out",
    "lag P99 ms",
    "wall s",
)


@click.command()
@trace_options
@click.option("--url", required=True, help="The endpoint, such as http://127.0.0.1:8000.", metavar="U")
@click.option("--rate", type=float, help="Rescale arrivals to a mean of R requests/s.", metavar="R")
@click.option(
    "--scale-lengths",
    type=float,
    default=1.0,
    help="Make blocks, inputs and outputs X times as long; what is shared stays.",
    metavar="X",
)
@click.option("--model", help="Name of the model (default: the one that the endpoint lists).", metavar="NAME")
@click.option("--api-key-env", help="Environment variable that holds the API key.", metavar="VAR")
@click.option("--concurrency-limit", type=click.IntRange(1), help="At most N requests under way.", metavar="N")
@click.option(
    "--warmup", type=FiniteRange(0), default=0.0, help="Leave the first S seconds out of the figures.", metavar="S"
)
@click.option(
    "--slo", default="1.0+0.0002L", show_default=True, help="TTFT target: seconds plus seconds per input token."
)
@click.option(
    "--output-tokens",
    default="trace",
    show_default=True,
    help="Tokens asked of every request, or trace.",
    metavar="N|trace",
)
@click.option(
    "--vocab", type=int, default=32_000, show_default=True, help="Prompts have token ids below N.", metavar="N"
)
@click.option("--timeout", type=FiniteRange(0), default=600.0, show_default=True, help="Of a request.", metavar="S")
@click.option("--plot", help="Write a plot to FILE (.png, .svg or .pdf).", metavar="FILE")
@click.option("--csv", help="Write a line per request to FILE as CSV.", metavar="FILE")
@force_option
@json_option
def command(
    source: TraceOptions,
    url: str,
    rate: float | None,
    scale_lengths: float,
    model: str | None,
    api_key_env: str | None,
    concurrency_limit: int | None,
    warmup: float,
    slo: str,
    output_tokens: str,
    vocab: int,
    timeout: float,
    plot: str | None,
    csv: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Send TRACE to a live OpenAI-compatible endpoint, open loop, and print what its clients saw.

    Prompts are token ids that share blocks exactly as the trace says. Ctrl-C ends the replay with the results so far
    and exit status 130.

    \b
    vertumnus replay trace.jsonl.gz --url http://127.0.0.1:8000 --rate 4
    vertumnus replay synth:toolagent --url http://127.0.0.1:8000 --limit 200 --scale-lengths 0.05 --plot ttft.png
    """
    from vertumnus.workload.output import check_writable
    from vertumnus.workload.plot_path import check_plot_path

    if plot is not None:
        check_plot_path(plot, force=force)
    if csv is not None:
        check_writable(csv, force=force)
    if plot is not None and csv is not None and Path(plot).resolve() == Path(csv).resolve():
        raise ConfigError(f"csv is {csv!r} beside plot {plot!r}; accepted: two different files")
    try:
        from vertumnus.replay.report import warnings_of
        from vertumnus.replay.run import ReplaySettings, replay
    except ModuleNotFoundError as error:
        raise ConfigError(f"replay needs the package {error.name!r}; accepted: pip install vertumnus[serve]") from None
    from vertumnus.core.slo import Slo

    settings = ReplaySettings(
        url=url,
        rate_per_s=rate,
        length_scale=scale_lengths,
        output_tokens=_output_tokens(output_tokens),
        model=model,
        api_key=_api_key(api_key_env),
        seed=source.seed,
        vocab=vocab,
        concurrency_limit=concurrency_limit,
        timeout_s=timeout,
        warmup_s=warmup,
        slo=Slo.parse(slo),
    )
    (trace,) = source.read()
    warn(trace.warnings)
    with replay_progress(trace.num_requests) as show:
        report = replay(trace, settings, on_progress=show)
    entry = report.to_json()
    warn(warnings_of(entry))
    title = f"{trace.name} at {report.endpoint.base_url}"
    if csv is not None or plot is not None:
        from vertumnus.replay.files import write_csv, write_plot

        if plot is not None:
            write_plot(report, title, plot, force=force)
            note(f"plot: {plot}")
        if csv is not None:
            write_csv(report, csv, force=force)
            note(f"table: {csv}")
    if as_json:
        print_json(
            {
                "command": "replay",
                "trace": trace.name,
                "url": report.endpoint.base_url,
                "model": report.endpoint.model,
                "settings": settings.to_json(),
                "results": [entry],
            }
        )
    else:
        print_table(title, HEADINGS, [_row(report.endpoint.model, entry)])
    if entry["interrupted"]:
        sys.exit(INTERRUPTED_STATUS)


def _output_tokens(text: str) -> int | None:
    if text == "trace":
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"output-tokens is {text!r}; accepted: a number of tokens, or trace") from None


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"api-key-env is {variable!r}; accepted: an environment variable that holds a key")
    return key


def _row(model: str, entry: dict[str, Any]) -> list[str]:
    return [
        model,
        f"{entry['rate_per_s']:.4g}",
        _number(entry["achieved_rate_per_s"]),
        *(seconds(entry[f"{name}_ttft_s"]) for name in ("mean", "p50", "p90", "p99")),
        *(_milliseconds(entry[f"{name}_tpot_s"]) for name in ("mean", "p99")),
        percent(entry["slo_attainment_ratio"]),
        percent(entry["token_hit_ratio"]),
        f"{entry['num_completed']:,}",
        f"{entry['num_failed']:,}",
        _number(entry["output_tokens_per_s"]),
        _milliseconds(entry["p99_lag_s"]),
        f"{entry['wall_s']:.1f}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _milliseconds(value_s: float | None) -> str:
    return "-" if value_s is None else f"{1000 * value_s:,.1f}"


@contextmanager
def replay_progress(num_requests: int) -> "Iterator[Callable[[Progress], None] | None]":
    """A bar on standard error with what is under way, failures and the TTFT of late; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
    # No thread of its own: it would hold up the event loop whenever it likes.
    with Bar(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("replaying", total=num_requests, state="")

        def show(progress: "Progress") -> None:
            state = f"{progress.num_sent - progress.num_ended:,} under way, {progress.num_failed:,} failed"
            if progress.mean_ttft_s is not None:
                state += f", TTFT {seconds(progress.mean_ttft_s)} s"
            bar.update(task, completed=progress.num_ended, state=state, refresh=True)

        yield show
