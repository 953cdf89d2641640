"""What a replay found, from the client's side; `docs/replay.md` defines every figure."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from vertumnus.core.slo import Slo
from vertumnus.replay.endpoint import Endpoint
from vertumnus.replay.load import Played
from vertumnus.replay.outcome import GENERATOR, Outcome
from vertumnus.workload.reuse import block_reuse
from vertumnus.workload.trace import FloatArray, Trace

LAG_BOUND_S = 0.01
"""Of the 99th percentile of the generator's lag and of its event loop's stall; above it, it was slow."""

LOW_RATE_RATIO = 0.95
"""An achieved rate below this share of the one asked for is worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A replay and its figures. `trace` is fully named, as it was played."""

    trace: Trace
    endpoint: Endpoint
    played: Played
    slo: Slo
    warmup_s: float
    wall_s: float

    @property
    def outcomes(self) -> list[Outcome]:
        """In order of the trace."""
        return sorted(self.played.outcomes, key=lambda outcome: outcome.index)

    @property
    def measured(self) -> list[Outcome]:
        """The answers that came in full, to requests scheduled after the warm-up."""
        return [outcome for outcome in self.outcomes if outcome.is_completed and outcome.scheduled_s >= self.warmup_s]

    @property
    def generator_was_slow(self) -> bool:
        """Whether the figures may tell of the generator instead of the endpoint."""
        lags_s = np.array([outcome.lag_s for outcome in self.played.outcomes])
        late = any(len(late_s) and np.percentile(late_s, 99) > LAG_BOUND_S for late_s in (lags_s, self.played.stalls_s))
        return bool(late) or any(outcome.error == GENERATOR for outcome in self.played.outcomes)

    def to_json(self) -> dict[str, Any]:
        """The figures, under names that `simulate` uses for the same things."""
        outcomes = self.outcomes
        completed = [outcome for outcome in outcomes if outcome.is_completed]
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        measured = self.measured
        missed = [outcome for outcome in failed if outcome.scheduled_s >= self.warmup_s]
        return {
            "num_requests": self.trace.num_requests,
            "num_completed": len(completed),
            "num_failed": len(failed),
            "num_unfinished": sum(outcome.is_unfinished for outcome in outcomes),
            "num_unsent": self.trace.num_requests - len(outcomes),
            "num_measured": len(measured),
            "rate_per_s": self.trace.mean_rate_per_s,
            "achieved_rate_per_s": achieved_rate_per_s(outcomes),
            **quantiles("ttft_s", [outcome.ttft_s for outcome in measured]),
            **quantiles("tpot_s", [outcome.tpot_s for outcome in measured]),
            **quantiles("e2e_s", [outcome.e2e_s for outcome in measured]),
            "slo_attainment_ratio": self._slo_attainment_ratio(measured, missed),
            **self._hits(measured),
            "output_tokens_per_s": output_tokens_per_s(measured),
            "errors": dict(sorted(Counter(str(outcome.error) for outcome in failed).items())),
            "error_messages": dict(sorted(self.played.messages.items())),
            "num_missing_usage": sum(outcome.output_tokens is None for outcome in completed),
            "num_other_prompt_length": sum(
                outcome.prompt_tokens not in (None, outcome.input_tokens) for outcome in completed
            ),
            "max_in_flight": self.played.max_in_flight,
            "num_held_back": sum(outcome.ready_s > outcome.scheduled_s for outcome in outcomes),
            **lateness("lag_s", np.array([outcome.lag_s for outcome in outcomes])),
            **lateness("loop_stall_s", self.played.stalls_s),
            "generator_was_slow": self.generator_was_slow,
            "interrupted": self.played.is_interrupted,
            "wall_s": self.wall_s,
        }

    def _slo_attainment_ratio(self, measured: list[Outcome], missed: list[Outcome]) -> float | None:
        num_tokens = sum(outcome.input_tokens for outcome in (*measured, *missed))
        return (
            sum(outcome.input_tokens for outcome in measured if self.meets_slo(outcome)) / num_tokens
            if num_tokens
            else None
        )

    def meets_slo(self, outcome: Outcome) -> bool:
        """Whether the answer came in full and its first token in time."""
        if not outcome.is_completed or outcome.ttft_s is None:
            return False
        return outcome.ttft_s <= float(self.slo.tau_s(np.array([outcome.input_tokens], dtype=np.float64))[0])

    def _hits(self, measured: list[Outcome]) -> dict[str, float | None]:
        """The share of prompt tokens found in a cache, and what an unlimited one would have found of the same."""
        told = [outcome for outcome in measured if outcome.cached_tokens is not None]
        if not told:
            return {"token_hit_ratio": None, "ideal_token_hit_ratio": None}
        num_tokens = sum(outcome.input_tokens for outcome in told)
        reachable = block_reuse(self.trace).found_tokens(None, self.trace.num_requests)
        return {
            "token_hit_ratio": sum(outcome.cached_tokens or 0 for outcome in told) / num_tokens,
            "ideal_token_hit_ratio": float(reachable[[outcome.index for outcome in told]].sum()) / num_tokens,
        }


def quantiles(name: str, values: list[float | None]) -> dict[str, float | None]:
    """Mean, P50, P90 and P99 of the values that there are, under `mean_NAME` and so on."""
    there = [value for value in values if value is not None]
    if not there:
        return dict.fromkeys(f"{figure}_{name}" for figure in ("mean", "p50", "p90", "p99"))
    p50, p90, p99 = np.percentile(there, (50, 90, 99))
    return {
        f"mean_{name}": float(np.mean(there)),
        f"p50_{name}": float(p50),
        f"p90_{name}": float(p90),
        f"p99_{name}": float(p99),
    }


def lateness(name: str, late_s: FloatArray) -> dict[str, float | None]:
    """P50, P99 and the largest, under `p50_NAME` and so on."""
    if not len(late_s):
        return {f"p50_{name}": None, f"p99_{name}": None, f"max_{name}": None}
    p50, p99 = np.percentile(late_s, (50, 99))
    return {f"p50_{name}": float(p50), f"p99_{name}": float(p99), f"max_{name}": float(late_s.max())}


def achieved_rate_per_s(outcomes: list[Outcome]) -> float | None:
    """The reciprocal of the mean gap between requests as they went out."""
    sent_s = [outcome.sent_s for outcome in outcomes]
    if len(sent_s) < 2 or max(sent_s) <= min(sent_s):
        return None
    return (len(sent_s) - 1) / (max(sent_s) - min(sent_s))


def output_tokens_per_s(measured: list[Outcome]) -> float | None:
    """Tokens generated for the measured requests, per second from the first one sent to the last one answered."""
    told = [outcome for outcome in measured if outcome.output_tokens is not None and outcome.e2e_s is not None]
    if not told:
        return None
    length_s = max(outcome.sent_s + (outcome.e2e_s or 0) for outcome in told) - min(o.sent_s for o in told)
    return sum(outcome.output_tokens or 0 for outcome in told) / length_s if length_s > 0 else None


def warnings_of(entry: dict[str, Any]) -> list[str]:
    """What a reader of a report's figures has to know."""
    warnings = [
        f"{count:,} failed with {kind}: {entry['error_messages'][kind]}" for kind, count in entry["errors"].items()
    ]
    if entry["errors"].get(GENERATOR):
        warnings.append("this machine had no socket or port left for some requests; that is not the endpoint's failure")
    if entry["generator_was_slow"]:
        lag_ms, stall_ms = (1000 * (entry[name] or 0) for name in ("p99_lag_s", "p99_loop_stall_s"))
        warnings.append(
            f"the generator was slow (P99 of its lag {lag_ms:.1f} ms, of its event loop's stall {stall_ms:.1f} ms; "
            f"bound {1000 * LAG_BOUND_S:g} ms): the figures tell of this machine as well as of the endpoint"
        )
    if entry["num_held_back"]:
        warnings.append(f"the concurrency limit held back {entry['num_held_back']:,} requests: no open loop")
    achieved_per_s, rate_per_s = entry["achieved_rate_per_s"], entry["rate_per_s"]
    if achieved_per_s is not None and not entry["interrupted"] and achieved_per_s < LOW_RATE_RATIO * rate_per_s:
        warnings.append(f"{achieved_per_s:.4g} requests/s went out instead of {rate_per_s:.4g}")
    if entry["num_missing_usage"]:
        warnings.append(f"{entry['num_missing_usage']:,} answers had no usage: TPOT and token hit leave them out")
    if entry["num_other_prompt_length"]:
        warnings.append(f"{entry['num_other_prompt_length']:,} answers count other prompt tokens than were sent")
    if entry["interrupted"]:
        warnings.append(
            f"interrupted: {entry['num_unfinished']:,} requests were under way and {entry['num_unsent']:,} not yet sent"
        )
    return warnings
