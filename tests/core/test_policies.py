"""Each baseline policy on a small pool that shows the behaviour it is known by."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import DEGREES, view

from vertumnus.core.placement import PlacementPolicy
from vertumnus.core.policies import (
    PAPER_SYSTEM,
    POLICIES,
    CacheAware,
    CacheFirst,
    Dynamo,
    LeastLoaded,
    LengthThreshold,
    LengthThresholdWithCache,
    MinimumTTFT,
    Preble,
    RoundRobin,
    ShortestTTFT,
    make_policy,
)
from vertumnus.errors import ConfigError


@st.composite
def views(draw: st.DrawFn) -> dict[str, list]:
    """Columns of a view of 1 to 6 workers in any state, with ids that leave gaps."""
    size = draw(st.integers(1, 6))

    def column(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=size, max_size=size))

    return {
        "degrees": column(st.sampled_from(DEGREES)),
        "reusable_tokens": column(st.integers(0, 99).map(lambda blocks: 10.0 * blocks)),
        "outstanding_s": column(st.floats(0, 100)),
        "num_outstanding": column(st.integers(0, 200)),
        "outstanding_tokens": column(st.integers(0, 10**6)),
        "resident_blocks": column(st.integers(0, 1000)),
        "worker_ids": sorted(draw(st.sets(st.integers(0, 50), min_size=size, max_size=size))),
    }


@pytest.mark.parametrize("name", POLICIES)
@given(st.lists(views(), min_size=1, max_size=4))
def test_every_policy_chooses_a_candidate_and_says_why(name, pools):
    policy = make_policy(name)
    assert policy.name == name
    for columns in pools:
        seen = view(**columns)
        placement = policy.place(seen)
        assert placement.worker_id == columns["worker_ids"][placement.row]
        assert placement.cost.shape == placement.worker_ids.shape
        assert placement.cost[placement.row] == placement.cost.min() < np.inf
        assert placement.reason
        if placement.terms:
            np.testing.assert_allclose(sum(placement.terms.values()), placement.cost, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", POLICIES)
@given(views())
def test_a_policy_leaves_what_it_looks_at_as_it_was(name, columns):
    seen, untouched = view(**columns), view(**columns)
    make_policy(name).place(seen)
    for field in (
        "worker_ids",
        "degrees",
        "reusable_tokens",
        "service_s",
        "outstanding_s",
        "wait_s",
        "num_outstanding",
    ):
        np.testing.assert_array_equal(getattr(seen, field), getattr(untouched, field))


def test_an_unknown_policy_is_refused_with_the_list_of_known_ones():
    with pytest.raises(ConfigError) as caught:
        make_policy("fastest")
    assert "'fastest'" in str(caught.value)
    assert all(name in str(caught.value) for name in (*POLICIES, PAPER_SYSTEM))


def test_two_policies_of_one_name_share_no_state():
    first, second = make_policy("round-robin"), make_policy("round-robin")
    assert [choices(first, 1), choices(second, 1)] == [[0], [0]]


def choices(policy: PlacementPolicy, times: int, **columns: object) -> list[int]:
    """The workers that one policy chooses for the same request in the same pool, time after time."""
    return [policy.place(view(**columns)).worker_id for _ in range(times)]


def test_round_robin_takes_turns_whatever_the_load():
    assert choices(RoundRobin(), 5, degrees=(1, 8, 1), outstanding_s=(99, 0, 0)) == [0, 1, 2, 0, 1]


def test_round_robin_goes_on_after_the_last_when_workers_come_and_go():
    policy = RoundRobin()
    assert choices(policy, 2, degrees=(1, 1, 1), worker_ids=(0, 1, 2)) == [0, 1]
    assert choices(policy, 2, degrees=(1, 1), worker_ids=(0, 5)) == [5, 0]


def test_least_loaded_counts_predicted_seconds_and_not_requests():
    # One long prompt outweighs many short ones.
    pool = {"outstanding_s": (50, 10), "num_outstanding": (1, 20)}
    assert choices(LeastLoaded(), 1, **pool) == [1]


def test_cache_first_follows_the_longest_prefix_and_breaks_ties_by_load():
    pool = {"degrees": (1, 1, 1), "reusable_tokens": (500, 500, 490), "outstanding_s": (90, 80, 0)}
    assert choices(CacheFirst(), 1, **pool) == [1]


def test_the_length_rule_keeps_short_requests_off_the_large_workers_and_long_ones_on_them():
    pool = {"degrees": (1, 2, 8), "outstanding_s": (5, 4, 0)}
    policy = LengthThreshold(long_tokens=1000)
    assert choices(policy, 1, input_tokens=1000, **pool) == [1]
    assert choices(policy, 1, input_tokens=1001, **(pool | {"outstanding_s": (0, 0, 99)})) == [2]


def test_the_length_rule_with_one_degree_is_least_loaded():
    assert choices(LengthThreshold(1000), 1, input_tokens=10, degrees=(4, 4), outstanding_s=(1, 0)) == [1]


def test_the_length_rule_with_cache_weighs_wait_and_service_inside_the_class():
    pool = {"degrees": (1, 1, 8), "reusable_tokens": (900, 0, 0), "outstanding_s": (5, 0, 0)}
    assert choices(LengthThreshold(), 1, **pool) == [1]
    assert choices(LengthThresholdWithCache(), 1, **pool) == [0]


def test_cache_aware_follows_a_match_above_its_threshold_only():
    pool = {"reusable_tokens": (310, 0), "resident_blocks": (9, 5)}
    assert choices(CacheAware(), 1, **pool) == [0]
    assert choices(CacheAware(), 1, **(pool | {"reusable_tokens": (300, 0)})) == [1]


def test_cache_aware_sends_all_misses_to_the_smallest_cache_whatever_its_load():
    # Known of the original: the smallest tree takes every miss until the counts are far out of balance.
    pool = {"resident_blocks": (9, 5), "outstanding_s": (0, 500), "num_outstanding": (0, 60)}
    assert choices(CacheAware(), 3, **pool) == [1, 1, 1]


def test_cache_aware_throws_affinity_away_once_out_of_balance():
    # Known of the original, and taken over: one imbalance, and the longest match counts for nothing.
    pool = {"degrees": (1, 1, 1), "reusable_tokens": (0, 990, 0), "num_outstanding": (70, 30, 2)}
    assert choices(CacheAware(), 1, **pool) == [2]
    assert choices(CacheAware(), 1, **(pool | {"num_outstanding": (66, 30, 2)})) == [1]


def test_preble_exploits_above_half_and_explores_by_load_below():
    pool = {"reusable_tokens": (510, 0), "outstanding_s": (100, 0)}
    assert choices(Preble(), 1, **pool) == [0]
    assert choices(Preble(), 1, **(pool | {"reusable_tokens": (500, 0)})) == [1]


def test_dynamo_weighs_uncached_and_waiting_tokens_and_knows_no_degree():
    pool = {"degrees": (1, 8), "reusable_tokens": (200, 0), "outstanding_tokens": (100, 0)}
    assert choices(Dynamo(), 1, **pool) == [0]
    assert choices(Dynamo(), 1, **(pool | {"outstanding_tokens": (201, 0)})) == [1]


def test_minimum_ttft_takes_the_least_wait_plus_service_and_does_not_price_gpu_time():
    # 1 s + 10 s on one rank, 1 s + 1.25 s on eight.
    assert choices(MinimumTTFT(), 1, degrees=(1, 8), outstanding_s=(0, 8.5)) == [1]
    assert choices(MinimumTTFT(), 1, degrees=(1, 8), outstanding_s=(0, 9)) == [0]


def test_minimum_ttft_sees_the_saturation_that_request_counts_miss():
    # Two requests on each worker, but one worker's are long.
    pool = {"num_outstanding": (2, 2), "outstanding_s": (60, 3)}
    assert choices(MinimumTTFT(), 1, **pool) == [1]


def test_flexlb_spreads_a_burst_over_the_best_third():
    # The best 30% of ten workers are three; a burst at one instant takes them in turn.
    pool = {"degrees": (1,) * 10, "outstanding_s": tuple(range(10))}
    assert choices(ShortestTTFT(), 6, **pool) == [0, 1, 2, 0, 1, 2]


def test_flexlb_always_has_one_best_worker():
    assert choices(ShortestTTFT(), 2, degrees=(1, 1), outstanding_s=(1, 0)) == [1, 1]


def test_a_burst_does_not_pile_up_where_reservations_are_seen():
    # Each choice is reserved before the next: the burst ends evenly spread although only worker 0 has the prefix.
    policy, outstanding_s = make_policy("vertumnus"), np.zeros(4)
    for _ in range(40):
        placement = policy.place(
            view(degrees=(1,) * 4, reusable_tokens=(300, 0, 0, 0), outstanding_s=outstanding_s.tolist())
        )
        outstanding_s[placement.row] += 8.3 if placement.row == 0 else 11.0
    assert outstanding_s.max() - outstanding_s.min() <= 22.0


def test_a_policys_parameters_are_given_by_name():
    """At half of the prompt cached, the ratio decides whether Preble exploits the hit."""
    pools = {"degrees": [1, 1], "reusable_tokens": [500.0, 0.0], "outstanding_s": [9.0, 0.0], "input_tokens": 1000}
    assert make_policy("preble", exploit_ratio=0.4).place(view(**pools)).row == 0
    assert make_policy("preble", exploit_ratio=0.6).place(view(**pools)).row == 1


def test_unknown_parameter_of_a_policy_is_named_with_what_is_accepted():
    with pytest.raises(ConfigError, match=r"overlap_wait.*accepted: overlap_weight"):
        make_policy("dynamo", overlap_wait=1.0)
    with pytest.raises(ConfigError, match="accepted: none"):
        make_policy("least-loaded", beta=1.0)
