"""Fits the coefficients of eq. 2 to measured prefill times, none of them negative.

E_C(R, P) = d + a*R + b*P + (c*R + alpha*W(R, P)) / C is linear in its coefficients, so this is non-negative least
squares. Errors are weighted relatively by default: one per cent of a short prompt counts as much as of a long one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.cost import Coefficients, CostModel, FloatArray, attention_pairs
from vertumnus.errors import ConfigError

_SYMBOLS = ("d", "a", "b", "c", "alpha")
_SEPARATED_BY = {
    "d": "samples of several suffix lengths",
    "a": "samples of several suffix lengths at several degrees",
    "b": "samples with and without a cached prefix",
    "c": "samples of several suffix lengths at several degrees",
    "alpha": "samples of at least three suffix lengths, far apart",
}
_SINGULAR_RATIO = 1e-9  # of the largest singular value, columns scaled to length one


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One measured queue-free prefill."""

    degree: int
    suffix_tokens: int
    prefix_tokens: int
    seconds: float

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field, for a sample that nobody can have measured."""
        if self.degree < 1:
            raise ConfigError(f"degree is {self.degree}; accepted: 1 or more")
        if self.suffix_tokens < 1:
            raise ConfigError(f"suffix_tokens is {self.suffix_tokens}; accepted: 1 or more")
        if self.prefix_tokens < 0:
            raise ConfigError(f"prefix_tokens is {self.prefix_tokens}; accepted: 0 or more")
        if not (np.isfinite(self.seconds) and self.seconds > 0):
            raise ConfigError(f"seconds is {self.seconds}; accepted: a finite number > 0")


@dataclass(frozen=True, slots=True)
class Cell:
    """All samples of one (degree, suffix, prefix): their mean time, the model's, and how far the model is off."""

    degree: int
    suffix_tokens: int
    prefix_tokens: int
    num_samples: int
    measured_s: float
    predicted_s: float

    @property
    def error_ratio(self) -> float:
        """Predicted over measured, less one: positive where the model is too slow."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted coefficients per degree and their errors per cell, by degree, suffix and prefix."""

    coefficients: dict[int, Coefficients]
    cells: tuple[Cell, ...]

    @property
    def mean_error_ratio(self) -> float:
        """Mean over cells of the absolute relative error."""
        return float(np.mean([abs(cell.error_ratio) for cell in self.cells]))

    @property
    def max_error_ratio(self) -> float:
        """Largest absolute relative error of any cell."""
        return max(abs(cell.error_ratio) for cell in self.cells)

    def cost_model(self) -> CostModel:
        """The cost model of the fitted coefficients."""
        return CostModel(self.coefficients)


def fit_uniform(samples: Sequence[PrefillSample], *, relative: bool = True) -> Fit:
    """One set of coefficients for all degrees in the samples, as the paper has it.

    Raises ConfigError, saying which samples are missing, if they cannot tell the coefficients apart: a and c need two
    degrees, b needs prefixes, alpha and a need suffixes far apart.
    """
    degrees = _degrees(samples)
    values = _solve(_design(samples), _SYMBOLS, samples, relative)
    return _fit(dict.fromkeys(degrees, Coefficients(**dict(zip(_SYMBOLS, values, strict=True)))), samples)


def fit_fixed_per_degree(samples: Sequence[PrefillSample], *, relative: bool = True) -> Fit:
    """Coefficients of which d alone differs by degree: a larger degree costs short prompts more to set up, and the rest
    is as the paper has it. Raises ConfigError as `fit_uniform`."""
    degrees = _degrees(samples)
    design = _design(samples)
    symbols = [*(f"d at degree {degree}" for degree in degrees), *_SYMBOLS[1:]]
    is_at = np.array([[sample.degree == degree for degree in degrees] for sample in samples], dtype=np.float64)
    values = _solve(np.column_stack([is_at, design[:, 1:]]), symbols, samples, relative).tolist()
    shared = dict(zip(_SYMBOLS[1:], values[len(degrees) :], strict=True))
    coefficients = {degree: Coefficients(d=d, **shared) for degree, d in zip(degrees, values, strict=False)}
    return _fit(coefficients, samples)


