"""A controller that lets other compositions shadow the traffic and goes where it would have been served better.

Thresholds on demand over capacity say that something is wrong, not what would be right; so far from the right
composition they are slow, and near it they fidget. Here every window's arrivals are replayed through shadows of other
compositions (`core.rollout`): the target is the one of least mean TTFT, however many operations away.

What keeps it calm: all compositions are judged on the same arrivals, over as long as the traffic has not changed, so
that evidence adds up; the gain must exceed a margin and, unless it is large, stand out from chance; and under the same
traffic no composition is entered more than twice. When the traffic changes, all compositions start anew; as evidence
comes in, those that are clearly worse are dropped, which also bounds the work.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vertumnus.core.composition import Composition
from vertumnus.core.controller import Arrivals, PoolState, Proposal, Reason, Window
from vertumnus.core.cost import CostModel, FloatArray
from vertumnus.core.rollout import Shadows
from vertumnus.core.search_space import searchable_compositions
from vertumnus.core.slices import finish
from vertumnus.core.topology import Topology
from vertumnus.errors import ConfigError

_MAX_HALF_LIVES = 12
"""Evidence older than this weighs less than a 4,000th and is dropped, so that memory stays bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadSettings:
    """Patience and memory of the controller."""

    min_gain_ratio: float = 0.05
    """Share of the predicted mean TTFT that another composition must save."""
    urgent_gain_ratio: float = 0.5
    """Gain at which a single window is reason enough."""
    min_windows: int = 2
    """Windows of the same traffic before a smaller gain counts."""
    min_requests: int = 6
    """Requests of the same traffic before it does."""
    fine_windows: int = 6
    """Up to that many, evidence is weighed request by request: a few windows say little of how much windows differ."""
    gain_sigmas: float = 4.0
    """Standard errors by which a smaller gain must stand out (what follows each other near saturation is far from
    independent)."""
    doubt_sigmas: float = 2.0
    """Standard errors by which each composition's mean TTFT counts as more than it seems, when the best is chosen."""
    half_life_windows: float = 30.0
    """Age at which a window's evidence weighs half."""
    change_sigmas: float = 5.0
    """Standard errors by which rate or work per request must differ from before to count as other traffic."""
    recent_windows: int = 6
    """Windows that are compared with all before them, beside the last one alone, to see a slower change."""
    max_shadows: int = 24
    """Compositions followed once the first window has ranked them all."""
    backlog_windows: int = 6
    """Windows after which a pool with a backlog looks at all compositions again: those followed may all be too slow."""

    def __post_init__(self) -> None:
        for name in ("min_gain_ratio", "urgent_gain_ratio"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: above 0 and below 1")
        for name in ("min_windows", "min_requests", "fine_windows", "recent_windows", "max_shadows", "backlog_windows"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        for name in ("gain_sigmas", "half_life_windows", "change_sigmas"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: above 0")
        if not self.doubt_sigmas >= 0:
            raise ConfigError(f"doubt_sigmas is {self.doubt_sigmas}; accepted: 0 or more")


@dataclass(frozen=True, slots=True)
class _Traffic:
    """One window in numbers: its length, and the sums over its arrivals of 1, w and w^2 with w = E_1(L, 0).

    Cold work, since reuse depends on what the controller does.
    """

    duration_s: float
    num_requests: int
    work_s: float
    work_squared_s2: float


@dataclass(slots=True)
class LookaheadController:
    """Proposes the composition whose shadow serves the traffic best. See the module's text."""

    cost_model: CostModel
    settings: LookaheadSettings = LookaheadSettings()
    _traffic: deque[_Traffic] = field(default_factory=lambda: deque(maxlen=180))
    _shadows: Shadows | None = None
    _ttft_sums_s: list[FloatArray] = field(default_factory=list)
    """Per window since the traffic changed, the summed TTFT of its arrivals in every shadow."""
    _fine_ttft_s: list[FloatArray] = field(default_factory=list)
    """Of the first of these windows, request by request."""
    _counts: list[int] = field(default_factory=list)
    _entered: Counter[Composition] = field(default_factory=Counter)
    _topology: Topology | None = None

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        """A target of less predicted mean TTFT, or None.

        Costs some microseconds per arrival; a window in which the traffic changed, tens of milliseconds.
        """
        has_changed = self._remember(window) or state.topology != self._topology
        current = state.composition
        arrivals = window.arrivals
        is_known = self._shadows is not None and current in self._shadows.compositions
        if has_changed:
            self._entered.clear()
        is_behind = len(state.queued) > 2 * current.num_workers and len(self._counts) >= self.settings.backlog_windows
        # An unknown composition is one that was dropped, passed through on the way; a backlog means that the first
        # window ranked too little. Neither is news of the traffic, so what was entered before still counts.
        if has_changed or not is_known or is_behind:
            self._start_anew(state)
            arrivals = _with_queued(state.queued, arrivals)
        if len(arrivals) == 0 or self._shadows is None:
            return None
        ttft_s = finish(self._shadows.replay(arrivals))
        self._ttft_sums_s.append(ttft_s.sum(axis=0))
        if len(self._counts) < self.settings.fine_windows:
            self._fine_ttft_s.append(ttft_s)
        self._counts.append(len(arrivals))
        if len(self._counts) > _MAX_HALF_LIVES * self.settings.half_life_windows:
            del self._counts[0], self._ttft_sums_s[0]
        row = self._shadows.compositions.index(current)
        mean_ttft_s = self._mean_ttft_s()
        # Under the same traffic a composition that was entered twice is not entered a third time.
        spent = [index != row and self._entered[each] >= 2 for index, each in enumerate(self._shadows.compositions)]
        best = self._best(row, np.where(spent, np.inf, mean_ttft_s))
        gain_ratio = 1.0 - float(mean_ttft_s[best] / mean_ttft_s[row])
        proposal = None
        if not state.in_transition and self._is_worth_it(row, best, gain_ratio):
            target = self._shadows.compositions[best]
            self._entered[target] += 1
            proposal = Proposal(
                target,
                (),
                Reason.BETTER_COMPOSITION,
                {
                    "mean_ttft_s": float(mean_ttft_s[row]),
                    "target_mean_ttft_s": float(mean_ttft_s[best]),
                    "num_requests": float(sum(self._counts)),
                    "num_windows": float(len(self._counts)),
                },
            )
        self._drop_hopeless(mean_ttft_s, keep=(row, best))
        return proposal

    def _best(self, row: int, mean_ttft_s: FloatArray) -> int:
        """The composition to go for. Of many that were seen on few requests, the one that looks best is mostly one that
        was lucky, so that doubt counts against each; but where the pool is far from right, any of the best will do."""
        best = int(mean_ttft_s.argmin())
        if mean_ttft_s[best] <= (1.0 - self.settings.urgent_gain_ratio) * mean_ttft_s[row]:
            return best
        return int((mean_ttft_s + self.settings.doubt_sigmas * self._standard_errors(row)).argmin())

    def use_costs(self, cost_model: CostModel) -> None:
        """Another cost model: what was learnt with the old one is forgotten."""
        self.cost_model = cost_model
        self._shadows = None
        self._traffic.clear()

    def _is_worth_it(self, row: int, best: int, gain_ratio: float) -> bool:
        settings = self.settings
        if best == row or gain_ratio < settings.min_gain_ratio:
            return False
        if gain_ratio >= settings.urgent_gain_ratio:
            return True
        if len(self._counts) < settings.min_windows or sum(self._counts) < settings.min_requests:
            return False
        return self._sigmas(row, best) >= settings.gain_sigmas

    def _weights(self) -> FloatArray:
        """What each window's evidence weighs: its arrivals, halved with every half-life of age."""
        age = np.arange(len(self._counts))[::-1]
        weights: FloatArray = np.array(self._counts) * 0.5 ** (age / self.settings.half_life_windows)
        return weights

    def _mean_ttft_s(self) -> FloatArray:
        weights = self._weights()
        means = np.array(self._ttft_sums_s) / np.array(self._counts)[:, None]
        mean_ttft_s: FloatArray = weights @ means / weights.sum()
        return mean_ttft_s

    def _sigmas(self, worse: int, better: int) -> float:
        """Standard errors by which two shadows' means differ."""
        mean_ttft_s = self._mean_ttft_s()
        error_s = float(self._standard_errors(worse)[better])
        return float(mean_ttft_s[worse] - mean_ttft_s[better]) / max(error_s, 1e-12)

    def _standard_errors(self, row: int) -> FloatArray:
        """Of the difference between a shadow's mean TTFT and each other's: from the differences request by request at
        first, later window by window."""
        if len(self._counts) <= self.settings.fine_windows:
            ttft_s = np.concatenate(self._fine_ttft_s)
            return _standard_errors(ttft_s[:, row, None] - ttft_s)
        weights = self._weights()
        weights = weights / weights.sum()
        means = np.array(self._ttft_sums_s) / np.array(self._counts)[:, None]
        differences = means[:, row, None] - means
        errors: FloatArray = np.sqrt((weights**2) @ (differences - weights @ differences) ** 2)
        return errors

    def _drop_hopeless(self, mean_ttft_s: FloatArray, keep: Sequence[int]) -> None:
        """Follows the best `max_shadows` compositions only, later those alone that may still turn out best."""
        assert self._shadows is not None
        order = np.argsort(mean_ttft_s, kind="stable")[: self.settings.max_shadows].tolist()
        rows = sorted({*order, *keep})
        if len(self._counts) > self.settings.fine_windows:
            best = int(mean_ttft_s.argmin())
            hopeless = {
                row
                for row in rows
                if mean_ttft_s[row] > 1.1 * mean_ttft_s[best] and self._sigmas(row, best) > self.settings.gain_sigmas
            }
            rows = [row for row in rows if row in keep or row not in hopeless]
        if len(rows) < len(mean_ttft_s):
            self._shadows.keep(rows)
            self._ttft_sums_s = [sums[rows] for sums in self._ttft_sums_s]
            self._fine_ttft_s = [ttft_s[:, rows] for ttft_s in self._fine_ttft_s]

    def _start_anew(self, state: PoolState) -> None:
        """Shadows of everything that could be gone to; what was learnt under other traffic is forgotten."""
        self._topology = state.topology
        current = state.composition
        others = [
            each
            for each in searchable_compositions(state.topology, state.degrees)
            if each != current and state.admits(each)
        ]
        self._shadows = Shadows([current, *others], self.cost_model)
        self._ttft_sums_s.clear()
        self._fine_ttft_s.clear()
        self._counts.clear()

    def _remember(self, window: Window) -> bool:
        """Appends a window to the history of the traffic; a change (True) ends the history before it."""
        work_s = self.cost_model.for_degrees((self.cost_model.degrees[0],)).prefill_s(window.arrivals.input_tokens, 0.0)
        traffic = _Traffic(window.duration_s, len(work_s), float(work_s.sum()), float((work_s**2).sum()))
        self._traffic.append(traffic)
        history = list(self._traffic)
        for num_recent in (1, self.settings.recent_windows):
            before, recent = history[:-num_recent], history[-num_recent:]
            if before and self._differ(before, recent):
                self._traffic.clear()
                self._traffic.extend(recent)
                return True
        return False

    def _differ(self, before: Sequence[_Traffic], recent: Sequence[_Traffic]) -> bool:
        """Whether arrival rate or mean work of some windows lie outside what chance makes of those before."""
        sigmas = self.settings.change_sigmas
        duration_before_s, duration_s = (sum(each.duration_s for each in part) for part in (before, recent))
        num_before, num_recent = (sum(each.num_requests for each in part) for part in (before, recent))
        scale = duration_s / duration_before_s
        # Both counts are Poisson: the variance of the scaled difference is the sum of both.
        if abs(num_recent - num_before * scale) > sigmas * np.sqrt(num_recent + num_before * scale**2 + 1):
            return True
        if num_before < 2 or num_recent < 2:
            return False
        means, errors = [], []
        for part, num_requests in ((before, num_before), (recent, num_recent)):
            mean = sum(each.work_s for each in part) / num_requests
            means.append(mean)
            errors.append((sum(each.work_squared_s2 for each in part) / num_requests - mean**2) / num_requests)
        # Requests of one length have no variance; what rounding makes of their mean is no news.
        return bool(abs(means[0] - means[1]) > sigmas * np.sqrt(max(sum(errors), 0.0)) + 1e-6 * means[0])


def _standard_errors(values: FloatArray) -> FloatArray:
    """Of the mean of each column, [n, K] -> [K], where each value depends on the one before (an AR(1) process):
    s*sqrt(k/n) with k = (1 + r)/(1 - r), r the correlation of neighbours where it is positive."""
    num_values = len(values)
    deviations = values - values.mean(axis=0)
    variance = (deviations**2).mean(axis=0)
    covariance = (deviations[1:] * deviations[:-1]).sum(axis=0) / num_values
    correlation = np.clip(covariance / np.maximum(variance, 1e-30), 0.0, 0.99)
    errors: FloatArray = np.sqrt(variance * (1.0 + correlation) / (1.0 - correlation) / num_values)
    return errors


def _with_queued(queued: Arrivals, arrivals: Arrivals) -> Arrivals:
    """What waits already, as arrivals at the instant of the first arrival, followed by the arrivals."""
    if len(queued) == 0:
        return arrivals
    start_s = float(arrivals.arrival_s[0]) if len(arrivals) else 0.0
    return Arrivals(
        arrival_s=np.concatenate((np.full(len(queued), start_s), arrivals.arrival_s)),
        input_tokens=np.concatenate((queued.input_tokens, arrivals.input_tokens)),
        prefix_tokens=np.concatenate((queued.prefix_tokens, arrivals.prefix_tokens)),
    )
