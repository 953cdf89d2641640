"""`vertumnus validate`: one trace through a live pool and through the simulator, side by side."""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vertumnus.cli.options import (
    DEFAULT_PROFILE_NAME,
    FiniteRange,
    TraceOptions,
    force_option,
    json_option,
    trace_options,
)
from vertumnus.cli.output import note, percent, print_json, print_table, seconds, warn
from vertumnus.cli.replay import replay_progress
from vertumnus.errors import ConfigError

if TYPE_CHECKING:
    from vertumnus.validation.run import Validation

MAX_NUM_RANKS = 256
INTERRUPTED_STATUS = 130
PROFILE_BOUND_RATIO = 0.1
"""An error of the profile at idle above this share is worth a warning: the target itself is 10%."""


class ValidationFailed(click.ClickException):
    """The live pool could not be played against: one sentence on standard error, exit status 1."""


@click.command()
@trace_options
@click.option(
    "--profile",
    help=f"Built-in profile or TOML file (default: {DEFAULT_PROFILE_NAME}; with --model measured at start).",
)
@click.option(
    "--ranks",
    "--gpus",
    "ranks",
    type=click.IntRange(1, MAX_NUM_RANKS),
    help="Prefill ranks (default: 16 stub ranks, or 2 real ones).",
)
@click.option("--model", type=click.Path(path_type=Path), help="Real ranks with the folder DIR.", metavar="DIR")
@click.option("--dtype", help="Of real ranks: float32, bfloat16 or float16 [default: the checkpoint's].")
@click.option("--composition", default="auto", show_default=True, help="COUNTxDEGREE parts such as 8x2, or auto.")
@click.option(
    "--adaptive/--fixed", "is_adaptive", default=True, show_default=True, help="Whether the controller changes it."
)
@click.option(
    "--window",
    type=FiniteRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="The controller's, in seconds.",
)
@click.option(
    "--step-tokens",
    type=click.IntRange(1),
    help="Token budget of a step (default: whole requests; real ranks: 512).",
)
@click.option("--rate", type=float, help="Rescale arrivals to a mean of R requests/s.", metavar="R")
@click.option(
    "--scale-lengths",
    type=float,
    default=1.0,
    help="Make blocks and inputs X times as long; what is shared stays.",
    metavar="X",
)
@click.option("--duration", type=FiniteRange(0, min_open=True), help="Play the first S seconds only.", metavar="S")
@click.option(
    "--warmup", type=FiniteRange(0), default=0.0, help="Leave the first S seconds out of the figures.", metavar="S"
)
@click.option("--virtual", "is_virtual", is_flag=True, help="The live pool without HTTP, on a virtual clock: seconds.")
@click.option("--plot", help="Write a plot to FILE (.png, .svg or .pdf).", metavar="FILE")
@force_option
@json_option
def command(
    source: TraceOptions,
    profile: str | None,
    ranks: int | None,
    model: Path | None,
    dtype: str | None,
    composition: str,
    is_adaptive: bool,
    window: float,
    step_tokens: int | None,
    rate: float | None,
    scale_lengths: float,
    duration: float | None,
    warmup: float,
    is_virtual: bool,
    plot: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Play TRACE through a live pool and through the simulator, and print both side by side.

    The live pool answers over HTTP and has stub ranks that take what the profile says, or real ones (--model). It takes
    as long as the trace does, and half a minute to measure what the program around the ranks adds.

    \b
    vertumnus validate trace.jsonl.gz --rate 5 --duration 240 --composition 8x2 --fixed
    vertumnus validate synth:conversation --limit 500 --virtual --plot validation.png
    vertumnus validate trace.jsonl.gz --model smollm2 --scale-lengths 0.02 --rate 0.5 --duration 180
    """
    from vertumnus.workload.plot_path import check_plot_path

    if plot is not None:
        check_plot_path(plot, force=force)
    if model is not None and is_virtual:
        raise ConfigError(f"virtual is given with model {str(model)!r}; accepted: stub ranks on a virtual clock")
    if dtype is not None and model is None:
        raise ConfigError(f"dtype is {dtype!r} without a model; accepted: with --model only")
    if warmup and duration is not None and warmup >= duration:
        raise ConfigError(f"warmup is {warmup:g}; accepted: less than duration, {duration:g}")
    _require_packages(model is not None)
    from vertumnus.validation.choice import PoolChoice
    from vertumnus.validation.live import LiveSideFailed
    from vertumnus.validation.run import as_validated, validate

    (trace,) = source.read()
    warn(trace.warnings)
    trace = as_validated(trace, rate_per_s=rate, length_scale=scale_lengths, duration_s=duration)
    choice = PoolChoice(
        profile=profile,
        num_ranks=ranks,
        composition=composition,
        controller="lookahead" if is_adaptive else None,
        window_s=window,
        step_tokens=step_tokens,
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            if model is None:
                chosen = choice.stubs(trace)
            else:
                chosen = choice.real(trace, model, dtype=dtype, folder=Path(folder), say=note)
            with replay_progress(trace.num_requests) as show:
                found = validate(
                    trace,
                    chosen,
                    seed=source.seed,
                    is_virtual=is_virtual,
                    warmup_s=warmup,
                    say=note,
                    on_progress=show,
                )
        except LiveSideFailed as error:
            raise ValidationFailed(str(error)) from None
        except KeyboardInterrupt:
            note("interrupted: half a trace says nothing")
            sys.exit(INTERRUPTED_STATUS)
    spec = chosen.spec
    entry = found.to_json()
    warn(_warnings_of(entry))
    kind = "stub ranks" if model is None else f"{model.resolve().name}, real ranks"
    title = f"{trace.name}, {spec.composition} {'adaptive' if is_adaptive else 'fixed'}, {spec.profile.name}, {kind}"
    if plot is not None:
        from vertumnus.validation.plot import write_plot

        write_plot(found.comparison, title, plot, force=force)
        note(f"plot: {plot}")
    if as_json:
        settings = spec.to_json() | {"scale_lengths": scale_lengths, "warmup_s": warmup, "seed": source.seed}
        print_json(
            {
                "command": "validate",
                "trace": trace.name,
                "mode": "virtual" if is_virtual else "http",
                "ranks": "stub" if model is None else "real",
                "settings": settings,
                "results": [entry],
            }
        )
        return
    _print(title, entry, found)


def _require_packages(has_model: bool) -> None:
    import importlib.util

    needed = ["fastapi", "uvicorn", "uvloop", "aiohttp", "tokenizers", "prometheus_client", "pydantic", "msgpack"]
    missing = [name for name in needed + ["torch"] * has_model if importlib.util.find_spec(name) is None]
    if missing:
        extras = "serve,engine" if has_model else "serve"
        raise ConfigError(f"validate needs {', '.join(missing)}; accepted: pip install vertumnus[{extras}]")


def _warnings_of(entry: dict[str, Any]) -> list[str]:
    warnings = []
    if entry["num_failed"]:
        warnings.append(f"{entry['num_failed']:,} requests were not answered live; the figures leave them out")
    ratio = entry["idle_step_ratio"]
    if ratio is not None and abs(ratio - 1) > PROFILE_BOUND_RATIO:
        warnings.append(
            f"steps took {ratio:.2f} times E_C on the idle pool: the profile is not of these ranks, or was measured "
            "while the machine had other work"
        )
    lags = entry["lags"]
    if lags is not None and lags["machine_was_slow"]:
        late = ", ".join(
            f"{label} {1000 * (lags[f'p99_{name}_s'] or 0):.1f} ms"
            for label, name in (
                ("generator's lag", "generator_lag"),
                ("its stall", "generator_stall"),
                ("pool's loop", "loop_lag"),
            )
        )
        warnings.append(f"this machine was slow (P99: {late}): part of the difference is its own")
    return warnings


def _print(title: str, entry: dict[str, Any], found: "Validation") -> None:
    rows = []
    difference = entry["difference"]
    for label, name in (("mean TTFT s", "mean"), ("P50", "p50"), ("P90", "p90"), ("P99", "p99")):
        change = difference[f"{name}_ttft_ratio"]
        sides = (seconds(entry[side][f"{name}_ttft_s"]) for side in ("live", "simulated"))
        rows.append([label, *sides, "-" if change is None else f"{change:+.1%}"])
    hits = [percent(entry[side]["token_hit_ratio"]) for side in ("live", "simulated")]
    rows.append(["token hit", *hits, f"{100 * (difference['token_hit_ratio'] or 0):+.2f} points"])
    correlation, decisions = entry["correlation"], entry["decisions"]
    rows += [
        ["correlation of log TTFT", "", "", _plain(correlation["pearson_of_log_ttft"])],
        ["rank correlation", "", "", _plain(correlation["spearman_of_ttft"])],
        ["placed at another degree", "", "", percent(decisions["other_degree_ratio"])],
        ["placed on other ranks", "", "", percent(decisions["other_ranks_ratio"])],
    ]
    rows.append(
        ["splits and merges", *(str(len(entry["compositions"][side]) - 1) for side in ("live", "simulated")), ""]
    )
    print_table(title, ("", "live", "simulated", "difference"), rows)
    if found.overheads is not None:
        each = found.overheads
        note(
            f"measured at idle: {1000 * each.request_s:.2f} ms a request and {1e6 * each.request_s_per_token:.3f} us a "
            f"token until it is placed, {1000 * each.step_s:.2f} ms a step, {1000 * each.handover_s:.2f} ms a handover"
        )
    note("within 10% and a point" if entry["within_target"] else "beyond 10% or a point")


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
