"""When demand is counted and when the replication scan runs (Algorithms 1 and 2, driven by the control plane)."""

from collections.abc import Callable, Generator

import numpy as np

from vertumnus.core.cost import CostModel, FloatArray
from vertumnus.core.index import Match, PrefixIndex
from vertumnus.core.index.replication import PoolLoad, ReplicationSettings, ScanResult

_NEXT_SLICE_S = 0.001


class Replicator:
    """Runs one scan after another, in slices; `due_s` is when the next slice is due."""

    def __init__(self, settings: ReplicationSettings, interval_s: float) -> None:
        self.settings = settings
        self.interval_s = interval_s
        self.due_s = interval_s
        self._scan: Generator[None, None, ScanResult] | None = None

    def advance(self, index: PrefixIndex, pool: Callable[[], PoolLoad], now_s: float) -> ScanResult | None:
        """Runs the next slice of a few milliseconds; the result after the last one. A scan goes by `pool` as it is at
        its first slice."""
        if self._scan is None:
            self._scan = index.scan(self.settings, pool(), now_s)
        try:
            next(self._scan)
        except StopIteration as finished:
            self._scan = None
            self.due_s = now_s + self.interval_s
            result: ScanResult = finished.value
            return result
        self.due_s = now_s + _NEXT_SLICE_S
        return None


def record_missed(index: PrefixIndex, match: Match, input_tokens: int, degree: int, cost_model: CostModel) -> None:
    """Algorithm 1, line 2: what a request lost for want of its prefix at its preferred degree.

    missed[z, C_pref] += E(L - len(parent(z)), len(parent(z))) - E(L - len(z), len(z)) for every matched block z that
    no worker of that degree holds; a prefix never counts beyond the last block below L.
    """
    costs = cost_model.for_degrees((degree,))
    most_tokens = (input_tokens - 1) // index.block_tokens * index.block_tokens

    def marginal_benefit_s(start_block: int, end_block: int) -> FloatArray:
        prefix = np.minimum(np.arange(start_block, end_block + 1.0) * index.block_tokens, most_tokens)
        seconds = costs.prefill_s(input_tokens - prefix, prefix)
        return np.maximum(seconds[:-1] - seconds[1:], 0.0)

    index.record_missed(match, degree, marginal_benefit_s)
