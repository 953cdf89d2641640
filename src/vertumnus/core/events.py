"""What goes into the control plane and what comes out of it: plain values, no behaviour.

Events are what a real pool can report. Actions are what a pool must do. A cache report (`core.index.reports`) is an
event too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vertumnus.core.composition import Composition, RankGroup
from vertumnus.core.index.reports import CacheReport
from vertumnus.core.placement import Placement
from vertumnus.core.requests import PrefillRequest


class CopyReason(Enum):
    """Why blocks are copied between workers."""

    INTER_DEGREE = "inter-degree replication"
    INTRA_DEGREE = "intra-degree replication"
    RECONCILIATION = "reconciliation"
    """Of blocks that a split took from a worker, on their first reuse."""
    PULL = "pull"
    """On demand, for one request, as copying was cheaper than recomputing."""


# Events


@dataclass(frozen=True, slots=True)
class RequestArrived:
    request: PrefillRequest


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client went away. A step that runs already is not interrupted; its result is discarded."""

    request_id: int


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A worker began a step; `reused_tokens` is what its cache really held for each item of the step, in order."""

    worker_id: int
    reused_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A worker's step is done and all KV it produced is installed (reported apart, by the cache)."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """A block copy ended. What was installed is reported by the destination's cache, so `ok` is for the record."""

    copy_id: int
    ok: bool


@dataclass(frozen=True, slots=True)
class RankConfirmed:
    """A rank has adopted a configuration epoch."""

    rank: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RankFailed:
    rank: int


@dataclass(frozen=True, slots=True)
class RankRecovered:
    """A failed rank is back, empty, and parked."""

    rank: int


@dataclass(frozen=True, slots=True)
class CompositionRequested:
    """An operator wants this composition. The controller pauses, so as not to undo it; see `ControllerPaused`."""

    composition: Composition


@dataclass(frozen=True, slots=True)
class ControllerPaused:
    """The controller proposes nothing while it is paused; resumed, it starts from the composition that it finds."""

    is_paused: bool


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The instant asked for by `ControlPlane.next_timer_s` has come."""


Event = (
    RequestArrived
    | RequestCancelled
    | StepStarted
    | StepFinished
    | CopyEnded
    | RankConfirmed
    | RankFailed
    | RankRecovered
    | CompositionRequested
    | ControllerPaused
    | TimerFired
    | CacheReport
)


# Actions


@dataclass(frozen=True, slots=True)
class StepItem:
    """One request's share of a step: tokens [start, end) are new; tokens [0, start) have KV if the prediction holds.

    With `is_first` the pool looks up what its cache really holds and may start further on, never further back than
    what it holds.
    """

    request: PrefillRequest
    start_tokens: int
    end_tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class RequestPlaced:
    """A request was reserved at a worker; `placement` says why. `is_redirected` on any but the first placement."""

    request_id: int
    worker_id: int
    placement: Placement
    is_redirected: bool


@dataclass(frozen=True, slots=True)
class RequestRejected:
    request_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class DropRequest:
    """A request whose first chunks have run goes on elsewhere later, or was cancelled: what the worker still holds for
    it can go. What was computed stays cached."""

    worker_id: int
    request_id: int


@dataclass(frozen=True, slots=True)
class StartStep:
    """Run one step on a worker now."""

    worker_id: int
    epoch: int
    items: tuple[StepItem, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBlocks:
    """Pull blocks, in path order below `parent`, from one worker's store into another's."""

    copy_id: int
    reason: CopyReason
    source_worker_id: int
    destination_worker_id: int
    parent: bytes | None
    blocks: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ReclaimBlocks:
    """Free these blocks at a worker unless they are in use."""

    worker_id: int
    blocks: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class ActivateGroups:
    """Every rank of these groups adopts the epoch; each confirms. The workers that ran on the ranks are parked."""

    epoch: int
    groups: tuple[RankGroup, ...]


@dataclass(frozen=True, slots=True)
class OpenWorker:
    """A rank group serves as a worker from now on; the pool answers with a cache snapshot of what its ranks hold."""

    worker_id: int
    group: RankGroup
    epoch: int


@dataclass(frozen=True, slots=True)
class CloseWorker:
    """A worker is gone: its ranks failed or serve as other workers now."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class SendSnapshot:
    """The index lost track of this worker's cache and needs a snapshot."""

    worker_id: int


Action = (
    RequestPlaced
    | RequestRejected
    | DropRequest
    | StartStep
    | CopyBlocks
    | ReclaimBlocks
    | ActivateGroups
    | OpenWorker
    | CloseWorker
    | SendSnapshot
)
