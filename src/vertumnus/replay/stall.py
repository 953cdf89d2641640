"""How long the event loop kept others waiting: what would make an answer look later than it was."""

import asyncio
from array import array
from time import perf_counter

PERIOD_S = 0.01


class StallWatch:
    """Asks to be woken every 10 ms and notes by how much each wake-up came too late."""

    def __init__(self) -> None:
        self.stalls_s = array("d")

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            due_s = perf_counter() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.stalls_s.append(max(0.0, perf_counter() - due_s))
