"""Which form of the cost model the measured times support: eq. 2 as it is, or with coefficients by degree.

A form with more coefficients always fits at least as well. It is taken only if it also predicts cells better that it
has not seen, and if an information criterion finds its coefficients worth their number.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf, log

import numpy as np

from vertumnus.core.fit import Fit, PrefillSample, fit_fixed_per_degree, fit_per_degree, fit_uniform
from vertumnus.errors import ConfigError

MIN_GAIN_RATIO = 0.05
"""Share of the held-out error that a richer form must save."""

MIN_BIC_GAIN = 6.0
"""By how much it must lower the information criterion: strong evidence, a likelihood ratio of twenty."""

LARGEST_GRID = 100
"""Cells of which each is left out by itself; a longer log is left out in NUM_FOLDS parts."""

NUM_FOLDS = 10


class Form(Enum):
    """Forms of eq. 2, from few coefficients to many."""

    UNIFORM = "eq. 2: one set of coefficients"
    FIXED_PER_DEGREE = "d by degree"
    PER_DEGREE = "d, a and b by degree"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A form, fitted to all cells.

    held_out_error_ratio: mean absolute relative error of cells that were left out of the fit, each once (by itself,
    or in parts of a long log); infinite where the others never settle the form. bic: n*ln(mean squared relative error)
    + k*ln(n), over n cells with k coefficients; smaller is better.
    """

    form: Form
    fit: Fit
    num_coefficients: int
    held_out_error_ratio: float
    bic: float


@dataclass(frozen=True, slots=True)
class Choice:
    """All forms that the samples settle, few coefficients first, and the one that they support."""

    candidates: tuple[Candidate, ...]
    chosen: Candidate
    num_samples: int


def choose_fit(samples: Sequence[PrefillSample]) -> Choice:
    """Fits every form to the medians of the cells and chooses. Raises ConfigError where the samples settle no form.

    With a single degree a and c cannot be told apart: `PER_DEGREE` alone is left, where a stands for a + c/C.
    """
    cells = medians(samples)
    num_degrees = len({cell.degree for cell in cells})
    forms: list[tuple[Form, Callable[[Sequence[PrefillSample]], Fit], int]] = [
        (Form.UNIFORM, fit_uniform, 5),
        (Form.FIXED_PER_DEGREE, fit_fixed_per_degree, 4 + num_degrees),
        (Form.PER_DEGREE, fit_per_degree, 3 * num_degrees + 1),
    ]
    candidates: list[Candidate] = []
    refusal: ConfigError | None = None
    for form, fit_form, num_coefficients in forms if num_degrees > 1 else forms[-1:]:
        try:
            candidates.append(_candidate(form, fit_form, num_coefficients, cells))
        except ConfigError as error:
            refusal = refusal or error
    if not candidates:
        assert refusal is not None
        raise refusal
    chosen = candidates[0]
    for richer in candidates[1:]:
        saved = 1.0 - richer.held_out_error_ratio / max(chosen.held_out_error_ratio, 1e-12)
        if saved >= MIN_GAIN_RATIO and richer.bic < chosen.bic - MIN_BIC_GAIN:
            chosen = richer
    return Choice(tuple(candidates), chosen, len(samples))


def medians(samples: Sequence[PrefillSample]) -> list[PrefillSample]:
    """One sample per cell: the median of its times, which a disturbance leaves alone."""
    seconds: dict[tuple[int, int, int], list[float]] = {}
    for sample in samples:
        seconds.setdefault((sample.degree, sample.suffix_tokens, sample.prefix_tokens), []).append(sample.seconds)
    return [PrefillSample(*cell, statistics.median(times)) for cell, times in sorted(seconds.items())]


def _candidate(
    form: Form, fit_form: Callable[[Sequence[PrefillSample]], Fit], num_coefficients: int, cells: list[PrefillSample]
) -> Candidate:
    fit = fit_form(cells)
    errors = [cell.error_ratio for cell in fit.cells]
    mean_square = max(statistics.fmean(error**2 for error in errors), 1e-12)
    return Candidate(
        form=form,
        fit=fit,
        num_coefficients=num_coefficients,
        held_out_error_ratio=_held_out(fit_form, cells),
        bic=len(errors) * log(mean_square) + num_coefficients * log(len(errors)),
    )


def _held_out(fit_form: Callable[[Sequence[PrefillSample]], Fit], cells: list[PrefillSample]) -> float:
    """Each cell predicted without it; cells that are needed to settle a coefficient are left out of the mean."""
    order = np.random.default_rng(0).permutation(len(cells))
    num_folds = len(cells) if len(cells) <= LARGEST_GRID else NUM_FOLDS
    errors: list[float] = []
    for number in range(num_folds):
        left_out = set(order[number::num_folds].tolist())
        try:
            model = fit_form([cell for index, cell in enumerate(cells) if index not in left_out]).cost_model()
            held_out = [cells[index] for index in sorted(left_out)]
            errors += [
                abs(model.prefill_s(each.suffix_tokens, each.prefix_tokens, each.degree) / each.seconds - 1)
                for each in held_out
            ]
        except ConfigError:
            continue
    return statistics.fmean(errors) if errors else inf
