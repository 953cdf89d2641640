"""From which length on a request counts as long."""

from bisect import bisect_left
from itertools import accumulate
from math import floor, log2

from vertumnus.errors import ConfigError

DEFAULT_LONG_TOKENS = 32 * 1024

_BUCKETS_PER_OCTAVE = 8
_NUM_BUCKETS = 32 * _BUCKETS_PER_OCTAVE
_FULL_HISTORY = 200.0


class LongThreshold:
    """A fixed length, or a quantile of recent traffic.

    The quantile comes from a histogram over lengths (buckets 9% wide) that halves every `half_life_windows`. That is
    far slower than a window, or the share of long requests could never change. Until some 200 requests were seen the
    fixed length holds. It changes between windows only.
    """

    def __init__(
        self,
        *,
        fixed_tokens: int = DEFAULT_LONG_TOKENS,
        quantile_ratio: float | None = None,
        half_life_windows: float = 180.0,
    ) -> None:
        if fixed_tokens < 1:
            raise ConfigError(f"fixed_tokens is {fixed_tokens}; accepted: 1 or more")
        if quantile_ratio is not None and not 0 < quantile_ratio < 1:
            raise ConfigError(f"quantile_ratio is {quantile_ratio}; accepted: above 0 and below 1, or none")
        if not half_life_windows > 0:
            raise ConfigError(f"half_life_windows is {half_life_windows}; accepted: above 0")
        self.tokens = fixed_tokens
        """Requests of more tokens than this are long."""
        self._quantile_ratio = quantile_ratio
        self._decay_ratio = 0.5 ** (1 / half_life_windows)
        self._weights = [0.0] * _NUM_BUCKETS

    def is_long(self, input_tokens: int) -> bool:
        """Whether a request of this length is long in the present window."""
        return input_tokens > self.tokens

    def add(self, input_tokens: int) -> None:
        """Counts one arrival."""
        if self._quantile_ratio is not None:
            bucket = floor(log2(max(input_tokens, 1)) * _BUCKETS_PER_OCTAVE)
            self._weights[min(bucket, _NUM_BUCKETS - 1)] += 1

    def end_window(self) -> None:
        """Ages the history by one window and sets the threshold of the next."""
        if self._quantile_ratio is None:
            return
        total = sum(self._weights)
        if total >= _FULL_HISTORY:
            self.tokens = self._quantile(self._quantile_ratio * total)
        self._weights = [weight * self._decay_ratio for weight in self._weights]

    def _quantile(self, weight_below: float) -> int:
        """Upper edge of the bucket in which this much of the weight is reached."""
        bucket = bisect_left(list(accumulate(self._weights)), weight_below)
        return floor(2 ** ((bucket + 1) / _BUCKETS_PER_OCTAVE))
