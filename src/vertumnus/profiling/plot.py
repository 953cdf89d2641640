"""Predicted against measured prefill time of every cell, and what is left, by degree (the paper's Figure 4)."""

import os

from vertumnus.core.fit import Fit
from vertumnus.workload.output import replacing
from vertumnus.workload.plot_path import check_plot_path

_COLOURS = {1: "#c05621", 2: "#2b6cb0", 4: "#0b6e4f", 8: "#805ad5"}


def write_fit_plot(fit: Fit, title: str, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raises ConfigError unless a plot can be written there."""
    check_plot_path(path, force=force)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 4.0), dpi=110)
    for degree in sorted(fit.coefficients):
        cells = [cell for cell in fit.cells if cell.degree == degree]
        colour = _COLOURS.get(degree, "#555555")
        for is_warm, marker in ((False, "o"), (True, "^")):
            shown = [cell for cell in cells if (cell.prefix_tokens > 0) is is_warm]
            label = f"degree {degree}{', behind a prefix' if is_warm else ''}"
            measured_s = [cell.measured_s for cell in shown]
            left.plot(measured_s, [cell.predicted_s for cell in shown], marker, color=colour, label=label, markersize=5)
            right.plot(
                measured_s, [100 * cell.error_ratio for cell in shown], marker, color=colour, label=label, markersize=5
            )
    span = [min(cell.measured_s for cell in fit.cells), max(cell.measured_s for cell in fit.cells)]
    left.plot(span, span, color="#999999", linewidth=1.0, zorder=0)
    right.axhline(0.0, color="#999999", linewidth=1.0, zorder=0)
    left.set(xscale="log", yscale="log", xlabel="measured, s", ylabel="predicted, s")
    right.set(xscale="log", xlabel="measured, s", ylabel="predicted over measured, %")
    for axis in (left.xaxis, left.yaxis, right.xaxis):  # 0.1, 0.2, 0.5, 1: a decade or less has no labels otherwise
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    left.legend(fontsize=7, frameon=False)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    errors = f"mean error {fit.mean_error_ratio:.1%}, worst cell {fit.max_error_ratio:.1%}"
    figure.suptitle(f"{title}: {errors}", fontsize=10)
    figure.tight_layout()
    with replacing(path, force=force) as temporary:
        figure.savefig(temporary)
    plt.close(figure)
