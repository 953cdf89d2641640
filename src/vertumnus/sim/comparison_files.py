"""A comparison as CSV and as a plot: mean TTFT and SLO attainment, by rate where there are several rates."""

import csv
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vertumnus.workload.output import replacing
from vertumnus.workload.plot_path import check_plot_path

OURS = "#c8642b"
OTHERS = ("#1f5a7a", "#3f7d4e", "#8a6fb0", "#7a6a53", "#2f9c95", "#b04a6e", "#5b7db1", "#8f9a3a", "#555555", "#c9a227")
MARKERS = "osD^vPXd<>*"
COLLAPSED_RATIO = 12.0
"""The axis of TTFT ends at this multiple of the least; slower pools have collapsed and only show that they have."""

Entry = dict[str, Any]


def write_csv(entries: Sequence[Entry], path: str, *, force: bool = False) -> None:
    """One line per entry, columns under the names of the figures; whole or not at all."""
    columns = [name for name in entries[0] if name != "runs"]
    with replacing(path, force=force) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(entries)


def write_plot(entries: Sequence[Entry], title: str, path: str, *, force: bool = False) -> None:
    """Lines over the rate, or bars where all entries have one rate. Raises ConfigError as `check_plot_path` does."""
    check_plot_path(path, force=force)
    series = _series(entries)
    num_rates = len({entry["rate_per_s"] for entry in entries})
    with matplotlib.rc_context({"svg.hashsalt": "vertumnus"}), replacing(path, force=force) as temporary:
        figure = _lines(series, title) if num_rates > 1 else _bars(series, title)
        metadata = {"Date": None} if path.lower().endswith(".svg") else None
        figure.savefig(temporary, dpi=120, metadata=metadata)


def _series(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The entries by name, in order of appearance, each by rising rate."""
    several = len({entry["composition"] for entry in entries if "label" not in entry}) > 1
    series: dict[str, list[Entry]] = {}
    for entry in entries:
        name = entry.get("label") or entry["policy"]
        if several and "label" not in entry and len(_compositions_of(entries, entry)) > 1:
            name = f"{name}, {entry['composition']}"
        series.setdefault(name, []).append(entry)
    return {name: sorted(of_name, key=lambda entry: float(entry["rate_per_s"])) for name, of_name in series.items()}


def _compositions_of(entries: Sequence[Entry], like: Entry) -> set[str]:
    """The compositions that this policy was given at this rate."""
    key = like["policy"], like["rate_per_s"]
    return {entry["composition"] for entry in entries if (entry["policy"], entry["rate_per_s"]) == key}


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Warm for what begins with our own name, cold for the others."""
    others = [name for name in names if name != names[0] or not name.startswith("vertumnus")]
    colors = {name: OTHERS[index % len(OTHERS)] for index, name in enumerate(others)}
    return {name: colors.get(name, OURS) for name in names}


def _lines(series: dict[str, list[Entry]], title: str) -> Figure:
    figure = Figure(figsize=(11.5, 5.2), layout="constrained")
    figure.suptitle(title, fontsize=11)
    left, right = figure.subplots(1, 2)
    colors = _colors(list(series))
    for index, (name, entries) in enumerate(series.items()):
        rates = [entry["rate_per_s"] for entry in entries]
        style: dict[str, Any] = {
            "color": colors[name],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 5,
            "linewidth": 2.4 if colors[name] == OURS else 1.4,
            "zorder": 3 if colors[name] == OURS else 2,
        }
        left.plot(rates, [_number(entry["mean_ttft_s"]) for entry in entries], label=name, **style)
        right.plot(rates, [100 * _number(entry["slo_attainment_ratio"]) for entry in entries], **style)
    _cut_at_collapse(left, [entry for entries in series.values() for entry in entries])
    _label(left, "Mean TTFT", "seconds")
    _label(right, "SLO attainment, weighted by input tokens", "%")
    right.set_ylim(0, 102)
    for axis in (left, right):
        axis.set_xlabel("requests/s")
    figure.legend(loc="outside lower center", ncols=min(4, len(series)), frameon=False, fontsize=9)
    return figure


def _bars(series: dict[str, list[Entry]], title: str) -> Figure:
    """One bar each, its value written at its end."""
    names = list(series)
    entries = [of_name[0] for of_name in series.values()]
    figure = Figure(figsize=(11.5, 1.6 + 0.42 * len(names)), layout="constrained")
    figure.suptitle(f"{title}, {entries[0]['rate_per_s']:.4g} requests/s", fontsize=11)
    left, right = figure.subplots(1, 2, sharey=True)
    colors = list(_colors(names).values())
    rows = list(range(len(names)))
    means = [_number(entry["mean_ttft_s"]) for entry in entries]
    ratios = [100 * _number(entry["slo_attainment_ratio"]) for entry in entries]
    end = _axis_end_s(entries)
    left.barh(rows, means, color=colors, height=0.62)
    left.set_xlim(0, 1.18 * end)
    right.barh(rows, ratios, color=colors, height=0.62)
    right.set_xlim(0, 112)
    for row, mean, ratio in zip(rows, means, ratios, strict=True):
        left.text(min(mean, end), row, f" {mean:.3g}", va="center", fontsize=9)
        right.text(ratio, row, f" {ratio:.1f}", va="center", fontsize=9)
    left.set_yticks(rows, names)
    left.invert_yaxis()
    _label(left, "Mean TTFT", "")
    _label(right, "SLO attainment, weighted by input tokens", "")
    left.set_xlabel("seconds")
    right.set_xlabel("%")
    return figure


def _axis_end_s(entries: Sequence[Entry]) -> float:
    means = [entry["mean_ttft_s"] for entry in entries if entry["mean_ttft_s"] is not None]
    return min(max(means), COLLAPSED_RATIO * min(means)) if means and min(means) > 0 else 1.0


def _cut_at_collapse(axis: Axes, entries: Sequence[Entry]) -> None:
    """A pool that has collapsed leaves the picture at the top instead of flattening all the others."""
    end = _axis_end_s(entries)
    if end < max(_number(entry["mean_ttft_s"]) for entry in entries):
        axis.text(0.01, 0.99, f"beyond {end:.2g} s: collapsed", transform=axis.transAxes, va="top", fontsize=8)
    axis.set_ylim(0, 1.05 * end)


def _label(axis: Axes, title: str, unit: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_ylabel(unit)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
