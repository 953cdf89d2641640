"""Ranks that go over from some workers to others: who hands over, whose caches are known, who waits meanwhile.

The old workers stay in the index until the new ones' caches are known, so that what is known of their blocks does
not die in between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vertumnus.core.composition import Operation, OperationKind
from vertumnus.core.index.reports import Chain
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.workers import Worker, WorkerStatus


@dataclass(slots=True)
class Handover:
    """Workers whose ranks go over to others, and the others whose caches are not known yet."""

    operation: Operation
    sources: list[Worker]
    opening: set[int] = field(default_factory=set)
    held: dict[int, tuple[Chain, ...]] = field(default_factory=dict)
    """What the opened ones hold, by worker id."""
    is_committed: bool = False
    suspended: list[PrefillRequest] = field(default_factory=list)
    """Requests between two chunks, of sources that merge: they go on once their KV has a worker again."""


class Handovers:
    """All that are under way, by operation."""

    def __init__(self) -> None:
        self._by_operation: dict[Operation, Handover] = {}

    def __iter__(self) -> Iterator[Handover]:
        return iter(self._by_operation.values())

    def begin(self, operation: Operation, sources: Sequence[Worker]) -> Handover:
        handover = self._by_operation[operation] = Handover(operation, list(sources))
        return handover

    def end(self, operation: Operation) -> Handover:
        """Takes it off the list, whatever became of it."""
        return self._by_operation.pop(operation)

    def opened(self, operation: Operation | None, worker_id: int) -> None:
        """A worker that an operation makes, if it is one's, waits for its cache to become known."""
        if operation in self._by_operation:
            self._by_operation[operation].opening.add(worker_id)

    def committed(self, operation: Operation) -> None:
        self._by_operation[operation].is_committed = True

    def cache_known(self, worker_id: int, chains: tuple[Chain, ...]) -> None:
        """What a worker holds that may have been opened by one of these."""
        for handover in self:
            if worker_id in handover.opening:
                handover.held[worker_id] = chains

    def done_with(self, worker_id: int) -> list[Handover]:
        """Takes off the list what waited for this worker alone: it serves with a known cache, or has served, and is
        gone or parked again before its cache became known."""
        done = []
        for handover in list(self):
            handover.opening.discard(worker_id)
            if handover.is_committed and not handover.opening:
                done.append(self.end(handover.operation))
        return done

    def merging(self, worker: Worker) -> Handover | None:
        """The merge that a worker drains for. What it has begun need not end before: a merge moves no KV, so requests
        between two chunks go on at the merged worker. After a split, either child would lack half of theirs."""
        if worker.status is not WorkerStatus.DRAINING:
            return None
        for handover in self:
            if handover.operation.kind is OperationKind.MERGE and worker in handover.sources:
                return handover
        return None

    @property
    def suspended(self) -> list[PrefillRequest]:
        return [request for handover in self for request in handover.suspended]

    def forget_suspended(self, request_id: int) -> None:
        for handover in self:
            handover.suspended = [each for each in handover.suspended if each.request_id != request_id]

    @property
    def sources(self) -> set[int]:
        """The workers that somebody will close or give back."""
        return {worker.worker_id for handover in self for worker in handover.sources}
