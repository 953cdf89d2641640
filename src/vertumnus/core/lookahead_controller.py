"""A controller that replays recent traffic through other compositions and goes where it would have been served better.

Thresholds on demand over capacity say that something is wrong, not what would be right; so far from the right
composition they are slow, and near it they fidget. Here every window ends with a rollout (`core.rollout`) of the
recent arrivals, and of what is queued, through all compositions: the target is the one of least mean TTFT, however many
operations away.

What keeps it calm: all compositions are judged on the same arrivals; the gain must exceed a margin, a small one for
several windows in a row; the sample reaches back as long as the traffic has not changed; and a composition that was
left is not returned to while the traffic is as it was then. So under any constant load each composition is entered at
most once, and transitions come to an end.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from vertumnus.core.composition import Composition, compositions
from vertumnus.core.controller import Arrivals, PoolState, Proposal, Reason, Window
from vertumnus.core.cost import CostModel, FloatArray
from vertumnus.core.rollout import rollout_ttft_s
from vertumnus.core.topology import Topology
from vertumnus.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadSettings:
    """Patience and memory of the controller."""

    beta: float = 2.0
    lambda_: float = 0.3
    """Weights of J in the rollouts; those of the placement policy."""
    min_gain_ratio: float = 0.05
    """Share of the predicted mean TTFT that another composition must save."""
    urgent_gain_ratio: float = 0.25
    """Gain at which a single window is reason enough."""
    persistence: int = 2
    """Evaluations in a row that must promise a smaller gain."""
    calm_windows: int = 3
    """Windows between two evaluations while nothing calls for one sooner."""
    near_operations: int = 3
    """Splits and merges up to which a composition is looked at in every evaluation; farther ones only in need."""
    max_windows: int = 15
    """How far back the sample reaches at most."""
    max_requests: int = 2000
    """Most arrivals replayed."""
    change_sigmas: float = 4.0
    """Standard errors by which rate or work per request must differ from before to count as other traffic."""
    same_traffic_ratio: float = 0.15
    """Relative difference in work per second up to which traffic counts as the same."""

    def __post_init__(self) -> None:
        for name in ("min_gain_ratio", "urgent_gain_ratio"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: above 0 and below 1")
        for name in ("persistence", "calm_windows", "near_operations", "max_windows", "max_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        for name in ("change_sigmas", "same_traffic_ratio"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: above 0")


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """One window's arrivals with their work, E_1(R, P), in GPU seconds."""

    duration_s: float
    arrivals: Arrivals
    work_s: FloatArray


