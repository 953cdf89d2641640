"""Block copies that were asked for and have not ended, and the requests that wait for them."""

from dataclasses import dataclass, field

from vertumnus.core.events import CopyBlocks
from vertumnus.core.index.replication import CopyPlan
from vertumnus.core.queueing import QueuedRequest


@dataclass(slots=True)
class _Copy:
    action: CopyBlocks
    plan: CopyPlan | None
    waiters: list[QueuedRequest] = field(default_factory=list)


class CopyLedger:
    """Numbers copies and remembers them until they end. A block on its way to a worker is not asked for twice."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}
        self._coming: dict[tuple[int, bytes], int] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._copies)

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def coming(self, worker_id: int, block: bytes) -> int | None:
        """The copy that brings this block to this worker, or None."""
        return self._coming.get((worker_id, block))

    def begin(self, action: CopyBlocks, plan: CopyPlan | None = None) -> None:
        self._copies[action.copy_id] = _Copy(action, plan)
        for block in action.blocks:
            self._coming[action.destination_worker_id, block] = action.copy_id

    def await_copy(self, copy_id: int, item: QueuedRequest) -> None:
        """Makes a queued request wait for a copy, once."""
        waiters = self._copies[copy_id].waiters
        if not any(waiter is item for waiter in waiters):
            waiters.append(item)
            item.num_copies_awaited += 1

    def end(self, copy_id: int) -> tuple[CopyBlocks, CopyPlan | None] | None:
        """Forgets a copy and releases its waiters; None if it is not known (any more)."""
        copy = self._copies.pop(copy_id, None)
        if copy is None:
            return None
        for block in copy.action.blocks:
            key = copy.action.destination_worker_id, block
            if self._coming.get(key) == copy_id:
                del self._coming[key]
        for waiter in copy.waiters:
            waiter.num_copies_awaited -= 1
        return copy.action, copy.plan
