"""How a server starts, or fails to; how it ends. Whatever happens, no process of it is left."""

import asyncio
import contextlib
import json
import os
import signal
import socket

import aiohttp
import pytest
from tests.engine.pools import is_alive
from tests.serve.real import tiny_model
from tests.serve.real.clients import Question, Refused, ask, events, session
from tests.serve.real.live_server import LiveServer, body, kill, run, serving, until

SECRET = "0123456789abcdef-secret"


def failed_start(model=None, **config):
    """(exit status, the one sentence that says why). Other lines of standard error belong to no traceback."""
    server = LiveServer(model, **config)
    try:
        status = server.wait()
        said = [line for line in server.lines if line.startswith(("Error", "error", "vertumnus"))]
        assert not any("Traceback" in line for line in server.lines), server.lines
        assert len(said) == 1, server.lines
        return status, said[0]
    finally:
        server.close()


def broken_copy(remove=(), **config):
    """A model's folder that lacks files, or says other things of itself."""
    folder = tiny_model.copy_of(tiny_model.model())
    for name in remove:
        (folder / name).unlink()
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("make_model", "config", "words"),
    [
        (lambda: broken_copy() / "nowhere", {}, ["model", "nowhere", "accepted"]),
        (lambda: broken_copy(["config.json"]), {}, ["config.json", "accepted"]),
        (lambda: broken_copy(["tokenizer.json"]), {}, ["tokenizer.json", "accepted"]),
        (lambda: broken_copy(["model.safetensors"]), {}, ["safetensors", "accepted"]),
        (
            lambda: broken_copy(architectures=["GPT2LMHeadModel"], model_type="gpt2"),
            {},
            ["GPT2LMHeadModel", "accepted"],
        ),
        (None, {"composition": "1x8"}, ["composition", "1x8", "accepted"]),
        (None, {"composition": "2x1"}, ["composition", "2x1", "accepted"]),
        (None, {"colour": "blue"}, ["colour", "unknown", "accepted"]),
        (None, {"kv_mib_per_rank": 1 << 30}, ["kv_mib_per_rank", "accepted"]),
        (None, {"profile": "/nowhere/profile.toml"}, ["profile", "accepted"]),
    ],
    ids=[
        "no folder",
        "no config",
        "no tokenizer",
        "no weights",
        "unsupported architecture",
        "composition too large",
        "composition too small",
        "unknown key",
        "KV memory that is not there",
        "no profile",
    ],
)
def test_bad_input_is_said_in_one_sentence_with_the_remedy(make_model, config, words):
    status, sentence = failed_start(None if make_model is None else make_model(), **config)
    assert status == 2, sentence
    for word in words:
        assert word in sentence, sentence


def test_a_port_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, sentence = failed_start(port=taken.getsockname()[1])
    assert status == 2
    assert "port" in sentence
    assert "in use" in sentence


def test_a_rank_that_dies_while_it_starts_ends_the_start():
    """Killed as soon as there are any."""
    server = LiveServer()
    try:
        # Supervisor, router, launcher, and then ranks.
        until(lambda: len(server.pids()) > 3 or server.process.poll() is not None, "ranks start")
        kill(server.pids()[-1])
        # Either the start fails, or the rank is replaced: both are fine, hanging is not.
        until(lambda: server._find_url() or server.process.poll() is not None, "it has started or given up")
        if server.process.poll() is None:
            server.complete(tiny_model.prompt(1))
            assert server.stop() == 0
        else:
            assert server.wait() == 1
            assert any("could not start" in line for line in server.lines), server.lines
        assert not any("Traceback" in line for line in server.lines), server.lines
    finally:
        server.close()


def test_a_launcher_that_dies_while_it_loads_is_said():
    server = LiveServer()
    try:
        until(lambda: len(server.pids()) > 2 or server.process.poll() is not None, "the launcher starts")
        kill(server.pids()[-1])
        assert server.wait() == 1
        assert any("could not start" in line for line in server.lines), server.lines
        assert not any("Traceback" in line for line in server.lines), server.lines
    finally:
        server.close()


