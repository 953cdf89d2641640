"""The placement cost J against a direct transcription, and the laws that it keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import DEGREES, view

from vertumnus.core.cost import Coefficients, CostModel
from vertumnus.core.placement import PaperPolicy, VertumnusPolicy
from vertumnus.errors import ConfigError

MODEL = CostModel.uniform(Coefficients(d=0.03, a=3e-5, b=3e-7, c=1e-5, alpha=6e-9), DEGREES)
POLICIES = st.builds(PaperPolicy, beta=st.floats(1, 5), lambda_=st.floats(0, 2))


@st.composite
def candidates(draw: st.DrawFn) -> dict[str, list]:
    """Columns of a view: 1 to 6 workers with any degree, hit, load and delay."""
    size = draw(st.integers(1, 6))

    def column(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=size, max_size=size))

    return {
        "degrees": column(st.sampled_from(DEGREES)),
        "reusable_tokens": column(st.integers(0, 99).map(lambda percent: float(percent * 200))),
        "outstanding_s": column(st.floats(0, 20)),
        "delay_s": column(st.floats(0, 20)),
    }


def transcribed_cost(columns: dict[str, list], beta: float, lambda_: float) -> list[float]:
    """J = q + delay + beta*s + lambda*(C*s - C_min*E_Cmin(R, P)), term by term, for 20,000 input tokens."""
    smallest = min(columns["degrees"])
    costs = []
    for degree, prefix, q_s, delay_s in zip(*columns.values(), strict=True):
        s = MODEL.prefill_s(20_000 - prefix, prefix, degree)
        baseline = smallest * MODEL.prefill_s(20_000 - prefix, prefix, smallest)
        costs.append(q_s + delay_s + beta * s + lambda_ * (degree * s - baseline))
    return costs


@given(candidates(), POLICIES)
def test_the_cost_is_j_and_its_terms_add_up_to_it(columns, policy):
    placement = policy.place(view(input_tokens=20_000, cost_model=MODEL, **columns))
    expected = transcribed_cost(columns, policy.beta, policy.lambda_)
    np.testing.assert_allclose(placement.cost, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(sum(placement.terms.values()), placement.cost, rtol=1e-9, atol=1e-9)
    assert placement.cost[placement.row] == min(placement.cost)
    assert placement.worker_id == placement.worker_ids[placement.row]


@given(candidates(), POLICIES, st.randoms(use_true_random=False))
def test_renaming_the_workers_changes_only_ties(columns, policy, random):
    order = list(range(len(columns["degrees"])))
    random.shuffle(order)
    before = policy.place(view(input_tokens=20_000, cost_model=MODEL, **columns))
    renamed = {name: [values[position] for position in order] for name, values in columns.items()}
    after = policy.place(view(input_tokens=20_000, cost_model=MODEL, **renamed))
    assert after.cost[after.row] == before.cost[before.row]
    assert before.cost[order[after.row]] == before.cost[before.row]
    if np.count_nonzero(before.cost == before.cost.min()) == 1:
        assert order[after.row] == before.row


@given(candidates(), POLICIES)
def test_the_preferred_degree_is_the_choice_without_load(columns, policy):
    loaded = policy.place(view(input_tokens=20_000, cost_model=MODEL, **columns))
    idle = columns | dict.fromkeys(("outstanding_s", "delay_s"), [0.0] * len(columns["degrees"]))
    unloaded = policy.place(view(input_tokens=20_000, cost_model=MODEL, **idle))
    assert loaded.preferred_degree == columns["degrees"][unloaded.row]


@given(candidates(), st.floats(1, 5), st.floats(0, 2))
def test_gpu_time_is_never_charged_to_the_smallest_degree(columns, beta, lambda_):
    placement = PaperPolicy(beta, lambda_).place(view(input_tokens=20_000, cost_model=MODEL, **columns))
    smallest = np.array(columns["degrees"]) == min(columns["degrees"])
    np.testing.assert_allclose(placement.terms["gpu_time"][smallest], 0.0, atol=1e-9)
    assert (placement.terms["gpu_time"] >= -1e-9).all()


def test_a_cache_miss_never_excludes_a_worker():
    busy_holder = view(degrees=(1, 1), reusable_tokens=(900, 0), outstanding_s=(1000.0, 0.0))
    assert PaperPolicy().place(busy_holder).worker_id == 1


def test_a_hit_that_saves_more_than_the_wait_costs_is_taken():
    # 900 cached tokens save 9 s of computing less 0.9 s of gathering.
    assert PaperPolicy(beta=1).place(view(degrees=(1, 1), reusable_tokens=(900, 0), outstanding_s=(8, 0))).row == 0
    assert PaperPolicy(beta=1).place(view(degrees=(1, 1), reusable_tokens=(900, 0), outstanding_s=(9, 0))).row == 1


def test_a_higher_price_of_gpu_time_moves_a_request_to_a_smaller_degree():
    choices = [PaperPolicy(1.0, price).place(view(degrees=(1, 8))).row for price in (0.0, 10.0)]
    assert choices == [1, 0]


def test_equal_workers_are_taken_in_order_of_their_id():
    assert PaperPolicy().place(view(degrees=(2, 2, 2), worker_ids=(4, 7, 9))).worker_id == 4


@pytest.mark.parametrize("beta", [0.99, -1.0, float("nan"), float("inf")])
def test_a_beta_below_one_is_refused(beta):
    with pytest.raises(ConfigError, match=r"beta is .*accepted: a number >= 1"):
        PaperPolicy(beta=beta)


@pytest.mark.parametrize("lambda_", [-0.01, float("nan"), float("inf")])
def test_a_negative_lambda_is_refused(lambda_):
    with pytest.raises(ConfigError, match=r"lambda is .*accepted: a number >= 0"):
        PaperPolicy(lambda_=lambda_)


def test_the_price_follows_scarcity():
    """Idle: least predicted TTFT whatever the GPUs. Every worker with a waiting request: J with the full weights."""
    idle = view(input_tokens=20_000, degrees=(1, 8), num_outstanding=(1, 1), outstanding_s=(1, 1))
    full = view(input_tokens=20_000, degrees=(1, 8), num_outstanding=(2, 2), outstanding_s=(1, 1))
    fuller = view(input_tokens=20_000, degrees=(1, 8), num_outstanding=(9, 9), outstanding_s=(1, 1))
    ours, constant = VertumnusPolicy(3.0, 100.0), PaperPolicy(3.0, 100.0)
    assert np.allclose(ours.place(idle).cost, idle.load_s + idle.service_s)
    assert np.allclose(ours.place(full).cost, constant.place(full).cost)
    assert np.allclose(ours.place(fuller).cost, constant.place(fuller).cost)
    assert (ours.place(idle).worker_id, ours.place(full).worker_id) == (1, 0)


def test_a_full_pool_charges_what_is_computed_though_a_candidate_holds_it():
    """mu times the smallest degree's GPU seconds beyond the best prefix; nothing in an idle pool."""
    columns = {"degrees": (2, 4), "reusable_tokens": (16_000, 0), "input_tokens": 20_000, "cost_model": MODEL}
    full = VertumnusPolicy(mu=4.0).place(view(num_outstanding=(2, 2), **columns))
    excess = 2 * (MODEL.prefill_s(20_000, 0, 2) - MODEL.prefill_s(4_000, 16_000, 2))
    np.testing.assert_allclose(full.terms["miss"], [0.0, 4.0 * excess])
    np.testing.assert_allclose(sum(full.terms.values()), full.cost)
    assert VertumnusPolicy(mu=4.0).place(view(num_outstanding=(1, 1), **columns)).terms["miss"].tolist() == [0, 0]


