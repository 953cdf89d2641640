"""What waits at every candidate, as matrices: a placement asks all queues at once.

A placement wants to know of each queue where a new request would stand in it; an idle worker, which request of all
queues should leave. Asked one by one, a pool of thousands of workers takes milliseconds for that.
"""

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.cost import FloatArray
from vertumnus.core.queueing import ServiceOrder, WorkerQueue
from vertumnus.core.requests import PrefillRequest

_MIN_DEPTH = 4

_ROUNDING_S = 1e-9


class QueueTable:
    """The queues of all candidates, one column each; rows are positions in order of service.

    A column is a copy, true as of the last `update`.
    """

    def __init__(self, order: ServiceOrder, num_columns: int) -> None:
        self._order = order
        self._columns = np.arange(num_columns)
        self.num: NDArray[np.int64] = np.zeros(num_columns, dtype=np.int64)
        """Queued requests, by column."""
        self._total_s: FloatArray = np.zeros(num_columns)
        # Of the running request that is cut, if any: what it has left after this step, and its key when it comes back.
        self.later_s: FloatArray = np.zeros(num_columns)
        self._cut_keys: FloatArray = np.zeros(num_columns)
        self._num_cut = 0
        # Beyond the end of a queue: a key that no request has, no service, an end that never comes.
        self._keys: FloatArray = np.full((_MIN_DEPTH, num_columns), np.inf)
        self._service_s: FloatArray = np.zeros((_MIN_DEPTH, num_columns))
        self._suffix_tokens: FloatArray = np.zeros((_MIN_DEPTH, num_columns))
        self._prefix_tokens: FloatArray = np.zeros((_MIN_DEPTH, num_columns))
        self._is_movable: NDArray[np.bool_] = np.zeros((_MIN_DEPTH, num_columns), dtype=np.bool_)
        # Row k: the service of the first k requests.
        self._cumulative_s: FloatArray = np.full((_MIN_DEPTH + 1, num_columns), np.inf)
        self._cumulative_s[0] = 0.0

    def update(self, column: int, queue: WorkerQueue, cut: PrefillRequest | None, later_s: float) -> None:
        """Copies a queue into its column. `cut`: the running request that queues again for `later_s` seconds more."""
        before, now = int(self.num[column]), len(queue)
        if cut is not None:
            self._cut_keys[column] = self._order.key(cut, later_s)
        self._num_cut += (later_s > 0) - (float(self.later_s[column]) > 0)
        self.later_s[column] = later_s
        if not (before or now):
            return
        if now > len(self._keys):
            self._deepen(now)
        if now:
            items = queue.items()
            service_s = [item.service_s for item in items]
            self._is_movable[:now, column] = [item.is_movable for item in items]
            self._keys[:now, column] = queue.keys
            self._service_s[:now, column] = service_s
            self._suffix_tokens[:now, column] = [item.request.input_tokens - item.prefix_tokens for item in items]
            self._prefix_tokens[:now, column] = [item.prefix_tokens for item in items]
            self._cumulative_s[1 : now + 1, column] = list(accumulate(service_s))
        if now < before:
            self._keys[now:before, column] = np.inf
            self._service_s[now:before, column] = 0.0
            self._suffix_tokens[now:before, column] = 0.0
            self._prefix_tokens[now:before, column] = 0.0
            self._is_movable[now:before, column] = False
            self._cumulative_s[now + 1 : before + 1, column] = np.inf
        self.num[column] = now
        self._total_s[column] = queue.service_s

    def equals(self, other: "QueueTable") -> bool:
        """Whether both say the same of every queue. For tests."""
        depth = self._depth
        return (
            np.array_equal(self.num, other.num)
            and np.array_equal(self._total_s, other._total_s)
            and np.array_equal(self.later_s, other.later_s)
            and np.array_equal(self._cut_keys[self.later_s > 0], other._cut_keys[other.later_s > 0])
            and np.array_equal(self._keys[:depth], other._keys[:depth])
            and np.array_equal(self._service_s[:depth], other._service_s[:depth])
            and np.array_equal(self._suffix_tokens[:depth], other._suffix_tokens[:depth])
            and np.array_equal(self._prefix_tokens[:depth], other._prefix_tokens[:depth])
            and np.array_equal(self._is_movable[:depth], other._is_movable[:depth])
            and np.array_equal(self._cumulative_s[: depth + 1], other._cumulative_s[: depth + 1])
        )

    def _deepen(self, depth: int) -> None:
        more = max(depth, 2 * len(self._keys)) - len(self._keys)
        pad = ((0, more), (0, 0))
        self._keys = np.pad(self._keys, pad, constant_values=np.inf)
        self._service_s = np.pad(self._service_s, pad)
        self._suffix_tokens = np.pad(self._suffix_tokens, pad)
        self._prefix_tokens = np.pad(self._prefix_tokens, pad)
        self._is_movable = np.pad(self._is_movable, pad)
        self._cumulative_s = np.pad(self._cumulative_s, pad, constant_values=np.inf)

    @property
    def _depth(self) -> int:
        return int(self.num[self.num.argmax()]) if len(self.num) else 0

    def around(self, request: PrefillRequest, service_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(seconds of work served before, seconds that others would wait for it), per column, of a request that does
        not queue yet and takes `service_s` there. What runs does not count, but its further chunks do."""
        key = self._order.key(request, service_s)
        depth = self._depth
        if depth:
            position = _count(self._keys[:depth] <= key)
            # The total is kept apart from the sums: it has been added up in another order.
            ahead_s = np.where(position == self.num, self._total_s, self._cumulative_s[position, self._columns])
            delay_s = (self.num - position) * service_s
        else:
            ahead_s, delay_s = np.zeros(len(self.num)), np.zeros(len(self.num))
        if self._num_cut:
            is_cut = self.later_s > 0
            goes_on_first = self._cut_keys <= key
            ahead_s += np.where(is_cut & goes_on_first, self.later_s, 0.0)
            delay_s += np.where(is_cut & ~goes_on_first, service_s, 0.0)
        return ahead_s, delay_s

    def num_left(self, after_s: FloatArray) -> NDArray[np.int64]:
        """How many requests of each column will not have been served after so many seconds of serving."""
        ends_s = self._cumulative_s[1 : self._depth + 1]
        return self.num - _count(ends_s <= after_s + _ROUNDING_S)

    @property
    def num_movable(self) -> int:
        """Queued requests, of all columns, that could go to another worker at once."""
        return int(np.count_nonzero(self._is_movable[: self._depth]))

    def work(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(uncached tokens, cached tokens, predicted service seconds where it waits) of what is queued, each
        (positions, columns); 0 beyond the end of a queue. Read only."""
        depth = self._depth
        return self._suffix_tokens[:depth], self._prefix_tokens[:depth], self._service_s[:depth]

    def saved_s(self, until_free_s: FloatArray) -> FloatArray:
        """Seconds that would be saved if a queued request left, (positions, columns): its own wait and service, and
        the service that everybody behind it would not wait for any more; -inf for one that must stay, and beyond the
        end of a queue. `until_free_s`: what runs there before the first of the queue."""
        depth = self._depth
        num_served_later = self.num - np.arange(depth)[:, None]  # itself included
        saved_s = until_free_s + self._cumulative_s[:depth] + self._service_s[:depth] * num_served_later
        return np.where(self._is_movable[:depth], saved_s, -np.inf)


def _count(is_so: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many of each column, as `np.count_nonzero` along an axis in half the time."""
    counts: NDArray[np.int64] = np.add.reduce(is_so, 0, np.int64)
    return counts
