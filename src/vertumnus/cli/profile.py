"""`vertumnus profile`: a profile of one's own, measured here or fitted to a log."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vertumnus.cli.options import DEFAULT_PROFILE_NAME, force_option, json_option, seed_option
from vertumnus.cli.output import note, percent, print_json, print_table, progress, seconds
from vertumnus.errors import ConfigError

if TYPE_CHECKING:
    from vertumnus.core.fit import PrefillSample
    from vertumnus.core.fit_choice import Choice
    from vertumnus.core.profile import Profile
    from vertumnus.profiling.measure import Measured, MeasureSettings


@click.command()
@click.argument("model", required=False)
@click.option("-o", "--output", required=True, help="The profile to write.", metavar="FILE")
@click.option("--from-samples", help="Fit this log of (C, R, P, seconds) and measure nothing.", metavar="FILE")
@click.option(
    "--base",
    default=DEFAULT_PROFILE_NAME,
    show_default=True,
    help="With --from-samples: where everything but the coefficients comes from.",
    metavar="PROFILE",
)
@click.option("--ranks", type=click.IntRange(1, 8), default=2, show_default=True, help="Prefill ranks measured.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: the checkpoint's.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of one rank.")
@click.option("--max-tokens", type=click.IntRange(256), default=4096, show_default=True, help="Longest prompt.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Samples of every cell.")
@click.option("--minutes", type=click.FloatRange(0.1), default=8.0, show_default=True, help="No new round after that.")
@click.option("--kv-mib-per-rank", type=click.IntRange(1), default=512, show_default=True, help="Memory for KV blocks.")
@click.option("--samples", help="Keep the samples in FILE (default: beside the profile).", metavar="FILE")
@click.option("--resume", is_flag=True, help="Go on with the samples that are there.")
@click.option("--traffic", help="Trace for kappa, by a simulated load ramp on the measured costs.", metavar="TRACE")
@click.option("--name", help="The profile's name (default: the file's).")
@click.option("--plot", help="Predicted against measured, to FILE (.png, .svg or .pdf).", metavar="FILE")
@seed_option
@force_option
@json_option
def command(
    model: str | None,
    output: str,
    from_samples: str | None,
    base: str,
    ranks: int,
    dtype: str | None,
    threads: int,
    max_tokens: int,
    rounds: int,
    minutes: float,
    kv_mib_per_rank: int,
    samples: str | None,
    resume: bool,
    traffic: str | None,
    name: str | None,
    plot: str | None,
    seed: int,
    force: bool,
    as_json: bool,
) -> None:
    """Measure what MODEL costs on this machine and write a profile of it.

    Queue-free prefill over a grid of degrees, suffixes and cached prefixes, copies between ranks, and switches. The
    form of the cost model is the one that the samples support.

    \b
    vertumnus profile ./smollm2 --dtype bfloat16 -o mine.toml --plot fit.png
    vertumnus profile --from-samples log.csv --base qwen3-30b-a3b-h100 -o mine.toml
    """
    from vertumnus.core.profile import write_profile
    from vertumnus.workload.output import check_writable
    from vertumnus.workload.plot_path import check_plot_path

    check_writable(output, force=force)
    if plot is not None:
        check_plot_path(plot, force=force)
    if (model is None) == (from_samples is None):
        raise ConfigError("give MODEL, to measure it here, or --from-samples FILE; accepted: one of them")
    name = name or Path(output).stem
    if from_samples is not None:
        profile, choice, found = _fitted(Path(from_samples), base, name)
        measured = None
    else:
        from vertumnus.profiling.measure import MeasureSettings

        assert model is not None
        settings = MeasureSettings(
            folder=Path(model),
            dtype=dtype,
            num_ranks=ranks,
            threads_per_rank=threads,
            max_tokens=max_tokens,
            num_rounds=rounds,
            budget_s=60 * minutes,
            seed=seed,
        )
        samples_path = Path(samples) if samples is not None else Path(output).with_suffix(".samples.jsonl")
        measured, choice, profile = _measured(settings, samples_path, resume, kv_mib_per_rank, name, force)
        found = list(measured.samples)
    if traffic is not None:
        profile = _with_kappa(profile, traffic, seed)
    write_profile(profile, output, force=force)
    if plot is not None:
        from vertumnus.profiling.plot import write_fit_plot

        write_fit_plot(choice.chosen.fit, name, plot, force=force)
        note(f"plot: {plot}")
    if as_json:
        print_json(_document(profile, choice, found, measured))
        return
    _show(profile, choice, measured)
    note(f"profile: {output}")


def _fitted(path: Path, base: str, name: str) -> "tuple[Profile, Choice, list[PrefillSample]]":
    from vertumnus.core.fit_choice import choose_fit
    from vertumnus.core.profile import load_profile
    from vertumnus.profiling.build import profile_of_samples
    from vertumnus.profiling.samples import read_samples

    base_profile = load_profile(base)
    found = read_samples(path)
    choice = choose_fit(found)
    return profile_of_samples(base_profile, choice, found, name=name), choice, found


def _measured(
    settings: "MeasureSettings", samples_path: Path, resume: bool, kv_mib: int, name: str, force: bool
) -> "tuple[Measured, Choice, Profile]":
    from vertumnus.bench.environment import environment
    from vertumnus.core.fit_choice import choose_fit
    from vertumnus.engine.model_config import Dtype, ModelConfig
    from vertumnus.profiling.build import profile_of_measured
    from vertumnus.profiling.measure import cells_of, measure
    from vertumnus.profiling.samples import read_samples
    from vertumnus.workload.output import check_writable

    config = ModelConfig.from_folder(settings.folder)
    if settings.max_tokens > config.max_positions:
        raise ConfigError(f"max_tokens is {settings.max_tokens}; accepted: at most {config.max_positions}, the model's")
    known = []
    if resume and samples_path.exists():
        known = read_samples(samples_path)
    elif samples_path.exists():
        check_writable(samples_path, force=force)
        samples_path.unlink()
    if settings.num_ranks == 1:
        note("one rank: its degree 1 alone is measured")
    num_planned = len(cells_of(settings.degrees, settings.max_tokens)) * settings.num_rounds
    with progress("measuring", num_planned) as show:
        measured = asyncio.run(
            measure(settings, known=known, samples_path=samples_path, on_progress=lambda done, _: show(done))
        )
    choice = choose_fit(measured.samples)
    dtype = Dtype(settings.dtype) if settings.dtype is not None else config.dtype
    kv_bytes = config.kv_bytes_per_token(dtype)
    about = environment("")
    profile = profile_of_measured(
        measured,
        choice,
        name=name,
        model=f"{settings.folder.absolute().name}, {dtype.value}",
        hardware=f"{about['hardware']}, {settings.threads_per_rank} thread(s) a rank",
        kv_bytes_per_token=kv_bytes,
        kv_capacity_tokens=(kv_mib << 20) // kv_bytes,
        max_sequence_tokens=config.max_positions,
    )
    return measured, choice, profile


def _with_kappa(profile: "Profile", traffic: str, seed: int) -> "Profile":
    from vertumnus.core.profile import Provenance, Source
    from vertumnus.sim.kappa import RampSettings, measured_kappa
    from vertumnus.workload.readers import read_trace

    trace = read_trace(traffic, seed=seed)
    kappa = measured_kappa(trace, profile, RampSettings(num_gpus=None))
    if not all(kappa.values()):
        late = ", ".join(str(degree) for degree, value in kappa.items() if not value)
        raise ConfigError(
            f"traffic is {trace.name!r}, of which degree {late} serves nothing in time; accepted: shorter"
        )
    return profile.with_kappa(kappa, Provenance(Source.ESTIMATED, f"simulated load ramp of one worker, {trace.name}"))


def _document(
    profile: "Profile", choice: "Choice", samples: "list[PrefillSample]", measured: "Measured | None"
) -> dict[str, Any]:
    chosen = choice.chosen
    document: dict[str, Any] = {
        "profile": profile.name,
        "degrees": list(profile.degrees),
        "form": chosen.form.value,
        "num_samples": len(samples),
        "mean_error_ratio": chosen.fit.mean_error_ratio,
        "max_error_ratio": chosen.fit.max_error_ratio,
        "forms": [
            {
                "form": each.form.value,
                "num_coefficients": each.num_coefficients,
                "mean_error_ratio": each.fit.mean_error_ratio,
                "held_out_error_ratio": each.held_out_error_ratio,
                "bic": each.bic,
            }
            for each in choice.candidates
        ],
        "cells": [
            {
                "degree": cell.degree,
                "suffix_tokens": cell.suffix_tokens,
                "prefix_tokens": cell.prefix_tokens,
                "measured_s": cell.measured_s,
                "predicted_s": cell.predicted_s,
                "error_ratio": cell.error_ratio,
            }
            for cell in chosen.fit.cells
        ],
    }
    if measured is not None:
        model = profile.cost_model()
        document |= {
            "copy_latency_s": measured.copy_latency_s,
            "copy_s_per_block": measured.copy_s_per_block,
            "switch_s": measured.switch_s,
            "packed": [
                {
                    "degree": each.degree,
                    "num_requests": each.num_requests,
                    "suffix_tokens": each.suffix_tokens,
                    "measured_s": each.seconds,
                    "predicted_s": model.step_s([(each.suffix_tokens, 0)] * each.num_requests, each.degree),
                }
                for each in measured.packed
            ],
        }
    return document


def _show(profile: "Profile", choice: "Choice", measured: "Measured | None") -> None:
    print_table(
        "Forms of the cost model",
        ("form", "coefficients", "mean error", "held out", "BIC", ""),
        [
            (
                each.form.value,
                str(each.num_coefficients),
                percent(each.fit.mean_error_ratio),
                percent(each.held_out_error_ratio),
                f"{each.bic:.0f}",
                "chosen" if each is choice.chosen else "",
            )
            for each in choice.candidates
        ],
    )
    worst = sorted(choice.chosen.fit.cells, key=lambda cell: -abs(cell.error_ratio))[:5]
    print_table(
        "The cells that it meets worst",
        ("degree", "suffix", "prefix", "measured s", "predicted s", "error"),
        [
            (
                str(cell.degree),
                f"{cell.suffix_tokens:,}",
                f"{cell.prefix_tokens:,}",
                seconds(cell.measured_s),
                seconds(cell.predicted_s),
                percent(cell.error_ratio),
            )
            for cell in worst
        ],
    )
    if measured is not None:
        rate, latency_ms = profile.intra_node_bytes_per_s / 1e9, 1e3 * measured.copy_latency_s
        note(f"copies {rate:.2f} GB/s after {latency_ms:.1f} ms; switch {1e3 * measured.switch_s:.1f} ms")
