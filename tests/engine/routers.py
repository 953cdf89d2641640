"""Processes that have a pool and can be killed: what they do first comes as JSON, what they found goes out as JSON.
They import no torch, as no process that has a pool does.

python -m tests.engine.routers '{"config": {...}, "is_attaching": false, "steps": [...], "num_held": 0}'
"""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vertumnus.engine.messages import RunStep, decode, encode
from vertumnus.engine.pool import RankPool
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.engine.step import Step

TOKEN = "0123456789abcdef"


def begun(gate: str) -> Path:
    """The file that says that a step waits for the gate."""
    return Path(f"{gate}.begun")


@contextmanager
def listening():
    """A socket as a supervisor holds it open for one router after the other."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as sock:
        yield sock


class Router:
    """A process with a pool over the socket `fd`. steps: run one after the other before `pids` are known, the last
    `num_held` of them only asked for: then it is known when the first of these has begun."""

    def __init__(
        self,
        fd: int,
        config: dict[str, Any],
        *,
        is_attaching: bool = False,
        geometry: dict[int, int] | None = None,
        steps: Sequence[Step] = (),
        num_held: int = 0,
    ) -> None:
        told = {
            "config": {**config, "listen_fd": fd, "token": TOKEN},
            "is_attaching": is_attaching,
            "geometry": [*(geometry or {}).items()],
            "steps": [encode(0, RunStep(step=step)).hex() for step in steps],
            "num_held": num_held,
        }
        command = [sys.executable, "-m", "tests.engine.routers", json.dumps(told)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[fd])

    async def found(self) -> dict[str, Any]:
        """launcher, ranks (pids by rank), tokens (of the first steps) and generation, once it has done all that."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        return {**json.loads(line), "router": self._process.pid}

    def kill(self) -> None:
        """-9."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> "Router":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


async def _main(told: dict[str, Any]) -> None:
    config = PoolConfig(**told["config"])
    pool = await (RankPool.attach(config) if told["is_attaching"] else RankPool.start(config))
    if told["geometry"]:
        await pool.activate(pool.highest_epoch + 1, dict(told["geometry"]))
    steps = [message.step for _, message in map(decode, map(bytes.fromhex, told["steps"]))]
    num_run = len(steps) - told["num_held"]
    tokens = []
    for step in steps[:num_run]:
        outputs = await pool.step(step)
        tokens += [out.token_id for output in outputs for out in output.outputs]
    held = [asyncio.create_task(pool.step(step)) for step in steps[num_run:]]
    while held and not begun(config.options["gate"]).exists():
        await asyncio.sleep(0.005)
    found = {
        "launcher": pool.roster.launcher_pid,
        "ranks": [*pool.roster.pids.values()],
        "tokens": tokens,
        "generation": pool.generation,
    }
    print(json.dumps(found), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(json.loads(sys.argv[1])))
