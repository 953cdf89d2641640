"""Queued work that moves: a worker with nothing to do takes over what waits elsewhere and would end sooner with it.

A placement is a prediction made at arrival. When a worker runs dry while others still have a queue, the prediction was
wrong, or the worker is new; what has not started costs nothing to move.
"""

from dataclasses import dataclass

from vertumnus.core.queueing import QueuedRequest
from vertumnus.core.workers import Worker, WorkerTable
from vertumnus.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSettings:
    """When a move is worth it.

    min_gain_s: seconds that it must save, over all requests that it touches. gpu_price: seconds of waiting that one
    more second of GPU time is worth; miss_price: that one second of GPU time for computing again what is cached is
    worth on top. max_tried: requests that one idle worker looks at.
    """

    min_gain_s: float = 0.02
    gpu_price: float = 0.3
    miss_price: float = 3.0
    max_tried: int = 4

    def __post_init__(self) -> None:
        for name in ("min_gain_s", "gpu_price", "miss_price"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 0 or more")
        if self.max_tried < 1:
            raise ConfigError(f"max_tried is {self.max_tried}; accepted: 1 or more")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that has not started, where it waits, and what its leaving would save there: its own wait and service,
    and the service that everybody behind it would not wait for any more. Seconds."""

    worker: Worker
    item: QueuedRequest
    saved_s: float


def most_to_save(table: WorkerTable, now_s: float, max_tried: int) -> list[Waiting]:
    """The requests whose leaving would save most, most first; those that await copies stay."""
    found: list[Waiting] = []
    for row in sorted(table.queued_rows):
        worker = table.active[row]
        ahead_s = max(worker.running_end_s - now_s, 0.0) + worker.later_s if worker.running else 0.0
        items = worker.queue.items()
        for position, item in enumerate(items):
            if not item.started and not item.num_copies_awaited:
                num_behind = len(items) - position - 1
                found.append(Waiting(worker, item, ahead_s + item.service_s * (1 + num_behind)))
            ahead_s += item.service_s
    found.sort(key=lambda each: -each.saved_s)
    return found[:max_tried]


def gain_s(
    settings: MoveSettings, waiting: Waiting, idle: Worker, *, service_s: float, recomputed_gpu_s: float
) -> float:
    """What moving a request to an idle worker saves in all, where it would take `service_s` there, and
    `recomputed_gpu_s` of GPU time for what is cached where it waits."""
    more_gpu_s = max(0.0, idle.degree * service_s - waiting.worker.degree * waiting.item.service_s)
    price_s = settings.gpu_price * more_gpu_s + settings.miss_price * recomputed_gpu_s
    return waiting.saved_s - service_s - price_s
