"""Block copies that were asked for and have not ended, and the requests that wait for them."""

from collections import Counter
from dataclasses import dataclass, field

from vertumnus.core.events import CopyBlocks
from vertumnus.core.index.replication import CopyPlan
from vertumnus.core.queueing import QueuedRequest


@dataclass(slots=True)
class _Copy:
    action: CopyBlocks
    source_node: int
    plan: CopyPlan | None
    waiters: list[QueuedRequest] = field(default_factory=list)


class CopyLedger:
    """Numbers copies and remembers them until they end. A block on its way to a worker is not asked for twice."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}
        self._coming: dict[tuple[int, bytes], int] = {}
        self._from_worker: Counter[int] = Counter()
        self._from_node: Counter[int] = Counter()
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._copies)

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def coming(self, worker_id: int, block: bytes) -> int | None:
        """The copy that brings this block to this worker, or None."""
        return self._coming.get((worker_id, block))

    def num_leaving(self, worker_id: int, node: int) -> tuple[int, int]:
        """Blocks that copies under way take from the worker's node, and from the worker: what else its links carry."""
        return self._from_node[node], self._from_worker[worker_id]

    def begin(self, action: CopyBlocks, *, source_node: int, plan: CopyPlan | None = None) -> None:
        self._copies[action.copy_id] = _Copy(action, source_node, plan)
        self._count(source_node, action, len(action.blocks))
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
        self._count(copy.source_node, copy.action, -len(copy.action.blocks))
        for block in copy.action.blocks:
            key = copy.action.destination_worker_id, block
            if self._coming.get(key) == copy_id:
                del self._coming[key]
        for waiter in copy.waiters:
            waiter.num_copies_awaited -= 1
        return copy.action, copy.plan

    def _count(self, source_node: int, action: CopyBlocks, num_blocks: int) -> None:
        for leaving, source in (self._from_node, source_node), (self._from_worker, action.source_worker_id):
            leaving[source] += num_blocks
            if not leaving[source]:
                del leaving[source]
