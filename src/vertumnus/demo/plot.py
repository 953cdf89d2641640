"""The picture of a live demonstration: what the pool was, and what its clients saw."""

import os

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vertumnus.demo.live import ACTS, Story
from vertumnus.workload.output import replacing
from vertumnus.workload.plot_path import check_plot_path

DEGREE_COLOURS = {1: "#9ec5d8", 2: "#3f8fb5", 4: "#1f5a7a", 8: "#0d2c40"}
KIND_COLOURS = {act.name: colour for act, colour in zip(ACTS, ("#1f5a7a", "#c8642b", "#3f7d4e"), strict=True)}
PROBE_COLOUR = "#8a6fb0"


def plot_story(story: Story, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Writes PNG, SVG or PDF, by suffix. Raises ConfigError if the path exists without `force`."""
    check_plot_path(path, force=force)
    figure = Figure(figsize=(11.5, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    _plot_workers(top, story)
    _plot_waits(bottom, story)
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
        for at_s, _ in story.acts[1:]:
            axis.axvline(at_s, color="#888888", linewidth=0.8, linestyle=":")
    for at_s, name in story.acts:
        top.annotate(name, (at_s, 1.02), xycoords=("data", "axes fraction"), fontsize=9)
    with replacing(path, force=force) as temporary:
        figure.savefig(temporary, dpi=110)


def _plot_workers(axis: Axes, story: Story) -> None:
    """One row per rank, one colour per degree; a line between the ranks of different workers."""
    ends = [at_s for at_s, _ in story.layouts[1:]] + [story.end_s]
    for (start_s, groups), end_s in zip(story.layouts, ends, strict=True):
        for first_rank, degree in groups:
            axis.barh(
                first_rank + degree / 2 - 0.5,
                end_s - start_s,
                left=start_s,
                height=degree - 0.08,
                color=DEGREE_COLOURS[degree],
            )
    axis.set_ylabel("rank")
    axis.set_yticks(range(sum(degree for _, degree in story.layouts[0][1]) if story.layouts else 1))
    axis.invert_yaxis()
    shown = sorted({degree for _, groups in story.layouts for _, degree in groups})
    handles = [axis.barh(0, 0, color=DEGREE_COLOURS[degree], label=f"degree {degree}") for degree in shown]
    axis.legend(handles=handles, loc="lower right", ncols=len(shown), fontsize=8, framealpha=0.9)


def _plot_waits(axis: Axes, story: Story) -> None:
    for kind, colour in [*KIND_COLOURS.items(), ("probe", PROBE_COLOUR)]:
        waits = [(each.sent_s, each.ttft_s) for each in story.of(kind) if each.ttft_s is not None]
        marker, label = ("x", "the same prompt, again and again") if kind == "probe" else ("o", kind)
        axis.scatter(
            [sent_s for sent_s, _ in waits],
            [ttft_s for _, ttft_s in waits],
            s=16,
            color=colour,
            marker=marker,
            label=label,
        )
    axis.set_yscale("log")
    axis.set_xlabel("seconds")
    axis.set_ylabel("time to first token (s)")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
