"""What steps really take, against what the cost model says, and corrections of it within bounds.

A profile is measured once; clocks, neighbours and drivers change. Per degree, predicted and actual seconds of recent
steps are summed with a decay; their ratio is the drift. A correction multiplies all coefficients of a degree by it.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from vertumnus.core.cost import Coefficients, CostModel
from vertumnus.errors import ConfigError

STALL_FACTOR = 10.0
"""A step that takes longer than so many times its prediction counts as this: it stood still, and says nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitSettings:
    """How soon, and how far, the cost model follows the ranks.

    max_factor: bound of a degree's correction against the profile, both ways. tolerance_ratio: drift that is left
    alone. min_steps: steps of a degree before it is corrected, and between two corrections. half_life_steps: age at
    which a step weighs half.
    """

    max_factor: float = 2.0
    tolerance_ratio: float = 0.05
    min_steps: int = 50
    half_life_steps: float = 100.0

    def __post_init__(self) -> None:
        if not self.max_factor > 1:
            raise ConfigError(f"max_factor is {self.max_factor}; accepted: above 1")
        for name in ("tolerance_ratio", "half_life_steps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: above 0")
        if self.min_steps < 1:
            raise ConfigError(f"min_steps is {self.min_steps}; accepted: 1 or more")


@dataclass(slots=True)
class _AtDegree:
    predicted_s: float = 0.0
    actual_s: float = 0.0
    num_steps: int = 0
    """Since the last correction."""
    factor: float | None = None
    """Applied so far, against the profile; None before its steps have said anything: it then goes with the others."""


class Drift:
    """Predicted against actual, by degree. `corrected` is asked after `record`."""

    def __init__(self, cost_model: CostModel, settings: RefitSettings | None = None) -> None:
        """`cost_model`: the profile's, which corrections are bounded against."""
        self._base = cost_model
        self._settings = settings or RefitSettings()
        self._decay = 0.5 ** (1.0 / self._settings.half_life_steps)
        self._at = {degree: _AtDegree() for degree in cost_model.degrees}

    def record(self, degree: int, predicted_s: float, actual_s: float) -> None:
        """One step, predicted by the cost model that is in force."""
        at = self._at[degree]
        at.predicted_s = at.predicted_s * self._decay + predicted_s
        at.actual_s = at.actual_s * self._decay + min(actual_s, STALL_FACTOR * predicted_s)
        at.num_steps += 1

    def ratios(self) -> dict[int, float]:
        """Actual over predicted of the degrees that have run steps since they were corrected last."""
        return {degree: at.actual_s / at.predicted_s for degree, at in self._at.items() if at.predicted_s > 0}

    @property
    def factors(self) -> Mapping[int, float]:
        """The corrections in force, by degree. A degree that has not been seen enough to be judged is as far off as the
        others are in the middle: mostly what has changed is the machine, which all of them share."""
        seen = [at.factor for at in self._at.values() if at.factor is not None]
        common = statistics.median(seen) if seen else 1.0
        return {degree: common if at.factor is None else at.factor for degree, at in self._at.items()}

    def corrected(self, degree: int) -> CostModel | None:
        """The cost model to use from now on, if the degree has drifted; None if not, or if it is not to be followed."""
        at, settings = self._at[degree], self._settings
        if at.num_steps < settings.min_steps or at.predicted_s <= 0:
            return None
        before = self.factors
        wanted = before[degree] * at.actual_s / at.predicted_s
        factor = min(max(wanted, 1.0 / settings.max_factor), settings.max_factor)
        if abs(factor / before[degree] - 1.0) <= settings.tolerance_ratio:
            at.factor = before[degree]
        else:
            self._at[degree] = _AtDegree(factor=factor)
        now = self.factors
        if now == before:
            return None
        for unseen, each in self._at.items():
            if each.factor is None:  # what it has summed up was predicted by the model that ends here
                each.predicted_s *= now[unseen] / before[unseen]
        return scaled(self._base, now)


def scaled(cost_model: CostModel, factors: Mapping[int, float]) -> CostModel:
    """Every coefficient of a degree times its factor."""
    return CostModel(
        {
            degree: Coefficients(
                **{name: factors.get(degree, 1.0) * getattr(each, name) for name in Coefficients.__slots__}
            )
            for degree, each in cost_model.coefficients.items()
        }
    )
