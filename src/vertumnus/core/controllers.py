"""The controllers by name."""

from collections.abc import Mapping

from vertumnus.core.controller import Controller
from vertumnus.core.cost import CostModel
from vertumnus.core.lookahead_controller import LookaheadController, LookaheadSettings
from vertumnus.core.threshold_controller import ThresholdController, ThresholdSettings
from vertumnus.errors import ConfigError

ControllerSettings = LookaheadSettings | ThresholdSettings


def make_controller(
    name: str,
    cost_model: CostModel,
    kappa: Mapping[int, float] | None,
    settings: ControllerSettings | None = None,
) -> Controller:
    """A fresh controller: `lookahead` (ours) or `threshold` (the paper's), which needs kappa per degree.

    Raises ConfigError for an unknown name, and for settings of the other one.
    """
    if name == "lookahead":
        if isinstance(settings, ThresholdSettings):
            raise ConfigError("settings are those of threshold; accepted for lookahead: its own")
        return LookaheadController(cost_model, settings or LookaheadSettings())
    if name == "threshold":
        if kappa is None:
            raise ConfigError(
                "kappa is missing in the profile; accepted for threshold: a profile with kappa per degree"
            )
        if isinstance(settings, LookaheadSettings):
            raise ConfigError("settings are those of lookahead; accepted for threshold: its own")
        return ThresholdController(kappa, settings)
    raise ConfigError(f"controller is {name!r}; accepted: lookahead, threshold")
