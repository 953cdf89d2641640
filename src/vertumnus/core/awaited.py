"""Prefixes that requests in the pool are about to compute, and the requests that wait for them.

The index knows a block once a step has reported it. Until then a second request with the same prefix would be placed as
if nothing were coming. Here it may count on what an earlier one is about to compute: at the same worker, or at another
that copies it then. It is held in its queue until the blocks are there, or their producer has gone some other way.
Nobody waits for a request that was placed later, so waits never form a ring.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from vertumnus.core.cost import FloatArray
from vertumnus.core.index import Match
from vertumnus.core.placement import PlacementView
from vertumnus.core.pulls import PullSettings, ServiceTime
from vertumnus.core.queueing import QueuedRequest
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.workers import Worker, WorkerTable
from vertumnus.errors import ConfigError, InvariantError

Waits = Callable[[PrefillRequest, FloatArray, FloatArray, FloatArray], tuple[FloatArray, FloatArray]]
"""(request, its seconds, what is left of each running step, each worker's outstanding seconds) -> (wait, delay)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSettings:
    """max_tried: requests with the same beginning that one placement looks at."""

    max_tried: int = 16

    def __post_init__(self) -> None:
        if self.max_tried < 1:
            raise ConfigError(f"max_tried is {self.max_tried}; accepted: 1 or more")


@dataclass(slots=True, eq=False)
class _Producer:
    """A request queued or running at a worker. `num_known` blocks of it were known to the pool when it was placed, or
    have been computed since; the next one is what it is found by."""

    item: QueuedRequest
    worker: Worker
    num_known: int
    ready_s: float
    """When it can begin at the earliest, where it waits itself."""
    awaits: "_Producer | None" = None
    num_awaited: int = 0
    """Blocks that it counts on."""
    waiters: dict[int, "_Producer"] = field(default_factory=dict)

    @property
    def request_id(self) -> int:
        return self.item.request.request_id

    @property
    def is_stranded(self) -> bool:
        return self.item.is_held and self.awaits is None

    @property
    def key(self) -> bytes | None:
        blocks = self.item.request.blocks
        return blocks[self.num_known] if self.num_known < len(blocks) else None


class AwaitedPrefixes:
    """Every request that is reserved at a worker, by what it will produce first; and who waits for whom."""

    def __init__(
        self,
        settings: WaitSettings,
        *,
        workers: WorkerTable,
        block_tokens: int,
        step_tokens: int | None,
        pull: PullSettings | None,
        cancelled: Collection[int],
        service_s: ServiceTime,
        waits: Waits,
    ) -> None:
        """`cancelled`: running requests that will not go on after their step."""
        self._settings = settings
        self._workers = workers
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._pull = pull if pull is not None and pull.from_any_worker else None
        self._cancelled = cancelled
        self._service_s = service_s
        self._waits = waits
        self._by_id: dict[int, _Producer] = {}
        self._by_block: dict[bytes, dict[int, _Producer]] = {}

    # Placement

    def with_waits(self, request: PrefillRequest, match: Match, view: PlacementView) -> PlacementView:
        """The view with every candidate a second time: as if the request waited there for a prefix under way.

        Unchanged where nothing is under way; a candidate that gains nothing by it is repeated as it is. The rows of
        `view` are those of the worker table.
        """
        limit = min((request.input_tokens - 1) // self._block_tokens, len(request.blocks))
        num_known = match.num_blocks
        if num_known >= limit:
            return view
        producers = self._by_block.get(request.blocks[num_known])
        if producers is None:
            return view
        found = self._longest(request, num_known, limit, producers.values())
        if found is None:
            return view
        producer, num_blocks = found
        table, length = self._workers, request.input_tokens
        prefix = np.full(len(view.service_s), float(num_blocks * self._block_tokens))
        suffix = length - prefix
        service = self._service_s(table.costs, suffix, prefix)
        row = producer.worker.row
        assert row is not None
        is_better = service < view.service_s
        ready_s = np.full(len(prefix), max(0.0, self._ready_s(producer, num_blocks, view.now_s) - view.now_s))
        if self._pull is None:
            is_better &= view.worker_ids == producer.worker.worker_id
        else:
            held = match.reusable_blocks[table.slots] * table.block_tokens
            copy_s = self._pull.latency_s + self._pull.s_per_token * (prefix - held)
            copy_s[row] = 0.0
            ready_s += copy_s
        if not is_better.any():
            return view
        remaining = np.maximum(table.running_end_s - view.now_s, 0.0)
        wait, delay = self._waits(request, service, remaining, view.outstanding_s)
        # What is served before the prefix is there passes it.
        num_delayed = table.queues.num_left(ready_s - remaining)
        delay = np.where(table.queues.num > 0, np.minimum(delay, num_delayed * service), delay)
        return view.with_waits(
            producer.request_id,
            reusable_tokens=np.where(is_better, prefix, view.reusable_tokens),
            service_s=np.where(is_better, service, view.service_s),
            wait_s=np.where(is_better, np.maximum(wait, ready_s), view.wait_s),
            delay_s=np.where(is_better, delay, view.delay_s),
            awaited_tokens=np.where(is_better, prefix, 0.0),
        )

    def _longest(
        self, request: PrefillRequest, num_known: int, limit: int, producers: Iterable[_Producer]
    ) -> tuple[_Producer, int] | None:
        """Who of them will produce most of the request's blocks, the first placed among equals, and how many."""
        best: tuple[_Producer, int] | None = None
        for producer in islice(producers, self._settings.max_tried):
            other = producer.item.request
            # A worker that drains is gone before anything can be copied from it.
            if producer.worker.row is None or other.request_id in self._cancelled or producer.is_stranded:
                continue
            if other.priority > request.priority and self._running_end_tokens(producer) is None:
                continue  # it may be overtaken for ever
            num_blocks = _num_shared(request.blocks, other.blocks, num_known, min(limit, len(other.blocks)))
            if best is None or num_blocks > best[1]:
                best = producer, num_blocks
        return best

    def _running_end_tokens(self, producer: _Producer) -> int | None:
        for running in producer.worker.running:
            if running.queued is producer.item:
                return running.end_tokens
        return None

    def _ready_s(self, producer: _Producer, num_blocks: int, now_s: float) -> float:
        """When the first `num_blocks` blocks of a request will be at its worker."""
        worker, item = producer.worker, producer.item
        end_tokens = self._running_end_tokens(producer)
        remaining_s = worker.running_end_s if worker.running else now_s
        if end_tokens is not None:
            return remaining_s + (worker.later_s * self._share(item, end_tokens, num_blocks) if worker.later_s else 0.0)
        ahead_s = worker.later_s
        for queued in worker.queue.items():
            if queued is item:
                break
            ahead_s += queued.service_s
        begin_s = max(remaining_s + ahead_s, producer.ready_s)
        is_chunked = self._step_tokens is not None
        return begin_s + item.service_s * (self._share(item, item.prefix_tokens, num_blocks) if is_chunked else 1.0)

    def _share(self, item: QueuedRequest, start_tokens: int, num_blocks: int) -> float:
        """The part of what is left of a request that must be computed before it has so many blocks."""
        left = item.request.input_tokens - start_tokens
        return min(1.0, max(0, num_blocks * self._block_tokens - start_tokens) / left) if left else 0.0

    # Who is there

    def begin(self, item: QueuedRequest, worker: Worker, num_known: int, view: PlacementView, row: int) -> None:
        """A request was reserved at a worker, as in this row of its view."""
        entry = _Producer(item, worker, num_known, view.now_s)
        if view.awaited_tokens is not None and view.awaited_tokens[row] > 0:
            assert view.awaited_request_id is not None
            entry.awaits = self._by_id[view.awaited_request_id]
            entry.num_awaited = int(view.awaited_tokens[row]) // self._block_tokens
            entry.ready_s = view.now_s + float(view.wait_s[row])
            entry.awaits.waiters[entry.request_id] = entry
            item.is_held = True
        self._by_id[entry.request_id] = entry
        self._register(entry)

    def computed(self, request_id: int, num_blocks: int) -> list[tuple[QueuedRequest, Worker]]:
        """The first blocks of a request are there; returns who waited for no more, held no longer."""
        producer = self._by_id[request_id]
        released = [waiter for waiter in producer.waiters.values() if waiter.num_awaited <= num_blocks]
        for waiter in released:
            self._release(waiter)
            waiter.item.is_held = False
            self._known(waiter, waiter.num_awaited)
        self._known(producer, num_blocks)
        return [(waiter.item, waiter.worker) for waiter in released]

    def left(self, request_id: int) -> list[QueuedRequest]:
        """A request left its worker, done or not; returns who waits for it in vain, to be placed anew."""
        entry = self._by_id.pop(request_id, None)
        if entry is None:
            return []
        self._unregister(entry)
        if entry.awaits is not None:
            self._release(entry)
        return self._stranded(entry)

    def drains(self, worker: Worker) -> list[QueuedRequest]:
        """A worker takes nothing more; returns who waits in vain for what it computes."""
        entries = [entry for entry in self._by_id.values() if entry.worker is worker]
        return [item for entry in entries for item in self._stranded(entry)]

    def is_current(self, item: QueuedRequest) -> bool:
        """Whether this is the present reservation of its request."""
        entry = self._by_id.get(item.request.request_id)
        return entry is not None and entry.item is item

    def _stranded(self, entry: _Producer) -> list[QueuedRequest]:
        """Whoever waits for it, or for one of those: nobody may count on them before they are placed anew."""
        stranded: list[QueuedRequest] = []
        left = deque([entry])
        while left:
            waiters = left.popleft().waiters
            left += waiters.values()
            for waiter in waiters.values():
                waiter.awaits = None
                stranded.append(waiter.item)
            waiters.clear()
        return stranded

    def _release(self, waiter: _Producer) -> None:
        assert waiter.awaits is not None
        del waiter.awaits.waiters[waiter.request_id]
        waiter.awaits = None

    def _known(self, entry: _Producer, num_blocks: int) -> None:
        if num_blocks > entry.num_known:
            self._unregister(entry)
            entry.num_known = num_blocks
            self._register(entry)

    def _register(self, entry: _Producer) -> None:
        if (key := entry.key) is not None:
            self._by_block.setdefault(key, {})[entry.request_id] = entry

    def _unregister(self, entry: _Producer) -> None:
        if (key := entry.key) is not None:
            alike = self._by_block[key]
            del alike[entry.request_id]
            if not alike:
                del self._by_block[key]

    def check_invariants(self, location: dict[int, int]) -> None:
        """Raises InvariantError where a wait has nobody to end it. For tests."""
        if {request_id: entry.worker.worker_id for request_id, entry in self._by_id.items()} != location:
            raise InvariantError("what will be computed differs from what is reserved")
        for request_id, entry in self._by_id.items():
            awaited = entry.awaits
            if entry.item.is_held is not (awaited is not None):
                raise InvariantError(f"request {request_id} is held for nobody")
            if awaited is not None and self._by_id.get(awaited.request_id) is not awaited:
                raise InvariantError(f"request {request_id} waits for one that is gone")
            if awaited is not None and awaited.waiters.get(request_id) is not entry:
                raise InvariantError(f"request {request_id} will not be told")
            if any(waiter.awaits is not entry for waiter in entry.waiters.values()):
                raise InvariantError(f"request {request_id} will tell others than wait for it")
        registered = {id(entry) for alike in self._by_block.values() for entry in alike.values()}
        if registered != {id(entry) for entry in self._by_id.values() if entry.key is not None}:
            raise InvariantError("the first blocks that will be computed are out of step with the requests")


def _num_shared(one: Sequence[bytes], other: Sequence[bytes], num_known: int, limit: int) -> int:
    """The length of the common beginning of two chains, at most `limit`, of which more than `num_known` is known to be
    shared. Equal hash means equal prefix, so it gallops and bisects; what it does not look at need not be hashed."""
    low, step = num_known + 1, 1
    while low < limit and one[min(low + step, limit) - 1] == other[min(low + step, limit) - 1]:
        low = min(low + step, limit)
        step *= 2
    high = min(low + step, limit + 1)  # not shared, or beyond the limit
    while high - low > 1:
        middle = (low + high) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle
    return min(low, limit)
