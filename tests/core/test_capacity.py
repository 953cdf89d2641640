"""Length mixes and the long-request threshold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.layout_strategies import DEGREES, compositions_of

from vertumnus.core.capacity import LengthClass, LengthMix
from vertumnus.core.composition import Composition, Topology
from vertumnus.core.cost import Coefficients, CostModel
from vertumnus.core.long_threshold import DEFAULT_LONG_TOKENS, LongThreshold
from vertumnus.errors import ConfigError

H20 = CostModel.uniform(Coefficients(d=0.028, a=3.46e-5, b=2.6e-7, c=1.31e-5, alpha=5.6e-9), DEGREES)


def tau_s(input_tokens):
    return 1.0 + 0.0002 * input_tokens


@given(st.lists(st.tuples(st.integers(1, 200_000), st.floats(0, 1)), min_size=1, max_size=50), st.floats(0.1, 1e5))
def test_classes_keep_the_number_of_requests_and_tokens(requests, duration_s):
    inputs = [tokens for tokens, _ in requests]
    suffixes = [tokens * share for tokens, share in requests]
    mix = LengthMix.of_requests(inputs, suffixes, duration_s)
    assert sum(each.arrivals_per_s for each in mix.classes) * duration_s == pytest.approx(len(requests))
    assert sum(each.arrivals_per_s * each.input_tokens for each in mix.classes) * duration_s == pytest.approx(
        sum(inputs)
    )
    assert sum(each.arrivals_per_s * each.suffix_tokens for each in mix.classes) * duration_s == pytest.approx(
        sum(suffixes)
    )
    assert list(mix.classes) == sorted(mix.classes, key=lambda each: each.input_tokens)


@given(compositions_of(Topology(24)), st.floats(0, 3), st.floats(1, 3))
def test_demand_is_that_of_the_degree_preferred(composition, lam, beta):
    mix = LengthMix((LengthClass(60_000.0, 40_000.0, 2.0),))
    demand = mix.demand_s_per_s(composition, H20, beta=beta, lam=lam)
    choices = {degree: 2.0 * H20.prefill_s(40_000.0, 20_000.0, degree) for degree in composition.degrees}
    assert demand in choices.values()
    if lam == 0:
        assert demand == choices[composition.degrees[-1]]


def test_a_mix_fits_where_each_class_has_a_degree_that_meets_its_slo():
    short, long, hopeless = LengthClass(4_000, 4_000, 5.0), LengthClass(90_000, 9_000, 1.0), LengthClass(2e6, 2e6, 0.1)
    small, large = Composition.parse("8x1"), Composition.parse("4x1,1x4")
    assert LengthMix((short,)).fits(small, H20, tau_s, DEGREES)
    assert not LengthMix((short, long)).fits(small, H20, tau_s, DEGREES)
    assert LengthMix((short, long)).fits(large, H20, tau_s, DEGREES)
    assert LengthMix((short, hopeless)).fits(small, H20, tau_s, DEGREES)


def test_unusable_history_is_refused():
    with pytest.raises(ConfigError, match="duration_s is 0"):
        LengthMix.of_requests([1], [1], 0)
    with pytest.raises(ConfigError, match="0 <= suffix <= input"):
        LengthMix.of_requests([1], [2], 1.0)


def test_long_means_more_than_32k_tokens_by_default():
    threshold = LongThreshold()
    threshold.add(10**6)
    threshold.end_window()
    assert threshold.tokens == DEFAULT_LONG_TOKENS == 32_768
    assert threshold.is_long(32_769)
    assert not threshold.is_long(32_768)


@given(st.floats(0.05, 0.95), st.integers(1, 100_000))
def test_a_quantile_threshold_leaves_its_share_of_traffic_above(quantile_ratio, scale):
    threshold = LongThreshold(quantile_ratio=quantile_ratio)
    lengths = [1 + scale * index // 1000 for index in range(1000)]
    for tokens in lengths:
        threshold.add(tokens)
    threshold.end_window()
    at_quantile = lengths[max(0, round(quantile_ratio * 1000) - 1)]
    assert at_quantile * 0.9 - 1 <= threshold.tokens <= at_quantile * 1.2 + 1


def test_the_quantile_follows_traffic_over_many_windows_only():
    threshold = LongThreshold(quantile_ratio=0.9, half_life_windows=10.0)
    for tokens, num_windows in ((1_000, 50), (100_000, 1)):
        for _ in range(num_windows):
            for _ in range(50):
                threshold.add(tokens)
            threshold.end_window()
    assert threshold.tokens < 1_200
    for _ in range(50):
        for _ in range(50):
            threshold.add(100_000)
        threshold.end_window()
    assert threshold.tokens > 90_000


@pytest.mark.parametrize(("field", "value"), [("fixed_tokens", 0), ("quantile_ratio", 1.0), ("half_life_windows", 0.0)])
def test_threshold_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        LongThreshold(**{field: value})
