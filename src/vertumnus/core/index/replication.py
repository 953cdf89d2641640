"""The words of Algorithm 2: its settings, what it must know about the pool, the plans it makes, copies under way."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from vertumnus.errors import ConfigError

_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationSettings:
    """Thresholds and bounds of one scan. The thresholds belong to a scan interval and a decay: calibrate them together.

    With demand of x per scan, a statistic settles at x / (1 - decay).
    """

    theta_inter_s: float = 2.0
    """Predicted seconds lost for want of a first replica at a degree, above which one is made."""
    theta_intra: float = 4.0
    """Uses per replica above which one more is made at the same degree."""
    min_relief_s: float = 0.0
    """Seconds that the destination of one more replica at a degree must be less busy than the least busy holder, whose
    queue it relieves; uses per replica then count as many times as that is seconds. 0: queues don't matter, as in
    Algorithm 2."""
    theta_reclaim: float = 0.1
    """Uses per replica below which one may be reclaimed; below theta_intra, else a copy is undone by the next scan."""
    decay: float = 0.8
    """What is left of all demand after a scan, inside (0, 1)."""
    max_inter: int = 8
    """First replicas planned in one scan."""
    max_intra: int = 8
    """Further replicas planned in one scan."""
    max_reclaim: int = 32
    """Reclaims planned in one scan; each takes a run of blocks at the end of a path."""
    max_blocks_per_copy: int = 256
    """Blocks that one scan may send over one link (source, destination); a longer copy is cut to its first blocks."""
    max_blocks_per_reclaim: int = 256
    """Blocks that one reclaim may take."""
    max_intake_ratio: float = 0.25
    """Share of its capacity that one scan may send to a worker; a full store makes room by evicting its coldest."""
    grace_s: float = 30.0
    """A block is not reclaimed so soon after a worker stored it."""
    pressure_ratio: float = 0.9
    """Resident blocks over capacity from which a worker's replicas are reclaimed."""

    def __post_init__(self) -> None:
        for name in (
            "theta_inter_s",
            "theta_intra",
            "min_relief_s",
            "theta_reclaim",
            "grace_s",
            "pressure_ratio",
            "max_intake_ratio",
        ):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: a finite number, 0 or more")
        if not self.theta_reclaim < self.theta_intra:
            raise ConfigError(f"theta_reclaim is {self.theta_reclaim}; accepted: below theta_intra, {self.theta_intra}")
        if not 0 < self.decay < 1:
            raise ConfigError(f"decay is {self.decay}; accepted: above 0 and below 1")
        for name in ("max_inter", "max_intra", "max_reclaim"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 0 or more")
        for name in ("max_blocks_per_copy", "max_blocks_per_reclaim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a scan must know about one worker."""

    queue_s: float
    """Outstanding predicted seconds."""
    capacity_blocks: int
    can_receive: bool = True
    """Active, and neither draining nor failed: may be the destination of a copy."""
    can_send: bool = True
    """May be the source of a copy."""


def _nothing_in_use(worker_id: int, block: bytes) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The workers that a scan may use, by id; a worker that is missing here neither sends, receives nor reclaims."""

    workers: Mapping[int, WorkerLoad]
    in_use: Callable[[int, bytes], bool] = _nothing_in_use
    """(worker_id, block): a step or copy is using the block there, so that it can't be reclaimed."""


class CopyKind(Enum):
    """Why a prefix is copied."""

    INTER = "inter-degree"
    """The first replica at a degree."""
    INTRA = "intra-degree"
    """One more replica at a degree that has some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Copy `blocks`, a chain below `parent`, so that the destination holds the complete prefix that ends in `block`."""

    kind: CopyKind
    degree: int
    """Of the destination."""
    block: bytes
    """The deepest block of the prefix."""
    source_worker_id: int
    destination_worker_id: int
    parent: bytes | None
    """What blocks[0] hangs below: None for the root."""
    blocks: tuple[bytes, ...]
    """The path from there to `block`, in order. The destination lacks all of them, save that stranded blocks may be
    among them (it then holds them and copies the others only: `missing_blocks`)."""
    missing_blocks: int
    """How many of `blocks` the destination lacks: the footprint of the copy."""
    score: float
    """Inter: seconds of missed benefit per copied block. Intra: uses per replica. Higher is better."""


@dataclass(frozen=True, slots=True)
class ReclaimPlan:
    """Remove `blocks`, the end of a path, deepest first, from a worker under cache pressure."""

    worker_id: int
    blocks: tuple[bytes, ...]
    score: float
    """Uses per replica of the deepest block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """What one scan decided."""

    replications: tuple[CopyPlan, ...]
    """Inter-degree plans, then intra-degree plans, best first each."""
    reclaims: tuple[ReclaimPlan, ...]
    num_nodes: int
    """Blocks looked at."""
    num_inter_candidates: int
    """Candidates (block, degree) by the paper's criterion, before any bound."""
    num_intra_candidates: int
    num_reclaim_candidates: int
    """As above, but of the ends of paths at workers under cache pressure, past their grace period, alone."""


class CopiesInFlight:
    """Copies that were started and have not ended: their destinations count as coming replicas."""

    def __init__(self) -> None:
        self._plans: dict[CopyPlan, int] = {}
        self._coming: dict[bytes, Counter[int]] = {}
        """Block -> {destination worker: number of copies that bring it}."""
        self._leased: Counter[tuple[int, bytes]] = Counter()
        """(worker, block) -> number of copies that rely on the block there."""
        self._num_to: Counter[int] = Counter()
        """Destination worker -> number of copies."""

    def __len__(self) -> int:
        return sum(self._plans.values())

    def copy(self) -> "CopiesInFlight":
        """An independent duplicate, in which a scan counts its own plans."""
        duplicate = CopiesInFlight()
        for plan, num_copies in self._plans.items():
            for _ in range(num_copies):
                duplicate.start(plan)
        return duplicate

    def start(self, plan: CopyPlan) -> None:
        """Counts a copy in."""
        self._plans[plan] = self._plans.get(plan, 0) + 1
        self._count(plan, 1)

    def end(self, plan: CopyPlan) -> None:
        """Counts a copy out; one that is not under way (its worker may have left) is ignored."""
        if plan not in self._plans:
            return
        self._plans[plan] -= 1
        if not self._plans[plan]:
            del self._plans[plan]
        self._count(plan, -1)

    def forget_worker(self, worker_id: int) -> None:
        """A worker left: its copies are over."""
        for plan in list(self._plans):
            if worker_id in (plan.source_worker_id, plan.destination_worker_id):
                while plan in self._plans:
                    self.end(plan)

    def is_destination(self, worker_id: int) -> bool:
        """Whether any copy is on its way to the worker."""
        return worker_id in self._num_to

    def coming_to(self, block: bytes) -> tuple[int, ...]:
        """The workers that the block is on its way to, by id."""
        return tuple(sorted(self._coming.get(block, ())))

    def is_leased(self, worker_id: int, block: bytes) -> bool:
        """Whether a copy reads the block at this worker, or ends a prefix with it that is being extended there."""
        return (worker_id, block) in self._leased

    def _count(self, plan: CopyPlan, change: int) -> None:
        _change(self._num_to, plan.destination_worker_id, change)
        if plan.parent is not None:
            _change(self._leased, (plan.destination_worker_id, plan.parent), change)
        for block in plan.blocks:
            _change(self._leased, (plan.source_worker_id, block), change)
            destinations = self._coming.setdefault(block, Counter())
            _change(destinations, plan.destination_worker_id, change)
            if not destinations:
                del self._coming[block]


def _change(counter: Counter[_Key], key: _Key, change: int) -> None:
    """Adds to a count and forgets it at zero."""
    counter[key] += change
    if not counter[key]:
        del counter[key]