def test_sigterm_lets_streams_end_and_takes_nothing_new():
    question = Question(tiny_model.prompt(1, 100), 400)

    async def stream_while_it_drains(server):
        async with session() as opened:
            asked = body(question.tokens, question.max_tokens, stream=True)
            async with opened.post(f"{server.url}/v1/completions", json=asked) as response:
                text, is_told, last = "", False, ""
                async for event in events(response):
                    if not is_told:
                        is_told = True
                        server.process.send_signal(signal.SIGTERM)
                        while (await ready(opened, server)) != 503:
                            pass
                        with pytest.raises(Refused, match="503"):
                            await ask(opened, server.url, Question(tiny_model.prompt(2), 1))
                    last = event
                    if event != "[DONE]":
                        text += json.loads(event)["choices"][0]["text"]
                assert last == "[DONE]"
                assert text == question.answer

    async def ready(opened, server):
        async with opened.get(f"{server.url}/ready") as response:
            return response.status

    server = LiveServer()
    try:
        run(stream_while_it_drains(server.until_ready()))
        assert server.wait() == 0
    finally:
        server.close()


def test_a_second_sigterm_kills_at_once():
    async def stream_until_it_breaks(server):
        async with session() as opened:
            asked = body(tiny_model.prompt(1, 100), 400, stream=True)
            async with opened.post(f"{server.url}/v1/completions", json=asked) as response:
                seen: list[str] = []
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async for event in events(response):
                        seen.append(event)
                        if len(seen) == 1:
                            server.process.send_signal(signal.SIGTERM)
                            await asyncio.to_thread(
                                until, lambda: any("draining" in line for line in server.lines), "it drains"
                            )
                            server.process.send_signal(signal.SIGTERM)
                assert "[DONE]" not in seen

    with_long_drain = LiveServer(drain_timeout_s=600.0)
    try:
        run(stream_until_it_breaks(with_long_drain.until_ready()))
        with_long_drain.wait()
    finally:
        with_long_drain.close()


def test_whatever_a_dead_supervisor_leaves_ends_by_itself():
    server = LiveServer().until_ready()
    try:
        pids = server.pids()
        assert len(pids) == 3 + 5
        kill(server.process.pid)
        until(lambda: not any(map(is_alive, pids)), "all have ended")
    finally:
        server.close()


def test_a_router_that_dies_again_and_again_ends_the_server():
    server = LiveServer(max_router_deaths=1, ranks=1, composition="1x1").until_ready()
    try:
        first = server.kill_router()
        server.until(lambda state: state["held"]["router_pid"] != first, "another one serves")
        server.kill_router()
        assert server.wait() == 1
        assert any("the router died 2 times" in line for line in server.lines), server.lines
    finally:
        server.close()


def test_api_keys_separate_what_is_cached():
    keys = {SECRET + "-a": "a", SECRET + "-b": "b"}
    tokens = tiny_model.prompt(3, 100)
    with serving(api_keys=keys) as server:
        found = []
        for key in [*keys, *keys]:
            answer = server.complete(tokens, authorization=f"Bearer {key}")
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert found == [0, 0, 96, 96]
        assert server.call("/v1/completions", body(tokens, 1), {"authorization": "Bearer wrong"})[0] == 401
        assert not any(SECRET in line for line in server.lines)


def test_full_queues_are_said_with_when_to_come_again():
    with serving(max_queued_requests=1, ranks=1, composition="1x1") as server:
        [rank] = [pid for rank, pid in server.held()["rank_pids"].items() if rank == "0"]
        os.kill(rank, signal.SIGSTOP)  # whatever is asked now waits

        async def overload():
            async with session() as opened:
                first = asyncio.ensure_future(ask(opened, server.url, Question(tiny_model.prompt(1), 4)))
                await asyncio.to_thread(server.until, lambda state: state["held"]["requests"] == 1, "it waits")
                async with opened.post(f"{server.url}/v1/completions", json=body(tiny_model.prompt(2), 1)) as response:
                    found = await response.json()
                    assert response.status == 429, found
                    assert int(response.headers["retry-after"]) >= 1
                    assert found["error"]["code"] == "overloaded"
                os.kill(rank, signal.SIGCONT)
                assert (await first).text == Question(tiny_model.prompt(1), 4).answer

        run(overload())
