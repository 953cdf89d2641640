"""How long an event loop was held up, by the clock and by what its own thread did meanwhile.

On a machine that others use too, the clock also tells of them; the CPU time of the thread does not.
"""

import asyncio
import time
from typing import Any

import numpy as np

PERIOD_S = 0.005


class HeldUp:
    """Asks the running event loop every 5 ms: whatever holds it up for longer is seen, short of at most 5 ms."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.begin()
        self._arm()

    def begin(self) -> None:
        """Forgets what was."""
        self._late_s: list[float] = []
        self._busy_s: list[float] = []

    def figures(self) -> dict[str, Any]:
        """Lateness by the clock, and the CPU seconds between one look and the next beyond the period: seconds."""
        late_s, busy_s = np.array(self._late_s or [0.0]), np.array(self._busy_s or [0.0])
        return {
            "p50_loop_late_s": float(np.quantile(late_s, 0.5)),
            "p99_loop_late_s": float(np.quantile(late_s, 0.99)),
            "max_loop_late_s": float(late_s.max()),
            "p99_loop_busy_cpu_s": float(np.quantile(busy_s, 0.99)),
            "max_loop_busy_cpu_s": float(busy_s.max()),
        }

    def _arm(self) -> None:
        self._due_s, self._cpu_s = time.perf_counter() + PERIOD_S, time.thread_time()
        self._loop.call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        self._late_s.append(max(0.0, time.perf_counter() - self._due_s))
        self._busy_s.append(max(0.0, time.thread_time() - self._cpu_s))
        self._arm()
