import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vertumnus.engine.sampling import log_probabilities, sample
from vertumnus.engine.step import Sampling
from vertumnus.errors import ConfigError

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 3.0])


def test_temperature_zero_takes_the_first_of_the_most_likely():
    assert sample(LOGITS, Sampling(), 7) == 1


@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 10**6))
def test_the_same_seed_and_position_give_the_same_token(seed, position):
    sampling = Sampling(temperature=0.8, seed=seed)
    assert sample(LOGITS, sampling, position) == sample(LOGITS.clone(), sampling, position)


def test_draws_follow_the_probabilities():
    sampling = Sampling(temperature=1.0, seed=5)
    counts = [0] * 5
    for position in range(4000):
        counts[sample(LOGITS, sampling, position)] += 1
    for count, probability in zip(counts, torch.softmax(LOGITS, 0).tolist(), strict=True):
        assert abs(count - 4000 * probability) < 5 * math.sqrt(4000 * probability) + 5


@given(seed=st.integers(0, 1000), top_k=st.integers(1, 5))
def test_top_k_leaves_the_k_most_likely(seed, top_k):
    kept = LOGITS.sort(descending=True, stable=True).indices[:top_k].tolist()
    assert sample(LOGITS, Sampling(temperature=5.0, top_k=top_k, seed=seed), 0) in kept


@given(seed=st.integers(0, 1000))
def test_top_p_leaves_the_fewest_that_add_up_to_p(seed):
    # Probabilities: 0.395 for tokens 1 and 4, 0.145, 0.053, 0.007.
    assert sample(LOGITS, Sampling(temperature=1.0, top_p=0.39, seed=seed), 0) == 1
    assert sample(LOGITS, Sampling(temperature=1.0, top_p=0.7, seed=seed), 0) in (1, 4)


def test_log_probability_is_that_of_the_plain_softmax():
    expected = math.log(torch.softmax(LOGITS.double(), 0)[2].item())
    assert log_probabilities(LOGITS, 2, 0)[0] == pytest.approx(expected, abs=1e-6)


@given(
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=40), num_top=st.integers(0, 20), token=st.integers(0, 39)
)
def test_top_log_probabilities_are_those_of_the_plain_softmax_and_equal_ones_are_in_the_order_of_their_ids(
    logits, num_top, token
):
    token %= len(logits)
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1).tolist()
    own, top = log_probabilities(torch.tensor(logits, dtype=torch.bfloat16), token, num_top)
    assert own == pytest.approx(expected[token], abs=1e-5)
    ranking = sorted(range(len(logits)), key=lambda each: (-logits[each], each))[:num_top]
    assert [each for each, _ in top] == ranking
    assert [logprob for _, logprob in top] == pytest.approx([expected[each] for each in ranking], abs=1e-5)


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", -1.0), ("temperature", math.inf), ("top_k", 0), ("top_p", 0.0), ("top_p", 1.1)]
)
def test_impossible_sampling_is_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        Sampling(**{field: value})
