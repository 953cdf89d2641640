"""The global trie over chained block hashes: who holds which prefix, what is in demand, what to copy and reclaim."""

from vertumnus.core.index.prefix_index import Match, PrefixIndex
from vertumnus.core.index.replication import (
    CopyKind,
    CopyPlan,
    PoolLoad,
    ReclaimPlan,
    ReplicationSettings,
    ScanResult,
    WorkerLoad,
)
from vertumnus.core.index.reports import (
    CacheReport,
    Cleared,
    Removed,
    ReportOutcome,
    Snapshot,
    Stored,
    ViewState,
)

__all__ = [
    "CacheReport",
    "Cleared",
    "CopyKind",
    "CopyPlan",
    "Match",
    "PoolLoad",
    "PrefixIndex",
    "ReclaimPlan",
    "Removed",
    "ReplicationSettings",
    "ReportOutcome",
    "ScanResult",
    "Snapshot",
    "Stored",
    "ViewState",
    "WorkerLoad",
]
