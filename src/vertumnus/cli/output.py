"""What the verbs print: one JSON object or a table on standard output, everything else on standard error."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

PIPE_WIDTH = 180
"""Columns of a table that does not go to a terminal: wide enough that nothing is cut."""


def print_json(document: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> None:
    """A table on standard output; all but the first `num_left` columns are numbers, to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, file=sys.stdout, highlight=False)
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < num_left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def note(text: str) -> None:
    """A line for the person at the terminal, on standard error."""
    click.echo(text, err=True)


def warn(warnings: Sequence[str]) -> None:
    """What was put right in the input, on standard error."""
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Calls with how much is done move a bar on standard error; without a terminal nothing is shown."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        step = max(1, total // 200)

        def show(done: int) -> None:
            if done % step == 0 or done == total:
                bar.update(task, completed=done)

        yield show


def seconds(value: float | None) -> str:
    """Seconds as a table shows them."""
    return "-" if value is None else f"{value:,.3f}" if value < 100 else f"{value:,.0f}"


def percent(ratio: float | None) -> str:
    """A ratio as a table shows it."""
    return "-" if ratio is None else f"{ratio:.1%}"
