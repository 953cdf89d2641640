"""What a worker tells the index about its cache, and what the index answers.

Every report carries the worker's *epoch* (it changes when the worker restarts, and only grows) and a *sequence*
number (0, 1, 2, ... within an epoch, one for every report of whatever kind). Block hashes are chained, 16 bytes.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

Chain: TypeAlias = tuple[bytes | None, tuple[bytes, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A chain is now resident: blocks[0] hangs below `parent` (None: the root), each of the others below the last."""

    worker_id: int
    epoch: int
    sequence: int
    parent: bytes | None
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """These blocks, in any order, are no longer resident."""

    worker_id: int
    epoch: int
    sequence: int
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """The worker's cache is empty."""

    worker_id: int
    epoch: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is resident at the moment of this sequence number, as chains in any order; replaces what was known."""

    worker_id: int
    epoch: int
    sequence: int
    chains: tuple[Chain, ...]


CacheReport: TypeAlias = Stored | Removed | Cleared | Snapshot


class ReportOutcome(Enum):
    """What became of a report."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    """Its sequence number is behind what is already known; ignored."""
    STALE_EPOCH = "stale epoch"
    """From before the worker's last restart; refused."""
    UNKNOWN_WORKER = "unknown worker"
    GAP = "gap"
    """The worker's view is degraded after this report: ask the worker for a Snapshot."""


class ViewState(Enum):
    """How far the index can be trusted about a worker."""

    EXACT = "exact"
    DEGRADED = "degraded"
    """Reports were lost. What was known stays readable, and may be wrong in both directions until a Snapshot comes."""