@dataclass(slots=True)
class LookaheadController:
    """Proposes the composition that a rollout of recent traffic likes best. See the module's text."""

    cost_model: CostModel
    settings: LookaheadSettings = LookaheadSettings()
    _samples: deque[_Sample] = field(default_factory=deque)
    _left: dict[Composition, float] = field(default_factory=dict)
    """Compositions that were left, with the work per second at that time."""
    _num_wanted: int = 0
    _num_windows_to_wait: int = 0
    _known: tuple[Topology, tuple[Composition, ...]] | None = None

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        """A target of less predicted mean TTFT, or None. Takes some 10 to 100 ms where it looks farther than near by."""
        has_changed = self._remember(window)
        sample = self._sample(state)
        self._num_windows_to_wait -= 1
        is_needed = has_changed or len(state.queued) > 2 * state.composition.num_workers
        if len(sample) == 0 or state.in_transition or (self._num_windows_to_wait > 0 and not is_needed):
            return None
        current = state.composition
        work_s_per_s = self._work_s_per_s()
        reach = None if is_needed else self.settings.near_operations
        near = self._candidates(state, work_s_per_s, reach)
        best, gain_ratio, mean_ttft_s = self._best(current, near, sample)
        if gain_ratio >= self.settings.urgent_gain_ratio and not is_needed:
            best, gain_ratio, mean_ttft_s = self._best(current, self._candidates(state, work_s_per_s, None), sample)
        if gain_ratio < self.settings.min_gain_ratio:
            self._num_wanted = 0
            self._num_windows_to_wait = self.settings.calm_windows
            return None
        self._num_wanted += 1
        is_urgent = gain_ratio >= self.settings.urgent_gain_ratio
        self._num_windows_to_wait = 1 if is_urgent else self.settings.calm_windows
        if not is_urgent and self._num_wanted < self.settings.persistence:
            return None
        self._num_wanted = 0
        self._left[current] = work_s_per_s
        return Proposal(
            best,
            (),
            Reason.BETTER_COMPOSITION,
            {
                "mean_ttft_s": mean_ttft_s,
                "target_mean_ttft_s": mean_ttft_s * (1 - gain_ratio),
                "num_requests": float(len(sample)),
                "work_s_per_s": work_s_per_s,
            },
        )

    def _best(
        self, current: Composition, others: list[Composition], sample: Arrivals
    ) -> tuple[Composition, float, float]:
        """(composition of least mean TTFT, share of the current one's mean that it saves, the current one's mean)."""
        mean_ttft_s = self._mean_ttft_s([current, *others], sample)
        best = int(mean_ttft_s.argmin())
        gain_ratio = 1.0 - float(mean_ttft_s[best] / mean_ttft_s[0])
        return [current, *others][best], gain_ratio, float(mean_ttft_s[0])

    def _remember(self, window: Window) -> bool:
        """Appends a window to the history; traffic that has changed (True) ends the history before it."""
        arrivals = window.arrivals
        work_s = self.cost_model.for_degrees((1,)).prefill_s(
            arrivals.input_tokens - arrivals.prefix_tokens, arrivals.prefix_tokens
        )
        sample = _Sample(window.duration_s, arrivals, work_s)
        has_changed = self._has_changed(sample)
        if has_changed:
            self._samples.clear()
        self._samples.append(sample)
        num_requests = sum(len(each.arrivals) for each in self._samples)
        while len(self._samples) > 1 and (
            len(self._samples) > self.settings.max_windows
            or num_requests - len(self._samples[0].arrivals) >= self.settings.max_requests
        ):
            num_requests -= len(self._samples.popleft().arrivals)
        return has_changed

    def _has_changed(self, sample: _Sample) -> bool:
        """Whether arrival rate or mean work of a window lie outside what chance makes of the history's."""
        if not self._samples:
            return False
        duration_s = sum(each.duration_s for each in self._samples)
        work_s = np.concatenate([each.work_s for each in self._samples])
        before, now = len(work_s), len(sample.work_s)
        ratio = sample.duration_s / duration_s
        # Both counts are Poisson: the variance of their (scaled) difference is the sum of both.
        if abs(now - before * ratio) > self.settings.change_sigmas * np.sqrt(now + before * ratio**2 + 1):
            return True
        if before < 2 or now < 2:
            return False
        error_s = np.sqrt(work_s.var() / before + sample.work_s.var() / now)
        return bool(abs(work_s.mean() - sample.work_s.mean()) > self.settings.change_sigmas * error_s)

    def _work_s_per_s(self) -> float:
        return float(sum(each.work_s.sum() for each in self._samples) / sum(each.duration_s for each in self._samples))

    def _may_enter(self, composition: Composition, work_s_per_s: float) -> bool:
        left_at = self._left.get(composition)
        if left_at is None:
            return True
        if abs(work_s_per_s - left_at) > self.settings.same_traffic_ratio * left_at:
            del self._left[composition]
            return True
        return False

    def _candidates(self, state: PoolState, work_s_per_s: float, reach: int | None) -> list[Composition]:
        """What could be gone to: at most `reach` operations away, and not left before under such traffic."""
        if self._known is None or self._known[0] != state.topology:
            self._known = (state.topology, compositions(state.topology, state.degrees))
        current = state.composition
        return [
            each
            for each in self._known[1]
            if each != current
            and (reach is None or _num_operations(current, each) <= reach)
            and state.admits(each)
            and self._may_enter(each, work_s_per_s)
        ]

    def _sample(self, state: PoolState) -> Arrivals:
        """Queued requests first, then the recent arrivals, all on the arrivals' clock."""
        recent = [each.arrivals for each in self._samples]
        start_s = next((float(each.arrival_s[0]) for each in recent if len(each)), 0.0)
        parts = [state.queued, *recent]
        arrival_s = np.concatenate([np.full(len(state.queued), start_s), *(each.arrival_s for each in recent)])
        last = len(state.queued) + self.settings.max_requests
        return Arrivals(
            arrival_s=arrival_s[:last],
            input_tokens=np.concatenate([each.input_tokens for each in parts])[:last],
            prefix_tokens=np.concatenate([each.prefix_tokens for each in parts])[:last],
        )

    def _mean_ttft_s(self, candidates: list[Composition], sample: Arrivals) -> FloatArray:
        rollout = rollout_ttft_s(
            candidates, sample, self.cost_model, beta=self.settings.beta, lambda_=self.settings.lambda_
        )
        while True:
            try:
                next(rollout)
            except StopIteration as finished:
                ttft_s: FloatArray = finished.value
                return ttft_s.mean(axis=0)


def _num_operations(start: Composition, end: Composition) -> int:
    """Splits and merges between two compositions by their counts alone, from the largest degree down."""
    degree = max(start.degrees[-1], end.degrees[-1])
    num_operations = splits = 0
    while degree > 1:
        # Workers of this degree that must go, those that come from splits above included.
        splits = start.count(degree) + 2 * splits - end.count(degree)
        num_operations += abs(splits)
        degree //= 2
    return num_operations
