"""The pool's log: one JSON object a line, at state changes, without a word of any prompt."""

import asyncio
import json
import logging

import pytest
from tests.serve.live_builders import asked, prompt
from tests.serve.test_live_backend import with_backend
from tests.serve.test_live_pool import read

from vertumnus.core.controller import PoolState, Proposal, Reason, Window
from vertumnus.serve.errors import Overloaded
from vertumnus.serve.log import POOL, PoolLog


@pytest.fixture
def lines(caplog):
    """The lines so far, parsed."""
    caplog.set_level(logging.INFO, POOL.name)
    return lambda: [json.loads(record.getMessage()) for record in caplog.records if record.name == POOL.name]


class Merging:
    """A controller that asks for one worker."""

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        target = type(state.composition).parse("1x2")
        return Proposal(target, (), Reason.LOAD_LOW, {"load_s_per_s": 0.1}) if state.composition != target else None


def test_transitions_losses_and_restarts_are_logged_with_their_fields(lines):
    async def body(pool, backend):
        await asyncio.sleep(25.0)
        answer = asyncio.ensure_future(read(pool.submit(asked(prompt(1, 100), max_tokens=50))))
        await asyncio.sleep(3.0)
        pool.ranks.kill(2)
        await answer
        backend.pause_controller(True)

    with_backend(body, controller=Merging())
    found = lines()
    events = [line["event"] for line in found]
    by_event = {line["event"]: line for line in found}
    assert {"proposal", "switch_started", "switch_ended", "transition", "worker_closed", "restarted"} <= set(events)
    assert by_event["proposal"]["figures"] == {"load_s_per_s": 0.1}
    assert by_event["transition"]["operation"].startswith("merge")
    assert by_event["transition"]["switch_s"] == pytest.approx(0.2)
    assert by_event["rank_lost"]["rank"] == by_event["rank_back"]["rank"] == 2
    assert by_event["restarted"] | {"time": 0} == {
        "event": "restarted",
        "time": 0,
        "request_id": "test",
        "reason": "its decode rank was lost",
        "attempt": 2,
    }
    assert events.index("proposal") < events.index("switch_started") < events.index("transition")
    assert events[-1] == "controller_paused"


class Broken:
    """A controller with a fault."""

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        raise KeyError("1x2")


def test_a_pool_serves_on_under_a_controller_that_raises_and_says_so_once_a_window(lines):
    async def body(pool, backend):
        for _ in range(2):
            await asyncio.sleep(20.5)
            await read(pool.submit(asked(prompt(1, 100))))
        assert "vertumnus_controller_faults_total 2.0" in backend.metrics_text().decode()
        told = [each for each in backend.decisions(100) if each["kind"] == "controller_failed"]
        assert [each["reason"] for each in told] == ["KeyError('1x2')"] * 2

    with_backend(body, controller=Broken(), outlives_controller_faults=True)
    found = [line for line in lines() if line["event"] == "controller_failed"]
    assert [line["reason"] for line in found] == ["KeyError('1x2')"] * 2
    assert found[0]["where"].startswith("test_log.py:")


def test_an_order_to_which_no_way_is_planned_is_refused_and_logged(lines, monkeypatch):
    def broken(*parts, **named):
        raise KeyError("a group")

    async def body(pool, backend):
        with monkeypatch.context() as patched:
            patched.setattr("vertumnus.core.steering.plan_towards", broken)
            outcome = await backend.set_composition("1x2")
        assert "no way was planned: KeyError('a group')" in outcome["refused"]
        assert backend.describe()["target"] is None
        await read(pool.submit(asked(prompt(1, 100))))
        assert "refused" not in await backend.set_composition("1x2"), "it is carried out once it can be planned"
        await asyncio.sleep(1.0)
        assert str(pool.control_plane.composition) == "1x2"

    with_backend(body, outlives_controller_faults=True)
    assert [line["event"] for line in lines()].count("controller_failed") == 1


def test_levels_tell_what_needs_a_look(lines, caplog):
    async def body(pool, backend):
        pool.ranks.kill(0)
        await asyncio.sleep(3.0)

    with_backend(body)
    levels = {json.loads(record.getMessage())["event"]: record.levelno for record in caplog.records}
    assert levels["rank_lost"] == logging.WARNING
    assert levels["rank_back"] == levels["worker_opened"] == logging.INFO


def test_an_overload_writes_one_line_a_second_that_counts_the_others(lines):
    log = PoolLog()
    for tenth in range(25):
        log.request_refused(tenth / 10, Overloaded.__name__, 100)
    assert [(line["kind"], line["num_requests"]) for line in lines()] == [
        ("Overloaded", 1),
        ("Overloaded", 10),
        ("Overloaded", 10),
    ]


def test_no_line_holds_a_prompt_or_a_token(lines):
    marks = [900 + place for place in range(50)]

    async def body(pool, backend):
        answer = asyncio.ensure_future(read(pool.submit(asked(marks, max_tokens=20))))
        await asyncio.sleep(1.0)
        pool.ranks.kill(0)
        await backend.drain(None)
        await answer

    with_backend(body)
    text = json.dumps([{name: value for name, value in line.items() if name != "time"} for line in lines()])
    assert lines()
    assert not any(str(mark) in text for mark in marks)


def test_nothing_is_made_ready_where_nobody_listens(caplog):
    caplog.set_level(logging.ERROR, POOL.name)
    PoolLog().rank_gone(0.0, 1, "killed")
    assert caplog.records == []
