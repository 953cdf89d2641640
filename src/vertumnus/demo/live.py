"""A real pool on this machine under traffic that changes: workers merge and split while answers go on.

Three acts. Many short prompts; then few long ones, for which the controller may merge workers; then an operator merges
and splits by hand while a long answer streams. All the while one prompt is asked again and again, greedily: its tokens
must not depend on what the pool looks like.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from vertumnus.core.composition import Composition
from vertumnus.demo.server import DemoFailed, RunningServer

PROBE = (
    "In the old harbour town the lighthouse keeper wrote down every ship that came in, its colours and its cargo, and "
    "what the weather had been. One winter evening, when the sea was quiet, he noticed that"
)
PROBE_TOKENS = 16
LONG_ANSWER_TOKENS = 120
POLL_S = 0.25
REQUEST_TIMEOUT_S = 90.0
CHANGE_TIMEOUT_S = 20.0
HOLD_S = 3.0
"""For which the operator lets a composition be."""
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 30000


@dataclass(frozen=True, slots=True)
class Act:
    """Traffic of one kind: prompts of `prompt_tokens`, at random instants, as many as are `load` times the seconds that
    this machine's cores have for them."""

    name: str
    duration_s: float
    load: float
    prompt_tokens: int
    answer_tokens: int


ACTS = (
    Act("many short prompts", 25.0, 0.35, 64, 6),
    Act("few long prompts", 45.0, 0.35, 640, 6),
    Act("an operator merges and splits", 20.0, 0.1, 96, 6),
)
BY_HAND = ("1x4", "2x2", "4x1")
"""Compositions of the third act."""


@dataclass(slots=True)
class Asked:
    """One request as its client saw it; instants from the start."""

    kind: str
    sent_s: float
    ttft_s: float | None = None
    end_s: float | None = None
    text: str = ""
    cached_tokens: int = 0
    composition: str = ""
    error: str | None = None


