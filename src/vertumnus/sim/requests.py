"""A trace's requests as the decision core sees them."""

from collections.abc import Iterator

import numpy as np

from vertumnus.core.requests import PrefillRequest
from vertumnus.workload.trace import Trace


def prefill_requests(trace: Trace) -> Iterator[PrefillRequest]:
    """The trace's requests, full blocks only, ids in order of arrival.

    A block id becomes a 16-byte hash by two odd multipliers: unequal ids give unequal hashes, and the low bits vary.
    """
    ids = trace.block_ids.astype(np.uint64) + np.uint64(1)
    pairs = np.stack((ids * np.uint64(0x9E3779B97F4A7C15), ids * np.uint64(0xC2B2AE3D27D4EB4F)), axis=1)
    hashes = np.ascontiguousarray(pairs).data.cast("B")
    starts = trace.block_offsets[:-1].tolist()
    num_full = np.minimum(trace.input_tokens // trace.block_tokens, np.diff(trace.block_offsets)).tolist()
    columns = zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), starts, num_full, strict=True)
    for request_id, (arrival_s, input_tokens, start, count) in enumerate(columns):
        raw = bytes(hashes[16 * start : 16 * (start + count)])
        blocks = [raw[position : position + 16] for position in range(0, 16 * count, 16)]
        yield PrefillRequest(request_id, arrival_s, input_tokens, blocks)
