"""Ranks that torchrun has started, on two nodes as far as it knows, behind the supervised router."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.engine.pools import is_alive
from tests.serve.real import live_server, tiny_model
from tests.serve.real.live_server import LiveServer, cached_tokens, serving

from vertumnus.serve.config import config_from
from vertumnus.serve.rank_launch import launch_file

POOL_TOKEN = "pool-0123456789abcdef"
WAIT_S = 120.0
"""Five processes import torch, on a busy machine."""
PROMPT = tiny_model.prompt(3, 60)
MAX_TOKENS = 6


def test_ranks_of_two_nodes_join_answer_and_outlive_the_router(tmp_path, monkeypatch):
    monkeypatch.setattr(live_server, "WAIT_S", WAIT_S)
    config = {
        **live_server.DEFAULTS,
        "model": str(tiny_model.folder()),
        "ranks": 2,
        "decode_ranks": 1,
        "composition": "1x2",
        "launcher": "external",
        "pool_port": free_port(),
        "pool_token": POOL_TOKEN,
    }
    launch = tmp_path / "launch.json"
    launch.write_text(launch_file(config_from(config).checked()), encoding="utf-8")
    with torchrun(launch, [2, 1]) as agents:  # they come first and wait
        with serving(**config) as server:
            assert any(line.startswith("waiting for 3 ranks at 127.0.0.1") for line in server.lines)
            check_answer(server)
            pids = server.until(lambda state: len(state["held"]["rank_pids"]) == 3, "all are there")["held"][
                "rank_pids"
            ]
            router = server.kill_router()
            held = server.until(lambda state: state["held"]["ranks_down"] == 0, "the next router has them")["held"]
            assert held["router_pid"] != router
            assert held["rank_pids"] == pids
            assert check_answer(server) >= 56
        # Those that the server has dismissed end well, and torchrun with them.
        assert [agent.wait(WAIT_S) for agent in agents] == [0, 0]
        assert not any(map(is_alive, pids.values()))


def check_answer(server: LiveServer) -> int:
    """The cached tokens of an answer that is right."""
    answer = server.complete(PROMPT, MAX_TOKENS)
    assert answer["choices"][0]["text"] == tiny_model.greedy(PROMPT, MAX_TOKENS)
    return cached_tokens(answer)


@contextlib.contextmanager
def torchrun(launch: Path, ranks_of_nodes: list[int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """An agent for each node, with its ranks below it; none of them is there afterwards."""
    master = ["--nnodes", str(len(ranks_of_nodes)), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with contextlib.ExitStack() as stack:
        agents = []
        for node, num_ranks in enumerate(ranks_of_nodes):
            node_is = ["--node-rank", str(node), "--nproc-per-node", str(num_ranks)]
            command = ["-m", "torch.distributed.run", *master, *node_is, "-m", "vertumnus.engine.rank_process"]
            agent = subprocess.Popen(
                [sys.executable, *command, str(launch)],
                env={**os.environ, "VERTUMNUS_POOL_TOKEN": POOL_TOKEN},
                start_new_session=True,
            )
            stack.callback(end, agent)
            agents.append(agent)
        yield agents


def end(agent: subprocess.Popen[bytes]) -> None:
    """An agent that is told to end takes its ranks with it."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
    agent.wait(WAIT_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])
