"""What it takes to change the groups of a pool, and to get over the loss of a rank.

Ranks have no model: what is timed is the machinery. A switch starts when every rank has a step of the old geometry
under way; `drain_s` ends with the last of these steps, `switch_s` is from there to the confirmation of every rank that
it has the new group active, the new group's first exchange included.
"""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from vertumnus.engine.kv_memory import bytes_in
from vertumnus.engine.messages import Message, Refusal, RunStep
from vertumnus.engine.pool import RankBack, RankPool
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.engine.step import Step, StepOutput, StepRequest

NUM_LOSSES = 20
NUM_SLOTS = 64
NUM_MODEL_SLOTS = 1
"""Hardly any KV: the memory of the start is that of the model and the processes."""

Geometry = dict[int, int]


def run(
    *, seed: int = 0, num_switches: int = 1000, num_ranks: int = 8, model: str | None = None
) -> list[dict[str, Any]]:
    """One entry for the start, one per pair of geometries switched between, one for all switches, one for losses.
    model: a folder; adds an entry for the start of ranks that hold it."""
    return asyncio.run(_run(np.random.default_rng(seed), num_switches, num_ranks, model))


async def _run(draw: np.random.Generator, num_switches: int, num_ranks: int, model: str | None) -> list[dict[str, Any]]:
    entries = []
    if model is not None:
        source, options = "vertumnus.engine.model_source:load", {"folder": model}
        pool, start = await _start(
            PoolConfig(source=source, options=options, num_ranks=num_ranks, num_slots=NUM_MODEL_SLOTS)
        )
        await pool.close()
        entries.append({**start, "model": Path(model).name})
    pool, start = await _start(
        PoolConfig(source="vertumnus.engine.bare_source:load", num_ranks=num_ranks, num_slots=NUM_SLOTS)
    )
    try:
        return [*entries, start, *await _switches(pool, draw, num_switches), await _losses(pool, draw)]
    finally:
        await pool.close()


async def _start(config: PoolConfig) -> tuple[RankPool, dict[str, Any]]:
    """A pool, how long it took to start, and the memory of its processes, pages they share counted once."""
    start_s = time.perf_counter()
    pool = await RankPool.start(config)
    started_s = time.perf_counter() - start_s
    pids = [pool.roster.launcher_pid, *pool.roster.pids.values()]
    proportional_bytes = sum(_proportional_bytes(pid) for pid in pids if pid is not None)
    return pool, {
        "kind": "start",
        "ranks": config.num_ranks,
        "start_s": started_s,
        "proportional_bytes": proportional_bytes,
    }


async def _switches(pool: RankPool, draw: np.random.Generator, num_switches: int) -> list[dict[str, Any]]:
    geometry: Geometry = dict.fromkeys(range(pool.config.num_ranks), 1)
    epoch = 1
    await pool.activate(epoch, geometry)
    measured: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(num_switches):
        wanted = _geometry(draw, pool.config.num_ranks)
        begin_s = time.perf_counter()
        await asyncio.gather(*(_step(pool, key, epoch) for key in geometry.items()))
        drained_s = time.perf_counter()
        epoch += 1
        confirmed = await pool.activate(epoch, wanted)
        end_s = time.perf_counter()
        assert not isinstance(confirmed, Refusal)
        pair = _written(geometry), _written(wanted)
        measured.setdefault(pair, []).append((drained_s - begin_s, end_s - drained_s))
        geometry = wanted
    entries = [
        {"kind": "switch", "from": old, "to": new, "num": len(times), **_summary(times)}
        for (old, new), times in sorted(measured.items())
    ]
    every = [times for each in measured.values() for times in each]
    return [*entries, {"kind": "switches", "from": "any", "to": "any", "num": len(every), **_summary(every)}]


