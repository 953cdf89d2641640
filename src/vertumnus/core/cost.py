"""Prefill time as a function of suffix, prefix and CP degree (eq. 1 and eq. 2).

Callers reach the model through two doors only: `CostModel.prefill_s` for one degree, and `CostModel.for_degrees`,
which binds a vector of degrees (one per worker) once and is then evaluated for every request. Coefficients are kept
per degree, so a measured model whose d, a or b differ by degree is the same class with other numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from vertumnus.errors import ConfigError

FloatArray = NDArray[np.float64]

# On short vectors NumPy is twice as fast with arrays of no dimension as with Python numbers.
_ONE = np.array(1.0)
_HALF = np.array(0.5)


@overload
def attention_pairs(suffix_tokens: float, prefix_tokens: float) -> float: ...
@overload
def attention_pairs(suffix_tokens: FloatArray, prefix_tokens: FloatArray | float) -> FloatArray: ...
def attention_pairs(suffix_tokens: FloatArray | float, prefix_tokens: FloatArray | float) -> FloatArray | float:
    """Causal attention pairs left after a prefix hit (eq. 1): W(R, P) = R*P + R*(R+1)/2."""
    return suffix_tokens * prefix_tokens + suffix_tokens * (suffix_tokens + 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """The coefficients of eq. 2 at one degree: seconds, seconds per token, seconds per attention pair. All >= 0."""

    d: float
    a: float
    b: float
    c: float
    alpha: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ConfigError(f"coefficient {name} is {value!r}; accepted: a finite number >= 0")


@dataclass(frozen=True, slots=True)
class DegreeCosts:
    """A cost model bound to a vector of degrees; calling it evaluates eq. 2 for all of them at once.

    Regrouped by powers of R, so that one request costs a handful of vector operations:
    E = fixed + R * (per_suffix + per_pair * (P + (R + 1) / 2)) + P * per_prefix.
    """

    fixed: FloatArray
    per_suffix: FloatArray
    per_prefix: FloatArray
    per_pair: FloatArray

    def prefill_s(self, suffix_tokens: FloatArray | float, prefix_tokens: FloatArray | float) -> FloatArray:
        """Predicted queue-free prefill seconds, one per bound degree; arguments broadcast against the degrees."""
        pairs_per_suffix_token = prefix_tokens + (suffix_tokens + _ONE) * _HALF
        seconds: FloatArray = (
            self.fixed
            + suffix_tokens * (self.per_suffix + self.per_pair * pairs_per_suffix_token)
            + self.per_prefix * prefix_tokens
        )
        return seconds

    def take(self, rows: NDArray[np.intp]) -> "DegreeCosts":
        """The same binding restricted to some of its degrees."""
        return DegreeCosts(self.fixed[rows], self.per_suffix[rows], self.per_prefix[rows], self.per_pair[rows])


class CostModel:
    """E_C(R, P), the predicted queue-free prefill time of every supported degree.

    E_C(R, P) = d + a*R + b*P + (c*R + alpha*W(R, P)) / C (eq. 2), with R the uncached suffix tokens, P the cached
    prefix tokens and W their attention pairs (eq. 1). With one set of coefficients for all degrees (see `uniform`)
    time never rises with C; with coefficients per degree it may, as measured CP does on short prompts.
    """

    def __init__(self, coefficients: Mapping[int, Coefficients]) -> None:
        if not coefficients:
            raise ConfigError("coefficients are empty; accepted: at least one degree")
        self.degrees: tuple[int, ...] = tuple(sorted(coefficients))
        self.coefficients: dict[int, Coefficients] = {degree: coefficients[degree] for degree in self.degrees}
        self._bound: dict[int, DegreeCosts] = {}
        for degree in self.degrees:
            if degree < 1:
                raise ConfigError(f"degree is {degree}; accepted: 1 or more")

    @classmethod
    def uniform(cls, coefficients: Coefficients, degrees: Sequence[int]) -> "CostModel":
        """The paper's form: one set of coefficients for every degree."""
        return cls(dict.fromkeys(degrees, coefficients))

    def prefill_s(self, suffix_tokens: float, prefix_tokens: float, degree: int) -> float:
        """Predicted queue-free prefill time in seconds of one request at one degree (eq. 2).

        Raises ConfigError for a negative count or a degree without coefficients.
        """
        if suffix_tokens < 0 or prefix_tokens < 0:
            raise ConfigError(
                f"suffix_tokens is {suffix_tokens}, prefix_tokens is {prefix_tokens}; accepted: 0 or more"
            )
        k = self._at(degree)
        pairs = attention_pairs(suffix_tokens, prefix_tokens)
        return k.d + k.a * suffix_tokens + k.b * prefix_tokens + (k.c * suffix_tokens + k.alpha * pairs) / degree

    def step_s(self, work: Iterable[tuple[float, float]], degree: int) -> float:
        """Predicted seconds of one step over several requests, each with its (R, P): they share the fixed cost d.

        A request with nothing to compute (R = 0) takes no part; a step without any takes no time.
        """
        fixed_s = self._at(degree).d
        variable_s = [self.prefill_s(suffix, prefix, degree) - fixed_s for suffix, prefix in work if suffix > 0]
        return fixed_s + sum(variable_s) if variable_s else 0.0

    def for_degrees(self, degrees: Sequence[int] | NDArray[np.integer]) -> DegreeCosts:
        """Binds the model to a vector of degrees (say, one per worker). Shared: read only."""
        if len(degrees) != 1:
            return self._bind(degrees)
        degree = int(degrees[0])
        bound = self._bound.get(degree)
        if bound is None:
            bound = self._bound[degree] = self._bind(degrees)
        return bound

    def _bind(self, degrees: Sequence[int] | NDArray[np.integer]) -> DegreeCosts:
        each, rows = np.unique(np.asarray(degrees, dtype=np.int64), return_inverse=True)
        known = [(self._at(int(degree)), int(degree)) for degree in each]
        return DegreeCosts(
            fixed=np.array([k.d for k, _ in known])[rows],
            per_suffix=np.array([k.a + k.c / degree for k, degree in known])[rows],
            per_prefix=np.array([k.b for k, _ in known])[rows],
            per_pair=np.array([k.alpha / degree for k, degree in known])[rows],
        )

    def _at(self, degree: int) -> Coefficients:
        try:
            return self.coefficients[degree]
        except KeyError:
            known = ", ".join(map(str, self.degrees))
            raise ConfigError(f"degree is {degree}; accepted: {known}") from None


def chunked_prefill_s(
    costs: DegreeCosts, suffix_tokens: FloatArray, prefix_tokens: FloatArray, step_tokens: int
) -> FloatArray:
    """Predicted prefill seconds of suffixes that are cut into chunks of `step_tokens`, one per bound degree.

    Attention pairs add up over chunks (W is additive), but every further chunk pays d again, and b for all the tokens
    before it: with n chunks of T tokens, E(R, P) + (n - 1)*d + b*((n - 1)*P + T*n*(n - 1)/2).
    """
    if suffix_tokens.max() <= step_tokens:  # one chunk each: what follows would add nothing
        return costs.prefill_s(suffix_tokens, prefix_tokens)
    num_chunks = np.ceil(np.maximum(suffix_tokens, 1) / step_tokens)
    further = num_chunks - 1
    replayed_tokens = further * prefix_tokens + step_tokens * num_chunks * further / 2
    more_s: FloatArray = further * costs.fixed + costs.per_prefix * replayed_tokens
    return costs.prefill_s(suffix_tokens, prefix_tokens) + more_s
