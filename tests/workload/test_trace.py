"""What every way of changing a trace keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.workload.trace_strategies import assert_same_requests, trace_of, traces

from vertumnus.errors import ConfigError, InvariantError
from vertumnus.workload.trace import Trace, num_unchained, numbered_by_appearance, stamp_resolution_s


@given(traces())
def test_full_blocks_are_the_leading_blocks_that_are_whole(trace):
    trace.check_invariants()
    for index in range(trace.num_requests):
        num_full = trace.input_tokens[index] // trace.block_tokens
        np.testing.assert_array_equal(trace.full_blocks(index), trace.blocks(index)[:num_full])
        assert len(trace.full_blocks(index)) == num_full


@given(traces(), st.integers(1, 25))
def test_limited_is_a_prefix(trace, num_requests):
    limited = trace.limited(num_requests)
    limited.check_invariants()
    assert limited.num_requests == min(num_requests, trace.num_requests)
    for index in range(limited.num_requests):
        np.testing.assert_array_equal(limited.blocks(index), trace.blocks(index))


@given(traces(), st.floats(0.01, 1000))
def test_rescaled_has_the_rate_and_the_proportions(trace, rate_per_s):
    if trace.num_requests > 1 and trace.duration_s == 0:
        with pytest.raises(ConfigError, match="share one instant"):
            trace.rescaled(rate_per_s)
        return
    rescaled = trace.rescaled(rate_per_s)
    rescaled.check_invariants()
    if trace.num_requests > 1:
        assert rescaled.mean_rate_per_s == pytest.approx(rate_per_s)
        np.testing.assert_allclose(
            rescaled.arrival_s / rescaled.duration_s, trace.arrival_s / trace.duration_s, atol=1e-12
        )


@given(traces(), st.integers(1, 4))
def test_plays_of_a_repeated_trace_are_alike_and_share_no_block(trace, times):
    repeated = trace.repeated(times)
    repeated.check_invariants()
    n = trace.num_requests
    assert repeated.num_requests == times * n
    assert repeated.mean_rate_per_s == pytest.approx(trace.mean_rate_per_s)
    plays = []
    for play in range(times):
        ids = repeated.block_ids[repeated.block_offsets[play * n] : repeated.block_offsets[(play + 1) * n]]
        np.testing.assert_array_equal(numbered_by_appearance(ids), numbered_by_appearance(trace.block_ids))
        plays.append(set(ids.tolist()))
        np.testing.assert_allclose(
            np.diff(repeated.arrival_s[play * n : (play + 1) * n]), np.diff(trace.arrival_s), atol=1e-9
        )
    assert sum(map(len, plays)) == len(set().union(*plays))


@given(st.lists(st.integers(0, 8), min_size=2, max_size=60), st.integers(1, 5000), st.integers(0, 3))
def test_spread_moves_every_arrival_within_its_own_stamp(steps, tick_ms, seed):
    stamps_s = np.cumsum([step if step > 4 else 0 for step in steps]) * tick_ms / 1000
    stamps_s -= stamps_s[0]
    trace = trace_of([[1]] * len(steps), arrival_s=stamps_s.tolist())
    resolution_s = stamp_resolution_s(trace.arrival_s)
    spread = trace.spread(seed)
    assert_same_requests(spread, trace.spread(seed))
    if resolution_s is None:
        assert spread is trace
        return
    spread.check_invariants()
    # All moved by one constant, the first arrival's own offset, so that the trace still starts at 0.
    offset_s = spread.arrival_s - stamps_s
    assert offset_s.max() - offset_s.min() <= resolution_s * (1 + 1e-9)
    for stamp_s, next_s in zip(np.unique(stamps_s)[:-1], np.unique(stamps_s)[1:], strict=True):
        assert spread.arrival_s[stamps_s == stamp_s].max() <= spread.arrival_s[stamps_s == next_s].min()


def test_coarse_stamps_reveal_their_resolution_in_spite_of_jitter():
    rng = np.random.default_rng(0)
    ticks_s = np.sort(rng.integers(0, 300, 2000)) * 3.0
    jitter_s = rng.integers(-3, 4, 300)[(ticks_s / 3).astype(int)] / 1000
    assert stamp_resolution_s(ticks_s + jitter_s) == pytest.approx(3.0, abs=0.008)


def test_fine_stamps_are_left_alone():
    arrival_s = np.sort(np.random.default_rng(0).integers(0, 3_600_000, 12_000)) / 1000
    assert len(np.unique(arrival_s)) < len(arrival_s)
    assert stamp_resolution_s(arrival_s) is None
    assert stamp_resolution_s(np.zeros(50)) is None, "a single burst reveals no resolution"


def test_a_trace_takes_no_later_change():
    trace = trace_of([[1, 2, 3], [1]])
    with pytest.raises(ValueError, match="read-only"):
        trace.arrival_s[0] = 1.0
    ours = np.array([0.0, 1.0])
    trace_of([[1], [2]], arrival_s=ours)
    ours[0] = -1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival_s": np.array([0.0, -1.0])}, "never fall"),
        ({"arrival_s": np.array([1.0, 2.0])}, "start at 0"),
        ({"arrival_s": np.array([0.0, np.nan])}, "never fall"),
        ({"input_tokens": np.array([3, -1])}, "input_tokens goes from -1"),
        ({"output_tokens": np.array([1 << 40, 1])}, "output_tokens"),
        ({"input_tokens": np.array([3])}, "differ in length"),
        ({"input_tokens": np.array([30, 1])}, "more or fewer block ids"),
        ({"block_offsets": np.array([0, 2, 1])}, "block_offsets"),
        ({"block_ids": np.array([-1, 0])}, "0 or more"),
        ({"has_block_ids": False}, "says that it has none"),
        ({"block_tokens": 0}, "block_tokens is 0"),
    ],
)
def test_contradictory_columns_are_refused(change, message):
    good = {
        "name": "two",
        "block_tokens": 4,
        "has_block_ids": True,
        "arrival_s": np.array([0.0, 1.0]),
        "input_tokens": np.array([3, 1]),
        "output_tokens": np.array([1, 1]),
        "block_ids": np.array([0, 1]),
        "block_offsets": np.array([0, 1, 2]),
    }
    Trace(**good).check_invariants()
    with pytest.raises(ConfigError, match=message):
        Trace(**(good | change))


def test_ids_that_name_no_prefix_break_the_invariant():
    assert num_unchained(np.array([0, 1, 2, 1]), np.array([0, 2, 4])) == 1
    trace = Trace(
        name="unchained",
        block_tokens=1,
        has_block_ids=True,
        arrival_s=np.array([0.0, 1.0]),
        input_tokens=np.array([2, 2]),
        output_tokens=np.array([1, 1]),
        block_ids=np.array([0, 1, 2, 1]),
        block_offsets=np.array([0, 2, 4]),
    )
    with pytest.raises(InvariantError, match="two different blocks"):
        trace.check_invariants()


@pytest.mark.parametrize(
    "call",
    [
        lambda trace: trace.limited(0),
        lambda trace: trace.rescaled(0),
        lambda trace: trace.rescaled(float("nan")),
        lambda trace: trace.repeated(0),
        lambda trace: trace.repeated(10**9),
        lambda trace: trace.spread(-1),
    ],
)
def test_changes_out_of_range_say_what_is_accepted(call):
    with pytest.raises(ConfigError, match="accepted"):
        call(trace_of([[1], [1, 2]]))
