"""Laws of the cost model (eq. 1 and eq. 2), and of its chunked form."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import DEGREES

from vertumnus.core.cost import Coefficients, CostModel, attention_pairs, chunked_prefill_s
from vertumnus.core.profile import load_profile
from vertumnus.errors import ConfigError

TOKENS = st.integers(0, 300_000)
COEFFICIENT = st.floats(0, 1, allow_subnormal=False)


@st.composite
def coefficients(draw: st.DrawFn) -> Coefficients:
    """Any non-negative coefficients, of the size that real ones have."""
    return Coefficients(
        d=draw(COEFFICIENT),
        a=draw(COEFFICIENT) * 1e-4,
        b=draw(COEFFICIENT) * 1e-6,
        c=draw(COEFFICIENT) * 1e-4,
        alpha=draw(COEFFICIENT) * 1e-8,
    )


def models() -> st.SearchStrategy[CostModel]:
    """The paper's form: the same coefficients at every degree."""
    return coefficients().map(lambda each: CostModel.uniform(each, DEGREES))


def models_by_degree() -> st.SearchStrategy[CostModel]:
    """The measured form: every degree has its own."""
    return st.tuples(*[coefficients()] * len(DEGREES)).map(
        lambda each: CostModel(dict(zip(DEGREES, each, strict=True)))
    )


@given(models(), TOKENS, TOKENS)
def test_a_larger_degree_never_takes_longer(model, suffix, prefix):
    times_s = [model.prefill_s(suffix, prefix, degree) for degree in DEGREES]
    assert all(large <= small * (1 + 1e-12) for small, large in pairwise(times_s))


@given(models_by_degree(), TOKENS, TOKENS, st.integers(0, 10_000), st.sampled_from(DEGREES))
def test_more_tokens_never_take_less_time(model, suffix, prefix, more, degree):
    time_s = model.prefill_s(suffix, prefix, degree)
    assert model.prefill_s(suffix + more, prefix, degree) >= time_s
    assert model.prefill_s(suffix, prefix + more, degree) >= time_s


@given(models_by_degree(), TOKENS, TOKENS, st.lists(st.sampled_from(DEGREES), min_size=1, max_size=6))
def test_the_vector_of_workers_agrees_with_one_degree_at_a_time(model, suffix, prefix, degrees):
    costs = model.for_degrees(degrees)
    expected = [model.prefill_s(suffix, prefix, degree) for degree in degrees]
    np.testing.assert_allclose(costs.prefill_s(suffix, prefix), expected, rtol=1e-9)
    np.testing.assert_allclose(
        costs.prefill_s(np.full(len(degrees), float(suffix)), np.full(len(degrees), float(prefix))), expected, rtol=1e-9
    )
    last = np.array([len(degrees) - 1])
    np.testing.assert_allclose(costs.take(last).prefill_s(suffix, prefix), expected[-1:], rtol=1e-9)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_attention_pairs_count_what_each_new_token_sees(suffix, prefix):
    assert attention_pairs(suffix, prefix) == sum(prefix + position + 1 for position in range(suffix))


@given(TOKENS, TOKENS, TOKENS)
def test_attention_pairs_add_up_over_chunks(first, second, prefix):
    whole = attention_pairs(first + second, prefix)
    assert attention_pairs(first, prefix) + attention_pairs(second, prefix + first) == pytest.approx(whole, rel=1e-12)


@given(models_by_degree(), st.integers(1, 50_000), TOKENS, st.integers(1000, 20_000), st.sampled_from(DEGREES))
def test_a_chunked_prompt_takes_the_sum_of_its_chunks(model, suffix, prefix, step_tokens, degree):
    expected_s, done = 0.0, 0
    while done < suffix:
        chunk = min(step_tokens, suffix - done)
        expected_s += model.prefill_s(chunk, prefix + done, degree)
        done += chunk
    costs = model.for_degrees((degree,))
    found = chunked_prefill_s(costs, np.array([float(suffix)]), np.array([float(prefix)]), step_tokens)
    np.testing.assert_allclose(found, [expected_s], rtol=1e-9)


def test_with_coefficients_per_degree_a_short_prompt_may_get_slower_with_the_degree():
    small = Coefficients(d=0.01, a=0, b=0, c=1e-4, alpha=0)
    large = Coefficients(d=0.05, a=0, b=0, c=1e-4, alpha=0)
    model = CostModel({1: small, 2: large})
    assert model.prefill_s(100, 0, 2) > model.prefill_s(100, 0, 1)
    assert model.prefill_s(10_000, 0, 2) < model.prefill_s(10_000, 0, 1)


def test_the_paper_speed_ups_at_64k_tokens_come_out_of_the_default_profile():
    model = load_profile().cost_model()
    single_s = model.prefill_s(65_536, 0, 1)
    assert single_s / model.prefill_s(65_536, 0, 4) == pytest.approx(2.71, rel=0.03)
    assert single_s / model.prefill_s(65_536, 0, 8) == pytest.approx(3.91, rel=0.03)


@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["d", "a", "b", "c", "alpha"])
def test_a_coefficient_below_zero_or_not_finite_is_refused_by_name(name, value):
    figures = dict.fromkeys(("d", "a", "b", "c", "alpha"), 0.0) | {name: value}
    with pytest.raises(ConfigError, match=rf"coefficient {name} is .*accepted"):
        Coefficients(**figures)


@pytest.mark.parametrize(("suffix", "prefix", "degree"), [(-1, 0, 1), (0, -1, 1), (1, 1, 16), (1, 1, 0)])
def test_a_negative_count_or_an_unsupported_degree_is_refused(suffix, prefix, degree):
    model = CostModel.uniform(Coefficients(d=0, a=0, b=0, c=0, alpha=0), DEGREES)
    with pytest.raises(ConfigError, match="accepted"):
        model.prefill_s(suffix, prefix, degree)


def test_a_model_without_degrees_or_with_degree_zero_is_refused():
    with pytest.raises(ConfigError, match="at least one degree"):
        CostModel({})
    with pytest.raises(ConfigError, match="degree is 0"):
        CostModel({0: Coefficients(d=0, a=0, b=0, c=0, alpha=0)})
