"""Ranks and routers that die at any moment, under load, by kill -9."""

import asyncio
import http.client
import random
import time

import pytest
from tests.engine.pools import is_alive
from tests.serve.real.clients import Load, load, more_answers, questions
from tests.serve.real.idle import until_idle
from tests.serve.real.live_server import CONTROL_TOKEN, WAIT_S, LiveServer, kill, run, until
from tests.serve.real.test_switches_under_load import COMPOSITIONS

PREFILL_RANKS = range(4)
DECODE_RANK = 4


def is_whole(state) -> bool:
    held = state["held"]
    return held["ranks_down"] == 0 and len(held["rank_pids"]) == 5


def kill_now(server: LiveServer, victims: list[int | None]) -> float:
    """Kills ranks, None: the router, all at one instant; returns the seconds until everything is there again."""
    held = server.until(is_whole, "all ranks are there")["held"]
    pids = [held["router_pid"] if victim is None else held["rank_pids"][str(victim)] for victim in victims]
    started_s = time.monotonic()
    for pid in pids:
        kill(pid)
    until(lambda: not any(map(is_alive, pids)), "they are dead")

    def is_recovered(state) -> bool:
        found = [state["held"]["router_pid"], *state["held"]["rank_pids"].values()]
        return is_whole(state) and not set(pids) & set(found)

    server.until(is_recovered, f"{victims} are back")
    return time.monotonic() - started_s


async def kill_under_load(server: LiveServer, kills: list[list[int | None]], seed: int = 0) -> tuple[Load, list[float]]:
    draws = random.Random(seed)
    recoveries = []
    async with load(server, questions()) as seen:
        for victims in kills:
            await more_answers(seen, draws.randrange(1, 4))
            if draws.random() < 0.4:  # the kill then meets the switch at whatever stage it has come to
                await asyncio.to_thread(server.compose, draws.choice(COMPOSITIONS))
            recoveries.append(await asyncio.to_thread(kill_now, server, victims))
            await more_answers(seen, 2)
    seen.check()
    await asyncio.to_thread(until_idle, server)
    return seen, recoveries


def tell(recoveries: list[float]) -> None:
    """For whoever wants to see them: pytest -rP."""
    print("seconds until all was there again:", *(f"{each:.2f}" for each in sorted(recoveries)))


def test_the_death_of_ranks_is_nothing_that_a_client_sees_but_time(server):
    kills = [[0], [DECODE_RANK], [3], [2, 3], [1, DECODE_RANK]]
    seen, recoveries = run(kill_under_load(server, kills))
    tell(recoveries)
    assert seen.num_retries == 0


def test_a_router_that_dies_costs_clients_one_more_try_and_no_rank(server):
    before = server.held()
    seen, recoveries = run(kill_under_load(server, [[None], [None]], seed=1))
    tell(recoveries)
    after = server.held()
    assert after["rank_pids"] == before["rank_pids"]
    assert after["launcher_pid"] == before["launcher_pid"]
    assert 0 < seen.num_retries <= 2 * 4 * 2, "each client has one question at a time"


def test_router_and_ranks_die_at_one_instant(server):
    _, recoveries = run(kill_under_load(server, [[None, 2], [None, DECODE_RANK]], seed=2))
    tell(recoveries)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_thirty_kills_of_anything(server, seed):
    draws = random.Random(seed)
    kills = []
    for _ in range(30):
        kind = draws.choice(["prefill", "decode", "router", "several"])
        some = draws.sample([None, *PREFILL_RANKS, DECODE_RANK], 2)
        of_kind = {"prefill": [draws.choice(PREFILL_RANKS)], "decode": [DECODE_RANK], "router": [None], "several": some}
        kills.append(of_kind[kind])
    _, recoveries = run(kill_under_load(server, kills, seed=seed), timeout_s=280.0)
    tell(recoveries)


def test_who_watches_the_dashboard_goes_on_watching_when_the_router_dies(server):
    host, port = server.url.removeprefix("http://").split(":")

    def get(path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
        try:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            response.read()
            return response
        finally:
            connection.close()

    login = get(f"/dashboard?token={CONTROL_TOKEN}").getheader("set-cookie")
    assert login is not None
    cookie = login.partition(";")[0]
    kill_now(server, [None])
    assert get("/admin/decisions", cookie=cookie).status == 200
    assert get("/admin/decisions", cookie=cookie + "0").status == 401


def test_what_an_operator_ordered_outlives_the_router(server):
    server.compose("1x4")
    server.until(lambda state: state["composition"] == "1x4", "it is 1x4")
    kill_now(server, [None])
    state = server.until(lambda state: state["composition"] == "1x4", "it still is")
    assert state["controller"]["is_paused"]
    assert server.call("/admin/pause-controller", {"paused": False})[0] == 200
    kill_now(server, [None])
    assert not server.state()["controller"]["is_paused"]
    assert server.call("/admin/drain", {})[0] == 200
    kill_now(server, [None])
    assert server.call("/ready")[0] == 503, "it is still drained"
    assert server.call("/admin/resume", {})[0] == 200
    kill_now(server, [None])
    assert server.call("/ready")[0] == 200
    assert server.call("/admin/pause-controller", {"paused": True})[0] == 200
    kill_now(server, [None])
    assert server.state()["controller"]["is_paused"]
    server.compose("2x1,1x2")
    server.until(lambda state: state["composition"] == "2x1,1x2", "it is as it was")
