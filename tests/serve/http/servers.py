"""The front end on a loopback port, in a thread with a loop of its own."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from functools import cache
from pathlib import Path

import uvloop
from tests.serve.http.fake_backend import FakeBackend

from vertumnus.serve.http import HttpConfig, Tokeniser, create_app, serve_http

CACHE = Path(__file__).resolve().parents[3] / ".cache"
MODEL = "smollm2"
VOCAB_SIZE = 49152
WAIT_S = 20
"""More than anything here takes on a busy machine."""


@cache
def model_folder():
    """SmolLM2's, of which the tokenizer's files are read; converted where it has not been yet."""
    for folder in sorted(CACHE.glob("smollm2-*")):
        if (folder / "tokenizer.json").is_file():
            return folder
    from tests.engine import models  # imports torch and transformers, which takes many seconds

    return models.smollm2_folder()


@cache
def tokeniser():
    return Tokeniser.from_folder(model_folder())


def http_config(**options):
    return HttpConfig(
        **{
            "model_name": MODEL,
            "max_context_tokens": 8192,
            "vocab_size": VOCAB_SIZE,
            "stop_token_ids": frozenset({2}),
            "drain_timeout_s": 0.5,
            **options,
        }
    )


class Server:
    def __init__(self, backend, config):
        self.backend, self.config = backend, config
        self.app = create_app(backend, tokeniser(), config)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._listener = listener
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._problem = None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        async def serve():
            started = asyncio.Event()
            serving = asyncio.ensure_future(
                serve_http(self.app, [self._listener], self.config, self._stop, started=started)
            )
            await asyncio.wait((serving, asyncio.ensure_future(started.wait())), return_when=asyncio.FIRST_COMPLETED)
            self._ready.set()
            await serving
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert not others, others

        try:
            self._loop.run_until_complete(serve())
        except BaseException as problem:
            self._problem = problem
        finally:
            self._ready.set()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def start(self):
        self._thread.start()
        assert self._ready.wait(WAIT_S)

    def begin_stop(self):
        """As SIGTERM would."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self):
        if self._thread.is_alive():
            self.begin_stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self._problem is not None:
            raise self._problem

    def call(self, function, *arguments):
        """Runs it in the server's loop and returns what it returns."""

        async def run():
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def until(self, condition):
        """Waits until the condition, looked at in the server's loop, is true."""
        give_up_s = time.monotonic() + WAIT_S
        while not self.call(condition):
            assert time.monotonic() < give_up_s, "waited in vain"
            time.sleep(0.005)

    def request(self, method, path, body=None, headers=None):
        """(status, headers in small letters, body bytes)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            headers = dict(headers or {})
            if isinstance(body, dict):
                body = json.dumps(body).encode()
            if body is not None:
                headers.setdefault("content-type", "application/json")
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path, **body):
        """(status, parsed body)."""
        status, _, answer = self.request("POST", path, {"model": MODEL, **body})
        return status, json.loads(answer)


@contextlib.contextmanager
def serving(backend=None, **options):
    server = Server(backend or FakeBackend(), http_config(**options))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def events_of(stream):
    """The data of every server-sent event, JSON parsed, `[DONE]` as it is; checks the framing."""
    assert stream.endswith(b"\n\n")
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        assert event.startswith("data: "), event
        data = event.removeprefix("data: ")
        assert "\n" not in data
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
