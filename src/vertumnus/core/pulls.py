"""Blocks of other workers that a placement counts on: when copying is cheaper than computing, and from where."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vertumnus.core.copies import CopyLedger
from vertumnus.core.cost import DegreeCosts, FloatArray
from vertumnus.core.events import CopyBlocks, CopyReason
from vertumnus.core.index import Match, PrefixIndex
from vertumnus.core.profile import Profile
from vertumnus.core.queueing import QueuedRequest
from vertumnus.core.reconciliation import PendingBlocks
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.topology import Topology
from vertumnus.core.workers import Worker, WorkerStatus, WorkerTable

ServiceTime = Callable[[DegreeCosts, FloatArray, FloatArray], FloatArray]
"""(costs, suffix tokens, prefix tokens) -> predicted seconds, chunks included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """What it costs to fetch blocks for one request, and which blocks may be fetched.

    The paper counts pending blocks as a miss. With these settings a placement takes the cheaper of recomputing and
    copying them, copy time included; `from_any_worker` goes further and lets every block that any worker holds be
    pulled, so that locality is a price and no longer a constraint.
    """

    s_per_token: float
    """Seconds to copy one token's KV over the slowest link that may be on the way."""
    latency_s: float
    from_any_worker: bool = False

    @classmethod
    def of_profile(cls, profile: Profile, *, from_any_worker: bool) -> "PullSettings":
        """The prices of a profile's hardware."""
        slowest = min(profile.inter_node_bytes_per_s, profile.intra_node_bytes_per_s)
        return cls(
            s_per_token=profile.kv_bytes_per_token / slowest,
            latency_s=profile.copy_latency_s,
            from_any_worker=from_any_worker,
        )


class Puller:
    """Prices and orders the copies that single requests need. Owns no block: it reads the index and the workers."""

    def __init__(
        self,
        settings: PullSettings,
        *,
        index: PrefixIndex,
        workers: WorkerTable,
        topology: Topology,
        pending: PendingBlocks,
        copies: CopyLedger,
        service_s: ServiceTime,
    ) -> None:
        self._settings = settings
        self._index = index
        self._workers = workers
        self._topology = topology
        self.pending = pending
        self._copies = copies
        self._service_s = service_s
        self._block_tokens = index.block_tokens

    def with_pulls(
        self,
        request: PrefillRequest,
        match: Match,
        reusable: FloatArray,
        suffix: FloatArray,
        service: FloatArray,
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(P, R, seconds) where each candidate takes the cheaper of recomputing missing blocks and copying them in."""
        table, block_tokens, length = self._workers, self._block_tokens, request.input_tokens
        reachable = reusable
        max_tokens = min(match.num_blocks, (length - 1) // block_tokens) * block_tokens
        if self._settings.from_any_worker:
            reachable = np.maximum(reusable, np.array(float(max_tokens)))
        else:
            for worker_id in self.pending.workers():
                row = self._workers[worker_id].row
                if row is not None and reusable[row] < max_tokens:
                    if reachable is reusable:
                        reachable = reusable.copy()
                    num_blocks = self._reachable_blocks(worker_id, request, match)
                    reachable[row] = min(num_blocks * block_tokens, max_tokens)
            if reachable is reusable:
                return reusable, suffix, service
        missing = reachable - reusable
        if missing[missing.argmax()] <= 0:
            return reusable, suffix, service
        # Arrays of no dimension, as NumPy takes Python numbers more slowly.
        all_tokens = np.array(float(length))
        copied = self._service_s(table.costs, all_tokens - reachable, reachable)
        copied += np.array(self._settings.latency_s) + np.array(self._settings.s_per_token) * missing
        is_cheaper = (missing > np.array(0.0)) & (copied < service)
        reusable = np.where(is_cheaper, reachable, reusable)
        return reusable, all_tokens - reusable, np.where(is_cheaper, copied, service)

    def ask(self, item: QueuedRequest, worker: Worker, match: Match, num_blocks: int) -> list[CopyBlocks]:
        """Asks for the blocks that the placement counts on and the worker lacks; the request waits for them.

        One copy per stretch that a single worker holds; a worker of the same node is preferred. What nobody holds any
        more ends the prefix there.
        """
        path = item.request.blocks
        if num_blocks <= int(match.reusable_blocks[worker.slot]):
            return []
        missing = [each for each in self._index.missing_blocks(worker.worker_id, match) if each < num_blocks]
        reason = CopyReason.RECONCILIATION if self.pending.of(worker.worker_id) else CopyReason.PULL
        copies: list[CopyBlocks] = []
        start = 0
        while start < len(missing):
            first = missing[start]
            coming = self._copies.coming(worker.worker_id, path[first])
            if coming is not None:
                self._copies.await_copy(coming, item)
                start += 1
                continue
            source = self._source(path[first], worker)
            if source is None:
                break
            end = start + 1
            while end < len(missing) and missing[end] == missing[end - 1] + 1:
                block = path[missing[end]]
                if (
                    not self._index.holds(source.worker_id, block)
                    or self._copies.coming(worker.worker_id, block) is not None
                ):
                    break
                end += 1
            copy = CopyBlocks(
                copy_id=self._copies.next_id(),
                reason=reason,
                source_worker_id=source.worker_id,
                destination_worker_id=worker.worker_id,
                parent=path[first - 1] if first else None,
                blocks=tuple(path[position] for position in missing[start:end]),
            )
            self._copies.begin(copy, source_node=self._node_of(source))
            self._copies.await_copy(copy.copy_id, item)
            copies.append(copy)
            start = end
        return copies

    def _reachable_blocks(self, worker_id: int, request: PrefillRequest, match: Match) -> int:
        """How much of a matched path the worker has once what is pending there has been copied."""
        pending = self.pending.of(worker_id)
        for position in self._index.missing_blocks(worker_id, match):
            if request.blocks[position] not in pending:
                return position
        return match.num_blocks

    def _source(self, block: bytes, destination: Worker) -> Worker | None:
        """A worker to copy a block from, None if nobody has it.

        In the destination's node if possible, else from the node that copies under way take fewest blocks from: in a
        large pool whose caches are cold, everybody wants the same first blocks of the few that hold them.
        """
        node = self._node_of(destination)
        sources = []
        for worker_id in self._index.holders(block):
            source = self._workers.get(worker_id)
            if source is not None and source.status is not WorkerStatus.PARKED and source is not destination:
                source_node = self._node_of(source)
                leaving = self._copies.num_leaving(worker_id, source_node)
                sources.append((source_node != node, *leaving, worker_id, source))
        return min(sources)[-1] if sources else None

    def _node_of(self, worker: Worker) -> int:
        return self._topology.node_of(worker.group.first_rank)
