"""A replay as CSV, a line per request, and as a plot: TTFT over time and its distribution, failures marked."""

import csv
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from vertumnus.replay.outcome import Outcome
from vertumnus.replay.report import Report
from vertumnus.workload.output import replacing
from vertumnus.workload.plot_path import check_plot_path

TTFT, MISSED, FAILED = "#1f5a7a", "#c8642b", "#b0203a"

COLUMNS = (
    "index",
    "scheduled_s",
    "sent_s",
    "lag_s",
    "input_tokens",
    "max_tokens",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "meets_slo",
    "error",
)


def write_csv(report: Report, path: str, *, force: bool = False) -> None:
    """One line per request that was sent, in order of the trace; empty cells where a figure is unknown."""
    with replacing(path, force=force) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for outcome in report.outcomes:
            row: dict[str, Any] = {name: getattr(outcome, name) for name in COLUMNS if hasattr(outcome, name)}
            row["meets_slo"] = int(report.meets_slo(outcome))
            row["error"] = "unfinished" if outcome.is_unfinished else outcome.error or ""
            writer.writerow({name: f"{cell:.6f}" if isinstance(cell, float) else cell for name, cell in row.items()})


def write_plot(report: Report, title: str, path: str, *, force: bool = False) -> None:
    """Raises ConfigError as `check_plot_path` does."""
    check_plot_path(path, force=force)
    with matplotlib.rc_context({"svg.hashsalt": "vertumnus"}), replacing(path, force=force) as temporary:
        figure = Figure(figsize=(11.5, 4.8), layout="constrained")
        figure.suptitle(title, fontsize=11)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _plot_over_time(left, report)
        _plot_distribution(right, [outcome.ttft_s for outcome in report.measured if outcome.ttft_s is not None])
        for axis in (left, right):
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        metadata = {"Date": None} if path.lower().endswith(".svg") else None
        figure.savefig(temporary, dpi=120, metadata=metadata)


def _plot_over_time(axis: Axes, report: Report) -> None:
    completed = [outcome for outcome in report.outcomes if outcome.is_completed]
    in_time = [outcome for outcome in completed if report.meets_slo(outcome)]
    missed = [outcome for outcome in completed if not report.meets_slo(outcome)]
    failed = [outcome for outcome in report.outcomes if outcome.error is not None]
    _scatter(axis, in_time, TTFT, "within the SLO")
    _scatter(axis, missed, MISSED, "beyond it")
    if failed:
        at_foot = axis.get_xaxis_transform()  # failures have no TTFT: a row of crosses along the foot
        times_s = [outcome.sent_s for outcome in failed]
        axis.plot(
            times_s, [0.02] * len(failed), "x", color=FAILED, markersize=6, transform=at_foot, label="failed", zorder=4
        )
    if report.warmup_s > 0:
        axis.axvspan(0, report.warmup_s, color="#888888", alpha=0.15, linewidth=0, label="warm-up")
    if completed:
        axis.set_yscale("log")
        _label_plainly(axis.yaxis)
    axis.set_title("TTFT by instant of sending", fontsize=10)
    axis.set_xlabel("s")
    axis.set_ylabel("s")
    if report.outcomes:
        axis.legend(frameon=False, fontsize=9)


def _scatter(axis: Axes, outcomes: list[Outcome], color: str, label: str) -> None:
    if outcomes:
        points = [(outcome.sent_s, outcome.ttft_s) for outcome in outcomes]
        axis.plot(*zip(*points, strict=True), ".", color=color, markersize=4, alpha=0.6, label=label)


def _plot_distribution(axis: Axes, ttft_s: list[float]) -> None:
    axis.set_title("Distribution of TTFT", fontsize=10)
    axis.set_xlabel("s")
    axis.set_ylabel("% of answers at most as late")
    axis.set_ylim(0, 101)
    if not ttft_s:
        axis.text(0.5, 0.5, "no request was answered", ha="center", va="center", transform=axis.transAxes)
        return
    rising = np.sort(ttft_s)
    axis.step(rising, 100 * np.arange(1, len(rising) + 1) / len(rising), where="post", color=TTFT)
    for quantile, height in ((0.5, 14), (0.9, 8), (0.99, 2)):
        value_s = float(np.quantile(rising, quantile))
        axis.axvline(value_s, color="#888888", linewidth=0.8, linestyle="--")
        axis.text(value_s, height, f" P{100 * quantile:.0f} {value_s:.3g} s", fontsize=8)
    axis.set_xscale("log")
    _label_plainly(axis.xaxis)


def _label_plainly(axis: Axis) -> None:
    """Ticks of a logarithmic axis as plain numbers, between the powers of ten too where there are few of those."""
    low, high = axis.get_view_interval()
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(StrMethodFormatter("{x:g}") if high < 10 * low else NullFormatter())
