"""Drives one request from its body to the last byte of its answer."""

import asyncio
import logging
import time

from vertumnus.errors import VertumnusError
from vertumnus.serve.errors import ShuttingDown
from vertumnus.serve.generation import FinishReason, Generation
from vertumnus.serve.http.access import Access, Tenant
from vertumnus.serve.http.api_error import ApiError, ClientGone, internal_error, seen_by_client
from vertumnus.serve.http.backend import Backend
from vertumnus.serve.http.config import HttpConfig
from vertumnus.serve.http.exchange import HEARTBEAT, BodyRoom, Exchange, Receive
from vertumnus.serve.http.jobs import Job, JobReader
from vertumnus.serve.http.request_log import log_request
from vertumnus.serve.http.tokeniser import Tokeniser
from vertumnus.serve.http.transcript import Transcript
from vertumnus.serve.http.wire_format import DONE, ChatFormat, CompletionFormat, WireFormat, error_event, usage_of

__all__ = ["Answering"]

LOG = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499
"""What servers call it among themselves; nobody is left to be sent it."""


class Answering:
    """Of /v1/completions and /v1/chat/completions. Knows the requests that are being answered."""

    def __init__(self, backend: Backend, tokeniser: Tokeniser, access: Access, config: HttpConfig) -> None:
        self._backend, self._tokeniser, self._access, self._config = backend, tokeniser, access, config
        self._reader = JobReader(tokeniser, config)
        self._room = BodyRoom(config.max_buffered_body_bytes)
        self._open: set[Generation] = set()
        self.num_active = 0
        """Requests whose answer is not out yet, those still being read included."""
        self.is_draining = False
        """New requests are refused."""

    @property
    def num_buffered_body_bytes(self) -> int:
        return self._room.num_bytes

    def give_up(self) -> None:
        """Ends every request that is still open with ShuttingDown."""
        for generation in tuple(self._open):
            _release(generation, ShuttingDown("the server stops before the answer is complete"))

    async def completion(self, exchange: Exchange) -> None:
        await self._answer(exchange, is_chat=False)

    async def chat(self, exchange: Exchange) -> None:
        await self._answer(exchange, is_chat=True)

    async def _answer(self, exchange: Exchange, *, is_chat: bool) -> None:
        """Never raises but for cancellation: whatever happens is told to the client, and logged."""
        answer = _Answer(exchange, self._tokeniser, self._config)
        tenant, error = Tenant(), None
        self.num_active += 1
        try:
            tenant = self._access.tenant(exchange)
            job = await self._read(exchange, tenant, is_chat=is_chat)
            generation = self._backend.submit(job.request)
            self._open.add(generation)
            try:
                await answer.give(job, generation)
            finally:
                self._open.discard(generation)
                _release(generation, ClientGone())
        except ClientGone:
            error = "client_gone"
            self._backend.http_error(CLIENT_GONE_STATUS, error)
        except (ApiError, VertumnusError) as problem:
            error = await self._fail(answer, problem if isinstance(problem, ApiError) else seen_by_client(problem))
        except Exception:
            LOG.exception("request %s failed", exchange.request_id)
            error = await self._fail(answer, internal_error())
        finally:
            self.num_active -= 1
            log_request(
                exchange,
                tenant_name=tenant.name,
                generation=answer.generation,
                first_token_s=answer.first_token_s,
                num_tokens=answer.num_tokens,
                finish_reason=answer.finish_reason,
                error_code=error,
            )

    async def _fail(self, answer: "_Answer", error: ApiError) -> str:
        self._backend.http_error(error.status, error.shown_code)
        await answer.fail(error)
        return error.shown_code

    async def _read(self, exchange: Exchange, tenant: Tenant, *, is_chat: bool) -> Job:
        try:
            body = await exchange.read_json_body(self._config.body_limit_bytes, self._room)
            if self.is_draining:
                raise ShuttingDown("the server is stopping")
            read = self._reader.chat if is_chat else self._reader.completion
            return await read(exchange, body, tenant.salt)
        finally:
            self._room.give_back(exchange.body_bytes)


