"""What the live pool tells of itself while it works. The base takes note of nothing; `metrics` counts."""

from collections.abc import Sequence

from vertumnus.core.events import CopyBlocks, OpenWorker, RequestPlaced
from vertumnus.engine.step import StepOutput
from vertumnus.serve.live_request import LiveRequest


class Telemetry:
    """Every method is called by the event loop and has to return at once. Times are the loop's, in seconds."""

    def request_placed(self, now_s: float, request: LiveRequest, action: RequestPlaced) -> None:
        """Or placed anew, after a change of the composition or a loss."""

    def request_refused(self, now_s: float, kind: str) -> None:
        """Nothing was reserved: `overloaded`, `too-large`, `shutting-down`."""

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
        """`stop`, `length`, `cancelled`, `deadline` or `failed`."""

    def request_restarted(self, now_s: float, request: LiveRequest, reason: str) -> None:
        """Its KV was lost or given up; it is computed again."""

    def copy_ended(self, now_s: float, action: CopyBlocks, *, started_s: float, num_installed: int) -> None:
        """A copy between workers has ended; num_installed of its blocks can be reused."""

    def handoff_ended(self, now_s: float, *, started_s: float, num_blocks: int, is_ok: bool) -> None:
        """A prompt's KV went to a decode rank."""

    def blocks_reclaimed(self, now_s: float, num_blocks: int) -> None:
        """Replicas that few want any more were given up."""

    def worker_opened(self, now_s: float, action: OpenWorker) -> None:
        """A group of ranks serves."""

    def worker_closed(self, now_s: float, worker_id: int) -> None:
        """Its ranks failed or serve as others."""

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
