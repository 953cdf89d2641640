"""What the live pool tells of itself while it works. The base takes note of nothing; `metrics` counts, `recent` knows
the last minutes, `decision_log` and `log` remember what was decided and what happened."""

from collections.abc import Callable, Sequence
from typing import Any

from vertumnus.core.composition import Composition
from vertumnus.core.control_plane import Transition
from vertumnus.core.controller import Proposal, Window
from vertumnus.core.events import ActivateGroups, CopyBlocks, OpenWorker, ReclaimBlocks, RequestPlaced
from vertumnus.engine.step import StepOutput
from vertumnus.serve.live_request import LiveRequest


class Telemetry:
    """Every method is called by the event loop and has to return at once. Times are the loop's, in seconds."""

    def request_accepted(self, now_s: float, request: LiveRequest) -> None:
        """It will end with `request_ended`, once."""

    def request_placed(self, now_s: float, request: LiveRequest, action: RequestPlaced) -> None:
        """Or placed anew, after a change of the composition or a loss."""

    def request_refused(self, now_s: float, kind: str, num_tokens: int) -> None:
        """Nothing is reserved for a prompt of so many tokens. kind: the name of the ServeError. Where no worker can
        hold an accepted request, `request_ended` follows."""

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
        """A prefill step has run. predicted_s: by the cost model, with the prefixes that were really there."""

    def prefill_ended(self, now_s: float, request: LiveRequest) -> None:
        """All KV of the prompt is there."""

    def first_token(self, now_s: float, request: LiveRequest) -> None:
        """The KV has reached a decode rank, or need not."""

    def decode_step_ended(self, now_s: float, *, rank: int, started_s: float, num_sequences: int) -> None:
        """Every sequence of the rank has one more token."""

    def request_ended(self, now_s: float, request: LiveRequest, outcome: str) -> None:
        """`stop`, `length`, `cancelled`, `deadline`, `refused` or `failed`."""

    def request_restarted(self, now_s: float, request: LiveRequest, reason: str) -> None:
        """Its KV, or the step that it was in, was lost or given up; it is computed again."""

    def copy_started(self, now_s: float, action: CopyBlocks) -> None:
        """A copy between workers was decided."""

    def copy_ended(self, now_s: float, action: CopyBlocks, *, started_s: float, num_installed: int) -> None:
        """A copy between workers has ended; num_installed of its blocks can be reused."""

    def handoff_ended(self, now_s: float, *, started_s: float, num_blocks: int, is_ok: bool) -> None:
        """A prompt's KV went to a decode rank."""

    def reclaim_started(self, now_s: float, action: ReclaimBlocks) -> None:
        """Replicas that few want any more are to be given up, as far as they are not in use."""

    def blocks_reclaimed(self, now_s: float, num_blocks: int) -> None:
        """Replicas that few want any more were given up."""

    def worker_opened(self, now_s: float, action: OpenWorker) -> None:
        """A group of ranks serves."""

    def worker_closed(self, now_s: float, worker_id: int) -> None:
        """Its ranks failed or serve as others."""

    def window_ended(self, now_s: float, window: Window, proposal: Proposal | None) -> None:
        """An observation window is over, and the controller has looked at it."""

    def controller_failed(self, now_s: float, fault: Exception) -> None:
        """It raised this, or the planning of the way to a composition did: the composition stays as it is. A controller
        that is not paused is asked again at the end of the next window."""

    def composition_requested(self, now_s: float, composition: Composition) -> None:
        """By an operator; the controller pauses."""

    def controller_paused(self, now_s: float, is_paused: bool) -> None:
        """By an operator, or let go on."""

    def pool_drained(self, now_s: float, is_draining: bool) -> None:
        """It takes nothing new, by an operator, or takes requests again."""

    def switch_started(self, now_s: float, action: ActivateGroups) -> None:
        """Ranks are to take up new groups."""

    def transition_committed(self, now_s: float, transition: Transition) -> None:
        """A split or merge is done: all its groups serve."""

    def switch_ended(self, now_s: float, *, epoch: int, num_ranks: int, started_s: float, is_ok: bool) -> None:
        """Ranks have taken up new groups, or could not."""

    def rank_gone(self, now_s: float, rank: int, reason: str) -> None:
        """The process is gone."""

    def rank_back(self, now_s: float, rank: int) -> None:
        """It is there again, empty."""

    def pool_failed(self, now_s: float, error: Exception) -> None:
        """Nothing can be served any more."""

    def step_failed(self, now_s: float, ranks: Sequence[int], reason: str) -> None:
        """A step did not end well; its requests run again."""


def together(parts: Sequence[Telemetry]) -> Telemetry:
    """One that tells all of these, in order. What nobody listens to costs nothing but the call."""
    both = Telemetry()
    for name, base in vars(Telemetry).items():
        if name.startswith("_"):
            continue
        # Looked for at the part, not at its class: one that tells others has listeners of its own.
        told = [getattr(part, name) for part in parts]
        listeners = [listener for listener in told if getattr(listener, "__func__", None) is not base]
        if listeners:
            setattr(both, name, listeners[0] if len(listeners) == 1 else _told_to(listeners))
    return both


def _told_to(listeners: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*arguments: Any, **named: Any) -> None:
        for listener in listeners:
            listener(*arguments, **named)

    return tell
