"""What a live pool under validation tells of itself: placements, splits and merges, and where the time of requests
goes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vertumnus.core.control_plane import Transition
from vertumnus.core.events import OpenWorker, RequestPlaced
from vertumnus.core.topology import Layout, RankGroup
from vertumnus.engine.step import StepOutput
from vertumnus.serve.live_request import LiveRequest
from vertumnus.serve.telemetry import Telemetry


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request as the pool saw it: when it was taken, prefilled, and given its first token; the ranks of the worker
    that it was placed on first."""

    accepted_s: float
    first_rank: int | None = None
    degree: int | None = None
    prefilled_s: float | None = None
    first_token_s: float | None = None

    @property
    def group(self) -> RankGroup | None:
        return None if self.first_rank is None or self.degree is None else RankGroup(self.first_rank, self.degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStep:
    """One prefill step: when it ended, how long it took, and E_C of it."""

    ended_s: float
    seconds: float
    predicted_s: float


@dataclass(slots=True, kw_only=True)
class Record:
    """All that a recorder saw. `started_s`: when the pool began to serve."""

    started_s: float = 0.0
    requests: dict[str, Seen] = field(default_factory=dict)
    """By the client's id."""
    steps: list[SeenStep] = field(default_factory=list)
    compositions: list[tuple[float, str]] = field(default_factory=list)
    loop_lags_s: list[float] = field(default_factory=list)
    """How late the pool's event loop came, sampled."""
    cpu_s: float = 0.0
    """CPU time of the pool's process while it served."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> "Record":
        return cls(
            **plain
            | {
                "requests": {name: Seen(**each) for name, each in plain["requests"].items()},
                "steps": [SeenStep(**each) for each in plain["steps"]],
                "compositions": [(at_s, text) for at_s, text in plain["compositions"]],
            }
        )


class Recorder(Telemetry):
    """Belongs to the pool's event loop. `clock`: seconds, finer than the loop's own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._groups: dict[int, RankGroup] = {}
        self._first_groups: list[RankGroup] = []
        self.seen = Record()
        self.transitions: list[Transition] = []

    def worker_opened(self, now_s: float, action: OpenWorker) -> None:
        if not self._groups:
            self.seen.started_s = self._clock()
        if not any(action.group.overlaps(each) for each in self._first_groups):
            self._first_groups.append(action.group)
        self._groups[action.worker_id] = action.group

    @property
    def first_layout(self) -> Layout:
        """The groups that the pool began with."""
        return tuple(sorted(self._first_groups))

    def request_accepted(self, now_s: float, request: LiveRequest) -> None:
        self.seen.requests[request.generation.request.request_id] = Seen(accepted_s=self._clock())

    def request_placed(self, now_s: float, request: LiveRequest, action: RequestPlaced) -> None:
        seen = self.seen.requests[request.generation.request.request_id]
        if seen.degree is None:
            group = self._groups[action.worker_id]
            seen.first_rank, seen.degree = group.first_rank, group.degree

    def step_ended(
        self,
        now_s: float,
        *,
        worker_id: int,
        degree: int,
        started_s: float,
        predicted_s: float,
        num_tokens: int,
        num_prefix_tokens: int,
        outputs: Sequence[StepOutput],
    ) -> None:
        self.seen.steps.append(SeenStep(ended_s=self._clock(), seconds=now_s - started_s, predicted_s=predicted_s))

    def prefill_ended(self, now_s: float, request: LiveRequest) -> None:
        self.seen.requests[request.generation.request.request_id].prefilled_s = self._clock()

    def first_token(self, now_s: float, request: LiveRequest) -> None:
        self.seen.requests[request.generation.request.request_id].first_token_s = self._clock()

    def transition_committed(self, now_s: float, transition: Transition) -> None:
        self.transitions.append(transition)
