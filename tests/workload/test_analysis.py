"""Reuse distances against a naive cache, and the sums of an analysis."""

import json
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.workload.trace_strategies import trace_of, traces

from vertumnus.errors import ConfigError
from vertumnus.workload.analysis import analyze
from vertumnus.workload.analysis_plot import plot
from vertumnus.workload.reuse import block_reuse
from vertumnus.workload.trace import Trace


def found_by_lru(trace: Trace, cache_blocks: int) -> list[list[bool]]:
    """Looks a request up in a plain LRU cache, then uses its blocks, the last one first."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for index in range(trace.num_requests):
        blocks = trace.blocks(index).tolist()
        found.append([block in cache for block in blocks])
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > cache_blocks:
            cache.popitem(last=False)
    return found


@given(traces(), st.integers(1, 30))
def test_reuse_distances_say_what_a_cache_of_any_size_finds(trace, cache_blocks):
    reuse = block_reuse(trace)
    expected = found_by_lru(trace, cache_blocks)
    assert reuse.found(cache_blocks).tolist() == [hit for request in expected for hit in request]
    for request in expected:
        assert request == sorted(request, reverse=True), "what is found is a prefix"
    assert reuse.found(None).tolist() == reuse.found(10**9).tolist()
    assert int(reuse.tokens.sum()) == int(trace.input_tokens.sum())


@given(traces(), st.integers(1, 30), st.floats(0.001, 0.05))
def test_windows_and_totals_agree(trace, cache_blocks, window_s):
    analysis = analyze(trace, window_s=window_s, cache_blocks=cache_blocks, long_tokens=6)
    assert sum(window.num_requests for window in analysis.windows) == trace.num_requests
    assert sum(window.length_s for window in analysis.windows) == pytest.approx(trace.duration_s, abs=1e-9)
    assert analysis.long_request_ratio == pytest.approx(float((trace.input_tokens > 6).mean()))
    reuse = analysis.reuse
    assert reuse is not None
    assert 0 <= reuse.finite_token_hit_ratio <= reuse.ideal_token_hit_ratio < 1
    assert reuse.num_distinct_blocks == trace.num_block_ids
    assert reuse.num_distinct_blocks + reuse.num_reused_blocks == len(trace.block_ids)
    sizes, hits = zip(*reuse.hit_by_cache_blocks, strict=True)
    assert list(hits) == sorted(hits)
    assert sizes[-1] >= reuse.num_distinct_blocks
    assert hits[-1] == pytest.approx(reuse.ideal_token_hit_ratio)
    assert sum(analysis.input.histogram) == sum(analysis.output.histogram) == trace.num_requests
    assert analysis.min_rate_per_s <= analysis.max_rate_per_s
    assert json.loads(json.dumps(analysis.to_json(), allow_nan=False))["num_requests"] == trace.num_requests


def test_figures_of_a_trace_worked_by_hand():
    trace = trace_of([[1] * 8, [1] * 8 + [2] * 2, [3] * 4, [1] * 8], arrival_s=[0, 1, 2, 4])
    analysis = analyze(trace, window_s=2, cache_blocks=2, long_tokens=8)
    assert analysis.mean_rate_per_s == 0.75
    assert (analysis.long_request_ratio, analysis.long_token_ratio) == (0.25, pytest.approx(10 / 30))
    reuse = analysis.reuse
    assert reuse is not None
    assert reuse.ideal_token_hit_ratio == pytest.approx(16 / 30)
    assert reuse.ideal_block_hit_ratio == pytest.approx(4 / 8)
    # The last request's blocks lie 1 and 2 deep: [3] was used after them, and the first also after the second.
    assert reuse.finite_token_hit_ratio == pytest.approx((8 + 4) / 30)
    assert reuse.request_hit_ratio == 0.5
    assert [window.num_requests for window in analysis.windows] == [2, 1, 1]
    assert [window.ideal_token_hit_ratio for window in analysis.windows] == [pytest.approx(8 / 18), 0, 1]
    labels = dict(analysis.rows())
    assert labels["token hit, unlimited cache"] == "53.3%"


def test_without_block_ids_reuse_is_unknown(tmp_path):
    trace = Trace(
        name="plain",
        block_tokens=512,
        has_block_ids=False,
        arrival_s=np.array([0.0]),
        input_tokens=np.array([700]),
        output_tokens=np.array([0]),
        block_ids=np.array([], dtype=np.int64),
        block_offsets=np.zeros(2),
    )
    analysis = analyze(trace)
    assert analysis.reuse is None
    assert analysis.rows()[-1] == ("prefix reuse", "unknown: the trace has no block ids")
    assert [window.ideal_token_hit_ratio for window in analysis.windows] == [None]
    plot(analysis, tmp_path / "page.svg")


def test_what_is_out_of_range_is_refused():
    trace = trace_of([[1], [1]])
    for change in ({"window_s": 0}, {"window_s": float("inf")}, {"cache_blocks": 0}, {"long_tokens": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(change))} is .*accepted"):
            analyze(trace, **change)


@pytest.mark.parametrize(("name", "magic"), [("page.png", b"\x89PNG"), ("page.svg", b"<?xml")])
def test_the_page_is_written_whole_and_reproducibly(tmp_path, name, magic):
    analysis = analyze(trace_of([[1] * 8, [1] * 10, [3] * 4, [1] * 8], arrival_s=[0, 100, 200, 20000]), window_s=5000)
    plot(analysis, tmp_path / name)
    first = (tmp_path / name).read_bytes()
    assert first.startswith(magic)
    with pytest.raises(ConfigError, match="exists"):
        plot(analysis, tmp_path / name)
    plot(analysis, tmp_path / name, force=True)
    assert (tmp_path / name).read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_page_in_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plot path is '.*page\.jpeg2000'; accepted"):
        plot(analyze(trace_of([[1]])), tmp_path / "page.jpeg2000")
