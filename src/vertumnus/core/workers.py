"""The control plane's own record of its workers, and the vectors that a placement reads.

A worker's numbers live twice: as fields of `Worker`, and, while the worker is a candidate for placement, as one row of
the vectors in `WorkerTable`. The table is the only writer of both.
"""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from vertumnus.core.composition import RankGroup
from vertumnus.core.cost import CostModel, DegreeCosts, FloatArray
from vertumnus.core.placement import IntArray
from vertumnus.core.queue_table import QueueTable
from vertumnus.core.queueing import QueuedRequest, ServiceOrder, WorkerQueue
from vertumnus.core.requests import PrefillRequest
from vertumnus.errors import InvariantError


class WorkerStatus(Enum):
    """Life of a worker: opened by a confirmed epoch, active once its cache is known, then draining, then gone."""

    OPENING = "opening"
    ACTIVE = "active"
    DRAINING = "draining"
    PARKED = "parked"


@dataclass(slots=True)
class RunningItem:
    """A request's share of the step that runs: new tokens [start, end)."""

    queued: QueuedRequest
    start_tokens: int
    end_tokens: int


@dataclass(slots=True)
class Worker:
    """One CP group that serves requests. `slot` is its index in the prefix index's per-worker vectors."""

    worker_id: int
    slot: int
    group: RankGroup
    epoch: int
    queue: WorkerQueue
    status: WorkerStatus = WorkerStatus.OPENING
    running: list[RunningItem] = field(default_factory=list)
    running_end_s: float = 0.0
    step_started_s: float = 0.0
    step_predicted_s: float = 0.0
    """Of the running step: when it began, and what it takes by the cost model with the prefixes really there."""
    running_tokens: int = 0
    later_s: float = 0.0
    """Predicted seconds of the running requests' further chunks, which neither run nor queue."""
    queued_tokens: int = 0
    reused_blocks: float = 0.0
    """Blocks reused here, recent ones weighing more."""
    row: int | None = None

    @property
    def degree(self) -> int:
        return self.group.degree

    @property
    def num_outstanding(self) -> int:
        return len(self.queue) + len(self.running)

    @property
    def cut(self) -> PrefillRequest | None:
        """The running request that is not done after this step: the last of the step, if any."""
        return self.running[-1].queued.request if self.later_s else None

    def outstanding_s(self, now_s: float) -> float:
        """q: predicted seconds queued and left of the running step."""
        return self.queue.service_s + self.later_s + (max(self.running_end_s - now_s, 0.0) if self.running else 0.0)


class WorkerTable:
    """All workers by id, and for the active ones vectors in ascending worker id."""

    def __init__(self, cost_model: CostModel, order: ServiceOrder, block_tokens: int) -> None:
        self.block_tokens = np.array(float(block_tokens))
        """Of no dimension, as NumPy takes Python numbers more slowly."""
        self._cost_model = cost_model
        self._order = order
        self._workers: dict[int, Worker] = {}
        self._rows: list[Worker] = []
        self._rebuild()

    def __getitem__(self, worker_id: int) -> Worker:
        return self._workers[worker_id]

    def get(self, worker_id: int) -> Worker | None:
        return self._workers.get(worker_id)

    def all(self) -> list[Worker]:
        """Every worker, in ascending id."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    @property
    def active(self) -> list[Worker]:
        """The candidates for placement, in row order."""
        return self._rows

    def open(self, worker_id: int, slot: int, group: RankGroup, epoch: int) -> Worker:
        worker = Worker(worker_id, slot, group, epoch, WorkerQueue(self._order))
        self._workers[worker_id] = worker
        return worker

    def close(self, worker: Worker) -> None:
        del self._workers[worker.worker_id]
        self._rebuild()

    def set_status(self, worker: Worker, status: WorkerStatus) -> None:
        worker.status = status
        self._rebuild()

    def use_costs(self, cost_model: CostModel) -> None:
        """Binds the candidates to another cost model; what is reserved already keeps the seconds it has."""
        self._cost_model = cost_model
        self._rebuild()

    def changed(self, worker: Worker) -> None:
        """Copies a worker's load into its row, after its queue or its running step changed."""
        row = worker.row
        if row is None:
            return
        queue = worker.queue
        num_queued, num_running = len(queue), len(worker.running)
        self.queued_s[row] = queue.service_s + worker.later_s
        self.running_end_s[row] = worker.running_end_s if num_running else 0.0
        self.num_outstanding[row] = num_queued + num_running
        self.outstanding_tokens[row] = worker.queued_tokens + worker.running_tokens
        self.queues.update(row, queue, worker.cut, worker.later_s)

    def _rebuild(self) -> None:
        for worker in self._rows:
            worker.row = None
        self._rows = [worker for worker in self.all() if worker.status is WorkerStatus.ACTIVE]
        num_rows = len(self._rows)
        self.worker_ids: IntArray = np.array([worker.worker_id for worker in self._rows], dtype=np.int64)
        self.slots = np.array([worker.slot for worker in self._rows], dtype=np.intp)
        degrees = np.array([worker.degree for worker in self._rows], dtype=np.int64)
        self.degrees: FloatArray = degrees.astype(np.float64)
        self.costs: DegreeCosts = self._cost_model.for_degrees(degrees)
        self.smallest_degree = int(degrees.min()) if num_rows else 0
        self.smallest_costs: DegreeCosts = self._cost_model.for_degrees(np.full(num_rows, self.smallest_degree))
        """The cost model at the smallest degree, once per row."""
        self.queued_s: FloatArray = np.zeros(num_rows)
        self.running_end_s: FloatArray = np.zeros(num_rows)
        self.num_outstanding: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.outstanding_tokens: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.queues = QueueTable(self._order, num_rows)
        for row, worker in enumerate(self._rows):
            worker.row = row
            if worker.num_outstanding:
                self.changed(worker)

    def check_invariants(self) -> None:
        """Raises InvariantError where a row disagrees with its worker or a load is not the sum of its parts."""
        for row, worker in enumerate(self._rows):
            if worker.row != row or worker.status is not WorkerStatus.ACTIVE:
                raise InvariantError(f"row {row} is out of step with worker {worker.worker_id}")
            if self.num_outstanding[row] != worker.num_outstanding or (
                self.queued_s[row] != worker.queue.service_s + worker.later_s
            ):
                raise InvariantError(f"row {row} does not show the load of worker {worker.worker_id}")
        queues = QueueTable(self._order, len(self._rows))
        for row, worker in enumerate(self._rows):
            queues.update(row, worker.queue, worker.cut, worker.later_s)
        if not self.queues.equals(queues):
            raise InvariantError("what the placements read of the queues differs from what waits in them")
        for worker in self._workers.values():
            total = sum(item.service_s for item in worker.queue.items())
            if abs(total - worker.queue.service_s) > 1e-6 * max(1.0, total):
                raise InvariantError(f"worker {worker.worker_id} has {total} s queued, not {worker.queue.service_s}")
            if worker.num_outstanding == 0 and worker.queued_tokens + worker.running_tokens != 0:
                raise InvariantError(f"worker {worker.worker_id} is idle with tokens reserved")
