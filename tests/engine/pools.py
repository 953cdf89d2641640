"""Pools of ranks whose steps do what a test tells them to, and what a pool must not leave behind."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from tests.engine.routers import begun

from vertumnus.engine.bare_source import BareStepper
from vertumnus.engine.collectives import GroupLink
from vertumnus.engine.kv_memory import KvMemory
from vertumnus.engine.pool import RankPool
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.engine.step import Address, Step, StepOutput, StepRequest

BLOCK_BYTES = 4096
BLOCK_TOKENS = 4
TIMEOUT_S = 50.0

# What the first token of a step's first request makes the ranks do; the second names a member by its index.
MEET = 0  # one exchange
FILL = 1  # put the second token's byte into every slot to be written
DIE = 2  # the member kills itself while the others wait for it
RAISE = 3  # the member raises while the others wait for it
STOP = 4  # the member stops (SIGSTOP) while the others wait for it
HOLD = 5  # like FILL, but the first rank says that it has begun, and is not done until the gate opens


class ToldStepper:
    def __init__(self, rank: int, memory: KvMemory, gate: str) -> None:
        self._gate = gate
        self._bare = BareStepper(rank)
        self._rank = rank
        self._memory = memory

    def refusal(self, step: Step) -> str | None:
        return "request without tokens" if any(not request.token_ids for request in step.requests) else None

    def run(self, step: Step, link: GroupLink) -> StepOutput:
        what, argument = (*step.requests[0].token_ids, 0)[:2]
        if link.index == argument and what in (DIE, STOP):
            os.kill(os.getpid(), signal.SIGKILL if what == DIE else signal.SIGSTOP)
            signal.pause()  # the signal may take another thread first
        if link.index == argument and what == RAISE:
            raise ValueError("as told")
        if what in (FILL, HOLD):
            for request in step.requests:
                for rank, slot in request.blocks[request.num_prefix_tokens // BLOCK_TOKENS :]:
                    if rank == self._rank:
                        self._memory.block(slot)[:] = bytes([argument]) * BLOCK_BYTES
        if what == HOLD and link.index == 0:
            begun(self._gate).touch()
            while not Path(self._gate).exists():
                time.sleep(0.005)
        found = link.all_gather(torch.tensor([self._rank])).wait()
        assert found.flatten().tolist() == list(range(step.first_rank, step.first_rank + step.degree))
        return self._bare.run(step, link)


class ToldSource:
    block_bytes = BLOCK_BYTES
    block_tokens = BLOCK_TOKENS

    def __init__(self, gate: str) -> None:
        self._gate = gate

    def stepper(self, rank: int, memory: KvMemory) -> ToldStepper:
        return ToldStepper(rank, memory, self._gate)


def load(gate: str = "") -> ToldSource:
    return ToldSource(gate)


def config(num_ranks: int, **changes: Any) -> PoolConfig:
    values: dict[str, Any] = {
        "source": "tests.engine.pools:load",
        "num_ranks": num_ranks,
        "num_slots": 16,
        "start_timeout_s": 40.0,
        "step_timeout_s": 20.0,
    }
    return PoolConfig(**{**values, **changes})


def told(
    what: int,
    argument: int = 0,
    *,
    step_id: int = 1,
    group: tuple[int, int],
    epoch: int,
    blocks: list[Address] | None = None,
    labels: Sequence[bytes] = (),
) -> Step:
    """With labels, the request fills as many blocks."""
    first_rank, degree = group
    blocks = [(first_rank, 0)] if blocks is None else blocks
    token_ids = [what, argument, *[0] * (len(labels) * BLOCK_TOKENS - 2)]
    request = StepRequest(request_id=1, token_ids=token_ids, num_prefix_tokens=0, blocks=blocks, labels=labels)
    return Step(step_id=step_id, first_rank=first_rank, degree=degree, epoch=epoch, requests=[request])


@asynccontextmanager
async def open_pool(num_ranks: int, **changes: Any):
    """A pool, and the certainty that nothing of it is left."""
    shared = set(os.listdir("/dev/shm"))
    pool = await RankPool.start(config(num_ranks, **changes))
    pids = {*pool.roster.pids.values(), pool.roster.launcher_pid}
    try:
        yield pool
        pids |= {*pool.roster.pids.values()}
    finally:
        await pool.close()
    await gone(*pids)
    assert set(os.listdir("/dev/shm")) <= shared


async def gone(*pids: int | None) -> None:
    """Waits until the processes are no more."""
    while any(pid is not None and is_alive(pid) for pid in pids):
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Neither gone nor only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Runs a test's coroutine within a bound."""
    asyncio.run(asyncio.wait_for(test(), TIMEOUT_S))
