"""A trace made ready for prompts: every block of every request named, lengths and blocks scaled alike."""

from dataclasses import replace

import numpy as np

from vertumnus.errors import ConfigError
from vertumnus.workload.trace import MAX_TOKENS, IntArray, Trace


def fully_named(trace: Trace) -> Trace:
    """The trace with an id for every block of every request, partly filled last ones included.

    A block that the trace does not name is met nowhere else, so it gets an id of its own; without prefix information
    that goes for all blocks.
    """
    named = np.diff(trace.block_offsets)
    wanted = -(-trace.input_tokens // trace.block_tokens)
    offsets = np.concatenate(([0], np.cumsum(wanted)))
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], wanted)
    is_named = within < np.repeat(named, wanted)
    ids = np.empty(offsets[-1], dtype=np.int64)
    ids[is_named] = trace.block_ids
    ids[~is_named] = trace.num_block_ids + np.arange(int((~is_named).sum()))
    return replace(trace, has_block_ids=True, block_ids=ids, block_offsets=offsets)


def scaled_lengths(trace: Trace, factor: float) -> Trace:
    """The fully named trace with shorter or longer blocks and outputs; which blocks are shared stays as it is.

    A block of B tokens becomes one of B' = max(1, round(factor * B)); an input of f full blocks and r tokens more
    becomes f * B' + ceil(r * B' / B). So inputs scale by B'/B, which is not exactly `factor` where blocks are small,
    and every request keeps its number of blocks. An output of n tokens becomes max(1, round(factor * n)).
    Raises ConfigError unless the factor is above 0 and no length comes out beyond what a trace may have.
    """
    if not (np.isfinite(factor) and factor > 0):
        raise ConfigError(f"scale-lengths is {factor}; accepted: a finite number above 0")
    longest = max(trace.block_tokens, int(trace.input_tokens.max()), int(trace.output_tokens.max()))
    if longest * factor > MAX_TOKENS:
        raise ConfigError(
            f"scale-lengths is {factor:g}, which makes {longest:,} tokens {longest * factor:,.0f}; "
            f"accepted: at most {MAX_TOKENS:,} tokens"
        )
    block_tokens = max(1, round(factor * trace.block_tokens))
    full, rest = np.divmod(trace.input_tokens, trace.block_tokens)
    return replace(
        trace,
        block_tokens=block_tokens,
        input_tokens=full * block_tokens + -(-rest * block_tokens // trace.block_tokens),
        output_tokens=np.maximum(1, np.rint(factor * trace.output_tokens)).astype(np.int64),
    )


def siblings(trace: Trace) -> tuple[IntArray, IntArray, IntArray]:
    """Per block id of a fully named trace: the id before it (-1 for a first one), its number among the blocks that
    come after the same one, counted from 0, and its fewest tokens in any request.

    Shorter blocks are counted first: they have the fewest tokens to be told apart by. Ids that no request has count
    as first blocks of full length.
    """
    num_blocks = np.diff(trace.block_offsets)
    request = np.repeat(np.arange(trace.num_requests), num_blocks)
    start = (np.arange(len(trace.block_ids)) - trace.block_offsets[request]) * trace.block_tokens
    tokens_here = np.minimum(trace.block_tokens, trace.input_tokens[request] - start)
    parent = np.full(trace.num_block_ids, -1, dtype=np.int64)
    before = np.concatenate(([-1], trace.block_ids[:-1]))
    parent[trace.block_ids] = np.where(start == 0, -1, before)
    tokens = np.full(trace.num_block_ids, trace.block_tokens, dtype=np.int64)
    np.minimum.at(tokens, trace.block_ids, tokens_here)

    order = np.lexsort((np.arange(len(parent)), tokens, parent))
    is_first = np.ones(len(order), dtype=np.bool_)
    is_first[1:] = parent[order][1:] != parent[order][:-1]
    first_at = np.flatnonzero(is_first)
    number = np.empty_like(parent)
    number[order] = np.arange(len(order)) - np.repeat(first_at, np.diff(np.append(first_at, len(order))))
    return parent, number, tokens
