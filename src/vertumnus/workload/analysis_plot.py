"""One page of figures for an analysis: the paper's three observations, lengths and cache sizes."""

import os

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vertumnus.workload.analysis import Analysis, Window
from vertumnus.workload.output import replacing
from vertumnus.workload.plot_path import check_plot_path

REQUESTS, TOKENS, IDEAL, FINITE = "#1f5a7a", "#c8642b", "#3f7d4e", "#8a6fb0"


def plot(analysis: Analysis, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Writes the figure page as PNG, SVG or PDF, by suffix. Raises ConfigError if the path exists without `force`."""
    check_plot_path(path, force=force)
    # A fixed salt and no date: equal analyses give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "vertumnus"}), replacing(path, force=force) as temporary:
        figure = _page(analysis)
        metadata = {"Date": None} if str(path).lower().endswith(".svg") else None
        figure.savefig(temporary, dpi=110, metadata=metadata)


def _page(analysis: Analysis) -> Figure:
    figure = Figure(figsize=(11.5, 9.5), layout="constrained")
    mark = ", synthesised" if analysis.synthesised else ""
    figure.suptitle(
        f"{analysis.name}{mark}: {analysis.num_requests:,} requests in {analysis.duration_s:,.0f} s", fontsize=12
    )
    axes = figure.subplots(3, 2)
    windows = [window for window in analysis.windows if window.length_s >= analysis.window_s / 2] or list(
        analysis.windows
    )
    _plot_long(axes[0][0], analysis, windows)
    _plot_rate(axes[0][1], analysis, windows)
    _plot_hits(axes[1][0], analysis, windows)
    _plot_cache_sizes(axes[1][1], analysis)
    _plot_lengths(axes[2][0], analysis)
    _plot_distances(axes[2][1], analysis)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def _time_axis(axis: Axes, analysis: Analysis, windows: list[Window]) -> list[float]:
    """Labels the time axis in minutes or hours; middles of the windows in that unit."""
    unit_s, unit = (3600.0, "hours") if analysis.duration_s > 3 * 3600 else (60.0, "minutes")
    axis.set_xlabel(f"time, {unit}")
    return [(window.start_s + window.length_s / 2) / unit_s for window in windows]


def _percent(ratios: list[float | None]) -> list[float]:
    return [float("nan") if ratio is None else 100 * ratio for ratio in ratios]


def _plot_long(axis: Axes, analysis: Analysis, windows: list[Window]) -> None:
    times = _time_axis(axis, analysis, windows)
    axis.plot(times, _percent([w.long_token_ratio for w in windows]), color=TOKENS, marker=".", label="of input tokens")
    axis.plot(times, _percent([w.long_request_ratio for w in windows]), color=REQUESTS, marker=".", label="of requests")
    axis.set_title(f"1. Share of requests longer than {analysis.long_tokens:,} tokens", fontsize=10)
    axis.set_ylabel("%")
    axis.set_ylim(bottom=0)
    axis.legend()


def _plot_rate(axis: Axes, analysis: Analysis, windows: list[Window]) -> None:
    times = _time_axis(axis, analysis, windows)
    axis.plot(times, [window.rate_per_s for window in windows], color=REQUESTS, marker=".")
    axis.axhline(analysis.mean_rate_per_s, color="#888888", linewidth=1, linestyle="--", label="mean")
    axis.set_title(f"2. Arrival rate ({analysis.window_s:g} s windows)", fontsize=10)
    axis.set_ylabel("requests/s")
    axis.set_ylim(bottom=0)
    axis.legend()


def _plot_hits(axis: Axes, analysis: Analysis, windows: list[Window]) -> None:
    axis.set_title("3. Token hit rate of a prefix cache", fontsize=10)
    if analysis.reuse is None:
        _say_unknown(axis)
        return
    times = _time_axis(axis, analysis, windows)
    ideal, finite = [w.ideal_token_hit_ratio for w in windows], [w.finite_token_hit_ratio for w in windows]
    axis.plot(times, _percent(ideal), color=IDEAL, marker=".", label="unlimited")
    axis.plot(times, _percent(finite), color=FINITE, marker=".", label=f"{analysis.reuse.cache_blocks:,} blocks")
    axis.set_ylabel("%")
    axis.set_ylim(bottom=0)
    axis.legend()


def _plot_cache_sizes(axis: Axes, analysis: Analysis) -> None:
    axis.set_title("Token hit rate by cache size", fontsize=10)
    if analysis.reuse is None:
        _say_unknown(axis)
        return
    sizes, hits = zip(*analysis.reuse.hit_by_cache_blocks, strict=True)
    axis.semilogx(sizes, [100 * hit for hit in hits], color=IDEAL, marker=".")
    axis.axvline(analysis.reuse.cache_blocks, color=FINITE, linewidth=1, linestyle="--")
    axis.set_xlabel(f"blocks of {analysis.block_tokens} tokens")
    axis.set_ylabel("%")
    axis.set_ylim(bottom=0)


def _plot_lengths(axis: Axes, analysis: Analysis) -> None:
    for lengths, color, label in ((analysis.input, REQUESTS, "input"), (analysis.output, TOKENS, "output")):
        edges = [float(1 << power) for power in range(len(lengths.histogram) + 1)]
        shares = [100 * count / analysis.num_requests for count in lengths.histogram]
        axis.stairs(shares, edges, color=color, fill=True, alpha=0.45, label=label)
    axis.set_xscale("log", base=2)
    longest = max(analysis.input.max_tokens, analysis.output.max_tokens)
    axis.set_xlim(1, 2.0 ** longest.bit_length())
    axis.set_title("Lengths (doubling bins)", fontsize=10)
    axis.set_xlabel("tokens")
    axis.set_ylabel("% of requests")
    axis.legend()


def _plot_distances(axis: Axes, analysis: Analysis) -> None:
    """Where reuse lies: the token hit that each doubling of the cache adds."""
    axis.set_title("Reuse distance", fontsize=10)
    if analysis.reuse is None:
        _say_unknown(axis)
        return
    sizes, hits = zip(*analysis.reuse.hit_by_cache_blocks, strict=True)
    gains = [100 * (hit - before) for hit, before in zip(hits, (0.0, *hits[:-1]), strict=True)]
    axis.stairs(gains, [0.5, *map(float, sizes)], color=IDEAL, fill=True, alpha=0.45)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("distinct blocks used in between")
    axis.set_ylabel("% of input tokens")


def _say_unknown(axis: Axes) -> None:
    axis.text(0.5, 0.5, "unknown: no block ids in this trace", ha="center", va="center", transform=axis.transAxes)
    axis.set_xticks([])
    axis.set_yticks([])
