"""An event loop whose clock jumps to the next timer as soon as nothing is left to do: hours pass in milliseconds."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that waits on this loop's timers and on nothing outside."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0
        self._num_timers = 0

    def call_at(self, when, callback, *args, context=None):
        # Timers of one instant go off in the order in which they were set.
        self._num_timers += 1
        return super().call_at(when + self._num_timers * 1e-13, callback, *args, context=context)

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._virtual_s = max(self._virtual_s, self._scheduled[0].when())
        super()._run_once()


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run. Fails if a task is left, as it would be forgotten silently."""
    loop = VirtualTimeLoop()
    try:
        result = loop.run_until_complete(main)
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks are left: {left}"
        return result
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                loop.run_until_complete(task)
        loop.close()
