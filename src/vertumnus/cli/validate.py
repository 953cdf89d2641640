"""`vertumnus validate`: does the simulator tell the truth?"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vertumnus.cli.options import PoolOptions, TraceOptions, force_option, json_option, pool_options, trace_options
from vertumnus.cli.output import note, percent, print_json, print_table, seconds, warn
from vertumnus.errors import ConfigError

if TYPE_CHECKING:
    from vertumnus.core.profile import Profile
    from vertumnus.sim.simulate import SimulationSettings
    from vertumnus.validation.comparison import Comparison
    from vertumnus.validation.sides import Side
    from vertumnus.workload.trace import Trace

MAX_STUB_RANKS = 64
DEFAULT_STEP_TOKENS = 512
"""Of `vertumnus serve`."""


@click.command()
@trace_options
@pool_options
@click.option("--composition", default="auto", show_default=True, help="COUNTxDEGREE parts, or auto.", metavar="TEXT")
@click.option("--rate", type=float, help="Rescale arrivals to a mean of R requests/s.", metavar="R")
@click.option("--scale-lengths", type=float, default=1.0, show_default=True, help="Factor on all lengths.", metavar="X")
@click.option("--virtual", is_flag=True, help="No HTTP and no real time: the live pool on a virtual clock.")
@click.option("--model", help="A real model instead of stub ranks; --gpus is then the number of ranks.", metavar="DIR")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of the real model.")
@click.option("--plot", help="Live against simulated, to FILE (.png, .svg or .pdf).", metavar="FILE")
@force_option
@json_option
def command(
    source: TraceOptions,
    pool: PoolOptions,
    composition: str,
    rate: float | None,
    scale_lengths: float,
    virtual: bool,
    model: str | None,
    dtype: str | None,
    plot: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Play TRACE through the live pool and through the simulator, and set them side by side.

    Stub ranks that sleep as long as the profile says stand for the GPUs, behind the real router and its HTTP front
    end, in real time. With --virtual, without HTTP on a virtual clock. With --model, real ranks of a real model.

    \b
    vertumnus validate synth:conversation --gpus 16 --rate 5 --limit 1000 --virtual
    vertumnus validate synth:conversation --gpus 2 --model smollm2 --profile mine.toml --scale-lengths 0.05 --rate 0.5
    """
    from vertumnus.replay.blocks import fully_named, scaled_lengths
    from vertumnus.sim.simulate import chosen_composition
    from vertumnus.validation.comparison import Comparison, write_comparison_plot
    from vertumnus.validation.sides import as_stubs_behave, live_stubs, live_virtually, simulated, spec_of
    from vertumnus.workload.plot_path import check_plot_path

    if plot is not None:
        check_plot_path(plot, force=force)
    settings = pool.settings(composition, source.seed)
    if settings.num_gpus > MAX_STUB_RANKS:
        raise ConfigError(f"gpus is {settings.num_gpus}; accepted: at most {MAX_STUB_RANKS} for a live pool")
    if settings.failures or settings.noise_ratio or settings.report_delay_s:
        raise ConfigError("--fail, --noise and --report-delay are the simulator's alone; accepted: none of them")
    (trace,) = source.read()
    warn(trace.warnings)
    trace = scaled_lengths(fully_named(trace), scale_lengths)
    if rate is not None:
        trace = trace.rescaled(rate)
    profile = pool.load_profile()
    profile = profile if model is not None else as_stubs_behave(profile)
    settings = replace(settings, composition=chosen_composition(trace, profile, settings))
    if model is not None:
        live, profile, settings = _live_model(trace, profile, settings, model, dtype, pool.profile)
    else:
        spec = spec_of(pool.profile, profile, settings, trace.block_tokens)
        if virtual:
            live = live_virtually(trace, spec, source.seed)
        else:
            note(f"playing {trace.num_requests:,} requests in {trace.duration_s:,.0f} s")
            live = live_stubs(trace, spec, source.seed)
    comparison = Comparison(live, simulated(trace, profile, settings))
    if plot is not None:
        write_comparison_plot(comparison, f"{trace.name}, {settings.composition}", plot, force=force)
        note(f"plot: {plot}")
    document = comparison.to_json()
    if as_json:
        about = {"trace": trace.name, "profile": pool.profile, "settings": settings.to_json()}
        print_json(about | document)
        return
    _show(comparison, document, f"{trace.name}, {settings.composition} on {settings.num_gpus} ranks")


def _show(comparison: "Comparison", document: dict[str, object], title: str) -> None:
    rows = []
    for key, side in (("live", comparison.live), ("simulated", comparison.simulated)):
        figures = document[key]
        assert isinstance(figures, dict)
        ttft = [seconds(figures[f"{name}_ttft_s"]) for name in ("mean", "p50", "p90", "p99")]
        rows.append((side.name, *ttft, percent(figures["token_hit_ratio"]), str(figures["num_transitions"])))
    ratios = [f"{document[f'{name}_over_live_ratio']:.3f}" for name in ("mean", "p50", "p90", "p99")]
    rows.append(("simulated over live", *ratios, f"{document['hit_difference']:+.3f}", ""))
    print_table(title, ("pool", "mean TTFT s", "P50", "P90", "P99", "token hit", "splits + merges"), rows)
    note(
        f"{document['num_compared']} of {document['num_requests']} requests compared; correlation of log TTFT "
        f"{document['log_correlation']}, of ranks {document['rank_correlation']}"
    )


def _live_model(
    trace: "Trace",
    profile: "Profile",
    settings: "SimulationSettings",
    model: str,
    dtype: str | None,
    profile_name: str,
) -> "tuple[Side, Profile, SimulationSettings]":
    """The real ranks' side; and profile and settings as they were served with."""
    from vertumnus.engine.model_config import ModelConfig
    from vertumnus.validation.sides import live_model

    config = ModelConfig.from_folder(Path(model))
    longest = int(trace.input_tokens.max())
    if longest + 2 > config.max_positions:
        raise ConfigError(
            f"trace has a prompt of {longest:,} tokens; accepted: at most {config.max_positions - 2:,} for this model "
            "(--scale-lengths)"
        )
    settings = replace(settings, step_tokens=settings.step_tokens or DEFAULT_STEP_TOKENS)
    options = {
        "--ranks": settings.num_gpus,
        "--decode-ranks": 1,
        "--composition": settings.composition,
        "--profile": profile_name,
        "--controller": "none" if settings.is_fixed else settings.controller,
        "--window": settings.window_s,
        "--step-tokens": settings.step_tokens,
        "--block-tokens": trace.block_tokens,
        "--queue": settings.discipline.value,
        "--dtype": dtype,
    }
    given = [str(word) for flag, value in options.items() if value is not None for word in (flag, value)]
    with tempfile.TemporaryDirectory() as folder:
        side = live_model(trace, [model, *given], config.vocab_size, settings.seed, Path(folder) / "serve.log")
    return side, profile, settings
