"""What a trace is like: the paper's three observations, lengths, and what caches of any size would find."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vertumnus.errors import ConfigError
from vertumnus.workload.reuse import BlockReuse, block_reuse
from vertumnus.workload.trace import FloatArray, IntArray, Trace

LONG_TOKENS = 32 * 1024

DEFAULT_CACHE_TOKENS = 8 * 1400 * 512
"""Default size of the finite cache: about what a node of eight GPUs holds (1,400 blocks of 512 tokens each)."""

MAX_NUM_WINDOWS = 48
_WINDOW_STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400)
_LENGTH_BIN_EDGES = tuple(1 << power for power in range(25))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of token counts; `histogram[k]` requests have 2**k to 2**(k+1) - 1 tokens, the first also 0."""

    mean_tokens: float
    p50_tokens: float
    p90_tokens: float
    p95_tokens: float
    p99_tokens: float
    max_tokens: int
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One stretch of the trace; ratios are None where it has no request or the trace no block ids."""

    start_s: float
    length_s: float
    num_requests: int
    rate_per_s: float
    long_request_ratio: float | None
    long_token_ratio: float | None
    ideal_token_hit_ratio: float | None
    finite_token_hit_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """What prefix caches would find.

    Distances count the distinct blocks used between two uses of a block. `hit_by_cache_blocks` pairs cache sizes with
    the token hit ratio of a least-recently-used cache of that size (see `workload/reuse.py`).
    """

    ideal_token_hit_ratio: float
    ideal_block_hit_ratio: float
    request_hit_ratio: float
    cache_blocks: int
    finite_token_hit_ratio: float
    num_distinct_blocks: int
    num_reused_blocks: int
    p50_distance_blocks: float | None
    p90_distance_blocks: float | None
    p99_distance_blocks: float | None
    hit_by_cache_blocks: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """The figures of one trace. `reuse` is None without prefix information."""

    name: str
    synthesised: bool
    num_requests: int
    duration_s: float
    mean_rate_per_s: float
    block_tokens: int
    long_tokens: int
    long_request_ratio: float
    long_token_ratio: float
    window_s: float
    min_rate_per_s: float
    max_rate_per_s: float
    input: Lengths
    output: Lengths
    reuse: Reuse | None
    windows: tuple[Window, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each headline figure, as a table shows them."""
        rows = [
            ("requests", f"{self.num_requests:,}" + (" (synthesised)" if self.synthesised else "")),
            ("duration", f"{self.duration_s:,.0f} s"),
            (
                f"arrival rate: mean (min to max of {self.window_s:g} s windows)",
                f"{self.mean_rate_per_s:.2f} ({self.min_rate_per_s:.2f} to {self.max_rate_per_s:.2f}) requests/s",
            ),
            (
                f"longer than {self.long_tokens:,} tokens: requests / input tokens",
                f"{self.long_request_ratio:.1%} / {self.long_token_ratio:.1%}",
            ),
            ("input tokens: mean / p50 / p90 / p95 / p99 / max", _length_row(self.input)),
            ("output tokens: mean / p50 / p90 / p95 / p99 / max", _length_row(self.output)),
        ]
        if self.reuse is None:
            return [*rows, ("prefix reuse", "unknown: the trace has no block ids")]
        reuse = self.reuse
        return [
            *rows,
            ("token hit, unlimited cache", f"{reuse.ideal_token_hit_ratio:.1%}"),
            (
                f"token hit, cache of {reuse.cache_blocks:,} blocks of {self.block_tokens} tokens",
                f"{reuse.finite_token_hit_ratio:.1%}",
            ),
            (
                "found in an unlimited cache: blocks / requests with any",
                f"{reuse.ideal_block_hit_ratio:.1%} / {reuse.request_hit_ratio:.1%}",
            ),
            ("distinct blocks", f"{reuse.num_distinct_blocks:,}"),
            ("reuse distance in distinct blocks: p50 / p90 / p99", _distance_row(reuse)),
        ]


