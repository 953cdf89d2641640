"""Queued work that moves: a worker with nothing to do takes over what waits elsewhere and would end sooner with it.

A placement is a prediction made at arrival. When a worker runs dry while others still have a queue, the prediction was
wrong, or the worker is new; what has not started costs nothing to move.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vertumnus.core.index import Match
from vertumnus.core.placement import Placement, PlacementView, choose
from vertumnus.core.queueing import QueuedRequest
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.workers import Worker, WorkerTable
from vertumnus.errors import ConfigError

_TIE_S = 1e-6  # neighbours of equal length save the same but for rounding: the one that goes first moves


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A queued request, where it waits, and its placement at the worker that takes it over."""

    request: PrefillRequest
    worker: Worker
    match: Match
    view: PlacementView
    placement: Placement


def best_move(
    settings: MoveSettings,
    table: WorkerTable,
    idle: Worker,
    now_s: float,
    max_tokens: int,
    look_at: Callable[[PrefillRequest], tuple[Match, PlacementView] | None],
) -> Move | None:
    """The queued request whose move to an idle candidate saves most, if that is enough. `max_tokens`: the longest
    prompt that the idle worker can hold. `look_at` gives what is cached of a request and the view of its placement;
    None if there is none."""
    best: Move | None = None
    best_s = settings.min_gain_s
    for waiting in _most_to_gain(settings, table, idle, now_s, max_tokens):
        if waiting.saved_s <= best_s:
            continue
        seen = look_at(waiting.item.request)
        if seen is None:
            continue
        match, view = seen
        gained_s = _gain_s(settings, waiting, idle, view)
        if gained_s > best_s + _TIE_S:
            cost = np.where(view.worker_ids == idle.worker_id, view.service_s, np.inf)
            placement = choose(view, cost, "a worker with nothing to do took it over")
            request, best_s = waiting.item.request, gained_s
            best = Move(request=request, worker=waiting.worker, match=match, view=view, placement=placement)
    return best


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that has not started, and what its leaving would save."""

    worker: Worker
    item: QueuedRequest
    saved_s: float


def _most_to_gain(
    settings: MoveSettings, table: WorkerTable, idle: Worker, now_s: float, max_tokens: int
) -> list[_Waiting]:
    """The requests whose move would gain most if the idle worker had as much of each cached as the one where it waits,
    most first; without those that must stay, or that are too long.

    Ranked by what their leaving saves alone, a few long requests that wait for a large degree, and that no small one
    serves soon enough, would keep all idle workers of a large pool from everything else.
    """
    num_tried = min(settings.max_tried, table.queues.num_movable)
    if not num_tried:
        return []
    assert idle.row is not None
    remaining_s = np.maximum(table.running_end_s - now_s, 0.0)
    saved_s = table.queues.saved_s(remaining_s + table.queues.later_s)
    suffix_tokens, prefix_tokens, there_s = table.queues.work()
    here_s = table.costs.take(np.array([idle.row])).prefill_s(suffix_tokens, prefix_tokens)
    more_gpu_s = np.maximum(idle.degree * here_s - table.degrees * there_s, 0.0)
    gain_s = saved_s - here_s - settings.gpu_price * more_gpu_s
    gain_s[suffix_tokens + prefix_tokens > max_tokens] = -np.inf
    ranks = np.rint(gain_s / _TIE_S)
    least = np.partition(ranks, -num_tried, axis=None)[-num_tried]
    rows, positions = np.nonzero(((ranks >= least) & (ranks > -np.inf)).T)
    found = []
    for each in np.argsort(-ranks[positions, rows], kind="stable")[:num_tried]:
        row, position = int(rows[each]), int(positions[each])
        worker = table.active[row]
        found.append(_Waiting(worker, worker.queue[position], float(saved_s[position, row])))
    return found


def _gain_s(settings: MoveSettings, waiting: _Waiting, idle: Worker, view: PlacementView) -> float:
    """What moving a request saves in all. What is cached where it waits and would be computed again counts as GPU time
    of the smallest degree."""
    here, there = idle.row, waiting.worker.row
    assert here is not None
    assert there is not None
    service_s = float(view.service_s[here])
    more_gpu_s = max(0.0, idle.degree * service_s - waiting.worker.degree * waiting.item.service_s)
    least_s = view.smallest_service_s
    recomputed_gpu_s = view.smallest_degree * max(0.0, float(least_s[here] - least_s[there]))
    price_s = settings.gpu_price * more_gpu_s + settings.miss_price * recomputed_gpu_s
    return waiting.saved_s - service_s - price_s
