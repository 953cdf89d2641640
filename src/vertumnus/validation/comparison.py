"""Two sides set beside each other. docs/validation.md says what every figure means."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from vertumnus.validation.side import Side, mean_composition
from vertumnus.workload.trace import FloatArray, Trace

TTFT_FIGURES = ("mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "p99_ttft_s")
TTFT_TARGET_RATIO = 0.10
"""Of mean and P90, when the pool is not saturated."""
HIT_TARGET_RATIO = 0.01
MIN_CORRELATED = 3
"""Requests below which a correlation says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Comparison:
    """A live side and a simulated one of one trace, over the requests that both answered after the warm-up."""

    trace: Trace
    live: Side
    simulated: Side
    warmup_s: float = 0.0

    @property
    def is_measured(self) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """By request."""
        answered = np.isfinite(self.live.ttft_s) & np.isfinite(self.simulated.ttft_s)
        late: np.ndarray[Any, np.dtype[np.bool_]] = answered & (self.trace.arrival_s >= self.warmup_s)
        return late

    def figures_of(self, side: Side) -> dict[str, float | None]:
        measured = self.is_measured
        return ttft_figures(side.ttft_s[measured]) | {
            "token_hit_ratio": float(
                side.cached_tokens[measured].sum() / max(1, self.trace.input_tokens[measured].sum())
            )
        }

    def to_json(self) -> dict[str, Any]:
        live, simulated = self.figures_of(self.live), self.figures_of(self.simulated)
        end_s = self.trace.duration_s
        return {
            "num_measured": int(self.is_measured.sum()),
            "live": live,
            "simulated": simulated,
            "difference": differences(live, simulated),
            "within_target": within_target(live, simulated),
            "correlation": self._correlation(),
            "decisions": self._decisions(),
            "compositions": {
                "live": _rounded(self.live.compositions),
                "simulated": _rounded(self.simulated.compositions),
                "share_of_ranks_by_degree": {
                    "live": mean_composition(self.live.compositions, end_s),
                    "simulated": mean_composition(self.simulated.compositions, end_s),
                },
            },
        }

    def _correlation(self) -> dict[str, float | None]:
        """Over requests: Pearson's of the logarithms of TTFT, and Spearman's; None where one side does not vary."""
        live, simulated = self.live.ttft_s[self.is_measured], self.simulated.ttft_s[self.is_measured]
        if len(live) < MIN_CORRELATED or min(np.ptp(np.log(live)), np.ptp(np.log(simulated))) < 1e-10:
            return {"pearson_of_log_ttft": None, "spearman_of_ttft": None}
        return {
            "pearson_of_log_ttft": float(stats.pearsonr(np.log(live), np.log(simulated)).statistic),
            "spearman_of_ttft": float(stats.spearmanr(live, simulated).statistic),
        }

    def _decisions(self) -> dict[str, Any]:
        """First placements that differ, of those that both sides made."""
        pairs = [
            (row, live, simulated)
            for row, (live, simulated) in enumerate(zip(self.live.groups, self.simulated.groups, strict=True))
            if live is not None and simulated is not None
        ]
        other_ranks = [row for row, live, simulated in pairs if live != simulated]
        other_degree = [row for row, live, simulated in pairs if live.degree != simulated.degree]
        first = other_ranks[0] if other_ranks else None
        return {
            "num_compared": len(pairs),
            "other_degree_ratio": len(other_degree) / len(pairs) if pairs else None,
            "other_ranks_ratio": len(other_ranks) / len(pairs) if pairs else None,
            "first_difference": None
            if first is None
            else {
                "request": first,
                "arrival_s": round(float(self.trace.arrival_s[first]), 3),
                "live": str(self.live.groups[first]),
                "simulated": str(self.simulated.groups[first]),
            },
        }


def ttft_figures(ttft_s: FloatArray) -> dict[str, float | None]:
    """Mean and quantiles, linear between order statistics; None of nothing."""
    if not len(ttft_s):
        return dict.fromkeys(TTFT_FIGURES)
    values = (ttft_s.mean(), *np.percentile(ttft_s, (50, 90, 99)))
    return {name: float(value) for name, value in zip(TTFT_FIGURES, values, strict=True)}


def differences(live: dict[str, float | None], simulated: dict[str, float | None]) -> dict[str, float | None]:
    """Simulated less live: of times as a share of the live one, of the hit ratio as it is."""
    found: dict[str, float | None] = {}
    for name in TTFT_FIGURES:
        ours, theirs = simulated[name], live[name]
        found[f"{name.removesuffix('_s')}_ratio"] = None if ours is None or not theirs else ours / theirs - 1
    hits = simulated["token_hit_ratio"], live["token_hit_ratio"]
    found["token_hit_ratio"] = None if None in hits else hits[0] - hits[1]  # type: ignore[operator]
    return found


def within_target(live: dict[str, float | None], simulated: dict[str, float | None]) -> bool:
    """Whether mean and P90 are within 10% and the hit ratio within a point."""
    found = differences(live, simulated)
    times = (found["mean_ttft_ratio"], found["p90_ttft_ratio"])
    hit = found["token_hit_ratio"]
    return (
        all(each is not None and abs(each) <= TTFT_TARGET_RATIO for each in times)
        and hit is not None
        and abs(hit) <= HIT_TARGET_RATIO
    )


def _rounded(compositions: tuple[tuple[float, str], ...]) -> list[dict[str, Any]]:
    return [{"s": round(at_s, 2), "composition": text} for at_s, text in compositions]
