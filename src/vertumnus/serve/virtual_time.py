"""An event loop whose clock jumps to the next timer as soon as nothing is left to do: hours pass in milliseconds, and
no machine is too slow."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from vertumnus.errors import InvariantError

Result = TypeVar("Result")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that waits on this loop's timers and on nothing outside."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0
        self._num_timers = 0

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        # Timers of one instant go off in the order in which they were set.
        self._num_timers += 1
        return super().call_at(when + self._num_timers * 1e-13, callback, *args, context=context)

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._virtual_s = max(self._virtual_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run. Raises InvariantError if a task is left, as it would be forgotten silently."""
    loop = VirtualTimeLoop()
    try:
        result = loop.run_until_complete(main)
        if left := asyncio.all_tasks(loop):
            raise InvariantError(f"tasks are left: {left}")
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                loop.run_until_complete(task)
        loop.close()
