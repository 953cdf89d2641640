"""What the drawings of all experiments share."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vertumnus.reproduction.rows import Row

OURS = ("#c8642b", "#e0a03c", "#8d3b12")
OTHERS = ("#1f5a7a", "#3f7d4e", "#8a6fb0", "#7a6a53", "#2f9c95", "#b04a6e", "#5b7db1", "#8f9a3a", "#555555", "#c9a227")
FIXED = ("fixed", "local LRU")
"""What the lesser of two pools of ours is called."""

MARKERS = "osD^vPXd<>*"
COLLAPSED_RATIO = 12.0
"""An axis of seconds ends at this multiple of its least value: a pool that collapsed only shows that it has."""


def panels(title: str, num_rows: int, num_columns: int) -> tuple[Figure, list[Axes]]:
    """A figure and its axes, row by row."""
    figure = Figure(figsize=(4.1 * num_columns, 0.7 + 3.0 * num_rows), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    return figure, [axis for row in axes for axis in row]


def lines(axis: Axes, rows: Sequence[Row], x: str, y: str, by: str, *, scale: float = 1.0) -> None:
    """One line per value of column `by`, in order of appearance; what begins with our name is warm and thick."""
    series: dict[str, list[Row]] = {}
    for row in rows:
        if row[y] is not None:
            series.setdefault(str(row[by]), []).append(row)
    num_others = 0
    for index, (name, each) in enumerate(series.items()):
        style: dict[str, Any] = {"linewidth": 1.3, "zorder": 2, "color": OTHERS[num_others % len(OTHERS)]}
        if name.startswith("vertumnus"):
            kind = 0 if name.split(",")[0] == "vertumnus" else 2
            style = {"linewidth": 2.4, "zorder": 3, "color": OURS[1 if name.endswith(FIXED) else kind]}
        else:
            num_others += 1
        each = sorted(each, key=lambda row: float(row[x]))
        marker = MARKERS[index % len(MARKERS)]
        axis.plot([row[x] for row in each], [scale * row[y] for row in each], label=name, marker=marker, ms=4, **style)


def finish(axis: Axes, title: str, x: str, y: str) -> None:
    """Titles, grid and spines."""
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x, fontsize=8)
    axis.set_ylabel(y, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def cut_at_collapse(axis: Axes, values: Sequence[float | None]) -> None:
    """Ends an axis of seconds where pools have collapsed."""
    known = [value for value in values if value is not None]
    if known and min(known) > 0:
        end = min(max(known), COLLAPSED_RATIO * min(known))
        axis.set_ylim(0, 1.05 * end)
        if end < max(known):
            axis.text(0.01, 0.99, "above: collapsed", transform=axis.transAxes, va="top", fontsize=7)


def bars(title: str, values: Mapping[str, float | None], unit: str, reference: float | None = None) -> Figure:
    """Horizontal bars with their values."""
    figure = Figure(figsize=(9.0, 1.2 + 0.3 * len(values)), layout="constrained")
    axis = figure.subplots()
    names = list(values)
    numbers = [float("nan") if value is None else value for value in values.values()]
    known = [value for value in values.values() if value is not None and value > 0] or [1.0]
    end = max(known) if reference != 1.0 else min(max(known), COLLAPSED_RATIO)
    axis.barh(range(len(names)), numbers, color=[OURS[0] if n.startswith("vertumnus") else OTHERS[0] for n in names])
    start = max(-end, min([0.0, *(value for value in values.values() if value is not None)]))
    axis.set_xlim(1.15 * start, 1.15 * end)
    for row, number in enumerate(numbers):
        if number == number:
            axis.text(max(0.0, min(number, end)), row, f" {number:.3g}", va="center", fontsize=8)
    if reference is not None:
        axis.axvline(reference, color="#444444", linewidth=0.8, linestyle="--")
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    finish(axis, title, unit, "")
    return figure


def legend(figure: Figure, axis: Axes, num_columns: int = 5) -> None:
    """One legend below all panels."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=num_columns, frameon=False, fontsize=8)


def png_uri(figure: Figure) -> str:
    """The picture as a data URI, for a page that needs no other file."""
    buffer = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "vertumnus"}):
        figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
