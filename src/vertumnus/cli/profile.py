"""`vertumnus profile`: a profile of one's own, measured here or fitted to a log."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from vertumnus.cli.options import (
    DEFAULT_PROFILE_NAME,
    SYNTH_PREFIX,
    asked_for,
    force_option,
    json_option,
    seed_option,
)
from vertumnus.cli.output import note, percent, print_json, print_table, progress, seconds
from vertumnus.errors import ConfigError, VertumnusError

if TYPE_CHECKING:
    from vertumnus.core.fit_choice import Choice
    from vertumnus.core.profile import Profile
    from vertumnus.core.slo import Slo
    from vertumnus.profiling.measure import Measured, MeasureSettings
    from vertumnus.profiling.samples import PackedStep, SampleLog
    from vertumnus.workload.trace import Trace


class ProfilingError(click.ClickException):
    """The ranks did not do what was asked of them: one sentence on standard error, exit status 1."""


@click.command()
@click.argument("model", required=False)
@click.option("-o", "--output", required=True, help="The profile to write.", metavar="FILE")
@click.option("--from-samples", help="Fit this log of (C, R, P, seconds) and measure nothing.", metavar="FILE")
@click.option(
    "--base",
    default=DEFAULT_PROFILE_NAME,
    show_default=True,
    help="With --from-samples: where everything but the coefficients comes from; with a GPU: links and the switch.",
    metavar="PROFILE",
)
@click.option("--ranks", type=click.IntRange(1, 8), default=2, show_default=True, help="Prefill ranks measured.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="cuda: one GPU, at degree 1; auto: a GPU where there is one, unless --ranks or --threads speak of ranks.",
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Default: the checkpoint's.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads of one rank.")
@click.option("--max-tokens", type=click.IntRange(256), default=4096, show_default=True, help="Longest prompt.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Samples of every cell.")
@click.option("--minutes", type=click.FloatRange(0.1), default=8.0, show_default=True, help="Time for them.")
@click.option("--kv-mib-per-rank", type=click.IntRange(1), default=512, show_default=True, help="Memory for KV blocks.")
@click.option("--samples", help="Keep the samples in FILE (default: beside the profile).", metavar="FILE")
@click.option("--resume", is_flag=True, help="Go on with the samples that are there.")
@click.option(
    "--traffic",
    help="Trace, or synth:KIND, for kappa, by a load ramp on one worker per degree.",
    metavar="TRACE",
)
@click.option(
    "--ramp",
    type=click.Choice(["simulated", "live"]),
    default="simulated",
    show_default=True,
    help="On the measured costs in seconds, or on real ranks over HTTP in two to seven minutes a degree.",
)
@click.option("--slo", default="1.0+0.0002L", show_default=True, help="TTFT target that kappa meets.")
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
    device: str,
    dtype: str | None,
    threads: int,
    max_tokens: int,
    rounds: int,
    minutes: float,
    kv_mib_per_rank: int,
    samples: str | None,
    resume: bool,
    traffic: str | None,
    ramp: str,
    slo: str,
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
    from vertumnus.core.slo import Slo
    from vertumnus.workload.output import check_writable
    from vertumnus.workload.plot_path import check_plot_path

    check_writable(output, force=force)
    if plot is not None:
        check_plot_path(plot, force=force)
    if (model is None) == (from_samples is None):
        raise ConfigError("give MODEL, to measure it here, or --from-samples FILE; accepted: one of them")
    if ramp == "live" and (model is None or traffic is None):
        raise ConfigError("ramp is 'live'; accepted: simulated, or live with MODEL and --traffic")
    name = name or Path(output).stem
    target = Slo.parse(slo)
    trace = None if traffic is None else _traffic(traffic, seed)
    if from_samples is not None:
        _check_measures_nothing()
        profile, choice, log = _fitted(Path(from_samples), base, name)
        measured, packed = None, log.packed
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
            device=_device(device),
        )
        if settings.device is not None and ramp == "live":
            raise ConfigError(
                "ramp is 'live' with a GPU; accepted: simulated, as GPUs cannot be served on yet, or --device cpu"
            )
        samples_path = Path(samples) if samples is not None else Path(output).with_suffix(".samples.jsonl")
        measured, choice, profile = _measured(settings, samples_path, resume, kv_mib_per_rank, name, force, base)
        packed = measured.packed
    if trace is not None:
        kappa_of = None
        if ramp == "live":
            assert model is not None
            kappa_of = partial(
                _live_kappa, Path(model), dtype=dtype, threads=threads, kv_mib_per_rank=kv_mib_per_rank, seed=seed
            )
        try:
            profile = _with_kappa(profile, trace, target, kappa_of)
        except VertumnusError as error:  # what was measured before stays
            write_profile(profile, output, force=force)
            raise ProfilingError(f"{error}; {output} is without kappa") from None
    write_profile(profile, output, force=force)
    if plot is not None:
        from vertumnus.profiling.plot import write_fit_plot

        write_fit_plot(choice.chosen.fit, name, plot, force=force)
        note(f"plot: {plot}")
    if as_json:
        print_json(_document(profile, choice, measured, packed))
        return
    _show(profile, choice, measured)
    note(f"profile: {output}")


def _fitted(path: Path, base: str, name: str) -> "tuple[Profile, Choice, SampleLog]":
    from vertumnus.core.fit_choice import choose_fit
    from vertumnus.core.profile import load_profile
    from vertumnus.profiling.build import profile_of_samples
    from vertumnus.profiling.samples import read_samples

    base_profile = load_profile(base)
    log = read_samples(path)
    if log.packed:
        note(f"{len(log.packed)} packed steps are compared with the fit, which takes steps of one request")
    choice = choose_fit(log.samples)
    return profile_of_samples(base_profile, choice, log.samples, name=name), choice, log


def _measured(
    settings: "MeasureSettings", samples_path: Path, resume: bool, kv_mib: int, name: str, force: bool, base: str
) -> "tuple[Measured, Choice, Profile]":
    from vertumnus.bench.environment import environment
    from vertumnus.core.fit_choice import choose_fit
    from vertumnus.core.profile import load_profile
    from vertumnus.engine.model_config import Dtype, ModelConfig
    from vertumnus.profiling.build import profile_of_measured
    from vertumnus.profiling.grid import cells_of
    from vertumnus.profiling.measure import EMPTY_LOG, measure
    from vertumnus.profiling.samples import begin_samples, resume_samples
    from vertumnus.workload.output import check_writable

    config = ModelConfig.from_folder(settings.folder)
    base_profile = load_profile(base) if settings.device is not None else None
    if settings.max_tokens > config.max_positions:
        raise ConfigError(f"max_tokens is {settings.max_tokens}; accepted: at most {config.max_positions}, the model's")
    about = environment("")
    chosen_dtype = Dtype(settings.dtype) if settings.dtype is not None else config.dtype
    setup = {
        "model": settings.folder.absolute().name,
        "dtype": chosen_dtype.value,
        "threads_per_rank": settings.threads_per_rank,
        "hardware": about["hardware"],
        "torch": about.get("torch"),
    }
    if settings.device is not None:
        setup["hardware"] = _gpu_name() if settings.device == "cuda" else settings.device
        setup["device"] = settings.device
    known = EMPTY_LOG
    check_writable(samples_path, force=force or resume)
    if resume:
        known = resume_samples(samples_path, setup)
    else:
        begin_samples(samples_path, setup)
    if settings.device is not None:
        note(f"one {setup['hardware']}: degree 1, for which it is enough; links and the switch are those of {base}")
    elif settings.num_ranks == 1:
        note("one rank: its degree 1 alone is measured")
    num_planned = len(cells_of(settings.degrees, settings.max_tokens)) * settings.num_rounds
    try:
        with progress("measuring", num_planned) as show:
            measured = asyncio.run(
                measure(settings, known=known, samples_path=samples_path, on_progress=lambda done, _: show(done))
            )
    except ConfigError:
        raise
    except VertumnusError as error:
        raise ProfilingError(f"{error}; what was measured is in {samples_path}, to go on with --resume") from None
    if measured.num_left_out:
        note(f"{measured.num_left_out} of {num_planned // settings.num_rounds} cells would have taken too long")
    choice = choose_fit(measured.samples)
    kv_bytes = config.kv_bytes_per_token(chosen_dtype)
    on_ranks = f"{about['hardware']}, {settings.threads_per_rank} thread(s) a rank"
    profile = profile_of_measured(
        measured,
        choice,
        name=name,
        model=f"{setup['model']}, {chosen_dtype.value}",
        hardware=on_ranks if settings.device is None else str(setup["hardware"]),
        kv_bytes_per_token=kv_bytes,
        kv_capacity_tokens=(measured.kv_bytes or kv_mib << 20) // kv_bytes,
        max_sequence_tokens=config.max_positions,
        base=base_profile,
    )
    return measured, choice, profile


def _check_measures_nothing() -> None:
    """Refuses what was asked of a measurement that is none: it would change nothing."""
    of_measuring = ("ranks", "device", "dtype", "threads", "max_tokens", "rounds", "minutes", "kv_mib_per_rank")
    for name in asked_for((*of_measuring, "samples", "resume")):
        value = click.get_current_context().params[name]
        raise ConfigError(f"{name} is {value!r} with --from-samples; accepted: with MODEL only")


def _device(wanted: str) -> str | None:
    """Where one model is measured alone; None: on ranks, on the processor."""
    of_ranks = asked_for(("ranks", "threads"))
    if wanted == "cuda" and of_ranks:
        values = click.get_current_context().params
        given = " and ".join(f"{name} is {values[name]}" for name in of_ranks)
        raise ConfigError(f"{given} with one GPU at degree 1; accepted: --device cpu, or none of them")
    if wanted == "cpu" or of_ranks:
        return None
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise ConfigError("device is 'cuda', which torch does not find; accepted: cpu, or auto")
    return None


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def _traffic(text: str, seed: int) -> "Trace":
    """Read before anything is measured: a wrong name costs nobody the run."""
    from vertumnus.workload.readers import read_trace
    from vertumnus.workload.synthesis import synthesise

    if text.startswith(SYNTH_PREFIX):
        return synthesise(text[len(SYNTH_PREFIX) :], seed=seed)
    return read_trace(text, seed=seed)


def _live_kappa(model: Path, trace: "Trace", profile: "Profile", slo: "Slo", **ranks: Any) -> dict[int, float]:
    from vertumnus.validation.ramp import LiveRampSettings, RealWorkers, live_kappa

    workers = RealWorkers(model=model, profile=profile, slo=slo, **ranks)
    return live_kappa(trace, profile, workers.play, LiveRampSettings(slo=slo), note)


def _with_kappa(
    profile: "Profile",
    trace: "Trace",
    slo: "Slo",
    live: "Callable[[Trace, Profile, Slo], dict[int, float]] | None",
) -> "Profile":
    """By `live`, or by a simulated ramp; the profile as it is, with a word on why, where some degree cannot serve this
    traffic.

    Requests that are longer than the model takes are left out.
    """
    import numpy as np

    from vertumnus.core.profile import Provenance, Source
    from vertumnus.sim.kappa import RampSettings, measured_kappa

    if profile.max_sequence_tokens is not None:
        # An answer takes a token or two.
        rows = np.flatnonzero(trace.input_tokens <= profile.max_sequence_tokens - 2)
        if len(rows) < 2:
            note(f"no kappa: {trace.name} has no requests that the model takes")
            return profile
        trace = trace.selected(rows)
    if live is None:
        kappa = measured_kappa(trace, profile, RampSettings(num_gpus=None, slo=slo))
    else:
        kappa = live(trace, profile, slo)
    if not all(kappa.values()):
        late = ", ".join(str(degree) for degree, value in kappa.items() if not value)
        note(f"no kappa: at degree {late} no load of {trace.name} meets {slo}")
        return profile
    source, what = (Source.ESTIMATED, "simulated") if live is None else (Source.MEASURED, "live")
    return profile.with_kappa(kappa, Provenance(source, f"{what} load ramp of one worker, {trace.name}, SLO {slo}"))


def _document(
    profile: "Profile", choice: "Choice", measured: "Measured | None", packed: "Sequence[PackedStep]"
) -> dict[str, Any]:
    chosen = choice.chosen
    document: dict[str, Any] = {
        "profile": profile.name,
        "degrees": list(profile.degrees),
        "form": chosen.form.value,
        "num_samples": choice.num_samples,
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
    if packed:
        document["packed"] = _packed(profile, packed)
    if measured is not None:
        document |= {
            "num_left_out": measured.num_left_out,
            "copies": {way.value: asdict(line) for way, line in measured.copies.items()},
            "switch_s": measured.switch_s,
        }
    if profile.kappa is not None:
        document["kappa"] = {str(degree): value for degree, value in profile.kappa.items()}
    return document


def _packed(profile: "Profile", packed: "Sequence[PackedStep]") -> list[dict[str, Any]]:
    """Median of each packed step beside what the cost model says of it, and of its requests one by one."""
    model = profile.cost_model()
    times_s: dict[tuple[int, int, int, int], list[float]] = {}
    for each in packed:
        key = (each.degree, each.num_requests, each.suffix_tokens, each.prefix_tokens)
        times_s.setdefault(key, []).append(each.seconds)
    return [
        {
            "degree": degree,
            "num_requests": count,
            "suffix_tokens": suffix,
            "prefix_tokens": prefix,
            "measured_s": median(seconds),
            "predicted_s": model.step_s([(suffix, prefix)] * count, degree),
            "one_by_one_s": count * model.prefill_s(suffix, prefix, degree),
        }
        for (degree, count, suffix, prefix), seconds in sorted(times_s.items())
    ]


def _show(profile: "Profile", choice: "Choice", measured: "Measured | None") -> None:
    print_table(
        "Forms of the cost model",
        ("form", "coefficients", "mean error", "held out", "BIC", ""),
        [
            (
                each.form.value,
                str(each.num_coefficients),
                percent(each.fit.mean_error_ratio),
                percent(each.held_out_error_ratio) if isfinite(each.held_out_error_ratio) else "no fit without",
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
        for way, rate in (
            ("inside the host", profile.intra_node_bytes_per_s),
            ("to decode", profile.decode_bytes_per_s),
        ):
            latency_s = profile.copy_latency_s if way == "inside the host" else profile.decode_latency_s
            note(f"copies {way}: {rate / 1e9:.2f} GB/s after {1e3 * latency_s:.1f} ms")
        note(f"switch {1e3 * measured.switch_s:.1f} ms")