class _Answer:
    def __init__(self, exchange: Exchange, tokeniser: Tokeniser, config: HttpConfig) -> None:
        self._exchange, self._tokeniser, self._config = exchange, tokeniser, config
        self.generation: Generation | None = None
        self.first_token_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self._transcript: Transcript | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self._transcript is None else self._transcript.num_tokens

    async def give(self, job: Job, generation: Generation) -> None:
        has_tokens = job.request.num_top_logprobs is not None
        self.generation = generation
        self._transcript = transcript = Transcript(self._tokeniser, job.stops, has_tokens=has_tokens)
        form = (ChatFormat if job.is_chat else CompletionFormat)(
            self._exchange.request_id, self._config.model_name, self._tokeniser, has_usage_event=job.has_usage_event
        )
        watch = None
        if not generation.has_ended:
            watch = asyncio.ensure_future(_watch(self._exchange.receive, generation))
        try:
            if job.is_stream:
                with _Heartbeats(self._exchange, self._config.heartbeat_s):
                    await self._stream(job, generation, transcript, form)
            else:
                await self._whole(job, generation, transcript, form)
        finally:
            if watch is not None:
                watch.cancel()

    async def fail(self, error: ApiError) -> None:
        """Tells the client, in whichever way is still open."""
        if self._exchange.status is None:
            await self._exchange.refuse(error)
        else:
            await self._exchange.send_events(error_event(error), is_last=True)

    async def _whole(self, job: Job, generation: Generation, transcript: Transcript, form: WireFormat) -> None:
        pieces: list[str] = []
        reason = None
        while reason is None:
            piece, reason = await self._next(generation, transcript)
            pieces.append(piece)
        shown = transcript.take_shown() if job.request.num_top_logprobs is not None else None
        body = form.whole("".join(pieces), shown, reason, self._usage(generation))
        await self._exchange.answer(200, body)

    async def _stream(self, job: Job, generation: Generation, transcript: Transcript, form: WireFormat) -> None:
        has_tokens = job.request.num_top_logprobs is not None
        opening = form.opening()
        reason = None
        while reason is None:
            piece, reason = await self._next(generation, transcript)
            shown = transcript.take_shown() if has_tokens else None
            events = opening
            if piece or shown or reason is not None:
                events += form.event(piece, shown, reason)
            if reason is not None:
                if job.has_usage_event:
                    events += form.usage_event(self._usage(generation))
                events += DONE
            if events:
                await self._exchange.send_events(events, is_last=reason is not None)
                opening = b""

    async def _next(self, generation: Generation, transcript: Transcript) -> tuple[str, FinishReason | None]:
        """The next visible text, and why nothing follows it."""
        tokens = await generation.next_tokens()
        if self.first_token_s is None and tokens:
            self.first_token_s = time.monotonic() - self._exchange.started_s
        text = transcript.feed(tokens)
        if not transcript.is_stopped:
            if generation.finish_reason is None:
                return text, None
            text += transcript.finish()
        self.finish_reason = generation.finish_reason
        if transcript.is_stopped:
            self.finish_reason = FinishReason.STOP
            _release(generation, FinishReason.STOP)
        return text, self.finish_reason

    def _usage(self, generation: Generation) -> dict[str, object]:
        return usage_of(len(generation.request.token_ids), self.num_tokens, generation.cached_tokens)


class _Heartbeats:
    """Within its block, a comment goes out after every interval in which nothing else did."""

    def __init__(self, exchange: Exchange, interval_s: float) -> None:
        self._exchange, self._interval_s = exchange, interval_s
        self._num_sends = exchange.num_sends
        self._sending: asyncio.Future[None] | None = None

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._beat)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        if self._exchange.num_sends == self._num_sends:
            self._sending = asyncio.ensure_future(self._send_comment())
        self._num_sends = self._exchange.num_sends
        self.__enter__()

    async def _send_comment(self) -> None:
        if not self._exchange.is_sending:  # nor over
            await self._exchange.send_events(HEARTBEAT)


async def _watch(receive: Receive, generation: Generation) -> None:
    """Frees the request as soon as its client is gone, and wakes whoever waits for its tokens."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            _release(generation, ClientGone())
            return


def _release(generation: Generation, outcome: FinishReason | Exception) -> None:
    """Frees what it holds, and wakes whoever waits for its tokens; does nothing once it has ended."""
    if not generation.has_ended:
        generation.cancel()
        generation.end(outcome)
