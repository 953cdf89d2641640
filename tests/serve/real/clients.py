"""Clients that keep a server busy, check every token, and ask again only where their connection broke."""

import asyncio
import contextlib
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import aiohttp
from tests.serve.real import tiny_model
from tests.serve.real.live_server import LiveServer, body

ASK_TIMEOUT_S = 60.0
"""For one answer, with all that a request has to go through."""
MAX_RETRIES = 400
RETRY_PAUSE_S = 0.05


class Broken(Exception):
    """The connection ended before the answer did."""


class Refused(Exception):
    """The server answered with an error."""


@dataclass(frozen=True)
class Question:
    tokens: tuple[int, ...]
    max_tokens: int

    @property
    def answer(self) -> str:
        return tiny_model.greedy(self.tokens, self.max_tokens)


@dataclass
class Answer:
    text: str
    cached_tokens: int
    num_retries: int
    asked_s: float
    ended_s: float


@dataclass
class Load:
    """What clients have seen so far."""

    answers: list[Answer] = field(default_factory=list)
    num_asked: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def num_retries(self) -> int:
        return sum(answer.num_retries for answer in self.answers)

    def check(self) -> None:
        """Everybody got the right answer, once."""
        assert not self.wrong, self.wrong[:3]
        assert len(self.answers) == self.num_asked > 0


def questions(num_prompts: int = 10, seed: int = 0) -> list[Question]:
    """Of several lengths, half of them with a beginning in common; their answers are computed here."""
    draws = random.Random(seed)
    found = []
    for number in range(num_prompts):
        num_tokens = draws.choice([7, 60, 130, 250, 400])
        tokens = tiny_model.prompt(number, num_tokens, num_shared=96 if number % 2 else 0)
        found.append(Question(tokens, draws.randint(2, 20)))
    for question in found:
        assert len(question.answer) == question.max_tokens
    return found


async def read(
    session: aiohttp.ClientSession, url: str, question: Question, *, request_id: str, is_streaming: bool = True
) -> tuple[str, int]:
    """(text, cached tokens) of one answer. Raises Broken or Refused."""
    asked = body(question.tokens, question.max_tokens, stream=is_streaming)
    if is_streaming:
        asked["stream_options"] = {"include_usage": True}
    text, usage, is_done = "", None, False
    try:
        async with session.post(f"{url}/v1/completions", json=asked, headers={"x-request-id": request_id}) as response:
            if response.status != 200:
                raise Refused(f"{response.status}: {await response.text()}")
            assert response.headers["x-request-id"] == request_id
            if not is_streaming:
                found = await response.json()
                return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]
            async for event in events(response):
                if event == "[DONE]":
                    is_done = True
                    continue
                found = json.loads(event)
                if "error" in found:
                    raise Refused(event)
                text += "".join(choice["text"] for choice in found["choices"])
                usage = found.get("usage") or usage
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
        raise Broken(repr(error)) from error
    if not is_done or usage is None:
        raise Broken("the stream ended too early")
    return text, usage["prompt_tokens_details"]["cached_tokens"]


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ").decode().rstrip("\n")


async def ask(session: aiohttp.ClientSession, url: str, question: Question, *, is_streaming: bool = True) -> Answer:
    """Asks until it is answered, each time under the same id."""
    asked_s, request_id = time.monotonic(), uuid.uuid4().hex
    for num_retries in range(MAX_RETRIES):
        try:
            text, cached_tokens = await asyncio.wait_for(
                read(session, url, question, request_id=request_id, is_streaming=is_streaming), ASK_TIMEOUT_S
            )
        except Broken:
            await asyncio.sleep(RETRY_PAUSE_S)
            continue
        return Answer(text, cached_tokens, num_retries, asked_s, time.monotonic())
    raise AssertionError("the connection breaks again and again")


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as opened:
        yield opened


@contextlib.asynccontextmanager
async def load(server: LiveServer, asked: Sequence[Question], num_clients: int = 4) -> AsyncIterator[Load]:
    """Clients that ask one question after the other for as long as the block lasts, and then wait for their answers."""
    seen, is_over = Load(), False

    async def client(number: int) -> None:
        draws = random.Random(number)
        while not is_over:
            question = draws.choice(asked)
            seen.num_asked += 1
            try:
                answer = await ask(opened, server.url, question, is_streaming=draws.random() < 0.7)
            except Exception as error:
                seen.wrong.append(f"{len(question.tokens)} tokens: {error!r}")
                return
            if answer.text != question.answer:
                seen.wrong.append(f"{len(question.tokens)} tokens: {answer.text!r} for {question.answer!r}")
            seen.answers.append(answer)

    async with session() as opened:
        clients = [asyncio.ensure_future(client(number)) for number in range(num_clients)]
        try:
            yield seen
            is_over = True
            await asyncio.gather(*clients)
        finally:
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def more_answers(seen: Load, num_answers: int = 1) -> None:
    """Returns when so many more answers have come, or one was wrong."""
    wanted = len(seen.answers) + num_answers
    give_up_s = time.monotonic() + ASK_TIMEOUT_S
    while len(seen.answers) < wanted and not seen.wrong:
        assert time.monotonic() < give_up_s, "no answer comes"
        await asyncio.sleep(0.005)
