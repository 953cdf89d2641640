"""Two sides of one trace against each other. `docs/validation.md` says how to read the figures."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from vertumnus.validation.sides import Side
from vertumnus.workload.plot_path import check_plot_path
from vertumnus.workload.trace import FloatArray, IntArray

TARGET_RATIO = 0.10
"""Of mean and P90: how far the simulator may be off while the machine is not saturated."""
TARGET_HIT = 0.01


@dataclass(frozen=True, slots=True)
class Comparison:
    """Only requests that both sides answered are compared."""

    live: Side
    simulated: Side

    @property
    def both(self) -> IntArray:
        """Rows of the requests that both sides answered."""
        answered = np.isfinite(self.live.ttft_s) & np.isfinite(self.simulated.ttft_s)
        return np.flatnonzero(answered).astype(np.int64)

    def to_json(self) -> dict[str, Any]:
        """Figures of both sides, the simulated over the live one, and how they agree request by request."""
        both = self.both
        sides = {"live": _figures(self.live, both), "simulated": _figures(self.simulated, both)}
        over = {
            f"{name}_over_live_ratio": sides["simulated"][f"{name}_ttft_s"] / sides["live"][f"{name}_ttft_s"]
            for name in ("mean", "p50", "p90", "p99")
        }
        hit_points = sides["simulated"]["token_hit_ratio"] - sides["live"]["token_hit_ratio"]
        live_s, simulated_s = self.live.ttft_s[both], self.simulated.ttft_s[both]
        is_known = self.live.degree[both] > 0
        differs = self.live.degree[both] != self.simulated.degree[both]
        return {
            "num_requests": len(self.live.ttft_s),
            "num_compared": len(both),
            **sides,
            **over,
            "hit_difference": hit_points,
            "log_correlation": _correlation(np.log(live_s), np.log(simulated_s)),
            "rank_correlation": _correlation(_ranks(live_s), _ranks(simulated_s)),
            "other_degree_ratio": float(differs[is_known].mean()) if is_known.any() else None,
            "is_within_target": bool(
                abs(over["mean_over_live_ratio"] - 1) <= TARGET_RATIO
                and abs(over["p90_over_live_ratio"] - 1) <= TARGET_RATIO
                and abs(hit_points) <= TARGET_HIT
            ),
        }


def _figures(side: Side, rows: IntArray) -> dict[str, Any]:
    ttft_s = side.ttft_s[rows]
    return {
        "mean_ttft_s": float(ttft_s.mean()),
        **{f"p{q}_ttft_s": float(np.quantile(ttft_s, q / 100)) for q in (50, 90, 99)},
        "token_hit_ratio": float(np.nansum(side.reused_tokens[rows]) / side.input_tokens[rows].sum()),
        "num_transitions": side.num_transitions,
        "num_unanswered": int(np.isnan(side.ttft_s).sum()),
        **side.lags,
    }


def _correlation(left: FloatArray, right: FloatArray) -> float | None:
    """Pearson's; None where one side does not vary."""
    if len(left) < 2 or left.std() == 0 or right.std() == 0:
        return None
    return float(np.corrcoef(left, right)[0, 1])


def _ranks(values: FloatArray) -> FloatArray:
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def write_comparison_plot(comparison: Comparison, title: str, path: str | os.PathLike[str], *, force: bool) -> None:
    """TTFT of every request live and simulated, and the distribution of both."""
    check_plot_path(path, force=force)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    both = comparison.both
    live_s, simulated_s = comparison.live.ttft_s[both], comparison.simulated.ttft_s[both]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 4.0), dpi=110)
    left.plot(live_s, simulated_s, ".", color="#0b6e4f", markersize=3, alpha=0.5)
    span = [min(live_s.min(), simulated_s.min()), max(live_s.max(), simulated_s.max())]
    left.plot(span, span, color="#999999", linewidth=1.0, zorder=0)
    left.set(xscale="log", yscale="log", xlabel="TTFT live, s", ylabel="TTFT simulated, s")
    share = np.arange(1, len(both) + 1) / len(both)
    for side, values, colour in ((comparison.live, live_s, "#c05621"), (comparison.simulated, simulated_s, "#2b6cb0")):
        right.plot(np.sort(values), share, color=colour, label=side.name)
    right.set(xscale="log", xlabel="TTFT, s", ylabel="share of requests")
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        for spine in ("top", "right"):
            axes.spines[spine].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
