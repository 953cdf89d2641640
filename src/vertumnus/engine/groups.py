"""The groups of one rank: torch process groups that exist from the start, so that a switch only selects one.

A group is formed under a generation, which is part of the name under which its members find each other; one that lost
a member is formed anew under the next. There is no default group, and groups know nothing of each other.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # re-exported without saying so

from vertumnus.engine.collectives import GroupBroken, GroupLink
from vertumnus.engine.geometry import GroupKey


@dataclass(frozen=True, slots=True)
class Forming:
    """What `Groups.prepare` has begun: the groups that are to be, small ones first. Done once the group is there."""

    generation: int
    outcomes: dict[GroupKey, Future[None]]


class Groups:
    """One rank's ends of its groups. `form` is called by one thread, beside the one that runs steps;
    `prepare` and `abort` by any.

    store: where members find each other. host: the address that gloo listens on. connect_timeout_s bounds the forming
    of a group, exchange_timeout_s each wait for another member afterwards. has_own_gpu: NCCL instead of gloo;
    is_staged: tensors are on a GPU that gloo cannot reach.
    """

    def __init__(
        self,
        rank: int,
        store: Store,
        host: str,
        *,
        connect_timeout_s: float,
        exchange_timeout_s: float,
        has_own_gpu: bool = False,
        is_staged: bool = False,
    ) -> None:
        self.generation = 0
        """The highest that this rank was asked to form groups under."""
        self._rank = rank
        self._store = store
        self._host = host
        self._connect_timeout = timedelta(seconds=connect_timeout_s)
        self._exchange_timeout = timedelta(seconds=exchange_timeout_s)
        self._has_own_gpu = has_own_gpu
        self._is_staged = is_staged
        self._lock = threading.Lock()
        self._links: dict[GroupKey, GroupLink] = {}
        self._forming: dict[GroupKey, Future[None]] = {}

    @property
    def device(self) -> torch.device:
        """Where a tensor must lie to be sent as it is."""
        return torch.device("cuda" if self._has_own_gpu else "cpu")

    @property
    def usable(self) -> tuple[GroupKey, ...]:
        """Groups of two or more that are whole, as far as this rank knows."""
        with self._lock:
            return tuple(sorted(self._links))

    def prepare(self, generation: int, keys: Iterable[GroupKey]) -> Forming:
        """Gives up those of `keys` that have this rank as a member, and enters them as being formed, for `form` to do
        it: an `abort` from here on ends that too. Every member must be asked for the same generation."""
        mine = sorted((key for key in keys if self._rank in key.ranks), key=lambda key: (key.degree, key.first_rank))
        self.abort(mine)
        outcomes: dict[GroupKey, Future[None]] = {key: Future() for key in mine if key.degree > 1}
        with self._lock:
            self.generation = max(self.generation, generation)
            self._forming.update(outcomes)
        return Forming(generation, outcomes)

    def form(self, forming: Forming) -> None:
        """Forms the groups, each warmed by one exchange. All members return; or raise GroupBroken, at once where the
        group is given up meanwhile, and within the connect timeout otherwise."""
        try:
            for key, outcome in forming.outcomes.items():
                if not outcome.done():
                    # In a thread that nobody waits for: what waits for a member that died cannot be interrupted.
                    threading.Thread(target=self._connect, args=(forming.generation, key, outcome), daemon=True).start()
                outcome.result()
        finally:
            self._stop_forming(forming.outcomes)

    @contextmanager
    def using(self, key: GroupKey) -> Iterator[GroupLink]:
        """This rank's end of a group. If the block fails, the group is given up, for others may be waiting for what
        this rank was going to send next; what has been formed in its place meanwhile is left alone. Raises GroupBroken
        if the group was given up before."""
        if key.degree == 1 and key.first_rank == self._rank:
            yield GroupLink(0, 1)
            return
        with self._lock:
            link = self._links.get(key)
        if link is None:
            raise GroupBroken(f"the group {key} was given up")
        try:
            yield link
        except BaseException:
            with self._lock:
                if self._links.get(key) is link:
                    del self._links[key]
            link.give_up()
            raise

    def abort(self, keys: Iterable[GroupKey]) -> None:
        """Gives the groups up: a wait on one of them, in whichever thread, ends with GroupBroken, here and at once;
        at other members as soon as they notice that this end is closed."""
        keys = list(keys)
        with self._lock:
            forming = {key: self._forming[key] for key in keys if key in self._forming}
        self._stop_forming(forming)
        for key in keys:
            with self._lock:
                link = self._links.pop(key, None)
            if link is not None:
                link.give_up()

    def abort_all(self) -> None:
        """Gives up every group, those that are being formed included."""
        with self._lock:
            keys = {*self._links, *self._forming}
        self.abort(keys)

    def _stop_forming(self, outcomes: dict[GroupKey, Future[None]]) -> None:
        for key, outcome in outcomes.items():
            with self._lock:
                if self._forming.get(key) is outcome:
                    del self._forming[key]
            with contextlib.suppress(InvalidStateError):  # it is formed, or failed
                outcome.set_exception(GroupBroken(f"the group {key} was given up while it formed"))

    def _connect(self, generation: int, key: GroupKey, outcome: Future[None]) -> None:
        try:
            link = self._formed(generation, key)
        except Exception as error:  # raised by `form`
            with contextlib.suppress(InvalidStateError):
                outcome.set_exception(error)
            return
        with self._lock:
            is_wanted = self._forming.get(key) is outcome
            if is_wanted:
                del self._forming[key]
                self._links[key] = link
                outcome.set_result(None)
        if not is_wanted:
            link.give_up()

    def _formed(self, generation: int, key: GroupKey) -> GroupLink:
        name = f"{generation}/{key}/"
        store = PrefixStore(name, self._store)
        index = self._rank - key.first_rank
        try:
            process_group = self._process_group(store, index, key.degree)
            link = GroupLink(index, key.degree, process_group, is_staged=self._is_staged)
            link.all_gather(torch.zeros(1, device=self.device)).wait()
            if not self._has_own_gpu:
                process_group._set_default_timeout(self._exchange_timeout)
        except RuntimeError as error:
            raise GroupBroken(f"the group {key} did not form under generation {generation}: {error}") from error
        return link

    def _process_group(self, store: Store, index: int, degree: int) -> Any:
        if self._has_own_gpu:
            nccl = distributed.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = self._exchange_timeout
            return nccl(store, index, degree, options)
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self._host)]
        options._timeout = self._connect_timeout
        options._threads = 1
        store.set_timeout(self._connect_timeout)
        return gloo(store, index, degree, options)