def analyze(
    trace: Trace, *, window_s: float | None = None, cache_blocks: int | None = None, long_tokens: int = LONG_TOKENS
) -> Analysis:
    """The figures of a trace.

    Windows default to a round length that gives at most 48 of them; the finite cache to what a node of eight GPUs
    holds. A request is long above `long_tokens`. Hits count tokens of equal blocks, a partial last block included.
    """
    if window_s is None:
        window_s = _default_window_s(trace.duration_s)
    if not (np.isfinite(window_s) and window_s > 0 and trace.duration_s / window_s <= 1e6):
        raise ConfigError(f"window_s is {window_s}; accepted: seconds above 0, for at most a million windows")
    if cache_blocks is None:
        cache_blocks = max(1, DEFAULT_CACHE_TOKENS // trace.block_tokens)
    if cache_blocks < 1:
        raise ConfigError(f"cache_blocks is {cache_blocks}; accepted: 1 or more")
    if long_tokens < 1:
        raise ConfigError(f"long_tokens is {long_tokens}; accepted: 1 or more")
    blocks = block_reuse(trace) if trace.has_block_ids else None
    windows = _windows(trace, window_s, blocks, cache_blocks, long_tokens)
    rates_per_s = [window.rate_per_s for window in windows if window.length_s >= window_s / 2] or [
        trace.mean_rate_per_s
    ]
    is_long = trace.input_tokens > long_tokens
    return Analysis(
        name=trace.name,
        synthesised=trace.synthesised,
        num_requests=trace.num_requests,
        duration_s=trace.duration_s,
        mean_rate_per_s=trace.mean_rate_per_s,
        block_tokens=trace.block_tokens,
        long_tokens=long_tokens,
        long_request_ratio=float(is_long.mean()),
        long_token_ratio=float(trace.input_tokens[is_long].sum() / trace.input_tokens.sum()),
        window_s=window_s,
        min_rate_per_s=min(rates_per_s),
        max_rate_per_s=max(rates_per_s),
        input=_lengths(trace.input_tokens),
        output=_lengths(trace.output_tokens),
        reuse=None if blocks is None else _reuse(trace, blocks, cache_blocks),
        windows=windows,
        warnings=trace.warnings,
    )


def _default_window_s(duration_s: float) -> float:
    return next((float(step) for step in _WINDOW_STEPS_S if duration_s / step <= MAX_NUM_WINDOWS), 86400.0)


def _lengths(tokens: IntArray) -> Lengths:
    p50, p90, p95, p99 = np.percentile(tokens, (50, 90, 95, 99)).tolist()
    counts, _ = np.histogram(np.maximum(tokens, 1), bins=_LENGTH_BIN_EDGES)
    return Lengths(
        mean_tokens=float(tokens.mean()),
        p50_tokens=p50,
        p90_tokens=p90,
        p95_tokens=p95,
        p99_tokens=p99,
        max_tokens=int(tokens.max()),
        histogram=tuple(counts.tolist()),
    )


def _windows(
    trace: Trace, window_s: float, blocks: BlockReuse | None, cache_blocks: int, long_tokens: int
) -> tuple[Window, ...]:
    """The trace cut into windows; the last one ends with the last arrival."""
    row = (trace.arrival_s // window_s).astype(np.int64)
    num_windows = int(row[-1]) + 1

    def summed(values: NDArray[np.generic]) -> FloatArray:
        return np.asarray(np.bincount(row, values.astype(np.float64), num_windows), dtype=np.float64)

    is_long = trace.input_tokens > long_tokens
    num_requests = np.bincount(row, minlength=num_windows)
    tokens = summed(trace.input_tokens)
    long_requests, long_input = summed(is_long), summed(trace.input_tokens * is_long)
    ideal = finite = None
    if blocks is not None:
        ideal = summed(blocks.found_tokens(None, trace.num_requests))
        finite = summed(blocks.found_tokens(cache_blocks, trace.num_requests))

    def ratio(part: FloatArray | None, whole: NDArray[np.generic], index: int) -> float | None:
        return float(part[index] / whole[index]) if part is not None and whole[index] > 0 else None

    windows = []
    for index in range(num_windows):
        start_s = index * window_s
        length_s = min(window_s, trace.duration_s - start_s)
        windows.append(
            Window(
                start_s=start_s,
                length_s=length_s,
                num_requests=int(num_requests[index]),
                rate_per_s=float(num_requests[index] / length_s) if length_s > 0 else 0.0,
                long_request_ratio=ratio(long_requests, num_requests, index),
                long_token_ratio=ratio(long_input, tokens, index),
                ideal_token_hit_ratio=ratio(ideal, tokens, index),
                finite_token_hit_ratio=ratio(finite, tokens, index),
            )
        )
    return tuple(windows)


def _reuse(trace: Trace, blocks: BlockReuse, cache_blocks: int) -> Reuse:
    num_tokens = int(trace.input_tokens.sum())
    found = blocks.found(None)
    distances = np.sort(blocks.distance_blocks[found])
    percentiles = np.percentile(distances, (50, 90, 99)).tolist() if len(distances) else (None, None, None)
    found_tokens = blocks.found_tokens(None, trace.num_requests)
    return Reuse(
        ideal_token_hit_ratio=float(found_tokens.sum() / num_tokens),
        ideal_block_hit_ratio=float(found.mean()) if len(found) else 0.0,
        request_hit_ratio=float((found_tokens > 0).mean()),
        cache_blocks=cache_blocks,
        finite_token_hit_ratio=float(blocks.tokens[blocks.found(cache_blocks)].sum() / num_tokens),
        num_distinct_blocks=int((~found).sum()),
        num_reused_blocks=int(found.sum()),
        p50_distance_blocks=percentiles[0],
        p90_distance_blocks=percentiles[1],
        p99_distance_blocks=percentiles[2],
        hit_by_cache_blocks=_hit_curve(blocks, num_tokens),
    )


def _hit_curve(blocks: BlockReuse, num_tokens: int) -> tuple[tuple[int, float], ...]:
    """Token hit ratio at doubling cache sizes, up to one that holds every distinct block."""
    found = blocks.found(None)
    order = np.argsort(blocks.distance_blocks[found], kind="stable")
    distances = blocks.distance_blocks[found][order]
    reached_tokens = np.concatenate(([0], np.cumsum(blocks.tokens[found][order])))
    num_distinct = max(1, int((~found).sum()))
    sizes = 1 << np.arange(num_distinct.bit_length() + 1)
    hits = reached_tokens[np.searchsorted(distances, sizes)] / num_tokens
    return tuple(zip(sizes.tolist(), hits.tolist(), strict=True))


def _length_row(lengths: Lengths) -> str:
    values = (
        lengths.mean_tokens,
        lengths.p50_tokens,
        lengths.p90_tokens,
        lengths.p95_tokens,
        lengths.p99_tokens,
        lengths.max_tokens,
    )
    return " / ".join(f"{value:,.0f}" for value in values)


def _distance_row(reuse: Reuse) -> str:
    if reuse.p50_distance_blocks is None:
        return "no block is reused"
    values = (reuse.p50_distance_blocks, reuse.p90_distance_blocks or 0.0, reuse.p99_distance_blocks or 0.0)
    return " / ".join(f"{value:,.0f}" for value in values)
