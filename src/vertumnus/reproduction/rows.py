"""Rows and comparisons: what an experiment gives."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

Row = dict[str, Any]
"""One line of a table: plain values by column; `label` says how its figures came about."""


class Label(Enum):
    """How a figure came about."""

    MEASURED = "measured"
    PUBLISHED = "published"
    ESTIMATED = "estimated"
    SYNTHESISED = "synthesised"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One published figure beside ours; None where there is none."""

    what: str
    published: str | None
    """As the paper prints it; label `published`."""
    ours: str | None
    label: str
    """How ours came about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an experiment gave."""

    rows: Sequence[Row]
    comparisons: Sequence[Comparison] = ()
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Outcome":
        comparisons = [Comparison(**each) for each in document["comparisons"]]
        return cls(rows=document["rows"], comparisons=comparisons, notes=document["notes"])
