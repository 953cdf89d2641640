"""What a prefix cache of any size would find in a trace, from one pass over its blocks.

The cache is least recently used over whole blocks, looked up when a request arrives and filled with all its blocks at
once; within a request the leading block counts as used last, so that what is evicted is always the end of a prefix.
Under that rule a block is found by a cache of N blocks exactly if its reuse distance, the number of distinct blocks
used since its last use, is below N: one set of distances answers for every size.

The blocks of a request that were last used together, by one earlier request, form a run. The first of a run has as
its distance the number of blocks last used after that earlier request, and every later one is one further away.
So one Fenwick tree over requests, asked once a run, is enough.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vertumnus.workload.trace import IntArray, Trace


@dataclass(frozen=True, slots=True)
class BlockReuse:
    """Per block entry of a trace: which request it belongs to, its tokens, and its reuse distance.

    `distance_blocks` is -1 for the first use of a block; a distance of 0 would be found by a cache of one block.
    """

    request: IntArray
    tokens: IntArray
    distance_blocks: IntArray

    def found(self, cache_blocks: int | None) -> NDArray[np.bool_]:
        """Which block entries a cache of that many blocks holds when they are asked for; None is unlimited."""
        found = self.distance_blocks >= 0
        return found if cache_blocks is None else found & (self.distance_blocks < cache_blocks)

    def found_tokens(self, cache_blocks: int | None, num_requests: int) -> IntArray:
        """Tokens that such a cache finds, per request."""
        found = self.found(cache_blocks)
        return np.bincount(self.request[found], self.tokens[found], num_requests).astype(np.int64)


def block_reuse(trace: Trace) -> BlockReuse:
    """Reuse distances of all blocks of a trace; time O(blocks log blocks), all but the runs vectorised."""
    num_blocks = np.diff(trace.block_offsets)
    request = np.repeat(np.arange(trace.num_requests), num_blocks)
    depth = np.arange(len(trace.block_ids)) - trace.block_offsets[request]
    tokens = np.minimum(trace.block_tokens, trace.input_tokens[request] - depth * trace.block_tokens)
    previous = _previous_request(trace.block_ids, request)

    starts_run = np.ones(len(request), dtype=np.bool_)
    starts_run[1:] = (previous[1:] != previous[:-1]) | (request[1:] != request[:-1])
    run_at = np.flatnonzero(starts_run)
    run_length = np.diff(np.append(run_at, len(request)))
    run_distance = _run_distances(request[run_at], previous[run_at], run_length, num_blocks)

    within_run = np.arange(len(request)) - np.repeat(run_at, run_length)
    distance = np.where(previous >= 0, np.repeat(run_distance, run_length) + within_run, -1)
    return BlockReuse(request, tokens, distance)


def _previous_request(block_ids: IntArray, request: IntArray) -> IntArray:
    """For every block entry the request that last used the same id; -1 at its first use."""
    order = np.argsort(block_ids, kind="stable")
    same = block_ids[order[1:]] == block_ids[order[:-1]]
    previous = np.full(len(block_ids), -1, dtype=np.int64)
    previous[order[1:][same]] = request[order[:-1][same]]
    return previous


def _run_distances(
    run_request: IntArray, run_previous: IntArray, run_length: IntArray, num_blocks: IntArray
) -> IntArray:
    """For every run the number of blocks last used after its previous request, when its own request arrives."""
    num_requests = len(num_blocks)
    size = num_requests + 1
    tree = [0] * size  # Fenwick tree over requests: blocks that were last used by each
    distances: list[int] = []
    taken: list[tuple[int, int]] = []  # (previous request, blocks that leave it), of the current request
    total = 0

    def add(row: int, amount: int) -> None:
        row += 1
        while row < size:
            tree[row] += amount
            row += row & -row

    def up_to(row: int) -> int:
        row, amount = row + 1, 0
        while row:
            amount += tree[row]
            row &= row - 1
        return amount

    blocks_of = num_blocks.tolist()
    current = -1
    for request, previous, length in zip(run_request.tolist(), run_previous.tolist(), run_length.tolist(), strict=True):
        if request != current:
            for row, amount in taken:
                add(row, -amount)
                total -= amount
            if current >= 0:
                add(current, blocks_of[current])
                total += blocks_of[current]
            taken.clear()
            current = request
        if previous < 0:
            distances.append(-1)
            continue
        distances.append(total - up_to(previous))
        taken.append((previous, length))
    return np.array(distances, dtype=np.int64)
