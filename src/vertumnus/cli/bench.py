"""`vertumnus bench`: speed and memory of this program on this machine."""

from pathlib import Path
from typing import Any

import click

from vertumnus.cli.options import json_option, seed_option
from vertumnus.cli.output import note, print_json, print_table


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure this program on this machine. With --json: the environment and raw figures."""


@command.command("placement")
@click.option("--samples", type=click.IntRange(10), default=300, show_default=True, help="Placements timed per entry.")
@seed_option
@json_option
def placement(samples: int, seed: int, as_json: bool) -> None:
    """One placement, from the prompt's tokens to the reserved worker: 64 and 512 workers, 8K to 128K tokens."""
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


def _show(name: str, results: list[dict[str, Any]], as_json: bool, **options: Any) -> None:
    """Prints what was measured, with the command that repeats it; files are named without their folders."""
    from vertumnus.bench.environment import environment

    if as_json:
        given = {f"--{option}": value for option, value in options.items() if value is not None and value is not False}
        words = [flag if value is True else f"{flag} {value}" for flag, value in given.items()]
        command_line = " ".join(["vertumnus bench", name, *words])
        print_json({"bench": name, "environment": environment(command_line), "results": results})
        return
    columns = list(dict.fromkeys(key for entry in results for key in entry))
    print_table(f"bench {name}", columns, [[_cell(entry.get(column)) for column in columns] for entry in results])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
