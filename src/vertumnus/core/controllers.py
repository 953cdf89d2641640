"""The controllers by name."""

from collections.abc import Mapping

from vertumnus.core.controller import Controller
from vertumnus.core.cost import CostModel
from vertumnus.core.lookahead_controller import LookaheadController
from vertumnus.core.threshold_controller import ThresholdController
from vertumnus.errors import ConfigError


def make_controller(name: str, cost_model: CostModel, kappa: Mapping[int, float] | None) -> Controller:
    """A fresh controller: `lookahead` (ours) or `threshold` (the paper's), which needs kappa per degree."""
    if name == "lookahead":
        return LookaheadController(cost_model)
    if name == "threshold":
        if kappa is None:
            raise ConfigError(
                "kappa is missing in the profile; accepted for threshold: a profile with kappa per degree"
            )
        return ThresholdController(kappa)
    raise ConfigError(f"controller is {name!r}; accepted: lookahead, threshold")
