"""`vertumnus reproduce`: the paper's evaluation, and what goes past it, into one report."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from vertumnus.cli.options import force_option, json_option, seed_option
from vertumnus.cli.output import note, print_json
from vertumnus.errors import ConfigError

RECORDS = "benchmarks/results"
"""Measured records beside which the simulated figures are shown, where the working directory has them."""


@click.command()
@click.option("-o", "--output", required=True, help="Folder of the report and the tables; goes on where it ended.")
@click.option("--trace", help="The conversation trace, recorded (default: a synthesised one).", metavar="FILE")
@click.option(
    "--other", "others", multiple=True, help="A further trace, never used for tuning. Repeatable.", metavar="FILE"
)
@click.option("--only", help="These experiments alone.", metavar="NAME,...")
@click.option("--full", is_flag=True, help="Everything, in hours instead of half an hour.")
@click.option("--scale", type=click.Choice(["tiny", "default", "full"]), help="Size of the run; tiny is for tests.")
@click.option("-j", "--jobs", type=click.IntRange(1), default=2, show_default=True, help="Processes.", metavar="N")
@seed_option
@force_option
@json_option
def command(
    output: str,
    trace: str | None,
    others: tuple[str, ...],
    only: str | None,
    full: bool,
    scale: str | None,
    jobs: int,
    seed: int,
    force: bool,
    as_json: bool,
) -> None:
    """Run the experiments of the paper, and those past it, and write report.html and CSV tables into a folder.

    \b
    vertumnus reproduce -o out/reproduction
    vertumnus reproduce -o out/reproduction --trace conversation_trace.jsonl.gz --only fig7,fig14
    """
    from vertumnus.reproduction.catalogue import chosen
    from vertumnus.reproduction.run import reproduce
    from vertumnus.reproduction.scale import SCALES
    from vertumnus.workload.readers import read_trace

    if full and scale not in (None, "full"):
        raise ConfigError(f"scale is {scale!r} beside --full; accepted: one of the two")
    size = "full" if full else scale or "default"
    experiments = chosen(only)
    conversation = None if trace is None else read_trace(trace, seed=seed)
    named = {Path(path).name.split(".")[0]: read_trace(path, seed=seed) for path in others}
    is_terminal = sys.stderr.isatty()

    def show(done: int, total: int) -> None:
        if is_terminal:
            click.echo(f"\r  {done}/{total} cells " + "\n" * (done == total), err=True, nl=False)

    path = reproduce(
        experiments,
        Path(output),
        scale=SCALES[size],
        conversation=conversation,
        others=named,
        records=_records(),
        seed=seed,
        jobs=jobs,
        force=force,
        command=f"vertumnus reproduce --seed {seed} --scale {size}" + (f" --only {only}" if only else ""),
        say=note,
        on_cells=show,
    )
    if as_json:
        print_json({"report": str(path), "experiments": [experiment.name for experiment in experiments]})
    else:
        click.echo(path)


def _records() -> dict[str, Any]:
    """Benchmark records of this machine's runs, by file name; of a log of samples, those of one request each."""
    from vertumnus.profiling.samples import read_samples

    folder = Path(RECORDS)
    records = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    records |= {path.name: read_samples(path).samples for path in sorted(folder.glob("*.samples.jsonl"))}
    return records
