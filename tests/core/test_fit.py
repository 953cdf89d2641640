"""The fit: exact from exact samples, near from noisy ones, never negative, and clear about what it cannot know."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vertumnus.core.cost import Coefficients, CostModel
from vertumnus.core.fit import PrefillSample, fit_per_degree, fit_uniform
from vertumnus.core.profile import load_profile
from vertumnus.errors import ConfigError

DEGREES = (1, 2, 4, 8)
SUFFIXES = (512, 2048, 8192, 32768, 65536)
PREFIXES = (0, 4096, 32768)
GRID = tuple(itertools.product(DEGREES, SUFFIXES, PREFIXES))


def decades(low, high):
    """Positive numbers spread over decades, or zero."""
    return st.one_of(st.just(0.0), st.floats(low, high).map(lambda exponent: 10.0**exponent))


coefficients = st.builds(
    Coefficients,
    d=st.floats(-3, -1).map(lambda exponent: 10.0**exponent),
    a=decades(-6, -4),
    b=decades(-8, -6),
    c=decades(-6, -4),
    alpha=decades(-10, -8),
)


def samples_of(model, grid=GRID, noise=None):
    factors = np.ones(len(grid)) if noise is None else noise
    return [
        PrefillSample(degree, suffix, prefix, model.prefill_s(suffix, prefix, degree) * factor)
        for (degree, suffix, prefix), factor in zip(grid, factors, strict=True)
    ]


@given(coefficients, st.booleans())
def test_exact_samples_give_the_coefficients_back(true, relative):
    fit = fit_uniform(samples_of(CostModel.uniform(true, DEGREES)), relative=relative)
    # What a coefficient is worth is what it adds to the largest cell.
    worth = {"d": 1.0, "a": 65536.0, "b": 32768.0, "c": 65536.0, "alpha": 65536.0 * 65536.0}
    slowest_s = max(cell.measured_s for cell in fit.cells)
    for degree in DEGREES:
        for name, scale in worth.items():
            error_s = abs(getattr(fit.coefficients[degree], name) - getattr(true, name)) * scale
            assert error_s <= 1e-9 * slowest_s, name
    assert fit.max_error_ratio < 1e-6 if relative else fit.max_error_ratio < 1e-4


@given(coefficients, st.integers(0, 2**32 - 1))
def test_noise_of_two_percent_moves_predictions_by_a_few(true, seed):
    noise = 1 + 0.02 * np.random.default_rng(seed).uniform(-1, 1, len(GRID))
    model = CostModel.uniform(true, DEGREES)
    fitted = fit_uniform(samples_of(model, noise=noise)).cost_model()
    for degree, suffix, prefix in GRID:
        assert fitted.prefill_s(suffix, prefix, degree) == pytest.approx(
            model.prefill_s(suffix, prefix, degree), rel=0.04
        )


@given(st.lists(st.floats(1e-3, 100), min_size=len(GRID), max_size=len(GRID)))
def test_coefficients_are_never_negative_whatever_was_measured(seconds):
    samples = [PrefillSample(*cell, time_s) for cell, time_s in zip(GRID, seconds, strict=True)]
    for fit in (fit_uniform(samples), fit_per_degree(samples)):
        for at_degree in fit.coefficients.values():
            assert min(at_degree.d, at_degree.a, at_degree.b, at_degree.c, at_degree.alpha) >= 0


def test_built_in_profile_comes_back_from_its_own_times():
    true = load_profile().coefficients[1]
    fitted = fit_uniform(samples_of(load_profile().cost_model())).coefficients[1]
    for name in ("d", "a", "b", "c", "alpha"):
        assert getattr(fitted, name) == pytest.approx(getattr(true, name), rel=1e-6)


def test_per_degree_fit_follows_prompts_that_a_larger_degree_slows_down():
    true = CostModel(
        {
            degree: Coefficients(
                d=0.02 * degree, a=4e-5 / degree + 1e-6 * degree, b=1e-7 * (degree - 1), c=0.0, alpha=5e-9
            )
            for degree in DEGREES
        }
    )
    samples = samples_of(true)
    assert true.prefill_s(512, 0, 8) > true.prefill_s(512, 0, 1)
    assert fit_uniform(samples).max_error_ratio > 0.1
    per_degree = fit_per_degree(samples)
    assert per_degree.max_error_ratio < 1e-6
    assert per_degree.cost_model().prefill_s(512, 0, 8) == pytest.approx(true.prefill_s(512, 0, 8))


def test_cells_average_repeated_samples():
    model = load_profile().cost_model()
    samples = samples_of(model) + samples_of(model, noise=np.full(len(GRID), 1.1))
    fit = fit_uniform(samples)
    assert len(fit.cells) == len(GRID)
    assert all(cell.num_samples == 2 for cell in fit.cells)
    first = fit.cells[0]
    assert first.measured_s == pytest.approx(
        1.05 * model.prefill_s(first.suffix_tokens, first.prefix_tokens, first.degree)
    )
    assert fit.mean_error_ratio <= fit.max_error_ratio == max(abs(cell.error_ratio) for cell in fit.cells)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (list(itertools.product([4], SUFFIXES, PREFIXES)), "do not settle a, c; needed: .* several degrees"),
        (
            list(itertools.product(DEGREES, SUFFIXES, [0])),
            "do not settle b; needed: .* with and without a cached prefix",
        ),
        (list(itertools.product(DEGREES, [4096], [0])), "do not settle d, a, b, c, alpha; needed: "),
        (GRID[:3], "do not settle"),
    ],
)
def test_samples_that_leave_coefficients_open_are_refused(grid, message):
    with pytest.raises(ConfigError, match=message):
        fit_uniform(samples_of(load_profile().cost_model(), grid))


def test_per_degree_fit_names_the_degree_that_lacks_samples():
    grid = [cell for cell in GRID if cell[0] != 8 or cell[2] == 0]
    with pytest.raises(
        ConfigError, match="do not settle b at degree 8; needed: samples with and without a cached prefix"
    ):
        fit_per_degree(samples_of(load_profile().cost_model(), grid))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1, 0, 1.0), "degree is 0; accepted"),
        ((1, 0, 0, 1.0), "suffix_tokens is 0; accepted"),
        ((1, 1, -1, 1.0), "prefix_tokens is -1; accepted"),
        ((1, 1, 0, 0.0), "seconds is 0.0; accepted"),
        ((1, 1, 0, float("nan")), "seconds is nan; accepted"),
    ],
)
def test_impossible_sample_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        PrefillSample(*values)


@pytest.mark.parametrize("fit", [fit_uniform, fit_per_degree])
def test_no_samples_are_refused(fit):
    with pytest.raises(ConfigError, match="samples are empty"):
        fit([])


def test_scipy_is_loaded_only_to_fit():
    code = "import sys, vertumnus.core.fit; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
