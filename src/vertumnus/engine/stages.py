"""Where a step's time goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from vertumnus.engine.step import StepTimings

Stage = Literal["gather", "attention", "mlp", "projection", "wait"]


class Stages:
    """Adds up seconds by stage. On a GPU, where work is queued, a stage's time is the time to queue it."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._seconds: dict[Stage, float] = dict.fromkeys(("gather", "attention", "mlp", "projection", "wait"), 0.0)

    @contextmanager
    def measure(self, stage: Stage) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - start_s

    def timings(self) -> StepTimings:
        """So far."""
        seconds = self._seconds
        return StepTimings(
            total_s=time.perf_counter() - self._start_s,
            gather_s=seconds["gather"],
            attention_s=seconds["attention"],
            mlp_s=seconds["mlp"],
            projection_s=seconds["projection"],
            wait_s=seconds["wait"],
        )
