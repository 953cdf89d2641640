"""Which of several routers a request goes to."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vertumnus.workload.trace import Trace

Shares = NDArray[np.int64]
"""[requests]: the router of each request."""
Shard = Callable[[Trace, int], Shares]
"""(trace, number of routers) -> the router of each request."""

BOUND = 1.1
_MEMORY_S = 10.0
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def by_first_block(trace: Trace, num_routers: int) -> Shares:
    """The hash of a prompt's first block decides, however much that sends to one router; without a whole block, any."""
    first = trace.block_offsets[:-1]
    has_block = np.diff(trace.block_offsets) > 0
    key = np.where(has_block, trace.block_ids[np.minimum(first, len(trace.block_ids) - 1)], np.arange(len(first)))
    return ((key.astype(np.uint64) * _GOLDEN >> np.uint64(33)) % np.uint64(num_routers)).astype(np.int64)


def by_longest_prefix(trace: Trace, num_routers: int) -> Shares:
    """The router that was sent most of the prompt's beginning before, among those with at most BOUND times the mean
    load; of several the one with least load.

    Load is the input tokens sent to a router, of which a share 1/e is left ten seconds later. What is asked is what a
    proxy in front of the routers knows: where it sent which block, not whether that is still cached there.
    """
    all_routers = (1 << num_routers) - 1
    sent: dict[int, int] = {}  # block -> bit mask of the routers that were sent it
    load = np.zeros(num_routers)
    last_s = 0.0
    shares = []
    offsets, blocks = trace.block_offsets.tolist(), trace.block_ids.tolist()
    for row, (arrival_s, tokens) in enumerate(zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), strict=True)):
        load *= np.exp((last_s - arrival_s) / _MEMORY_S)
        last_s = arrival_s
        has_room = load + tokens <= BOUND * (load.sum() + tokens) / num_routers
        candidates = sum(1 << router for router in np.flatnonzero(has_room).tolist()) or all_routers
        prompt = blocks[offsets[row] : offsets[row + 1]]
        for block in prompt:
            deeper = candidates & sent.get(block, 0)
            if not deeper:
                break
            candidates = deeper
        router = min((each for each in range(num_routers) if candidates >> each & 1), key=load.__getitem__)
        for block in prompt:
            sent[block] = sent.get(block, 0) | 1 << router
        load[router] += tokens
        shares.append(router)
    return np.array(shares, dtype=np.int64)
