"""`vertumnus bench`: speed and memory of this program on this machine."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from vertumnus.cli.options import json_option, seed_option
from vertumnus.cli.output import note, print_json, print_table
from vertumnus.errors import ConfigError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure this program on this machine. With --json: the environment and raw figures."""


@command.command("placement")
@click.option("--samples", type=click.IntRange(10), default=300, show_default=True, help="Placements timed per entry.")
@seed_option
@json_option
def placement(samples: int, seed: int, as_json: bool) -> None:
    """One placement, from the prompt's tokens to the reserved worker: 64 and 512 workers, 8K to 128K tokens; 8K
    also under load."""
    from vertumnus.bench.placement import run

    note("building and timing; about a minute")
    _show("placement", run(seed=seed, num_samples=samples), as_json, samples=samples, seed=seed)


@command.command("trie")
@click.option("--blocks", type=click.IntRange(1000), default=1_000_000, show_default=True, help="Blocks of the index.")
@click.option("--workers", type=click.IntRange(8), default=64, show_default=True, help="Workers that hold them.")
@seed_option
@json_option
def trie(blocks: int, workers: int, seed: int, as_json: bool) -> None:
    """The prefix index: insert and remove reports, matches, scans, and bytes per block."""
    from vertumnus.bench.trie import run

    note("building and timing; about a minute")
    _show("trie", run(blocks, workers, seed), as_json, blocks=blocks, workers=workers, seed=seed)


@command.command("sim")
@click.option("--trace", help="Trace to replay (default: a synthesised conversation hour).", metavar="FILE")
@click.option("--large", is_flag=True, help="Also 200,000 and 1,000,000 requests: some minutes.")
@seed_option
@json_option
def sim(trace: str | None, large: bool, seed: int, as_json: bool) -> None:
    """The simulator: requests per second and peak memory, placement alone and everything on."""
    from vertumnus.bench.simulator import run

    note("replaying; about a minute" if not large else "replaying up to a million requests; some minutes")
    results = run(trace=trace, seed=seed, with_large=large)
    _show("sim", results, as_json, trace=trace and Path(trace).name, large=large, seed=seed)


@command.command("engine")
@click.argument("model")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="Of the ranks."
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Runs of every cell.")
@click.option("--large", is_flag=True, help="Instead: 16K and 32K tokens through two random layers of its shape.")
@click.option("--memory", is_flag=True, help="Instead: what a step takes of memory, against the formula of the docs.")
@click.option("--transformers", "with_transformers", is_flag=True, help="Also transformers' own model, same prompts.")
@json_option
def engine(
    model: str, dtype: str, rounds: int, large: bool, memory: bool, with_transformers: bool, as_json: bool
) -> None:
    """Prefill of the folder MODEL by prompt length, cached prefix and degree, and decode; one thread a rank.

    \b
    vertumnus model smollm2 -o smollm2
    vertumnus bench engine smollm2 --dtype bfloat16
    """
    _require_engine()
    from vertumnus.bench.engine import prompts_within, run, run_decode, run_large
    from vertumnus.engine.model_config import ModelConfig

    folder = Path(model)
    note("starting ranks and timing; some minutes")
    if memory:
        from vertumnus.bench.step_memory import run as run_memory

        _show(f"engine {folder.name} --dtype {dtype}", run_memory(folder, dtype=dtype), as_json, memory=True)
        return
    if large:
        results = run_large(folder, dtype=dtype, num_rounds=rounds, with_transformers=with_transformers)
    else:
        prompts = prompts_within(ModelConfig.from_folder(folder).max_positions)
        results = run(folder, dtype=dtype, prompts=prompts, num_rounds=rounds, with_transformers=with_transformers)
        results += run_decode(folder, dtype=dtype)
    options = {"rounds": rounds, "large": large, "transformers": with_transformers}
    _show(f"engine {folder.name} --dtype {dtype}", results, as_json, **options)


@command.command("switch")
@click.option("--ranks", type=click.IntRange(2), default=8, show_default=True, help="Ranks of the pool.")
@click.option("--switches", type=click.IntRange(10), default=1000, show_default=True, help="Switches timed.")
@click.option("--model", help="Folder of a model: also times the start of ranks that hold it.", metavar="DIR")
@seed_option
@json_option
def switch(ranks: int, switches: int, model: str | None, seed: int, as_json: bool) -> None:
    """Switches of a pool's groups, its start, its memory, and the loss of a rank."""
    _require_engine()
    from vertumnus.bench.switch import run

    note("starting ranks and switching; about a minute")
    results = run(seed=seed, num_switches=switches, num_ranks=ranks, model=model)
    _show("switch", results, as_json, ranks=ranks, switches=switches, model=model and Path(model).name, seed=seed)


@command.command("router")
@click.option("--seconds", type=click.IntRange(1), default=15, show_default=True, help="Length of every open loop.")
@seed_option
@json_option
def router(seconds: int, seed: int, as_json: bool) -> None:
    """The live pool and its HTTP front end over ranks that answer at once: what the router adds, and how much it takes.

    Open loops at rising rates with prompts of 4,096 token ids, then 2,000 streams open at a time.
    """
    try:
        from vertumnus.bench.router import run
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"bench router needs the package {error.name!r}; accepted: pip install vertumnus[serve]"
        ) from None
    note("starting routers and loading them; about two minutes")
    _show("router", run(seed=seed, duration_s=float(seconds)), as_json, seconds=seconds, seed=seed)


def _require_engine() -> None:
    missing = [package for package in ("torch", "safetensors", "msgpack") if find_spec(package) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}; accepted: after `pip install vertumnus[engine]`")


def _show(name: str, results: list[dict[str, Any]], as_json: bool, **options: Any) -> None:
    """Prints what was measured, with the command that repeats it; files are named without their folders."""
    from vertumnus.bench.environment import environment

    if as_json:
        given = {f"--{option}": value for option, value in options.items() if value is not None and value is not False}
        words = [flag if value is True else f"{flag} {value}" for flag, value in given.items()]
        command_line = " ".join(["vertumnus bench", name, *words])
        print_json({"bench": name, "environment": environment(command_line), "results": results})
        return
    shown = [{key: value for key, value in entry.items() if not isinstance(value, list)} for entry in results]
    columns = list(dict.fromkeys(key for entry in shown for key in entry))
    print_table(f"bench {name}", columns, [[_cell(entry.get(column)) for column in columns] for entry in shown])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
