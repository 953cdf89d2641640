"""What experiments may use."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vertumnus.reproduction.cells import Measure
from vertumnus.reproduction.scale import Scale
from vertumnus.workload.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the experiments share: the size of the run, the traffic given, and a way to simulate many cells."""

    scale: Scale
    measure: Measure
    """Simulates cells over the cores; their rows, in order."""
    conversation: Trace | None = None
    """The real conversation trace; None: a synthesised one takes its place."""
    others: Mapping[str, Trace] = field(default_factory=dict)
    """Further recorded traces by name, never used for tuning."""
    records: Mapping[str, Any] = field(default_factory=dict)
    """Measured records by file name, such as `bench-engine.json`."""
    seed: int = 0
