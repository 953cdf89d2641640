"""Serves on the listening socket whose descriptor is the first argument, until SIGTERM. Without torch."""

import asyncio
import socket
import sys

import uvloop
from tests.serve.http.fake_backend import FakeBackend, silent
from tests.serve.http.servers import http_config, tokeniser

from vertumnus.serve.generation import FinishReason, Token
from vertumnus.serve.http import create_app, serve_http, stop_on_signals


def answer_once_draining(app):
    async def wait(generation):
        while not app.answering.is_draining:
            await asyncio.sleep(0.01)
        generation.put(Token(504))
        generation.end(FinishReason.LENGTH)

    return wait


async def main():
    config, backend, stop = http_config(drain_timeout_s=20), FakeBackend(silent), asyncio.Event()
    app = create_app(backend, tokeniser(), config)
    tasks = []

    def answer(generation):
        generation.put(Token(504))
        tasks.append(asyncio.ensure_future(answer_once_draining(app)(generation)))

    backend.answer = answer
    with stop_on_signals(stop):
        await serve_http(app, [socket.socket(fileno=int(sys.argv[1]))], config, stop)
    heavy = {"torch", "transformers"} & set(sys.modules)
    assert not heavy, heavy
    assert backend.cancelled == []


uvloop.run(main())
