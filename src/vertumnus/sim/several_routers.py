"""Several routers in front of the same workers, who learn late what the others have placed.

The control plane stays one, as if all of them reported to it: only what a placement looks at is taken back to what the
request's router knew. A router knows its own placements at once, those of the others `delay_s` later; what ends or
moves it knows at once, as if workers told everybody. How late caches are known is the pool's report delay.
"""

from collections import defaultdict, deque
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vertumnus.core.cost import FloatArray
from vertumnus.core.placement import Placement, PlacementPolicy, PlacementView
from vertumnus.core.queueing import ServiceOrder
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.workers import WorkerTable
from vertumnus.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """num_routers: routers in front of all workers, among whom the requests go round. delay_s: after which one knows
    what another has placed. has_own_order: whether each has an order of its own for workers that cost the same; if all
    had one order, they would take the same idle worker.

    Raises ConfigError for values out of range, and for a delay that nobody would notice.
    """

    num_routers: int = 1
    delay_s: float = 0.0
    has_own_order: bool = True

    def __post_init__(self) -> None:
        if self.num_routers < 1:
            raise ConfigError(f"num_routers is {self.num_routers}; accepted: 1 or more")
        if not 0 <= self.delay_s < np.inf:
            raise ConfigError(f"router delay_s is {self.delay_s}; accepted: a finite number, 0 or more")
        if self.delay_s and self.num_routers == 1:
            raise ConfigError(f"router delay_s is {self.delay_s} with one router; accepted: with 2 or more")


_TIE_S = 1e-6
"""Beyond rounding, and below every difference in cost that matters."""
_GOLDEN = 0x9E3779B97F4A7C15


class _Placed(NamedTuple):
    at_s: float
    router: int
    worker_id: int
    request_id: int


class SeveralRouters:
    """A placement policy as several routers have it, each its own; request i comes to router i mod their number."""

    def __init__(
        self,
        policy: PlacementPolicy,
        settings: RouterSettings,
        *,
        workers: WorkerTable,
        order: ServiceOrder,
        arrival_s: FloatArray,
    ) -> None:
        """`workers`: the control plane's own, without a step budget. `arrival_s`: [requests], by id; their priorities
        are equal."""
        self.name = policy.name
        self._policies = [deepcopy(policy) for _ in range(settings.num_routers)]
        self._settings = settings
        self._workers = workers
        self._order = order
        self._arrival_s = arrival_s
        self._recent: deque[_Placed] = deque()

    def place(self, view: PlacementView) -> Placement:
        recent, router = self._recent, view.request_id % len(self._policies)
        while recent and recent[0].at_s <= view.now_s - self._settings.delay_s:
            recent.popleft()
        unknown: defaultdict[int, set[int]] = defaultdict(set)
        for placed in recent:
            if placed.router != router:
                unknown[placed.worker_id].add(placed.request_id)
        known = self._without(unknown, view) if unknown else view
        placement = self._policies[router].place(_in_order(router, known) if self._settings.has_own_order else known)
        recent.append(_Placed(view.now_s, router, placement.worker_id, view.request_id))
        return placement

    def _without(self, unknown: dict[int, set[int]], view: PlacementView) -> PlacementView:
        """The view as it would be if these requests, by worker, were not there."""
        load = {
            name: getattr(view, name).copy()
            for name in ("wait_s", "delay_s", "outstanding_s", "num_outstanding", "outstanding_tokens")
        }
        request_id = view.request_id
        request = PrefillRequest(request_id, float(self._arrival_s[request_id]), view.input_tokens, ())
        keys = np.broadcast_to(self._order.key(request, view.service_s), view.service_s.shape)
        waits = np.zeros(len(keys)) if view.awaited_tokens is None else view.awaited_tokens
        for row in np.flatnonzero(np.isin(view.worker_ids, list(unknown))).tolist():
            worker = self._workers[int(view.worker_ids[row])]
            requests = unknown[worker.worker_id]
            running = [each.queued for each in worker.running if each.queued.request.request_id in requests]
            queued = [
                (key, item)
                for key, item in zip(worker.queue.keys, worker.queue.items(), strict=True)
                if item.request.request_id in requests
            ]
            left_s = max(worker.running_end_s - view.now_s, 0.0) if running else 0.0
            items = [*running, *(item for _, item in queued)]
            load["outstanding_s"][row] -= left_s + sum(item.service_s for _, item in queued)
            load["num_outstanding"][row] -= len(items)
            load["outstanding_tokens"][row] -= sum(item.request.input_tokens - item.prefix_tokens for item in items)
            if waits[row] == 0:
                ahead_s = [item.service_s for key, item in queued if key <= keys[row]]
                load["wait_s"][row] -= left_s + sum(ahead_s)
                load["delay_s"][row] -= (len(queued) - len(ahead_s)) * view.service_s[row]
        if any(view.awaited_request_id in requests for requests in unknown.values()):
            load["wait_s"][waits > 0] = np.inf
        for name in ("wait_s", "delay_s", "outstanding_s"):
            np.maximum(load[name], 0.0, out=load[name])  # what is left of sums of floats
        return replace(view, **load)


def _in_order(router: int, view: PlacementView) -> PlacementView:
    """The view with less than a microsecond more at each worker, other ones for each router."""
    factor = np.uint64(_GOLDEN * (2 * router + 1) % 2**64)
    spread = (view.worker_ids.astype(np.uint64) + np.uint64(1)) * factor
    tie_s = _TIE_S * 2.0**-64 * spread.astype(np.float64)
    return replace(view, wait_s=view.wait_s + tie_s, outstanding_s=view.outstanding_s + tie_s)
