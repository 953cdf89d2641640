"""Builders and Hypothesis strategies for traces."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from vertumnus.workload.trace import Trace

PUBLIC_TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
needs_public_traces = pytest.mark.skipif(
    not PUBLIC_TRACES.is_dir(), reason="the public traces are not beside this repository"
)


def trace_of(
    prompts: Sequence[Sequence[int]],
    *,
    arrival_s: Sequence[float] | None = None,
    block_tokens: int = 4,
    name: str = "built",
) -> Trace:
    """A trace of prompts given as token lists: blocks with equal tokens after equal blocks get equal ids."""
    id_of_prefix: dict[tuple[int, ...], int] = {}
    ids: list[int] = []
    offsets = [0]
    for prompt in prompts:
        for start in range(0, len(prompt), block_tokens):
            prefix = tuple(prompt[: start + block_tokens])
            ids.append(id_of_prefix.setdefault(prefix, len(id_of_prefix)))
        offsets.append(len(ids))
    return Trace(
        name=name,
        block_tokens=block_tokens,
        has_block_ids=True,
        arrival_s=np.array(arrival_s if arrival_s is not None else np.arange(len(prompts)), dtype=np.float64),
        input_tokens=np.array([len(prompt) for prompt in prompts]),
        output_tokens=np.arange(len(prompts)),
        block_ids=np.array(ids, dtype=np.int64),
        block_offsets=np.array(offsets),
    )


def prompts(max_size: int = 20) -> st.SearchStrategy[list[list[int]]]:
    """Prompts over two tokens, so that prefixes often coincide."""
    return st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=max_size)


@st.composite
def traces(draw: st.DrawFn, block_tokens: int = 4) -> Trace:
    """Small traces with shared prefixes, ties among arrivals, and partial blocks."""
    drawn = draw(prompts())
    gaps_ms = draw(st.lists(st.integers(0, 3), min_size=len(drawn) - 1, max_size=len(drawn) - 1))
    arrival_s = np.concatenate(([0], np.cumsum(gaps_ms))) / 1000
    return trace_of(drawn, arrival_s=arrival_s.tolist(), block_tokens=block_tokens)


def assert_same_requests(one: Trace, other: Trace) -> None:
    """Everything but name and warnings agrees."""
    assert one.block_tokens == other.block_tokens
    assert one.has_block_ids == other.has_block_ids
    for field in ("arrival_s", "input_tokens", "output_tokens", "block_ids", "block_offsets"):
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field), err_msg=field)
