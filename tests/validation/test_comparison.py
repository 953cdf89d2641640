"""What the figures of a comparison mean, whatever made the sides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vertumnus.core.topology import RankGroup
from vertumnus.validation.comparison import Comparison
from vertumnus.validation.side import Side, mean_composition
from vertumnus.workload.trace import Trace

times_s = st.lists(st.floats(0.01, 100.0), min_size=3, max_size=40)


def trace_of(num_requests):
    return Trace(
        name="rows",
        block_tokens=10,
        has_block_ids=False,
        arrival_s=np.arange(num_requests, dtype=float),
        input_tokens=np.full(num_requests, 100),
        output_tokens=np.full(num_requests, 2),
        block_ids=np.empty(0),
        block_offsets=np.zeros(num_requests + 1),
    )


def side_of(ttft_s, *, groups=None, cached_tokens=None, compositions=((0.0, "2x1"),)):
    ttft_s = np.array(ttft_s, dtype=float)
    return Side(
        ttft_s=ttft_s,
        cached_tokens=np.zeros(len(ttft_s)) if cached_tokens is None else np.array(cached_tokens, dtype=float),
        groups=tuple(groups or [RankGroup(0, 1)] * len(ttft_s)),
        compositions=compositions,
    )


def compared(live, simulated, **more):
    return Comparison(trace=trace_of(len(live.ttft_s)), live=live, simulated=simulated, **more).to_json()


@given(times_s)
def test_a_side_agrees_with_itself(ttft_s):
    found = compared(side_of(ttft_s), side_of(ttft_s))
    assert set(found["difference"].values()) == {0.0}
    assert found["within_target"]
    assert found["decisions"]["other_ranks_ratio"] == 0.0
    assert found["decisions"]["first_difference"] is None
    if np.ptp(ttft_s) > 1e-6:
        assert found["correlation"]["spearman_of_ttft"] == pytest.approx(1.0)


@given(times_s, st.floats(0.5, 2.0))
def test_a_simulator_that_is_off_by_a_factor_differs_by_it_in_every_figure(ttft_s, factor):
    found = compared(side_of(ttft_s), side_of(np.array(ttft_s) * factor))
    for name in ("mean", "p50", "p90", "p99"):
        assert found["difference"][f"{name}_ttft_ratio"] == pytest.approx(factor - 1, abs=1e-9)
    assert found["within_target"] is (abs(found["difference"]["mean_ttft_ratio"]) <= 0.1) or (
        abs(abs(factor - 1) - 0.1) < 1e-6
    )


def test_the_hit_ratio_counts_tokens_and_its_difference_points():
    live = side_of([1, 1, 1], cached_tokens=[50, 0, 100])
    simulated = side_of([1, 1, 1], cached_tokens=[60, 0, 105])
    found = compared(live, simulated)
    assert found["live"]["token_hit_ratio"] == pytest.approx(0.5)
    assert found["difference"]["token_hit_ratio"] == pytest.approx(0.05)
    assert not found["within_target"]


def test_what_one_side_did_not_answer_counts_on_neither():
    found = compared(side_of([1, np.nan, 3]), side_of([1, 100, 3]))
    assert found["num_measured"] == 2
    assert found["difference"]["mean_ttft_ratio"] == 0.0


def test_the_warm_up_is_left_out():
    found = compared(side_of([9, 1, 1]), side_of([1, 1, 1]), warmup_s=1.0)
    assert found["num_measured"] == 2
    assert found["difference"]["mean_ttft_ratio"] == 0.0
    nothing = compared(side_of([9, 1, 1]), side_of([1, 1, 1]), warmup_s=100.0)
    assert nothing["num_measured"] == 0
    assert nothing["live"]["mean_ttft_s"] is None
    assert not nothing["within_target"]


def test_decisions_differ_by_ranks_and_by_degree():
    live = side_of([1, 1, 1, 1], groups=[RankGroup(0, 1), RankGroup(1, 1), RankGroup(2, 2), None])
    simulated = side_of([1, 1, 1, 1], groups=[RankGroup(0, 1), RankGroup(0, 1), RankGroup(0, 1), RankGroup(0, 1)])
    decisions = compared(live, simulated)["decisions"]
    assert decisions["num_compared"] == 3
    assert decisions["other_ranks_ratio"] == pytest.approx(2 / 3)
    assert decisions["other_degree_ratio"] == pytest.approx(1 / 3)
    assert decisions["first_difference"]["request"] == 1


def test_shares_of_ranks_are_weighted_by_time():
    compositions = [(0.0, "4x1"), (2.0, "2x2"), (6.0, "1x4"), (50.0, "4x1")]
    assert mean_composition(compositions, 10.0) == pytest.approx({1: 0.2, 2: 0.4, 4: 0.4})
    assert mean_composition([(-3.0, "1x2")], 10.0) == {2: 1.0}
