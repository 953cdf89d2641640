"""What an experiment is: how it runs, and how its rows are drawn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.rows import Outcome, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One figure or table: what the paper shows, what is run instead, and how to draw it."""

    name: str
    title: str
    paper: str
    ours: str
    budget_s: float
    """Seconds on two quiet cores at the default scale."""
    run: Callable[[Bench], Outcome]
    draw: Callable[[Sequence[Row]], Mapping[str, Figure]]
    """Figures by caption, from the rows alone."""
