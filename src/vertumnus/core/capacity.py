"""What a length mix asks of a composition: which degrees it needs, and how much service time it brings."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vertumnus.core.composition import Composition
from vertumnus.core.cost import CostModel
from vertumnus.errors import ConfigError

Slo = Callable[[float], float]
"""tau in seconds as a function of the input tokens."""


@dataclass(frozen=True, slots=True)
class LengthClass:
    """Requests of about one length: their mean input and suffix tokens, and how many arrive per second."""

    input_tokens: float
    suffix_tokens: float
    arrivals_per_s: float


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Traffic by length class, ascending."""

    classes: tuple[LengthClass, ...]

    @classmethod
    def of_requests(
        cls, input_tokens: ArrayLike, suffix_tokens: ArrayLike, duration_s: float, *, classes_per_octave: int = 2
    ) -> "LengthMix":
        """The mix of observed requests, in classes of equal ratio; ConfigError for unusable figures."""
        inputs, suffixes = np.asarray(input_tokens, dtype=float), np.asarray(suffix_tokens, dtype=float)
        if not duration_s > 0:
            raise ConfigError(f"duration_s is {duration_s}; accepted: above 0")
        if inputs.shape != suffixes.shape or inputs.size == 0 or (suffixes < 0).any() or (suffixes > inputs).any():
            raise ConfigError(
                f"input_tokens and suffix_tokens have shapes {inputs.shape} and {suffixes.shape}; "
                "accepted: as many of each, at least one, and 0 <= suffix <= input"
            )
        buckets = np.floor(np.log2(np.maximum(inputs, 1.0)) * classes_per_octave).astype(int)
        members = [buckets == bucket for bucket in np.unique(buckets)]
        return cls(
            tuple(
                LengthClass(float(inputs[each].mean()), float(suffixes[each].mean()), int(each.sum()) / duration_s)
                for each in members
            )
        )

    def fits(self, composition: Composition, cost: CostModel, slo: Slo, degrees: Collection[int]) -> bool:
        """Whether each class has a degree in the composition at which a cold prompt meets its tau, E_C(L, 0) <= tau.

        A class that meets it at none of the supported `degrees` asks for nothing, since no composition could help it.
        """

        def served(length: LengthClass, candidates: Collection[int]) -> bool:
            tau_s = slo(length.input_tokens)
            return any(cost.prefill_s(length.input_tokens, 0.0, degree) <= tau_s for degree in candidates)

        return all(served(each, composition.degrees) or not served(each, degrees) for each in self.classes)

    def demand_s_per_s(
        self, composition: Composition, cost: CostModel, *, beta: float = 1.0, lam: float = 0.0
    ) -> float:
        """Predicted service seconds per second if each class goes to its preferred degree in this composition.

        The preferred degree is the argmin of J without the queue: beta*s + lambda*(C*s - C_min*s_min).
        """
        return sum(
            each.arrivals_per_s * self._preferred_s(each, composition.degrees, cost, beta, lam) for each in self.classes
        )

    @staticmethod
    def _preferred_s(length: LengthClass, degrees: Sequence[int], cost: CostModel, beta: float, lam: float) -> float:
        prefix_tokens = length.input_tokens - length.suffix_tokens
        service_s = [cost.prefill_s(length.suffix_tokens, prefix_tokens, degree) for degree in degrees]
        # The baseline C_min*s_min is the same for every degree, so that it does not change which one is preferred.
        prices = [(beta + lam * degree) * s for degree, s in zip(degrees, service_s, strict=True)]
        return service_s[prices.index(min(prices))]