def test_a_waiting_request_that_an_idle_worker_could_take_makes_nothing_scarce():
    columns = {"degrees": (1, 8), "input_tokens": 20_000}
    stranded = VertumnusPolicy().place(view(num_outstanding=(2, 0), **columns))
    assert stranded.terms["gpu_time"].tolist() == [0, 0]


def test_a_negative_mu_is_refused():
    with pytest.raises(ConfigError, match=r"mu is .*accepted: a number >= 0"):
        VertumnusPolicy(mu=-1.0)


def test_half_the_waiting_halves_the_weights_beyond_one():
    half = view(input_tokens=20_000, degrees=(1, 8), num_outstanding=(2, 1))
    assert np.allclose(VertumnusPolicy(3.0, 1.0).place(half).cost, PaperPolicy(2.0, 0.5).place(half).cost)


def test_a_restricted_view_is_the_view_of_fewer_workers():
    whole = view(input_tokens=900, degrees=(1, 2, 4), reusable_tokens=(0, 100, 200), outstanding_s=(1, 2, 3))
    part = whole.restricted(np.array([False, True, True]))
    assert part is not None
    assert (part.worker_ids.tolist(), part.smallest_degree) == ([1, 2], 2)
    assert np.allclose(
        part.smallest_service_s, whole.costs.take(np.array([1])).prefill_s(part.suffix_tokens, part.reusable_tokens)
    )
    assert part.outstanding_s.tolist() == [2, 3]
    assert whole.restricted(np.zeros(3, dtype=bool)) is None


@given(candidates(), POLICIES)
def test_a_placement_keeps_what_its_cost_was_made_from(columns, policy):
    seen = view(input_tokens=20_000, cost_model=MODEL, **columns)
    placement = policy.place(seen)
    assert placement.degrees.tolist() == columns["degrees"]
    assert placement.reusable_tokens.tolist() == columns["reusable_tokens"]
    assert placement.service_s.tolist() == seen.service_s.tolist()
    assert placement.matched_tokens == seen.matched_tokens
