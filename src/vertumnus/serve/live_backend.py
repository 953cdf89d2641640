"""The live pool as the HTTP front end sees it, and all that watches the pool."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from vertumnus.core.composition import Composition
from vertumnus.core.slo import Slo
from vertumnus.serve.decision_log import DecisionLog
from vertumnus.serve.errors import PlanningFailed
from vertumnus.serve.generation import Generation, GenerationRequest
from vertumnus.serve.held import held
from vertumnus.serve.http.backend import Facts
from vertumnus.serve.live_pool import LivePool
from vertumnus.serve.log import PoolLog
from vertumnus.serve.loop_lag import LoopLag
from vertumnus.serve.metrics import Metrics
from vertumnus.serve.pool_view import PoolView
from vertumnus.serve.recent import Recent
from vertumnus.serve.telemetry import Telemetry, together

__all__ = ["LiveBackend", "Watch"]

STATE_PERIOD_S = 0.5
BATCH_PERIOD_S = 0.2
MAX_BATCH = 20
"""Decisions sent at once; a busy pool takes more than anybody can read."""
MAX_HISTORY = 100
"""Decisions that a new listener is told of at once."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Who watches a pool: give its `telemetry` to the pool, and the watch to the pool's `LiveBackend`."""

    slo: Slo = field(default_factory=Slo)
    num_decisions: int = 500
    metrics: Metrics = field(init=False)
    recent: Recent = field(init=False)
    decisions: DecisionLog = field(init=False)
    telemetry: Telemetry = field(init=False)

    def __post_init__(self) -> None:
        parts = {
            "metrics": Metrics(self.slo),
            "recent": Recent(self.slo),
            "decisions": DecisionLog(self.num_decisions),
        }
        for name, part in {**parts, "telemetry": together([*parts.values(), PoolLog()])}.items():
            object.__setattr__(self, name, part)


class LiveBackend:
    """`http.backend.Backend` over a live pool. Belongs to the pool's event loop."""

    def __init__(self, pool: LivePool, watch: Watch, *, kappa: Mapping[int, float] | None = None) -> None:
        """`kappa`: the profile's, for capacity; None: the controller's, if it has any."""
        self.pool = pool
        self.watch = watch
        self.view = PoolView(pool, kappa)
        self._loop = asyncio.get_running_loop()
        self._wall_offset_s = time.time() - self._loop.time()
        self._lag = LoopLag(watch.metrics.loop_lagged)
        self._shown: tuple[float, Facts] | None = None
        """What listeners were told last, and when: all of them are told the same."""
        watch.decisions.wall_offset_s = self._wall_offset_s
        watch.metrics.show_gauges(lambda: self.view.readings(self._loop.time()))
        watch.recent.watch(lambda: self.view.capacity_s_per_s, lambda: pool.control_plane.long_tokens)

    def start(self) -> None:
        """Begins to look at the event loop's lag; `close` ends it."""
        self._lag.start()

    def close(self) -> None:
        self._lag.close()

    @property
    def is_ready(self) -> bool:
        return self.pool.is_ready

    def submit(self, request: GenerationRequest) -> Generation:
        return self.pool.submit(request)

    def http_error(self, status: int, code: str) -> None:
        self.watch.metrics.http_error(status, code)

    # Watching

    def describe(self) -> Facts:
        """All that the dashboard shows but the decisions. Some hundred microseconds for a small pool."""
        now_s = self._loop.time()
        slo = self.watch.slo
        return {
            "time": round(now_s + self._wall_offset_s, 3),
            **self.view.describe(now_s),
            "slo": str(slo),
            "recent": self.watch.recent.figures(now_s),
            "history": self.watch.recent.history(now_s, self._wall_offset_s),
            "event_loop_lag_s": self._lag.largest_s,
            "held": held(self.pool),
        }

    def decisions(self, limit: int) -> list[Facts]:
        return self.watch.decisions.newest(limit)

    def metrics_text(self) -> bytes:
        return self.watch.metrics.text()

    async def events(self) -> AsyncIterator[Facts]:
        """`{"event": "state", ...}` twice a second, and `{"event": "decisions", "decisions": [...], "num_skipped": n}`
        as they come, oldest first. The first of these tells of the last hundred."""
        log = self.watch.decisions
        seen: int | None = None
        next_state_s = self._loop.time()
        while True:
            if self._loop.time() >= next_state_s:
                yield {"event": "state", **self._state()}
                next_state_s = self._loop.time() + STATE_PERIOD_S
            last = log.last
            if seen is None or seen < last:
                found = log.since(seen or 0, MAX_HISTORY if seen is None else MAX_BATCH)
                num_skipped = last - seen - len(found) if seen is not None else 0
                seen = last
                yield {"event": "decisions", "decisions": found, "num_skipped": num_skipped}
                await asyncio.sleep(BATCH_PERIOD_S)
            else:
                await log.wait(seen, max(next_state_s - self._loop.time(), 0.0))

    def _state(self) -> Facts:
        now_s = self._loop.time()
        if self._shown is None or now_s - self._shown[0] >= STATE_PERIOD_S / 2:
            self._shown = (now_s, self.describe())
        return self._shown[1]

    # Orders

    async def set_composition(self, text: str) -> Facts:
        """Pauses the controller. Refused while ranks are lost, as the rest cannot form it."""
        composition = Composition.parse(text)
        plane = self.pool.control_plane
        if self.pool.failure is not None:
            return {"refused": str(self.pool.failure)}
        if plane.lost_ranks:
            lost = ", ".join(map(str, sorted(plane.lost_ranks)))
            return {"refused": f"ranks that are lost: {lost}; ask again when they are back"}
        try:
            self.pool.set_composition(composition)
        except PlanningFailed as error:
            return {"refused": str(error)}
        return self._outcome()

    async def drain(self, worker_id: int | None) -> Facts:
        """The whole pool stops taking requests until `LivePool.resume`. One worker cannot be drained by itself: its
        ranks would serve nobody."""
        if worker_id is not None:
            return {"refused": "a worker drains only to become another one; ask for a composition without it"}
        await self.pool.drain(0.0)
        return {"draining": True, "num_open": self.pool.num_open}

    def resume(self) -> Facts:
        self.pool.resume()
        return {"draining": False, "num_open": self.pool.num_open}

    def pause_controller(self, is_paused: bool) -> Facts:
        self.pool.pause_controller(is_paused)
        return self._outcome()

    def _outcome(self) -> Facts:
        plane = self.pool.control_plane
        return {
            "composition": self.view.composition,
            "target": None if plane.target is None else str(plane.target),
            "controller_paused": plane.is_controller_paused,
        }
