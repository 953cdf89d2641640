"""Open loop: every request goes out at its instant, whatever has become of those before it."""

import asyncio
import errno
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

import aiohttp
import numpy as np

from vertumnus.replay.answer import Answer, message_of
from vertumnus.replay.endpoint import Endpoint
from vertumnus.replay.lookahead import Body, Lookahead
from vertumnus.replay.outcome import (
    BAD_ANSWER,
    BROKEN_STREAM,
    CONNECT,
    DISCONNECTED,
    GENERATOR,
    SERVER_ERROR,
    TIMEOUT,
    Outcome,
)
from vertumnus.replay.prompts import Prompts
from vertumnus.replay.stall import StallWatch
from vertumnus.workload.trace import FloatArray, Trace

OWN_ERRNOS = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}
"""What the operating system says when it is the client that has run out of something."""

DRAIN_S = 1.0
"""How long the end of a response may take after [DONE], for its connection to be used again."""

PROGRESS_PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a replay stands; `mean_ttft_s` over the answers since the last time it was told."""

    num_sent: int
    num_ended: int
    num_failed: int
    mean_ttft_s: float | None


@dataclass(slots=True, kw_only=True)
class Played:
    """What came of a replay: an outcome per request sent, in that order.

    `started_s` is the instant of `perf_counter` from which the outcomes count.
    `messages` has the first words of each kind of failure, `stalls_s` how late the event loop was, sampled.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    started_s: float = 0.0
    messages: dict[str, str] = field(default_factory=dict)
    stalls_s: FloatArray = field(default_factory=lambda: np.empty(0))
    max_in_flight: int = 0
    is_interrupted: bool = False