def fit_per_degree(samples: Sequence[PrefillSample], *, relative: bool = True) -> Fit:
    """Coefficients of which d, a and b differ by degree and alpha is shared.

    The form for hardware on which a larger degree slows short prompts down. Where each degree has its own a, c cannot
    be told from it: c is 0 here, and a at degree C stands for a + c/C. Raises ConfigError, naming degree and missing
    samples, if a degree's samples cannot tell its d, a and b apart.
    """
    degrees = _degrees(samples)
    design = _design(samples)
    symbols = [f"{symbol} at degree {degree}" for degree in degrees for symbol in ("d", "a", "b")] + ["alpha"]
    columns = np.zeros((len(samples), len(symbols)))
    for index, degree in enumerate(degrees):
        rows = np.array([sample.degree == degree for sample in samples])
        columns[rows, 3 * index : 3 * index + 3] = design[rows, :3]
    columns[:, -1] = design[:, -1]
    values = _solve(columns, symbols, samples, relative)
    coefficients = {
        degree: Coefficients(d=d, a=a, b=b, c=0.0, alpha=float(values[-1]))
        for degree, (d, a, b) in zip(degrees, values[:-1].reshape(-1, 3).tolist(), strict=True)
    }
    return _fit(coefficients, samples)


def _degrees(samples: Sequence[PrefillSample]) -> list[int]:
    if not samples:
        raise ConfigError("samples are empty; accepted: at least five")
    return sorted({sample.degree for sample in samples})


def _design(samples: Sequence[PrefillSample]) -> FloatArray:
    """The terms of eq. 2, one row per sample and one column per coefficient."""
    degree, suffix, prefix = np.array(
        [(sample.degree, sample.suffix_tokens, sample.prefix_tokens) for sample in samples], dtype=np.float64
    ).T
    pairs = attention_pairs(suffix, prefix)
    return np.column_stack([np.ones_like(suffix), suffix, prefix, suffix / degree, pairs / degree])


def _solve(
    design: FloatArray, symbols: Sequence[str], samples: Sequence[PrefillSample], relative: bool
) -> NDArray[np.float64]:
    from scipy.optimize import nnls  # here, so that who never fits does not wait for SciPy

    seconds = np.array([sample.seconds for sample in samples])
    weights = 1 / seconds if relative else np.ones_like(seconds)
    weighted = design * weights[:, None]
    # The columns differ by ten orders of magnitude (1 and pairs of tokens): scale each to length one.
    lengths = np.linalg.norm(weighted, axis=0)
    scaled = weighted / np.where(lengths > 0, lengths, 1)
    _check_identifiable(scaled, symbols)
    solution, _ = nnls(scaled, seconds * weights)
    values: FloatArray = solution / lengths
    return values


def _check_identifiable(scaled: FloatArray, symbols: Sequence[str]) -> None:
    """Raises ConfigError, naming the coefficients that the samples leave open, unless they settle them all."""
    # Of the triangle alone, which has the same singular values: the design may have a hundred thousand rows.
    _, singular, rows = np.linalg.svd(np.linalg.qr(scaled, mode="r"), full_matrices=True)
    rank = int(np.sum(singular > _SINGULAR_RATIO * singular[0]))
    if rank == len(symbols):
        return
    loose = np.abs(rows[rank:]).max(axis=0) > 1e-6
    names = [symbol for symbol, is_loose in zip(symbols, loose, strict=True) if is_loose]
    needed = dict.fromkeys(_SEPARATED_BY[name.split()[0]] for name in names)
    raise ConfigError(f"samples do not settle {', '.join(names)}; needed: {'; '.join(needed)}")


def _fit(coefficients: dict[int, Coefficients], samples: Sequence[PrefillSample]) -> Fit:
    model = CostModel(coefficients)
    seconds: dict[tuple[int, int, int], list[float]] = {}
    for sample in samples:
        seconds.setdefault((sample.degree, sample.suffix_tokens, sample.prefix_tokens), []).append(sample.seconds)
    cells = tuple(
        Cell(degree, suffix, prefix, len(times), float(np.mean(times)), float(model.prefill_s(suffix, prefix, degree)))
        for (degree, suffix, prefix), times in sorted(seconds.items())
    )
    return Fit(coefficients, cells)
