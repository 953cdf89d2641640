"""How late the event loop comes: by so much everything that waits for it is late too."""

import asyncio
from collections import deque
from collections.abc import Callable

PERIOD_S = 0.05
NUM_KEPT = 1200
"""A minute of them."""


class LoopLag:
    """Looks at the loop's clock 20 times a second from `start` to `close`."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        """`observe` is given every lag, in seconds."""
        self._observe = observe
        self._timer: asyncio.TimerHandle | None = None
        self._lags_s: deque[float] = deque(maxlen=NUM_KEPT)

    @property
    def largest_s(self) -> float | None:
        """Of the last minute; None before the first look."""
        return max(self._lags_s, default=None)

    def start(self) -> None:
        self._arm(asyncio.get_running_loop())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(PERIOD_S, self._look, loop, loop.time() + PERIOD_S)

    def _look(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        lag_s = max(0.0, loop.time() - due_s)
        self._lags_s.append(lag_s)
        self._observe(lag_s)
        self._arm(loop)