class Load:
    """Plays a trace against an endpoint, once."""

    def __init__(
        self,
        trace: Trace,
        prompts: Prompts,
        endpoint: Endpoint,
        session: aiohttp.ClientSession,
        *,
        concurrency_limit: int | None = None,
        request_id_prefix: str = "replay",
    ) -> None:
        self._trace = trace
        self._prompts = prompts
        self._endpoint = endpoint
        self._session = session
        self._limit = concurrency_limit
        self._request_id_prefix = request_id_prefix
        self._in_flight: set[asyncio.Task[None]] = set()
        self._has_slot = asyncio.Event()
        self._slot_freed_s = 0.0
        self._num_sent = 0
        self._num_failed = 0
        self._recent_ttft_s: list[float] = []
        self._started_s = 0.0
        self._error: BaseException | None = None
        self._played = Played()
        self._ahead = Lookahead(trace.num_requests, self._body)

    async def play(
        self, interrupt: asyncio.Event | None = None, on_progress: Callable[[Progress], None] | None = None
    ) -> Played:
        """Sends all requests and waits for all answers, or until `interrupt` is set; what is under way then counts as
        unfinished."""
        stalls = StallWatch()
        filling = asyncio.create_task(self._ahead.fill())
        background = [filling]
        try:
            priming = asyncio.create_task(self._ahead.primed())
            background.append(priming)
            await _either(priming, interrupt)
            background.append(asyncio.create_task(stalls.watch()))
            if on_progress is not None:
                background.append(asyncio.create_task(self._tell(on_progress)))
            sending = asyncio.create_task(self._send_all())
            background.append(sending)
            self._played.is_interrupted = not await _either(sending, interrupt)
        finally:
            for task in (*background, *self._in_flight):
                task.cancel()
            ended = await asyncio.gather(*background, *self._in_flight, return_exceptions=True)
        for error in (self._error, *ended):
            if isinstance(error, Exception):  # of this program, not of a request: those end in an outcome
                raise error
        self._played.stalls_s = np.array(stalls.stalls_s)
        if on_progress is not None:
            on_progress(self._progress())
        return self._played

    def _body(self, index: int) -> Iterator[bytes]:
        return self._endpoint.body(self._prompts.text_pieces(index), int(self._trace.output_tokens[index]))

    async def _send_all(self) -> None:
        self._started_s = self._played.started_s = perf_counter()
        for index, scheduled_s in enumerate(self._trace.arrival_s.tolist()):
            body = await self._ahead.take()
            while (early_s := scheduled_s - self._now_s()) > 0:
                await asyncio.sleep(early_s)
            ready_s = scheduled_s
            while self._limit is not None and len(self._in_flight) >= self._limit:
                self._has_slot.clear()
                await self._has_slot.wait()
                ready_s = max(scheduled_s, self._slot_freed_s)
            # All that is due goes out in one turn of the event loop: turns are long when many streams are open.
            task = asyncio.create_task(self._request(index, scheduled_s, ready_s, body))
            self._in_flight.add(task)
            task.add_done_callback(self._ended)
            self._num_sent += 1
            self._played.max_in_flight = max(self._played.max_in_flight, len(self._in_flight))
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._slot_freed_s = self._now_s()
        self._has_slot.set()
        if not task.cancelled():
            self._error = self._error or task.exception()

    async def _request(self, index: int, scheduled_s: float, ready_s: float, body: Body) -> None:
        outcome = Outcome(
            index=index,
            scheduled_s=scheduled_s,
            ready_s=ready_s,
            sent_s=self._now_s(),
            input_tokens=int(self._trace.input_tokens[index]),
            max_tokens=int(self._trace.output_tokens[index]),
        )
        answer = Answer()
        self._played.outcomes.append(outcome)
        try:
            outcome.error, message = await self._ask(index, body, answer)
        except asyncio.CancelledError:
            outcome.is_unfinished = True
            raise
        finally:
            _record(answer, outcome)
        if outcome.error is not None:
            self._num_failed += 1
            self._played.messages.setdefault(outcome.error, message)
        elif outcome.ttft_s is not None:
            self._recent_ttft_s.append(outcome.ttft_s)

    async def _ask(self, index: int, body: Body, answer: Answer) -> tuple[str | None, str]:
        """Sends one request and reads its answer; the kind of failure, if any, and what was said of it."""
        head_came = False
        try:
            async with self._session.post(
                self._endpoint.completions_url,
                data=body,
                headers={"X-Request-Id": f"{self._request_id_prefix}-{index}"},
                allow_redirects=False,
            ) as response:
                head_came = True
                if response.status != 200:
                    return f"http_{response.status}", _said(await response.content.read(1 << 16))
                if response.content_type != "text/event-stream":
                    return BAD_ANSWER, f"its content type is {response.content_type}"
                content = response.content
                while not content.at_eof() and answer.done_s is None and not answer.is_malformed:
                    answer.feed(await content.readany(), self._now_s())
                answer.end(self._now_s())
                if answer.done_s is not None:
                    with suppress(asyncio.TimeoutError, aiohttp.ClientError):
                        while not content.at_eof():
                            await asyncio.wait_for(content.readany(), DRAIN_S)
        except asyncio.TimeoutError:
            return TIMEOUT, "no complete answer within the timeout"
        except OSError as error:  # aiohttp's errors of connections among them
            if error.errno in OWN_ERRNOS:
                return GENERATOR, error.strerror or str(error)
            if isinstance(error, aiohttp.ClientConnectorError):
                return CONNECT, error.strerror or str(error)
            return (BROKEN_STREAM if head_came else DISCONNECTED), str(error)
        except aiohttp.ServerDisconnectedError:
            return (BROKEN_STREAM if head_came else DISCONNECTED), "the connection was closed"
        except aiohttp.ClientPayloadError as error:
            return BROKEN_STREAM, str(error)
        except aiohttp.ClientError as error:
            return BAD_ANSWER, str(error)
        return _flaw(answer)

    def _now_s(self) -> float:
        return perf_counter() - self._started_s

    async def _tell(self, on_progress: Callable[[Progress], None]) -> None:
        while True:
            on_progress(self._progress())
            await asyncio.sleep(PROGRESS_PERIOD_S)

    def _progress(self) -> Progress:
        recent, self._recent_ttft_s = self._recent_ttft_s, []
        mean_ttft_s = sum(recent) / len(recent) if recent else None
        return Progress(self._num_sent, self._num_sent - len(self._in_flight), self._num_failed, mean_ttft_s)


def _record(answer: Answer, outcome: Outcome) -> None:
    """What the answer says so far; instants become durations since sending."""
    if answer.first_s is not None and answer.last_s is not None:
        outcome.ttft_s = answer.first_s - outcome.sent_s
        outcome.last_token_s = answer.last_s - outcome.sent_s
    if answer.done_s is not None:
        outcome.e2e_s = answer.done_s - outcome.sent_s
    outcome.output_tokens = answer.output_tokens
    outcome.prompt_tokens = answer.prompt_tokens
    outcome.cached_tokens = answer.cached_tokens


def _flaw(answer: Answer) -> tuple[str | None, str]:
    """What is wrong with an answer that was read to its end."""
    if answer.error is not None:
        return SERVER_ERROR, answer.error
    if answer.is_malformed:
        return BAD_ANSWER, "an event in the stream is no JSON object"
    if answer.done_s is None:
        return BROKEN_STREAM, "the stream ended without [DONE]"
    if answer.first_s is None:
        return BROKEN_STREAM, "the stream had no token"
    return None, ""


def _said(content: bytes) -> str:
    try:
        return message_of(json.loads(content))
    except (ValueError, RecursionError):
        return message_of(content.decode(errors="replace"))


async def _either(task: asyncio.Task[None], interrupt: asyncio.Event | None) -> bool:
    """Waits for the task or the interrupt; whether the task ended."""
    if interrupt is None:
        await task
        return True
    waiting = asyncio.create_task(interrupt.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if task.done():
        task.result()
    return task.done()
