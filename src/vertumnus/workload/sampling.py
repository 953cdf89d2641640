"""Random draws for synthesis: named streams, quantile tables, stratified uniforms, arrivals of a varying rate."""

import zlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vertumnus.workload.trace import FloatArray, IntArray

STRATUM_REQUESTS = 200
"""Requests over which stratified draws cover their distribution evenly, so that short stretches hold its shares too."""


class Streams:
    """One independent random generator per concern, from one seed: one more draw here changes nothing there."""

    def __init__(self, kind: str, seed: int) -> None:
        self._kind = kind
        self._seed = seed

    def __getitem__(self, concern: str) -> np.random.Generator:
        """The generator of a concern, at its beginning."""
        key = zlib.crc32(f"{self._kind}/{concern}".encode())
        return np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=(key,)))


@dataclass(frozen=True)
class Quantiles:
    """A distribution of token counts given by some of its quantiles, log-linear in between."""

    levels: tuple[float, ...]
    tokens: tuple[float, ...]

    @classmethod
    def of(cls, tokens_at_percent: dict[float, float]) -> "Quantiles":
        """From {percent: tokens}, which includes 0 and 100."""
        return cls(tuple(percent / 100 for percent in tokens_at_percent), tuple(tokens_at_percent.values()))

    @cached_property
    def mean_tokens(self) -> float:
        """Of every stretch between two quantiles the mean of a log-uniform variable, weighted by its probability."""
        low, high = np.array(self.tokens[:-1]), np.array(self.tokens[1:])
        log_ratio = np.log(high / low)
        means = np.where(log_ratio > 0, (high - low) / np.where(log_ratio > 0, log_ratio, 1.0), low)
        return float((means * np.diff(self.levels)).sum())

    def at(self, uniform: FloatArray) -> IntArray:
        """Whole token counts at these levels (0..1)."""
        logs = np.interp(uniform, self.levels, np.log(self.tokens))
        return np.maximum(1, np.rint(np.exp(logs))).astype(np.int64)

    def scaled_to(self, mean_tokens: float) -> "Quantiles":
        """The same shape with another mean."""
        factor = mean_tokens / self.mean_tokens
        return replace(self, tokens=tuple(value * factor for value in self.tokens))


def stratified(rng: np.random.Generator, num_draws: int) -> FloatArray:
    """Uniforms in [0, 1) of which every batch has one in each of equally many equal strata, in random order."""
    batches = []
    for start in range(0, num_draws, STRATUM_REQUESTS):
        size = min(STRATUM_REQUESTS, num_draws - start)
        batches.append((rng.permutation(size) + rng.random(size)) / size)
    return np.concatenate(batches)


def arrivals(
    rng: np.random.Generator, num_requests: int, duration_s: float, rate_times: FloatArray, rates: FloatArray
) -> FloatArray:
    """Sorted arrival times of a Poisson process of varying rate with a given number of arrivals, in whole ms from 0.

    The rate is linear between `rate_times` (fractions of the duration, from 0 to 1); only the shape of `rates` counts.
    """
    expected = np.concatenate(([0.0], np.cumsum(np.diff(rate_times) * (rates[1:] + rates[:-1]) / 2)))
    grid = np.linspace(0.0, 1.0, 4097)
    # Within a stretch the expected count is quadratic in time; a fine grid makes its inverse linear enough.
    at = np.clip(np.searchsorted(rate_times, grid, side="right") - 1, 0, len(rates) - 2)
    ahead = grid - rate_times[at]
    slope = (rates[at + 1] - rates[at]) / (rate_times[at + 1] - rate_times[at])
    cumulative = expected[at] + ahead * (rates[at] + slope * ahead / 2)
    arrival_s = np.interp(np.sort(rng.random(num_requests)) * cumulative[-1], cumulative, grid) * duration_s
    return np.asarray(np.round((arrival_s - arrival_s[0]) * 1000) / 1000)


def phased_arrivals(
    rng: np.random.Generator, num_requests: int, starts_s: FloatArray, lengths_s: FloatArray, rates: FloatArray
) -> tuple[FloatArray, IntArray]:
    """The same where the rate is constant within phases that follow each other; also the phase of each arrival."""
    expected = np.concatenate(([0.0], np.cumsum(rates * lengths_s)))
    position = np.sort(rng.random(num_requests)) * expected[-1]
    phase = np.clip(np.searchsorted(expected, position, side="right") - 1, 0, len(rates) - 1)
    arrival_s = starts_s[phase] + (position - expected[phase]) / rates[phase]
    return np.asarray(np.round((arrival_s - arrival_s[0]) * 1000) / 1000), phase
