"""Ranks of a group as threads of one process: the real step code over collectives that need no socket."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from vertumnus.engine.collectives import GroupLink

R = TypeVar("R")

_PATIENCE_S = 60


class _Exchange:
    """One collective: everybody posts, everybody reads."""

    def __init__(self, degree: int) -> None:
        self.posted: list[Tensor | None] = [None] * degree
        self.is_complete = threading.Event()
        self.lock = threading.Lock()

    def post(self, index: int, tensor: Tensor) -> None:
        with self.lock:
            self.posted[index] = tensor.clone()
            if all(sent is not None for sent in self.posted):
                self.is_complete.set()


class _Work:
    def __init__(self, exchange: _Exchange, read: Callable[[Sequence[Tensor]], None]) -> None:
        self._exchange, self._read = exchange, read

    def wait(self) -> None:
        if not self._exchange.is_complete.wait(_PATIENCE_S) or any(sent is None for sent in self._exchange.posted):
            raise RuntimeError("a member did not come")
        self._read([sent for sent in self._exchange.posted if sent is not None])


class ThreadGroup:
    """Looks to each member's GroupLink like a torch ProcessGroup. Results arrive when waited for, not before."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._exchanges: list[_Exchange] = []
        self._lock = threading.Lock()
        self._is_broken = False

    def link(self, index: int) -> GroupLink:
        return GroupLink(index, self.degree, _Member(self, index) if self.degree > 1 else None)

    def exchange(self, number: int) -> _Exchange:
        with self._lock:
            while len(self._exchanges) <= number:
                self._exchanges.append(_Exchange(self.degree))
                if self._is_broken:
                    self._exchanges[-1].is_complete.set()
            return self._exchanges[number]

    def give_up(self) -> None:
        """Ends every wait with an error, as a member has failed."""
        with self._lock:
            self._is_broken = True
            for exchange in self._exchanges:
                exchange.is_complete.set()


class _Member:
    def __init__(self, group: ThreadGroup, index: int) -> None:
        self._group, self._index, self._num_started = group, index, 0

    def _start(self, sent: Tensor, read: Callable[[Sequence[Tensor]], None]) -> _Work:
        exchange = self._group.exchange(self._num_started)
        self._num_started += 1
        exchange.post(self._index, sent)
        return _Work(exchange, read)

    def _allgather_base(self, received: Tensor, sent: Tensor) -> _Work:
        def read(posted: Sequence[Tensor]) -> None:
            received.copy_(torch.cat(list(posted)))

        return self._start(sent, read)

    def alltoall_base(self, received: Tensor, sent: Tensor, *_: Any) -> _Work:
        def read(posted: Sequence[Tensor]) -> None:
            received.copy_(torch.stack([tensor[self._index] for tensor in posted]))

        return self._start(sent, read)


def on_every_rank(degree: int, run: Callable[[int, GroupLink], R]) -> list[R]:
    """run(index, link) on each member of a fresh group at once; results by index. Of errors, the first to happen."""
    group = ThreadGroup(degree)
    errors: list[Exception] = []

    def attempt(index: int) -> R | None:
        try:
            return run(index, group.link(index))
        except Exception as error:
            errors.append(error)
            group.give_up()
            return None

    with ThreadPoolExecutor(degree) as pool:
        results = list(pool.map(attempt, range(degree)))
    if errors:
        raise errors[0]
    return [result for result in results if result is not None]
