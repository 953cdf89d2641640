"""One request to the live pool, and the stream of tokens that answers it."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum

from vertumnus.engine.step import Sampling


class FinishReason(Enum):
    """Why a generation ended, under OpenAI's names."""

    STOP = "stop"
    """A stop token came; it is not part of the answer."""
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What a client asks for, once checked and tokenised.

    request_id: the client's or one made up; for logs and answers only.
    token_ids: of the prompt, uint32.
    num_top_logprobs: None for no log-probabilities; k for the sampled token's and the k most likely.
    tenant: salt of the block hashes; requests of different tenants share no cache.
    priority: smaller goes first; requests of equal priority go in the order of the queue's discipline.
    deadline_s: seconds from arrival after which nobody wants the answer any more.
    """

    request_id: str
    token_ids: "array[int]"
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: frozenset[int] = frozenset()
    num_top_logprobs: int | None = None
    tenant: bytes = b""
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `logprob` and `top_logprobs` (token, logprob; most likely first) only where asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Generation:
    """The answer to one request: iterate over it for its tokens, once.

        generation = pool.submit(request)
        async for token in generation: ...
        generation.finish_reason

    Iteration raises a `ServeError` where the request could not be answered. Whoever stops reading before the end has
    to `cancel`.
    """

    def __init__(self, request: GenerationRequest, on_cancel: Callable[[], None]) -> None:
        self.request = request
        self.cached_tokens = 0
        """Prompt tokens whose KV was not computed for this request; known from the first token on."""
        self.num_tokens = 0
        """Tokens generated so far, read or not."""
        self.finish_reason: FinishReason | None = None
        """Known when the iteration has ended."""
        self._tokens: list[Token] = []
        self._outcome: FinishReason | Exception | None = None
        self._wake: asyncio.Future[None] | None = None
        self._on_cancel = on_cancel

    def __aiter__(self) -> AsyncIterator[Token]:
        return self._read()

    async def _read(self) -> AsyncIterator[Token]:
        while True:
            for token in await self.next_tokens():
                yield token
            if self.finish_reason is not None:
                return

    async def next_tokens(self) -> list[Token]:
        """All tokens that have come since the last call, waiting for the first of them; with the last of all,
        `finish_reason` is set. Raises what the iteration raises."""
        while not self._tokens and self._outcome is None:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        tokens, self._tokens = self._tokens, []
        if isinstance(self._outcome, FinishReason):
            self.finish_reason = self._outcome
        elif self._outcome is not None and not tokens:
            raise self._outcome
        return tokens

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come; what has come may still be unread."""
        return self._outcome is not None

    def cancel(self) -> None:
        """Nobody reads on: frees what the request holds, at whatever stage it is. Harmless once it has ended."""
        if self._outcome is None:
            self._on_cancel()

    # For the pool

    def put(self, token: Token) -> None:
        self._tokens.append(token)
        self.num_tokens += 1
        self._rouse()

    def end(self, outcome: FinishReason | Exception) -> None:
        if self._outcome is None:
            self._outcome = outcome
            self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
