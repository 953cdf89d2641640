"""How long a KV copy takes, as a latency and a rate, for every way that one can go."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from vertumnus.engine.messages import Refusal
from vertumnus.engine.pool import RankPool
from vertumnus.serve.calibration import CalibrationFailed

COPIED_BLOCKS = (1, 4, 16, 64)
NUM_COPIES = 7
"""Of each number of blocks, each way."""


class Way(Enum):
    """From where to where."""

    INSIDE = "inside the host"
    """From prefill rank to prefill rank, memory to memory."""
    TCP = "over TCP"
    """The same over a TCP connection, as between hosts; here inside one."""
    DECODE = "to decode"
    """From a prefill rank to the decode rank, as a finished prefill is handed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLine:
    """seconds = latency_s + s_per_block * blocks, neither negative."""

    latency_s: float
    s_per_block: float

    @classmethod
    def through(cls, seconds: Mapping[int, float]) -> "CopyLine":
        """The line of least relative error through the seconds of two different numbers of blocks or more."""
        from scipy.optimize import nnls

        counts, times_s = np.array(sorted(seconds.items()), dtype=np.float64).T
        (latency_s, s_per_block), _ = nnls(np.column_stack([1 / times_s, counts / times_s]), np.ones_like(times_s))
        return cls(latency_s=float(latency_s), s_per_block=float(s_per_block))


async def time_ways(ranks: RankPool, num_prefill_ranks: int) -> dict[Way, CopyLine]:
    """A line per way, through medians; a single prefill rank copies to the decode rank. Raises CalibrationFailed."""
    decode_rank = num_prefill_ranks
    lines = {}
    for way in Way:
        destination = decode_rank if way is Way.DECODE or num_prefill_ranks == 1 else 1
        seconds: dict[int, list[float]] = {count: [] for count in COPIED_BLOCKS}
        for _ in range(NUM_COPIES):
            for count in COPIED_BLOCKS:
                slots = list(range(count))
                started_s = time.perf_counter()
                answer = await ranks.copy_blocks(0, slots, destination, slots, is_tcp=way is Way.TCP)
                if isinstance(answer, Refusal):
                    raise CalibrationFailed(f"a copy {way.value} cannot be measured: {answer.detail}")
                seconds[count].append(time.perf_counter() - started_s)
        # The first of each maps memory or opens a connection.
        lines[way] = CopyLine.through({count: statistics.median(times[1:]) for count, times in seconds.items()})
    return lines
