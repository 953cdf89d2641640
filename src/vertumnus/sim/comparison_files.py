"""A comparison on paper: a table as CSV and a plot."""
import csv
from collections.abc import Sequence
from typing import Any

from vertumnus.workload.output import replacing

_NOT_IN_CSV = ("runs",)


def write_csv(entries: Sequence[dict[str, Any]], path: str, *, force: bool = False) -> None:
    """One line per entry, columns under the names of the figures; whole or not at all."""
    columns = [name for name in entries[0] if name not in _NOT_IN_CSV]
    with replacing(path, force=force) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(entries)


def check_plot_path(path: str) -> None: ...
def write_plot(entries: Sequence[dict[str, Any]], title: str, path: str, *, force: bool = False) -> None: ...
