"""A request on its way through the live pool."""

import asyncio
from array import array
from dataclasses import dataclass
from enum import Enum

from vertumnus.core.requests import PrefillRequest
from vertumnus.engine.step import Address, RequestOutput, StepRequest
from vertumnus.serve.generation import FinishReason, Generation, Token


class Stage(Enum):
    """Where a request is. One whose KV is lost goes back to PREFILL."""

    PREFILL = "prefill"
    """Waiting for a worker or a step, or in one."""
    WAITING_FOR_DECODE = "waiting for decode"
    """Its KV is complete; no decode rank has room for it yet."""
    HANDOFF = "handoff"
    """Its KV is being copied to a decode rank."""
    DECODE = "decode"


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """One generation, and all tokens that its KV stands or will stand for.

    A request whose KV is lost starts again with what it has generated so far as part of its prompt, as another
    `attempt`: to the control plane that is another request.
    """

    generation: Generation
    tokens: "array[int]"
    """The prompt and what was generated."""
    num_prompt_tokens: int
    attempt: PrefillRequest
    arrival_s: float
    stage: Stage = Stage.PREFILL
    is_over: bool = False
    """Nobody waits for it any more: answered, failed or cancelled."""
    num_attempts: int = 1
    num_lost_steps: int = 0
    """Prefill steps with it that ended with their worker."""
    worker_id: int = -1
    """Where it was placed last."""
    degree: int = 0
    started_s: float | None = None
    """When the first step of the first attempt began."""
    prefilled_s: float = 0.0
    """When the last step of the last attempt ended."""
    first_token_s: float | None = None
    reused_tokens: int = 0
    reachable_tokens: int = 0
    """Of the prompt, what any worker was known to hold when the request was first placed."""
    predicted_s: float = 0.0
    """Service seconds that the first placement reserved."""
    held_token: Token | None = None
    """Sampled by the last step of the prefill; given out once the KV is at the decode rank."""
    ended_s: float | None = None
    deadline: asyncio.TimerHandle | None = None

    @property
    def request_id(self) -> int:
        """Of the present attempt."""
        return self.attempt.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def note_start(self, now_s: float, reused_tokens: int) -> None:
        """The first step of an attempt begins, with so much of the prompt in the cache."""
        if self.started_s is None:
            self.started_s = now_s
            self.reused_tokens = reused_tokens
            self.generation.cached_tokens = reused_tokens

    def take(self, token: Token) -> FinishReason | None:
        """Gives a token out; returns why it was the last, if it was."""
        asked = self.generation.request
        if token.token_id in asked.stop_token_ids:
            return FinishReason.STOP
        self.tokens.append(token.token_id)
        self.generation.put(token)
        return FinishReason.LENGTH if len(self.tokens) - self.num_prompt_tokens >= asked.max_tokens else None

    def would_end_with(self, token: Token) -> bool:
        """Whether nothing has to be decoded after this token."""
        asked = self.generation.request
        return token.token_id in asked.stop_token_ids or (
            len(self.tokens) + 1 - self.num_prompt_tokens >= asked.max_tokens
        )

    def prefill_share(
        self, first: int, end: int, blocks: list[Address], block_tokens: int, *, is_last: bool
    ) -> StepRequest:
        """Prompt tokens [first, end) behind a prefix of `first` tokens, with the next one sampled if they are the last.
        The ranks are told the hashes of the blocks, so that they can say later what they hold."""
        asked = self.generation.request
        return StepRequest(
            request_id=self.request_id,
            token_ids=self.tokens[first:end],
            num_prefix_tokens=first,
            blocks=blocks[: -(-end // block_tokens)],
            labels=self.attempt.blocks[: end // block_tokens],
            sampling=asked.sampling if is_last else None,
            num_top_logprobs=asked.num_top_logprobs if is_last else None,
        )

    def decode_share(self, blocks: list[Address]) -> StepRequest:
        """The last token, whose KV is still missing, and the next one sampled. `blocks` have room for all tokens."""
        asked = self.generation.request
        return StepRequest(
            request_id=self.request_id,
            token_ids=self.tokens[-1:],
            num_prefix_tokens=len(self.tokens) - 1,
            blocks=blocks,
            sampling=asked.sampling,
            num_top_logprobs=asked.num_top_logprobs,
        )


def token_of(output: RequestOutput) -> Token:
    return Token(output.token_id, output.logprob, tuple(output.top_logprobs))
