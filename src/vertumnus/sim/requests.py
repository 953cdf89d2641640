"""A trace's requests as the decision core sees them."""

from collections.abc import Iterator

import numpy as np

from vertumnus.core.requests import PrefillRequest
from vertumnus.workload.trace import Trace

_CHUNK_REQUESTS = 4096  # hashed at a time, so that a long trace is never held twice
_MAX_KNOWN_BLOCKS = 1 << 18


def prefill_requests(trace: Trace) -> Iterator[PrefillRequest]:
    """The trace's requests, full blocks only, ids in order of arrival.

    A block id becomes a 16-byte hash by two odd multipliers: unequal ids give unequal hashes, and the low bits vary.
    Requests that share a block mostly share the object too, so that looking it up touches no bytes of other objects.
    """
    known: dict[int, bytes] = {}
    num_full = np.minimum(trace.input_tokens // trace.block_tokens, np.diff(trace.block_offsets))
    for first in range(0, trace.num_requests, _CHUNK_REQUESTS):
        rows = slice(first, first + _CHUNK_REQUESTS)
        offsets = trace.block_offsets[first : first + _CHUNK_REQUESTS + 1]
        block_ids = trace.block_ids[offsets[0] : offsets[-1]]
        ids = block_ids.astype(np.uint64) + np.uint64(1)
        pairs = np.stack((ids * np.uint64(0x9E3779B97F4A7C15), ids * np.uint64(0xC2B2AE3D27D4EB4F)), axis=1)
        if len(known) > _MAX_KNOWN_BLOCKS:
            known.clear()
        fresh = pairs.view("V16").ravel().tolist()
        hashes = list(map(known.setdefault, block_ids.tolist(), fresh))
        starts = (offsets[:-1] - offsets[0]).tolist()
        ends = (offsets[:-1] - offsets[0] + num_full[rows]).tolist()
        columns = zip(trace.arrival_s[rows].tolist(), trace.input_tokens[rows].tolist(), starts, ends, strict=True)
        for request_id, (arrival_s, input_tokens, start, end) in enumerate(columns, first):
            yield PrefillRequest(request_id, arrival_s, input_tokens, hashes[start:end])
