"""A plan on paper: demand against capacity over time, and what the simulated pools would do."""

import matplotlib
from matplotlib.figure import Figure

from vertumnus.sim.plan import Plan
from vertumnus.workload.output import replacing
from vertumnus.workload.plot_path import check_plot_path

RECOMMENDED, ADAPTIVE, FEWER = "#c8642b", "#1f5a7a", "#8a6fb0"


def write_plan_plot(plan: Plan, title: str, path: str, *, force: bool = False) -> None:
    """Writes the page as PNG, SVG or PDF. Raises ConfigError as `check_plot_path` does."""
    check_plot_path(path, force=force)
    with matplotlib.rc_context({"svg.hashsalt": "vertumnus"}), replacing(path, force=force) as temporary:
        metadata = {"Date": None} if path.lower().endswith(".svg") else None
        _page(plan, title).savefig(temporary, dpi=120, metadata=metadata)


def _page(plan: Plan, title: str) -> Figure:
    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    figure.suptitle(f"{title}: {plan.composition} on {plan.num_gpus} GPUs", fontsize=11)
    left, middle, right = figure.subplots(1, 3, width_ratios=(2.2, 1, 1))
    end_s = plan.windows[-1].end_s
    unit_s, unit = (3600.0, "hours") if end_s > 3 * 3600 else (60.0, "minutes")
    edges = [window.start_s / unit_s for window in plan.windows] + [end_s / unit_s]
    colors = [RECOMMENDED, ADAPTIVE, FEWER]
    highest = 100.0
    for option, color in zip(plan.options, colors, strict=False):
        if option.role.endswith("adaptive"):
            continue  # the same composition at the start
        load = [100 * (1 - ratio) for ratio in option.headroom_ratios]
        highest = max(highest, *load)
        left.stairs(load, edges, color=color, linewidth=2, label=f"{option.num_gpus} GPUs: {option.composition}")
    left.axhline(100.0, color="#888888", linewidth=1, linestyle="--")
    left.set_ylim(0, 1.3 * highest)
    left.set_xlabel(f"time, {unit}")
    left.set_ylabel("%")
    left.set_title("Demand, as a share of the capacity", fontsize=10)
    left.legend(loc="upper left", frameon=False, fontsize=9)
    entries = [option.to_json() for option in plan.options]
    rows = list(range(len(entries)))
    names = [entry["role"].replace(", ", ",\n") for entry in entries]
    for axis, name, scale, text in (
        (middle, "mean_ttft_s", 1.0, "Mean TTFT, s"),
        (right, "slo_attainment_ratio", 100.0, "SLO attainment, %"),
    ):
        values = [scale * (entry[name] or 0.0) for entry in entries]
        axis.barh(rows, values, color=colors[: len(rows)], height=0.55)
        for row, value in zip(rows, values, strict=True):
            axis.text(value, row, f" {value:.3g}", va="center", fontsize=9)
        axis.set_xlim(0, 1.25 * max([*values, 1e-9]))
        axis.set_yticks(rows, names if axis is middle else ["" for _ in names])
        axis.invert_yaxis()
        axis.set_title(text, fontsize=10)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure
