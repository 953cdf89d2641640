"""A validation as a picture: every request live against simulated, the quantiles of both, and what the pools were."""

from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from vertumnus.core.composition import Composition
from vertumnus.validation.comparison import Comparison
from vertumnus.validation.side import Side
from vertumnus.workload.output import replacing
from vertumnus.workload.plot_path import check_plot_path

LIVE, SIMULATED, GREY = "#1f5a7a", "#c8642b", "#888888"
DEGREES = ("#dce9f0", "#a8c8da", "#5f95b4", "#1f5a7a")


def write_plot(comparison: Comparison, title: str, path: str, *, force: bool = False) -> None:
    """Raises ConfigError as `check_plot_path` does."""
    check_plot_path(path, force=force)
    is_adaptive = any(len(side.compositions) > 1 for side in (comparison.live, comparison.simulated))
    with matplotlib.rc_context({"svg.hashsalt": "vertumnus"}), replacing(path, force=force) as temporary:
        figure = Figure(figsize=(11.5, 7.2 if is_adaptive else 4.8), layout="constrained")
        figure.suptitle(title, fontsize=11)
        grid = figure.add_gridspec(3 if is_adaptive else 1, 2, height_ratios=(4, 1, 1) if is_adaptive else (1,))
        _scatter(figure.add_subplot(grid[0, 0]), comparison)
        _quantiles(figure.add_subplot(grid[0, 1]), comparison)
        if is_adaptive:
            for row, (name, side) in enumerate((("live", comparison.live), ("simulated", comparison.simulated)), 1):
                _compositions(figure.add_subplot(grid[row, :]), name, side, comparison.trace.duration_s)
        metadata: dict[str, Any] | None = {"Date": None} if path.lower().endswith(".svg") else None
        figure.savefig(temporary, dpi=120, metadata=metadata)


def _scatter(axis: Axes, comparison: Comparison) -> None:
    axis.set_title("TTFT of every request", fontsize=10)
    axis.set_xlabel("simulated, s")
    axis.set_ylabel("live, s")
    measured = comparison.is_measured
    live, simulated = comparison.live.ttft_s[measured], comparison.simulated.ttft_s[measured]
    if len(live):
        bounds = min(live.min(), simulated.min()) * 0.9, max(live.max(), simulated.max()) * 1.1
        axis.plot(bounds, bounds, color=GREY, linewidth=0.8, linestyle="--")
        axis.plot(simulated, live, ".", color=LIVE, markersize=4, alpha=0.5)
        axis.set_xlim(bounds)
        axis.set_ylim(bounds)
        axis.set_xscale("log")
        axis.set_yscale("log")
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_formatter(StrMethodFormatter("{x:g}"))
            each.set_minor_formatter(NullFormatter())
    _finish(axis)


def _quantiles(axis: Axes, comparison: Comparison) -> None:
    axis.set_title("Quantiles of TTFT", fontsize=10)
    axis.set_xlabel("s")
    axis.set_ylabel("% of requests at most as late")
    axis.set_ylim(0, 101)
    measured = comparison.is_measured
    styles: tuple[tuple[str, Side, dict[str, Any]], ...] = (
        ("live", comparison.live, {"color": LIVE, "linewidth": 2.4}),
        ("simulated", comparison.simulated, {"color": SIMULATED, "linewidth": 1.2}),
    )
    for name, side, style in styles:
        rising = np.sort(side.ttft_s[measured])
        if len(rising):
            label = f"{name}: mean {rising.mean():.3f} s, P90 {np.quantile(rising, 0.9):.3f} s"
            axis.step(rising, 100 * np.arange(1, len(rising) + 1) / len(rising), where="post", label=label, **style)
    if measured.any():
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.legend(frameon=False, fontsize=9, loc="lower right")
    _finish(axis)


def _compositions(axis: Axes, name: str, side: Side, end_s: float) -> None:
    """Ranks by the degree of their worker, stacked, over time."""
    times_s = [min(max(at_s, 0.0), end_s) for at_s, _ in side.compositions] + [end_s]
    counts = [dict(Composition.parse(text)) for _, text in side.compositions]
    degrees = sorted({degree for each in counts for degree in each})
    floor = np.zeros(len(times_s))
    for degree in degrees:
        ranks = np.array([degree * each.get(degree, 0) for each in [*counts, counts[-1]]], dtype=float)
        color = DEGREES[min(degree.bit_length() - 1, len(DEGREES) - 1)]
        axis.fill_between(
            times_s, floor, floor + ranks, step="post", color=color, label=f"degree {degree}", linewidth=0
        )
        floor = floor + ranks
    axis.set_ylabel(f"ranks, {name}", fontsize=9)
    axis.set_xlim(0, end_s)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    if name == "simulated":
        axis.set_xlabel("s from the first arrival")
    axis.spines[["top", "right"]].set_visible(False)


def _finish(axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
