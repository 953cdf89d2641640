"""Failures that an endpoint cannot be told to make: those of connections."""

import asyncio
import errno
import os
from types import SimpleNamespace

import aiohttp
import pytest
from tests.workload.trace_strategies import trace_of

from vertumnus.replay import lookahead
from vertumnus.replay.endpoint import Endpoint
from vertumnus.replay.load import Load
from vertumnus.replay.prompts import Prompts


class FailingSession:
    """Every request fails with the same error as soon as it is made."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def post(self, url, **options):
        return self

    async def __aenter__(self):
        raise self.error

    async def __aexit__(self, *error):
        pass


TARGET = SimpleNamespace(host="x", port=80, is_ssl=False, ssl=True, real_url="http://x")


def connector_error(number):
    return aiohttp.ClientConnectorError(TARGET, OSError(number, os.strerror(number)))


FAILURES = {
    "refused": (connector_error(errno.ECONNREFUSED), "connect"),
    "out of files": (connector_error(errno.EMFILE), "generator"),
    "out of ports": (connector_error(errno.EADDRNOTAVAIL), "generator"),
    "reset": (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), "disconnected"),
    "closed": (aiohttp.ServerDisconnectedError(), "disconnected"),
    "late": (asyncio.TimeoutError(), "timeout"),
    "late to connect": (aiohttp.ConnectionTimeoutError(), "timeout"),
    "cut": (aiohttp.ClientPayloadError("cut"), "broken_stream"),
    "no HTTP": (aiohttp.ClientResponseError(TARGET, (), message="bad head"), "bad_answer"),
}


def play(error):
    trace = trace_of([[0, 1], [0, 2]], arrival_s=[0.0, 0.0])

    async def main():
        load = Load(trace, Prompts(trace), Endpoint(base_url="http://x", model="m"), FailingSession(error))
        return await load.play()

    return asyncio.run(main())


@pytest.mark.parametrize(("error", "kind"), FAILURES.values(), ids=FAILURES.keys())
def test_failures_of_connections_have_their_kind(error, kind):
    played = play(error)
    assert [outcome.error for outcome in played.outcomes] == [kind, kind]
    assert played.messages.keys() == {kind}


def test_a_fault_of_the_program_itself_is_raised_and_nothing_hangs():
    with pytest.raises(ZeroDivisionError):
        play(ZeroDivisionError())


def test_a_prompt_that_cannot_be_made_ends_the_replay(monkeypatch):
    monkeypatch.setattr(Prompts, "text_pieces", lambda prompts, index: iter([b"1", 1 / 0]))
    with pytest.raises(ZeroDivisionError):
        play(aiohttp.ServerDisconnectedError())


@pytest.mark.parametrize("room", [1, 3, 100])
def test_bodies_come_in_order_and_no_more_of_them_than_there_is_room_for(monkeypatch, room):
    monkeypatch.setattr(lookahead, "MAX_BODIES", room)
    num_made = 0

    def make(index):
        nonlocal num_made
        num_made += 1
        yield str(index).encode()

    async def main():
        ahead = lookahead.Lookahead(20, make)
        filling = asyncio.create_task(ahead.fill())
        await ahead.primed()
        for index in range(20):
            assert num_made <= index + room + 1
            assert (await ahead.take()).decode() == str(index)
        await filling

    asyncio.run(main())


def test_a_body_above_all_room_is_made_all_the_same(monkeypatch):
    monkeypatch.setattr(lookahead, "MAX_BYTES", 1)

    async def main():
        ahead = lookahead.Lookahead(3, lambda index: iter([b"long", b"er"]))
        filling = asyncio.create_task(ahead.fill())
        assert [(await ahead.take()).num_bytes for _ in range(3)] == [6, 6, 6]
        await filling

    asyncio.run(main())
