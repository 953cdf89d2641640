"""Splits and merges of a real pool while answers stream."""

import asyncio
import itertools

import pytest
from tests.serve.real.clients import load, more_answers, questions
from tests.serve.real.idle import check_nothing_is_held, until_idle
from tests.serve.real.live_server import LiveServer, cached_tokens, run
from tests.serve.real.tiny_model import prompt

COMPOSITIONS = ("1x4", "2x1,1x2", "2x2", "4x1", "1x2,2x1", "2x2")


def switch(server: LiveServer, composition: str) -> None:
    num_transitions = server.state()["num_transitions"]
    server.compose(composition)
    server.until(
        lambda state: state["target"] is None and state["num_transitions"] > num_transitions, f"it is {composition}"
    )


async def switch_under_load(server: LiveServer, num_cycles: int) -> None:
    """A cycle is one change of the composition, of one or more splits and merges."""
    asked = questions()
    known = prompt(100, 300)
    await asyncio.to_thread(server.complete, known)
    before = await asyncio.to_thread(until_idle, server)
    async with load(server, asked) as seen:
        for composition in itertools.islice(itertools.cycle(COMPOSITIONS), num_cycles):
            await asyncio.to_thread(switch, server, composition)
            await more_answers(seen, 3)
    seen.check()
    assert seen.num_retries == 0
    after = await asyncio.to_thread(until_idle, server)
    check_nothing_is_held(before, after)
    assert after["rank_pids"] == before["rank_pids"]
    # The hit rate recovers: what is not there any more is computed once, wherever it is then.
    await asyncio.to_thread(server.complete, known)
    assert cached_tokens(await asyncio.to_thread(server.complete, known)) == 296


def test_answers_stay_the_same_and_nothing_leaks_while_workers_split_and_merge(server):
    run(switch_under_load(server, 6))


@pytest.mark.slow
def test_a_hundred_changes_of_the_composition(server):
    run(switch_under_load(server, 100), timeout_s=280.0)
