"""Placeholder until merged."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from vertumnus.core.composition import Composition
from vertumnus.serve.generation import Generation, GenerationRequest
from vertumnus.serve.live_pool import LivePool


class LiveBackend:
    def __init__(self, pool: LivePool) -> None:
        self.pool = pool

    @property
    def is_ready(self) -> bool:
        return self.pool.is_ready

    def submit(self, request: GenerationRequest) -> Generation:
        return self.pool.submit(request)

    def describe(self) -> dict[str, Any]:
        plane = self.pool.control_plane
        return {
            "composition": str(plane.composition),
            "num_open": self.pool.num_open,
            "transitions": len(plane.transitions),
            "epoch": plane.epoch,
            "in_use": self.pool.caches.num_in_use,
        }

    def decisions(self, limit: int) -> list[dict[str, Any]]:
        return []

    def metrics_text(self) -> bytes:
        return b""

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            yield self.describe()
            await asyncio.sleep(0.5)

    async def set_composition(self, text: str) -> dict[str, Any]:
        self.pool.set_composition(Composition.parse(text))
        return self.describe()

    async def drain(self, worker_id: int | None) -> dict[str, Any]:
        return {}

    def pause_controller(self, is_paused: bool) -> dict[str, Any]:
        self.pool.pause_controller(is_paused)
        return self.describe()
