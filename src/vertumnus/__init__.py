"""Vertumnus: adaptive context parallelism for the prefill stage of LLM inference.

The names below are the public interface; they are imported when first used, so that `import vertumnus` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vertumnus.core.composition import Composition
    from vertumnus.core.control_plane import ControlPlane
    from vertumnus.core.placement import Placement, PlacementPolicy, PlacementView, VertumnusPolicy, choose
    from vertumnus.core.policies import POLICIES, make_policy
    from vertumnus.core.profile import Profile, load_profile, write_profile
    from vertumnus.core.queueing import Discipline
    from vertumnus.core.settings import ControlPlaneSettings
    from vertumnus.core.slo import Slo
    from vertumnus.errors import ConfigError, TraceError, VertumnusError
    from vertumnus.sim.compare import compare
    from vertumnus.sim.simulate import SimulationResult, SimulationSettings, simulate
    from vertumnus.workload.analysis import analyze
    from vertumnus.workload.readers import read_trace
    from vertumnus.workload.synthesis import synthesise
    from vertumnus.workload.trace import Trace
    from vertumnus.workload.writers import write_trace

__version__ = "0.1.0"

_HOMES = {
    "Composition": "core.composition",
    "ConfigError": "errors",
    "ControlPlane": "core.control_plane",
    "ControlPlaneSettings": "core.settings",
    "Discipline": "core.queueing",
    "POLICIES": "core.policies",
    "Placement": "core.placement",
    "PlacementPolicy": "core.placement",
    "PlacementView": "core.placement",
    "Profile": "core.profile",
    "SimulationResult": "sim.simulate",
    "SimulationSettings": "sim.simulate",
    "Slo": "core.slo",
    "Trace": "workload.trace",
    "TraceError": "errors",
    "VertumnusError": "errors",
    "VertumnusPolicy": "core.placement",
    "analyze": "workload.analysis",
    "choose": "core.placement",
    "compare": "sim.compare",
    "load_profile": "core.profile",
    "make_policy": "core.policies",
    "read_trace": "workload.readers",
    "simulate": "sim.simulate",
    "synthesise": "workload.synthesis",
    "write_profile": "core.profile",
    "write_trace": "workload.writers",
}

__all__ = [
    "POLICIES",
    "Composition",
    "ConfigError",
    "ControlPlane",
    "ControlPlaneSettings",
    "Discipline",
    "Placement",
    "PlacementPolicy",
    "PlacementView",
    "Profile",
    "SimulationResult",
    "SimulationSettings",
    "Slo",
    "Trace",
    "TraceError",
    "VertumnusError",
    "VertumnusPolicy",
    "analyze",
    "choose",
    "compare",
    "load_profile",
    "make_policy",
    "read_trace",
    "simulate",
    "synthesise",
    "write_profile",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vertumnus' has no attribute {name!r}")
    return getattr(import_module(f"vertumnus.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
