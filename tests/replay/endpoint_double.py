"""A small OpenAI-compatible endpoint in a thread: streams completions, and misbehaves as it is told."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

MODEL = "tiny"


@dataclass
class EndpointDouble:
    """What the endpoint does, read at every request, and what it has seen.

    Requests are counted from 0 in order of arrival, one for a single token (the probe) not among them.
    """

    models: object = field(default_factory=lambda: [MODEL])
    models_status: int = 200
    key: str | None = None
    takes_ignore_eos: bool = True
    vocab: int = 1 << 30
    streams: bool = True
    probe_status: int = 200
    statuses: dict[int, int] = field(default_factory=dict)
    tokens_per_event: int = 1
    newline: str = "\n"
    has_usage: bool = True
    has_done: bool = True
    has_details: bool = True
    break_after_events: dict[int, int] = field(default_factory=dict)
    """By number of request: events until the connection is cut in the middle of a chunk."""
    error_after_events: dict[int, int] = field(default_factory=dict)
    raw_stream: dict[int, bytes] = field(default_factory=dict)
    gather: int = 0
    """No answer begins before so many requests have come."""
    silent_from: int = 1 << 30
    """Requests from this number on are never answered."""
    cache_block_tokens: int = 0
    """With a value, prompts are kept and found again in blocks of so many tokens."""

    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    probes: list[dict] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0

    def __post_init__(self) -> None:
        self._blocks: set[tuple[int, ...]] = set()
        self._gathered = asyncio.Event()
        self._forever = asyncio.Event()

    def cached_tokens(self, prompt: list[int]) -> int:
        size = self.cache_block_tokens
        if not size:
            return 0
        prefixes = [tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size)]
        found = 0
        while found < len(prefixes) and prefixes[found] in self._blocks:
            found += 1
        self._blocks.update(prefixes)
        return found * size

    async def list_models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "wrong key")
        if self.models_status != 200:
            return _error(self.models_status, "no list")
        if isinstance(self.models, list):
            return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})
        return web.json_response(self.models)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_probe = len(body["prompt"]) == 2 and not request.headers.get("X-Request-Id")
        if is_probe:
            self.probes.append(body)
            if self.probe_status != 200:
                return _error(self.probe_status, "not now")
        if "ignore_eos" in body and not self.takes_ignore_eos:
            return _error(400, "unrecognised argument: ignore_eos")
        if max(body["prompt"]) >= self.vocab:
            return _error(400, f"token {max(body['prompt'])} is out of vocabulary")
        if not self.streams:
            return web.json_response({"choices": [{"text": "x"}]})
        number = -1 if is_probe else len(self.bodies)
        if not is_probe:
            self.bodies.append(body)
            self.headers.append(request.headers.copy())
        if number in self.statuses:
            return _error(self.statuses[number], "as told")
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            return await self._stream(request, body, number)
        finally:
            self.num_open -= 1

    async def _stream(self, request: web.Request, body: dict, number: int) -> web.StreamResponse:
        if len(self.bodies) >= self.gather:
            self._gathered.set()
        if number >= 0:
            await self._gathered.wait()
        if number >= self.silent_from:
            await self._forever.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if number in self.raw_stream:
            await response.write(self.raw_stream[number])
            return response
        cached = self.cached_tokens(body["prompt"]) if number >= 0 else 0
        num_events = -(-body["max_tokens"] // self.tokens_per_event)
        for event in range(num_events):
            if event == self.break_after_events.get(number):
                request.transport.write(b"ff\r\ndata: {")
                request.transport.close()
                return response
            if event == self.error_after_events.get(number):
                await self._send(response, {"error": {"message": "a rank was lost", "code": 500}})
                return response
            await self._send(response, {"choices": [{"index": 0, "text": 'says "usage"'}], "usage": None})
        if self.has_usage:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            if self.has_details:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            await self._send(response, {"choices": [], "usage": usage})
        if self.has_done:
            await response.write(f"data: [DONE]{self.newline * 2}".encode())
        return response

    async def _send(self, response: web.StreamResponse, event: dict) -> None:
        await response.write(f"data: {json.dumps(event)}{self.newline * 2}".encode())


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "told"}}, status=status)


@contextmanager
def serving(double: EndpointDouble) -> Iterator[EndpointDouble]:
    """The endpoint in a thread of its own, on a free port of the loopback."""
    loop = asyncio.new_event_loop()
    is_up = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", double.list_models)
        app.router.add_post("/v1/completions", double.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        double.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        is_up.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert is_up.wait(30)
    try:
        yield double
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
