"""A live pool as people and Prometheus look at it: ranks, workers, queues and the controller, read off when asked."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vertumnus.core.composition import RankGroup
from vertumnus.core.controller import Controller
from vertumnus.core.threshold_controller import ThresholdController
from vertumnus.core.workers import Worker, WorkerStatus
from vertumnus.serve import metric_families as families
from vertumnus.serve.live_pool import LivePool
from vertumnus.serve.metrics import Reading

__all__ = ["INDEX_STATES", "PoolView", "RANK_STATES"]

RANK_STATES = ("serving", "opening", "draining", "switching", "spare", "lost")
INDEX_STATES = ("exact", "degraded", "fallback")

_STATE_OF = {
    WorkerStatus.ACTIVE: "serving",
    WorkerStatus.OPENING: "opening",
    WorkerStatus.DRAINING: "draining",
}


@dataclass(frozen=True, slots=True)
class _Rank:
    state: str
    worker: Worker | None
    group: RankGroup | None
    """The group that it serves in, or will."""


class PoolView:
    """Changes nothing. kappa: capacity of one worker by degree, in service seconds per second, where it is known."""

    def __init__(self, pool: LivePool, kappa: Mapping[int, float] | None = None) -> None:
        self._pool = pool
        self._plane = pool.control_plane
        controller = self._plane.controller
        if kappa is None and isinstance(controller, ThresholdController):
            kappa = controller.kappa
        self._kappa = kappa

    @property
    def capacity_s_per_s(self) -> float | None:
        """Of the planned composition; None where kappa is not known for all of it."""
        layout = self._plane.planned_layout
        if self._kappa is None or any(group.degree not in self._kappa for group in layout):
            return None
        return sum(self._kappa[group.degree] for group in layout)

    @property
    def composition(self) -> str:
        """Once everything under way has ended well; empty while all ranks are lost."""
        return str(self._plane.composition) if self._plane.planned_layout else ""

    def workers(self) -> list[Worker]:
        """Those that serve, will or still do; not those whose ranks are with others already."""
        return [worker for worker in self._plane.workers.all() if worker.status is not WorkerStatus.PARKED]

    def index_state(self, worker: Worker) -> str:
        """`fallback`: nothing is known of the worker's cache yet, so that no placement counts on it."""
        if worker.status is WorkerStatus.OPENING:
            return "fallback"
        return self._plane.index.view_state(worker.worker_id).value

    def describe(self, now_s: float) -> dict[str, Any]:
        """Everything but the traffic, for JSON."""
        plane, pool = self._plane, self._pool
        return {
            "composition": self.composition,
            "target": None if plane.target is None else str(plane.target),
            "epoch": plane.epoch,
            "is_ready": pool.is_ready,
            "is_draining": pool.is_draining,
            "failure": None if pool.failure is None else str(pool.failure),
            "num_open": pool.num_open,
            "num_unanswered": pool.num_unanswered,
            "num_waiting": plane.num_waiting,
            "num_waiting_for_decode": pool.decode.num_waiting,
            "num_transitions": len(plane.transitions),
            "ranks": [_rank_facts(rank, each) for rank, each in enumerate(self._ranks())],
            "workers": [self._worker_facts(worker, now_s) for worker in self.workers()],
            "decode_ranks": pool.decode.describe(),
            "controller": self._controller_facts(),
            "drift": {
                str(degree): {"step_ratio": ratio, "correction_ratio": plane.drift.factors[degree]}
                for degree, ratio in plane.drift.ratios().items()
            },
        }

    def readings(self, now_s: float) -> Iterator[Reading]:
        """Every gauge."""
        plane, pool = self._plane, self._pool
        yield families.OPEN, (), pool.num_open
        yield families.UNANSWERED, (), pool.num_unanswered
        yield families.WAITING, ("worker",), plane.num_waiting
        yield families.WAITING, ("decode",), pool.decode.num_waiting
        for rank in pool.decode.describe():
            yield families.DECODE_SEQUENCES, (str(rank["rank"]),), rank["num_sequences"]
            yield families.DECODE_FREE, (str(rank["rank"]),), rank["free_blocks"]
        yield families.INDEX_BLOCKS, (), plane.index.num_blocks
        planned = Counter(group.degree for group in plane.planned_layout)
        # A degree that is not there now may have been: it shows as 0.
        for degree in plane.cost_model.degrees:
            yield families.COMPOSITION, (str(degree),), planned[degree]
        found = Counter((worker.degree, worker.status) for worker in self.workers())
        for degree in plane.cost_model.degrees:
            for status in _STATE_OF:
                yield families.WORKERS, (str(degree), status.value), found[degree, status]
        for worker in self.workers():
            labels = (str(worker.worker_id), str(worker.degree))
            yield families.WORKER_QUEUE, labels, worker.outstanding_s(now_s)
            store = pool.caches.stores.get(worker.worker_id)
            if store is not None:
                yield families.RESIDENT, labels, store.num_resident
                yield families.FREE, labels, store.num_free
            for state in INDEX_STATES:
                yield families.INDEX_STATE, (labels[0], state), float(state == self.index_state(worker))
        states = Counter(rank.state for rank in self._ranks())
        for state in RANK_STATES:
            yield families.RANKS, (state,), states[state]
        for degree, ratio in plane.drift.ratios().items():
            yield families.DRIFT, (str(degree),), ratio
        for degree, factor in plane.drift.factors.items():
            yield families.CORRECTION, (str(degree),), factor
        yield families.EPOCH, (), plane.epoch
        yield families.POOL_FAILED, (), float(pool.failure is not None)
        yield families.DRAINING, (), float(pool.is_draining)
        yield families.PAUSED, (), float(plane.is_controller_paused)
        if (window := plane.last_window) is not None:
            yield families.DEMAND, (), window.demand_s_per_s
            if window.num_requests:
                yield families.LONG_RATIO, (), window.num_long / window.num_requests
        if (capacity_s_per_s := self.capacity_s_per_s) is not None:
            yield families.CAPACITY, (), capacity_s_per_s

    def _ranks(self) -> list[_Rank]:
        """By rank number."""
        worker_of = {rank: worker for worker in self.workers() for rank in worker.group.ranks}
        group_of = {rank: group for group in self._plane.planned_layout for rank in group.ranks}
        ranks = []
        for rank in range(self._plane.topology.num_gpus):
            worker, group = worker_of.get(rank), group_of.get(rank)
            if rank in self._plane.lost_ranks:
                ranks.append(_Rank("lost", None, None))
            elif worker is not None:
                ranks.append(_Rank(_STATE_OF[worker.status], worker, worker.group))
            else:
                ranks.append(_Rank("spare" if group is None else "switching", None, group))
        return ranks

    def _worker_facts(self, worker: Worker, now_s: float) -> dict[str, Any]:
        store = self._pool.caches.stores.get(worker.worker_id)
        step = {
            "num_requests": len(worker.running),
            "num_tokens": worker.running_tokens,
            "left_s": max(worker.running_end_s - now_s, 0.0),
        }
        return {
            "worker_id": worker.worker_id,
            "ranks": list(worker.group.ranks),
            "degree": worker.degree,
            "status": worker.status.value,
            "epoch": worker.epoch,
            "outstanding_s": worker.outstanding_s(now_s),
            "num_queued": len(worker.queue),
            "step": step if worker.running else None,
            "resident_blocks": store.num_resident if store is not None else 0,
            "free_blocks": store.num_free if store is not None else 0,
            "num_blocks": worker.degree * self._pool.settings.blocks_per_rank,
            "index_state": self.index_state(worker),
        }

    def _controller_facts(self) -> dict[str, Any]:
        plane = self._plane
        controller, window, proposal = plane.controller, plane.last_window, plane.last_proposal
        is_some = window is not None and window.num_requests > 0
        return {
            "name": None if controller is None else type(controller).__name__.removesuffix("Controller").lower(),
            "is_paused": plane.is_controller_paused,
            "window_s": plane.settings.window_s,
            "demand_s_per_s": None if window is None else window.demand_s_per_s,
            "long_ratio": window.num_long / window.num_requests if window is not None and is_some else None,
            "long_tokens": plane.long_tokens,
            "capacity_s_per_s": self.capacity_s_per_s,
            **_thresholds(controller),
            "proposal": None
            if proposal is None
            else {
                "composition": str(proposal.target),
                "reason": proposal.reason.value,
                "figures": dict(proposal.figures),
            },
        }


def _thresholds(controller: Controller | None) -> dict[str, float | None]:
    """Shares of the capacity at which a controller of thresholds splits and merges; None for any other."""
    if not isinstance(controller, ThresholdController):
        return {"upper_ratio": None, "lower_ratio": None}
    return {"upper_ratio": controller.settings.upper_ratio, "lower_ratio": controller.settings.lower_ratio}


def _rank_facts(rank: int, each: _Rank) -> dict[str, Any]:
    return {
        "rank": rank,
        "state": each.state,
        "worker_id": None if each.worker is None else each.worker.worker_id,
        "group": None if each.group is None else [each.group.first_rank, each.group.degree],
    }
