"""The cost model follows what steps really take: degree by degree, within bounds, and not for nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import COST_MODEL

from vertumnus import SimulationSettings, load_profile, simulate, synthesise
from vertumnus.core.composition import Composition
from vertumnus.core.drift import Drift, RefitSettings, scaled
from vertumnus.errors import ConfigError

factors = st.floats(0.2, 5.0)
steps = st.lists(st.floats(0.01, 10.0), min_size=20, max_size=60)
SOON = RefitSettings(min_steps=20)


def run(drift, degree, predicted, factor, model=None):
    """Steps that really take `factor` times what the profile says; returns the last cost model that came of it."""
    for base_s in predicted:
        now = model.prefill_s(100, 0, degree) / COST_MODEL.prefill_s(100, 0, degree) if model else 1.0
        drift.record(degree, base_s * now, base_s * factor)
        model = drift.corrected(degree) or model
    return model


@given(steps, factors)
def test_a_constant_error_is_its_ratio_whatever_the_steps(predicted, factor):
    drift = Drift(COST_MODEL)
    for seconds in predicted:
        drift.record(2, seconds, seconds * factor)
    assert drift.ratios() == {2: pytest.approx(factor)}


@given(steps, factors)
def test_a_degree_is_corrected_by_its_error_within_bounds_and_others_that_were_seen_are_left_alone(predicted, factor):
    drift = Drift(COST_MODEL, SOON)
    run(drift, 1, [1.0] * 30, 1.0)
    model = run(drift, 2, predicted * 3, factor)
    bounded = min(max(factor, 0.5), 2.0)
    if abs(bounded - 1) <= SOON.tolerance_ratio:
        assert model is None
    else:
        assert model is not None
        assert model.prefill_s(700, 30, 2) == pytest.approx(bounded * COST_MODEL.prefill_s(700, 30, 2))
        assert model.prefill_s(700, 30, 1) == COST_MODEL.prefill_s(700, 30, 1)
    assert drift.factors[1] == 1.0


@given(steps, factors)
def test_once_corrected_nothing_changes_while_the_error_stays(predicted, factor):
    drift = Drift(COST_MODEL, SOON)
    model = run(drift, 2, predicted * 3, factor)
    before = dict(drift.factors)
    run(drift, 2, predicted * 3, factor, model)
    assert drift.factors == before


@given(steps, factors)
def test_degrees_that_nobody_has_seen_go_with_the_others_until_they_are_seen(predicted, factor):
    drift = Drift(COST_MODEL, SOON)
    model = run(drift, 2, predicted * 3, factor)
    assert drift.factors[1] == drift.factors[2]
    later = run(drift, 1, [1.0] * 60, 1.0, model) or model
    assert drift.factors[1] == pytest.approx(1.0, rel=SOON.tolerance_ratio + 1e-9)
    if later is not None:
        assert later.prefill_s(700, 30, 2) == pytest.approx(drift.factors[2] * COST_MODEL.prefill_s(700, 30, 2))


def test_what_an_unseen_degree_has_summed_up_survives_a_correction_of_the_others():
    drift = Drift(COST_MODEL, SOON)
    for _ in range(10):
        drift.record(1, 1.0, 1.5)
    run(drift, 2, [1.0] * 20, 1.5)
    assert drift.factors[1] == pytest.approx(1.5)
    assert drift.ratios()[1] == pytest.approx(1.0)


def test_a_step_that_stood_still_corrects_nothing():
    drift = Drift(COST_MODEL, RefitSettings(min_steps=20, tolerance_ratio=0.15))
    for number in range(200):
        drift.record(2, 1.0, 300.0 if number == 150 else 1.0)
        assert drift.corrected(2) is None


def test_an_error_that_goes_away_is_unlearnt():
    drift = Drift(COST_MODEL, SOON)
    slow = run(drift, 2, [1.0] * 40, 1.6)
    assert drift.factors[2] == pytest.approx(1.6)
    run(drift, 2, [1.0] * 40, 1.0, slow)
    assert drift.factors[2] == pytest.approx(1.0)


def test_a_few_steps_say_nothing():
    drift = Drift(COST_MODEL, SOON)
    assert run(drift, 2, [1.0] * 19, 3.0) is None


@pytest.mark.parametrize("bad", [{"max_factor": 1.0}, {"tolerance_ratio": 0.0}, {"min_steps": 0}])
def test_a_bad_setting_is_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        RefitSettings(**bad)


def test_scaling_scales_every_coefficient_of_a_degree():
    model = scaled(load_profile().cost_model(), {4: 1.5})
    true = load_profile().cost_model()
    assert model.prefill_s(5000, 900, 4) == pytest.approx(1.5 * true.prefill_s(5000, 900, 4))
    assert model.prefill_s(5000, 900, 2) == true.prefill_s(5000, 900, 2)


WRONG = {
    "all twice": tuple((degree, 2.0) for degree in (1, 2, 4, 8)),
    "all half": tuple((degree, 0.5) for degree in (1, 2, 4, 8)),
    "degree 2 twice": ((2, 2.0),),
    "degree 4 half": ((4, 0.5),),
}


@pytest.mark.parametrize("error", WRONG)
def test_a_policy_with_a_profile_that_is_wrong_by_two_degrades_gracefully_and_refitting_mends_it(error):
    trace = synthesise("conversation", seed=5, duration_s=300, rate_per_s=6.0)
    settings = SimulationSettings(
        num_gpus=16, composition=Composition.parse("4x2,2x4"), is_fixed=True, blocks_per_rank=1400
    )

    def mean_ttft_s(**changes):
        return simulate(
            trace, load_profile(), "vertumnus", SimulationSettings(**{**_fields(settings), **changes})
        ).latency.mean_ttft_s

    right_s = mean_ttft_s()
    wrong_s = mean_ttft_s(cost_factors=WRONG[error])
    refitted_s = mean_ttft_s(cost_factors=WRONG[error], has_refit=True)
    assert wrong_s < 2.5 * right_s
    assert refitted_s < 1.15 * right_s


def test_an_error_of_all_degrees_does_not_set_those_that_nobody_has_seen_against_the_others():
    trace = synthesise("conversation", seed=5, duration_s=400, rate_per_s=6.0)
    base = {"num_gpus": 16, "composition": Composition.parse("8x2"), "blocks_per_rank": 1400}

    def mean_ttft_s(**changes):
        settings = SimulationSettings(**base, **changes)
        return simulate(trace, load_profile(), "vertumnus", settings).latency.mean_ttft_s

    right_s = mean_ttft_s()
    for error in ("all twice", "all half"):
        assert mean_ttft_s(cost_factors=WRONG[error], has_refit=True) < 1.1 * right_s


def _fields(settings):
    return {name: getattr(settings, name) for name in settings.__slots__}