async def _losses(pool: RankPool, draw: np.random.Generator) -> dict[str, Any]:
    """Kills a member of the largest group while the others wait for it, again and again. Its neighbours in the
    exchange notice by themselves, those further away when the pool tells them."""
    num_ranks = pool.config.num_ranks
    degree = max(degree for degree in (1, 2, 4, 8) if degree <= num_ranks)
    neighbours_s: list[float] = []
    others_s: list[float] = []
    recoveries_s: list[float] = []
    epoch = 10_000_000
    for _ in range(NUM_LOSSES):
        epoch += 1
        await pool.activate(epoch, {0: degree})
        victim = int(draw.integers(degree))
        os.kill(pool.roster.pids[victim], signal.SIGSTOP)  # so that the others are in the middle of the step
        answers = _ask_each(pool, degree, epoch)
        await pool.status((victim + 1) % degree)
        start_s = time.perf_counter()
        pool.kill(victim)
        for rank, answer in answers.items():
            failed_s = await answer - start_s
            if rank != victim:
                is_neighbour = (rank - victim) % degree in (1, degree - 1)
                (neighbours_s if is_neighbour else others_s).append(failed_s)
        while not isinstance(await pool.events.get(), RankBack):
            pass
        await pool.whole()
        recoveries_s.append(time.perf_counter() - start_s)
    return {
        "kind": "loss",
        "ranks": degree,
        "num": NUM_LOSSES,
        "neighbours_failed_p50_s": float(np.median(neighbours_s)),
        "neighbours_failed_max_s": max(neighbours_s),
        "others_failed_p50_s": float(np.median(others_s)) if others_s else None,
        "others_failed_max_s": max(others_s, default=None),
        "recovered_p50_s": float(np.median(recoveries_s)),
        "recovered_max_s": max(recoveries_s),
    }


def _ask_each(pool: RankPool, degree: int, epoch: int) -> dict[int, asyncio.Task[float]]:
    """Asks the members one by one, as a pool does; when each has answered, or its connection has ended."""

    async def answered_s(asked: asyncio.Future[Message]) -> float:
        await asyncio.wait([asked])
        return time.perf_counter()

    message = RunStep(step=_one_token((0, degree), epoch))
    tasks = {}
    for rank in range(degree):
        peer = pool.roster.peer(rank)
        assert peer is not None
        tasks[rank] = asyncio.create_task(answered_s(peer.ask(message)))
    return tasks


async def _step(pool: RankPool, group: tuple[int, int], epoch: int) -> list[StepOutput] | Refusal:
    return await pool.step(_one_token(group, epoch))


def _one_token(group: tuple[int, int], epoch: int) -> Step:
    first_rank, degree = group
    request = StepRequest(request_id=1, token_ids=[1], num_prefix_tokens=0, blocks=[(first_rank, 0)])
    return Step(step_id=epoch, first_rank=first_rank, degree=degree, epoch=epoch, requests=[request])


def _geometry(draw: np.random.Generator, num_ranks: int) -> Geometry:
    """Each block of ranks stays whole or is halved, by chance."""

    def split(first_rank: int, degree: int) -> Geometry:
        if degree > num_ranks - first_rank or (degree > 1 and draw.random() < 0.5):
            half = degree // 2
            halves = split(first_rank, half)
            return halves if first_rank + half >= num_ranks else halves | split(first_rank + half, half)
        return {first_rank: degree}

    found: Geometry = {}
    for first_rank in range(0, num_ranks, 8):
        found |= split(first_rank, 8)
    return found


def _written(geometry: Geometry) -> str:
    """COUNTxDEGREE by degree: where the groups lie makes no difference."""
    degrees = sorted(geometry.values())
    return ",".join(f"{degrees.count(degree)}x{degree}" for degree in sorted(set(degrees)))


def _summary(times: list[tuple[float, float]]) -> dict[str, float]:
    drain_s, switch_s = np.array(times).T
    return {
        "drain_s": float(np.median(drain_s)),
        "switch_s": float(np.median(switch_s)),
        "switch_p99_s": float(np.percentile(switch_s, 99)),
        "switch_max_s": float(switch_s.max()),
    }


def _proportional_bytes(pid: int) -> int:
    """Memory of a process, shared pages counted by the share."""
    return bytes_in(Path(f"/proc/{pid}/smaps_rollup"), "Pss") or 0
