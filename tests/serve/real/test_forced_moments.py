"""Deaths, disconnections and deadlines in the middle of a step, a handoff or a switch: ranks are stopped, so that the
pool stays there for as long as a test wants it to."""

import asyncio
import contextlib
import os
import signal

import aiohttp
import pytest
from tests.engine.pools import is_alive
from tests.serve.real.clients import Question, ask, events, session
from tests.serve.real.idle import check_nothing_is_held, until_idle
from tests.serve.real.live_server import LiveServer, body, cached_tokens, kill, run, until
from tests.serve.real.test_kills import is_whole, kill_now
from tests.serve.real.tiny_model import prompt

MOMENTS = {"step": ((0, 1, 2, 3), "steps"), "handoff": ((4,), "handoffs"), "switch": ((0,), "switches")}
"""What to stop, and what the server then has under way."""


def other_composition(server: LiveServer) -> str:
    """One that rank 0 has to change its worker for."""
    group = next(rank["group"] for rank in server.state()["ranks"] if rank["rank"] == 0)
    return "4x1" if group[1] > 1 else "1x4"


@contextlib.contextmanager
def stopped(server: LiveServer, moment: str):
    """pids of ranks that are stopped, once the server is at the moment; whoever still lives then goes on."""
    ranks, _ = MOMENTS[moment]
    pids = [server.rank_pid(rank) for rank in ranks]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in pids:
            kill(pid, signal.SIGCONT)


async def reach(server: LiveServer, moment: str) -> None:
    if moment == "switch":
        await asyncio.to_thread(server.compose, other_composition(server))
    name = MOMENTS[moment][1]
    await asyncio.to_thread(server.until, lambda state: state["held"][name] > 0, f"in the middle of a {moment}")


def fresh(server: LiveServer) -> Question:
    """A prompt that nothing is cached of, as far as possible."""
    return Question(prompt(server.next_number(), 150), 6)


@pytest.mark.parametrize("victim", ["ranks", "router"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_in_the_middle_of_it(server, moment, victim):
    async def die() -> None:
        question = fresh(server)
        with stopped(server, moment) as pids:
            async with session() as opened:
                # A question that came first might run on the stopped rank, which would then never come to switch.
                if moment == "switch":
                    await reach(server, moment)
                asking = asyncio.ensure_future(ask(opened, server.url, question))
                if moment != "switch":
                    await reach(server, moment)
                if victim == "ranks":
                    for pid in pids:
                        kill(pid)
                    await asyncio.to_thread(until, lambda: not any(map(is_alive, pids)), "they are dead")
                else:
                    await asyncio.to_thread(server.kill_router)
                    for pid in pids:
                        os.kill(pid, signal.SIGCONT)
                answer = await asking
                assert answer.text == question.answer
                assert victim == "router" or answer.num_retries == 0

    run(die())
    server.until(is_whole, "all is there again")
    until_idle(server)


@pytest.mark.parametrize("moment", ["step", "handoff"])
@pytest.mark.parametrize("is_streaming", [True, False], ids=["stream", "whole"])
def test_whoever_leaves_in_the_middle_of_it_frees_everything(server, moment, is_streaming):
    async def leave() -> None:
        with stopped(server, moment):
            async with session() as opened:
                asking = asyncio.ensure_future(ask(opened, server.url, fresh(server), is_streaming=is_streaming))
                await reach(server, moment)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await asyncio.to_thread(server.until, lambda state: state["held"]["requests"] == 0, "it is over")

    before = until_idle(server)
    run(leave())
    check_nothing_is_held(before, until_idle(server))


def test_whoever_leaves_a_stream_frees_everything(server):
    async def leave() -> None:
        async with session() as opened:
            asked = body(fresh(server).tokens, 300, stream=True)
            async with opened.post(f"{server.url}/v1/completions", json=asked) as response:
                async for _ in events(response):
                    break
                response.close()

    before = until_idle(server)
    run(leave())
    check_nothing_is_held(before, until_idle(server))


@pytest.mark.parametrize("moment", ["step", "handoff"])
def test_a_deadline_that_passes_in_the_middle_of_it(server, moment):
    async def expire() -> None:
        with stopped(server, moment):
            async with (
                aiohttp.ClientSession() as opened,
                opened.post(
                    f"{server.url}/v1/completions",
                    json=body(fresh(server).tokens, 4),
                    headers={"x-request-deadline-ms": "100"},
                ) as response,
            ):
                assert response.status == 504
                assert (await response.json())["error"]["code"] == "deadline_exceeded"
            await asyncio.to_thread(server.until, lambda state: state["held"]["requests"] == 0, "it is over")

    run(expire())
    until_idle(server)


def test_a_new_router_finds_the_cache_the_ranks_and_their_composition(server):
    composition = other_composition(server)
    server.compose(composition)
    server.until(lambda state: state["target"] is None, f"it is {composition}")
    known = fresh(server).tokens
    server.complete(known)
    before = until_idle(server)
    kill_now(server, [None])
    state = server.state()
    assert state["composition"] == composition
    after = state["held"]
    assert after["router_pid"] != before["router_pid"]
    assert after["rank_pids"] == before["rank_pids"]
    assert after["cached_blocks"] == before["cached_blocks"]
    assert cached_tokens(server.complete(known)) == 144
