"""What a controller sees at the end of each window, and what it may propose."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from vertumnus.core.composition import Composition, Layout, Operation, OperationCost, RankGroup, Topology
from vertumnus.core.cost import FloatArray
from vertumnus.core.slices import Slices
from vertumnus.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """Requests in order of arrival, as columns: when, how long, and the prefix reusable where each was placed."""

    arrival_s: FloatArray
    input_tokens: FloatArray
    prefix_tokens: FloatArray

    def __len__(self) -> int:
        return len(self.arrival_s)

    def part(self, start: int, end: int) -> "Arrivals":
        """Arrivals [start, end), as far as there are any; their instants stay as they are."""
        return Arrivals(
            arrival_s=self.arrival_s[start:end],
            input_tokens=self.input_tokens[start:end],
            prefix_tokens=self.prefix_tokens[start:end],
        )

    def thinned(self, share: float, seed: int = 0) -> "Arrivals":
        """As many as the share, in (0, 1], of them on average: what a part of a pool would get. One by chance of every
        1/share in a row, so that no pattern of the arrivals is taken for the whole."""
        draw = np.random.default_rng(seed)
        num_chosen = int(len(self) * share + draw.random())
        edges = np.linspace(0, len(self), num_chosen + 1)
        chosen = (edges[:-1] + draw.random(num_chosen) * np.diff(edges)).astype(int)
        return Arrivals(
            arrival_s=self.arrival_s[chosen],
            input_tokens=self.input_tokens[chosen],
            prefix_tokens=self.prefix_tokens[chosen],
        )


_NONE = Arrivals(arrival_s=np.empty(0), input_tokens=np.empty(0), prefix_tokens=np.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One observation window [start_s, end_s); windows follow each other without gap or overlap."""

    start_s: float
    end_s: float
    demand_s_per_s: float
    """Predicted service seconds that arrived per second, each request at the degree it was placed on."""
    backlog_s: float = 0.0
    """Predicted service seconds still outstanding at the end, over all workers."""
    num_requests: int = 0
    num_long: int = 0
    """Requests above the long-request threshold."""
    waited_s: float = 0.0
    """For how long requests waited for their first step in this window, in all."""
    input_tokens: int = 0
    suffix_tokens: int = 0
    """Input tokens that were not reusable where the request was placed."""
    arrivals: Arrivals = _NONE
    """The requests themselves, for a controller that looks at more than sums."""

    def __post_init__(self) -> None:
        if not self.end_s > self.start_s:
            raise ConfigError(f"window is {self.start_s} to {self.end_s}; accepted: an end after the start")
        counted = ("num_requests", "num_long", "input_tokens", "suffix_tokens")
        for name in ("demand_s_per_s", "backlog_s", "waited_s", *counted):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 0 or more")
        if self.num_long > self.num_requests:
            raise ConfigError(f"num_long is {self.num_long}; accepted: at most num_requests, {self.num_requests}")

    @property
    def duration_s(self) -> float:
        """Length of the window."""
        return self.end_s - self.start_s

    @property
    def load_s_per_s(self) -> float:
        """Service seconds per second that would serve the arrivals and work off the backlog in one more window."""
        return self.demand_s_per_s + self.backlog_s / self.duration_s

    @property
    def arrivals_per_s(self) -> float:
        """Requests that arrived per second."""
        return self.num_requests / self.duration_s

    @property
    def input_tokens_per_s(self) -> float:
        """Input tokens that arrived per second."""
        return self.input_tokens / self.duration_s


def _free(operation: Operation) -> tuple[float, float]:
    return 0.0, 0.0


def _any(composition: Composition) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class PoolState:
    """The pool as a controller sees it at the end of a window."""

    layout: Layout
    """The planned layout: ready groups, and the results of what is under way."""
    topology: Topology
    degrees: tuple[int, ...]
    cost: OperationCost = _free
    """Predicted drain in seconds and reconciliation bytes of an operation that could start now."""
    held: Collection[RankGroup] = ()
    """Groups of the layout that no operation can take, as they are not ready yet."""
    in_transition: bool = False
    """Whether an operation is under way."""
    queued: Arrivals = _NONE
    """Requests that wait now, anywhere, for their first step or the next of their chunks: whole, as if nothing of them
    were cached."""
    admits: Callable[[Composition], bool] = _any
    """Whether a composition can serve the traffic at all (lengths, KV memory); others are never proposed."""

    @cached_property
    def composition(self) -> Composition:
        """The layout, counted."""
        return Composition.of_layout(self.layout)


class Reason(Enum):
    """Why a controller wants another composition."""

    LOAD_HIGH = "load above the upper threshold"
    LOAD_LOW = "load below the lower threshold"
    LONG_ROSE = "the share of long requests rose"
    LONG_FELL = "the share of long requests fell"
    BETTER_COMPOSITION = "another composition serves this traffic better"


@dataclass(frozen=True, slots=True)
class Proposal:
    """Where a controller wants to go, and why. `operations` can start at once; empty leaves their choice open."""

    target: Composition
    operations: tuple[Operation, ...]
    reason: Reason
    figures: Mapping[str, float]
    """What the decision rests on, for the operator; keys carry their units."""


class Controller(Protocol):
    """Decides at the end of each window whether the composition should change.

    Called once per window, in order, also while an operation is under way; it may keep what it has learnt from
    earlier windows. The caller starts the proposal's operations, or plans them towards its target.
    """

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        """A proposal, or None to stay."""
        ...


@runtime_checkable
class PatientController(Controller, Protocol):
    """One that can take its time: a live loop takes other turns between two slices of an observation."""

    def observing(self, window: Window, state: PoolState) -> Slices[Proposal | None]:
        """`observe` in slices. One observation ends, or is given up, before the next begins."""
        ...


def observing(controller: Controller, window: Window, state: PoolState) -> Slices[Proposal | None]:
    """What any controller says: in slices where it takes its time, else at the first."""
    if isinstance(controller, PatientController):
        return (yield from controller.observing(window, state))
    return controller.observe(window, state)


class HoldingController:
    """Never proposes anything: an operator decides."""

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        return None
