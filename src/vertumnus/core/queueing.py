"""The requests that wait at one worker, and the order in which they are served.

Two disciplines. FIFO, as the paper. *Shortest*: shortest predicted service first with ageing. Its order is static:
a request is keyed by `arrival_s + ageing * service_s`, so one that takes s seconds is overtaken only by requests that
arrive less than `ageing * s` seconds after it. That is the ageing bound: nobody waits for ever, long requests wait
longest, and no re-sorting is needed as time passes.

A request's priority comes before both: whatever has a smaller one goes first.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import overload

from vertumnus.core.cost import FloatArray
from vertumnus.core.requests import PrefillRequest

_PRIORITY_S = 1e9  # arrival order that one step of priority outweighs; leaves keys a resolution of 0.1 ms


class Discipline(Enum):
    """Order of service at a worker."""

    FIFO = "fifo"
    SHORTEST = "shortest"


@dataclass(frozen=True, slots=True)
class ServiceOrder:
    """A discipline and its ageing, as one key by which requests are served, smallest first."""

    discipline: Discipline
    ageing: float

    @overload
    def key(self, request: PrefillRequest, service_s: float) -> float: ...
    @overload
    def key(self, request: PrefillRequest, service_s: FloatArray) -> FloatArray | float: ...
    def key(self, request: PrefillRequest, service_s: float | FloatArray) -> float | FloatArray:
        """The key of a request that takes so many predicted seconds, or one key for each of several predictions."""
        if self.discipline is Discipline.FIFO:
            return float(request.priority)
        return request.priority * _PRIORITY_S + request.arrival_s + self.ageing * service_s


@dataclass(slots=True, kw_only=True)
class QueuedRequest:
    """A request reserved at a worker: what is left of it, in tokens and in predicted seconds."""

    request: PrefillRequest
    prefix_tokens: int
    """Tokens whose KV needs no more computing: the reusable prefix predicted, later also the finished chunks."""
    service_s: float
    """Predicted seconds still to be served; what is reserved at the worker."""
    started: bool = False
    is_access_recorded: bool = False
    num_copies_awaited: int = 0
    """Block copies on their way for this request; it is not served before they end."""
    is_held: bool = False
    """Whether it waits for a prefix that another request is to compute; others pass meanwhile."""

    @property
    def is_ready(self) -> bool:
        """Whether it awaits neither copies nor another request."""
        return not (self.num_copies_awaited or self.is_held)

    @property
    def is_movable(self) -> bool:
        """Whether another worker could serve it at once: nothing of it has run, and it awaits nothing."""
        return not (self.started or self.num_copies_awaited or self.is_held)


class WorkerQueue:
    """Requests waiting at one worker, in order of service."""

    __slots__ = ("_items", "_keys", "_order", "service_s")

    def __init__(self, order: ServiceOrder) -> None:
        self._order = order
        self._keys: list[float] = []
        self._items: list[QueuedRequest] = []
        self.service_s = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, position: int) -> QueuedRequest:
        return self._items[position]

    def push(self, item: QueuedRequest) -> None:
        key = self._order.key(item.request, item.service_s)
        self._insert(bisect_right(self._keys, key), key, item)

    def push_back(self, item: QueuedRequest) -> None:
        """Returns a request whose chunk has run: under FIFO, ahead of all of its priority that has not started."""
        key = self._order.key(item.request, item.service_s)
        bisect = bisect_left if self._order.discipline is Discipline.FIFO else bisect_right
        self._insert(bisect(self._keys, key), key, item)

    def pop_ready(
        self,
        has_room: Callable[[PrefillRequest], bool] | None = None,
        is_wanted: Callable[[QueuedRequest], bool] | None = None,
    ) -> QueuedRequest | None:
        """Takes the first request that awaits no copy and no other request; None if there is none or it is not wanted.

        Where `has_room` says that one cannot begin yet, none behind it does either, so that it is not starved; those
        that have begun go on.
        """
        may_begin = True
        for position, item in enumerate(self._items):
            if not item.is_ready:
                continue
            if not item.started and has_room is not None:
                may_begin = may_begin and has_room(item.request)
                if not may_begin:
                    continue
            return self._take(position) if is_wanted is None or is_wanted(item) else None
        return None

    def remove_not_started(self) -> list[QueuedRequest]:
        """Takes out, in order, every request of which no chunk has run."""
        return self._take_all(lambda item: not item.started)

    def remove_started(self) -> list[QueuedRequest]:
        """Takes out, in order, every request between two of its chunks."""
        return self._take_all(lambda item: item.started)

    def _take_all(self, is_wanted: Callable[[QueuedRequest], bool]) -> list[QueuedRequest]:
        taken = [item for item in self._items if is_wanted(item)]
        kept = [(key, item) for key, item in zip(self._keys, self._items, strict=True) if not is_wanted(item)]
        self._keys = [key for key, _ in kept]
        self._items = [item for _, item in kept]
        self.service_s = sum(item.service_s for item in self._items)
        return taken

    def remove(self, request_id: int) -> QueuedRequest | None:
        """Takes out one request, or returns None if it does not queue here."""
        for position, item in enumerate(self._items):
            if item.request.request_id == request_id:
                return self._take(position)
        return None

    @property
    def num_ready(self) -> int:
        """Requests that await no copy and no other request."""
        return sum(item.is_ready for item in self._items)

    def items(self) -> tuple[QueuedRequest, ...]:
        return tuple(self._items)

    @property
    def keys(self) -> tuple[float, ...]:
        """By what the requests are ordered: one key each, ascending."""
        return tuple(self._keys)

    def _insert(self, position: int, key: float, item: QueuedRequest) -> None:
        self._keys.insert(position, key)
        self._items.insert(position, item)
        self.service_s += item.service_s

    def _take(self, position: int) -> QueuedRequest:
        item = self._items.pop(position)
        del self._keys[position]
        # Exactly zero when empty, so that rounding never accumulates over a worker's life.
        self.service_s = self.service_s - item.service_s if self._items else 0.0
        return item