@dataclass(slots=True)
class Story:
    """All that was seen."""

    asked: list[Asked] = field(default_factory=list)
    compositions: list[tuple[float, str]] = field(default_factory=list)
    """(when, what the pool became)."""
    layouts: list[tuple[float, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    """(when, the groups of ranks that serve from then on, as first rank and degree)."""
    acts: list[tuple[float, str]] = field(default_factory=list)
    end_s: float = 0.0

    @property
    def num_changes(self) -> int:
        return max(len(self.compositions) - 1, 0)

    def of(self, kind: str) -> list[Asked]:
        return [each for each in self.asked if each.kind == kind]

    @property
    def failed(self) -> list[Asked]:
        return [each for each in self.asked if each.error is not None]

    def differing(self, kind: str) -> list[Asked]:
        """Answers to the same prompt that are not what the first one was."""
        answers = [each for each in self.of(kind) if each.end_s is not None]
        return [each for each in answers if each.text != answers[0].text]


class LiveDemo:
    """Plays the acts against a server; `say` gets a line for people now and then."""

    def __init__(self, server: RunningServer, say: Callable[[str], None], *, num_ranks: int, seed: int = 0) -> None:
        self._server = server
        self._num_cores = min(os.cpu_count() or 1, num_ranks)
        self._rates_per_s: dict[str, float] = {}
        """Of each act, by its name."""
        self._say = say
        self._rng = np.random.default_rng(seed)
        self._start_s = time.monotonic()
        self._tasks: set[asyncio.Task[Asked]] = set()
        self._is_over = False
        self.story = Story()

    async def play(self, acts: tuple[Act, ...] = ACTS) -> Story:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            self._session = session
            watching = asyncio.create_task(self._watch())
            probing = asyncio.create_task(self._probe())
            try:
                for act in acts:  # the first answers warm up, and tell how long such prompts take here
                    self._rates_per_s[act.name] = await self._rate_per_s(act)
                for number, act in enumerate(acts):
                    self.story.acts.append((self._now_s(), act.name))
                    self._say(f"{self._now_s():5.1f} s  {act.name}")
                    by_hand = asyncio.create_task(self._compose()) if number == len(acts) - 1 else None
                    await self._send(act)
                    if by_hand is not None:
                        await by_hand
                await asyncio.gather(*self._tasks)
                self._is_over = True
                await probing  # the last answer is waited for like any other
            finally:
                for task in (watching, probing):
                    task.cancel()
                await asyncio.gather(watching, probing, return_exceptions=True)
                await asyncio.gather(*self._tasks, return_exceptions=True)
        self.story.end_s = self._now_s()
        return self.story

    async def _rate_per_s(self, act: Act) -> float:
        waits = []
        for _ in range(2):
            asked = await self._ask("alone", self._prompt(act), 1)
            if asked.ttft_s is None:
                raise DemoFailed(f"a prompt of {act.prompt_tokens} tokens was not answered: {asked.error}")
            waits.append(asked.ttft_s)
        return act.load * self._num_cores / min(waits)

    def _prompt(self, act: Act) -> list[int]:
        tokens: list[int] = self._rng.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, act.prompt_tokens).tolist()
        return tokens

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    async def _send(self, act: Act) -> None:
        end_s = self._now_s() + act.duration_s
        while (left_s := end_s - self._now_s()) > 0:
            await asyncio.sleep(min(float(self._rng.exponential(1 / self._rates_per_s[act.name])), left_s))
            if self._now_s() < end_s:
                self._start(self._ask(act.name, self._prompt(act), act.answer_tokens))

    async def _probe(self) -> None:
        while not self._is_over:
            await self._ask("probe", PROBE, PROBE_TOKENS)
            await asyncio.sleep(1.0)

    async def _compose(self) -> None:
        """An operator's hand, while one long answer streams; and the same answer again when all is quiet."""
        streaming = self._start(self._ask("long answer", PROBE, LONG_ANSWER_TOKENS))
        for composition in BY_HAND:
            self._say(f"{self._now_s():5.1f} s  POST /admin/composition {composition}")
            async with self._session.post(
                f"{self._server.url}/admin/composition",
                json={"composition": composition},
                headers={"Authorization": f"Bearer {self._server.token}"},
            ) as response:
                response.raise_for_status()
            await self._until(composition)
        await streaming
        self._start(self._ask("long answer", PROBE, LONG_ANSWER_TOKENS))

    async def _until(self, composition: str) -> None:
        """Until such workers serve: those that go drain first, so that takes as long as what they are at."""
        wanted = Composition.parse(composition)
        give_up_s = self._now_s() + CHANGE_TIMEOUT_S
        while self._serving_composition != wanted and self._now_s() < give_up_s:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(HOLD_S)

    @property
    def _serving_composition(self) -> Composition | None:
        groups = self.story.layouts[-1][1] if self.story.layouts else ()
        return Composition.of(Counter(degree for _, degree in groups)) if groups else None

    async def _watch(self) -> None:
        while True:
            state = await self._state()
            serving = [each["ranks"] for each in state["workers"] if each["status"] in ("active", "draining")]
            groups = tuple(sorted((ranks[0], len(ranks)) for ranks in serving))
            if not self.story.layouts or self.story.layouts[-1][1] != groups:
                self.story.layouts.append((self._now_s(), groups))
            composition = state["composition"]
            if not self.story.compositions or self.story.compositions[-1][1] != composition:
                if self.story.compositions:
                    self._say(f"{self._now_s():5.1f} s  the pool is {composition} now")
                self.story.compositions.append((self._now_s(), composition))
            await asyncio.sleep(POLL_S)

    async def _state(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._server.token}"}
        async with self._session.get(f"{self._server.url}/admin/state", headers=headers) as response:
            response.raise_for_status()
            state: dict[str, Any] = await response.json()
            return state

    def _start(self, work: Coroutine[Any, Any, Asked]) -> "asyncio.Task[Asked]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        return task

    async def _ask(self, kind: str, prompt: str | list[int], max_tokens: int) -> Asked:
        asked = Asked(kind, self._now_s())
        self.story.asked.append(asked)
        body = {
            "model": self._server.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._session.post(f"{self._server.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    asked.error = f"HTTP {response.status}"
                    return asked
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self._take(asked, json.loads(line[6:]))
                    elif line.startswith(b"data: [DONE]"):
                        asked.end_s = self._now_s()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            asked.error = type(error).__name__
        if asked.end_s is None and asked.error is None:
            asked.error = "the stream broke off"
        return asked

    def _take(self, asked: Asked, event: dict[str, Any]) -> None:
        if "error" in event:
            asked.error = event["error"]["message"]
            return
        for choice in event.get("choices", ()):
            if asked.ttft_s is None:
                asked.ttft_s = self._now_s() - asked.sent_s
                asked.composition = self.story.compositions[-1][1] if self.story.compositions else ""
            asked.text += choice["text"]
        if event.get("usage"):
            asked.cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
