"""What the shadows of compositions have shown since the traffic last changed, window by window."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vertumnus.core.cost import FloatArray
from vertumnus.core.rollout import Replayed

_MAX_HALF_LIVES = 12
"""Evidence older than this weighs less than a 4,000th and is dropped, so that memory stays bounded."""


@dataclass(slots=True)
class Evidence:
    """Waiting and service of every arrival in K shadows: arrival by arrival in the first windows, then in sums.

    `wait_ratio` (`WaitRatio`) turns a shadow's waits into those of the real pool.
    """

    fine_windows: int
    half_life_windows: float
    counts: list[int] = field(default_factory=list)
    """Arrivals of each window."""
    _sums_s: list[FloatArray] = field(default_factory=list)
    """Per window, of all waits and of all services: [2, K]."""
    _fine: list[Replayed] = field(default_factory=list)
    """Of the same windows, as long as these are few; then empty."""

    def add(self, replayed: Replayed) -> None:
        """One more window, of one arrival or more."""
        if len(self.counts) < self.fine_windows:
            self._fine.append(replayed)
        else:
            self._fine.clear()
        self._sums_s.append(np.stack((replayed.wait_s.sum(axis=0), replayed.service_s.sum(axis=0))))
        self.counts.append(len(replayed.wait_s))
        if len(self.counts) > max(_MAX_HALF_LIVES * self.half_life_windows, 1):
            del self.counts[0], self._sums_s[0], self._fine[:1]

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all shadows but these."""
        self._sums_s = [sums[:, rows] for sums in self._sums_s]
        self._fine = [Replayed(each.wait_s[:, rows], each.service_s[:, rows]) for each in self._fine]

    def clear(self) -> None:
        """Forgets everything."""
        self.counts.clear()
        self._sums_s.clear()
        self._fine.clear()

    def mean_ttft_s(self, wait_ratio: float) -> FloatArray:
        """Of all arrivals, each window weighing half as much with every half-life of its age: [K]."""
        weights = self._weights()
        mean_ttft_s: FloatArray = weights @ self._window_means_s(wait_ratio) / weights.sum()
        return mean_ttft_s

    def standard_errors_s(self, row: int, wait_ratio: float) -> FloatArray:
        """Of the difference between a shadow's mean TTFT and each other's, [K]: from the differences arrival by arrival
        at first, since a few windows say little of how much windows differ; later window by window."""
        if self._fine:
            ttft_s = np.concatenate([each.service_s + wait_ratio * each.wait_s for each in self._fine])
            return _standard_errors(ttft_s[:, row, None] - ttft_s)
        weights = self._weights()
        weights = weights / weights.sum()
        means = self._window_means_s(wait_ratio)
        differences = means[:, row, None] - means
        errors: FloatArray = np.sqrt((weights**2) @ (differences - weights @ differences) ** 2)
        return errors

    def _weights(self) -> FloatArray:
        age = np.arange(len(self.counts))[::-1]
        weights: FloatArray = np.array(self.counts) * 0.5 ** (age / self.half_life_windows)
        return weights

    def _window_means_s(self, wait_ratio: float) -> FloatArray:
        sums_s = np.array(self._sums_s)
        means: FloatArray = (wait_ratio * sums_s[:, 0] + sums_s[:, 1]) / np.array(self.counts)[:, None]
        return means


@dataclass(slots=True)
class WaitRatio:
    """How long requests really wait over how long they do in the shadow of the composition in force.

    Shadows queue in order of arrival; the pool lets short requests overtake, copies blocks and moves queued work:
    near saturation it waits a fraction of what its shadow does.
    """

    half_life_windows: float = 15.0
    prior_s: float = 10.0
    """Seconds of waiting that speak for a ratio of 1."""
    long_wait_s: float = 0.3
    """Mean wait in the shadow up to which a window counts in full: one that diverges says no more than one that
    queues."""
    _real_s: float = 0.0
    _shadow_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Between 0.1 and 1; 1 before anything was seen."""
        return min(max((self._real_s + self.prior_s) / (self._shadow_s + self.prior_s), 0.1), 1.0)

    def record(self, real_s: float, shadow_s: float, num_requests: int) -> None:
        """What the arrivals of a window waited until its end, in all: in the pool, outside of transitions, and in its
        shadow."""
        decay = 0.5 ** (1.0 / self.half_life_windows)
        weight = min(1.0, self.long_wait_s * num_requests / max(shadow_s, 1e-9))
        self._real_s = self._real_s * decay + weight * real_s
        self._shadow_s = self._shadow_s * decay + weight * shadow_s


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
