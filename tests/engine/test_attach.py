"""Ranks that outlive the process that has their pool, and the next process that finds them."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.engine.models import tiny_qwen3
from tests.engine.pools import FILL, HOLD, MEET, config, gone, is_alive, run, told
from tests.engine.routers import TOKEN, Router, listening

from vertumnus.engine.copies import checksum
from vertumnus.engine.errors import PoolError
from vertumnus.engine.messages import Lease
from vertumnus.engine.pool import RankPool, SlotLabel
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.engine.step import Sampling, Step, StepRequest
from vertumnus.errors import ConfigError

LABELS = [bytes([n]) * 16 for n in range(1, 5)]
ROOT = bytes(16)


def plain(pool_config: PoolConfig) -> dict:
    return {**asdict(pool_config), "options": dict(pool_config.options)}


def attached(sock: socket.socket, pool_config: PoolConfig):
    return RankPool.attach(PoolConfig(**{**plain(pool_config), "listen_fd": sock.fileno(), "token": TOKEN}))


def num_waiting(sock: socket.socket) -> int:
    """Connections that nobody has accepted yet: what Linux says of a listening socket in `tcpi_unacked`."""
    return int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[24:28], sys.byteorder)


async def _held_bytes(pool: RankPool, rank: int, slot: int) -> bytes:
    lease = await pool.lease(rank, [slot])
    assert isinstance(lease, Lease)
    await pool.release(lease)
    return lease.checksums[0]


def filled(byte: int) -> bytes:
    return checksum(memoryview(bytes([byte]) * 4096))


def test_the_next_router_finds_ranks_blocks_labels_and_epochs_as_they_were():
    async def test():
        steps = [
            told(FILL, 7, group=(0, 2), epoch=1, blocks=[(0, 3), (1, 5)], labels=LABELS[:2]),
            told(FILL, 9, group=(0, 2), epoch=1, blocks=[(1, 6)], labels=[LABELS[3]]),
        ]
        with listening() as sock:
            with Router(sock.fileno(), plain(config(4)), geometry={0: 2, 2: 2}, steps=steps) as router:
                found = await router.found()
            pool = await attached(sock, config(4))
            assert pool.roster.launcher_pid == found["launcher"]
            assert [*pool.roster.pids.values()] == found["ranks"]
            assert pool.generation > found["generation"]
            assert pool.highest_epoch == 1
            assert await pool.labels(0) == [SlotLabel(3, LABELS[0], ROOT)]
            assert await pool.labels(1) == [SlotLabel(5, LABELS[1], LABELS[0]), SlotLabel(6, LABELS[3], ROOT)]
            assert await pool.labels(2) == []
            assert await _held_bytes(pool, 1, 5) == filled(7)
            assert await _held_bytes(pool, 1, 6) == filled(9)
            await pool.activate(2, {0: 4})
            assert len(await pool.step(told(MEET, group=(0, 4), epoch=2))) == 4
            assert pool.events.empty()
            await pool.close()
            await gone(found["launcher"], *found["ranks"])

    run(test)


def test_a_prefix_that_the_old_router_had_computed_gives_the_new_one_the_same_token():
    async def test():
        saved = tiny_qwen3()
        model = PoolConfig(
            source="vertumnus.engine.model_source:load",
            options={"folder": str(saved.folder), "block_tokens": 4},
            num_ranks=2,
            num_slots=16,
        )
        prompt = [n * 7 % 60 for n in range(22)]
        blocks = [(n % 2, n // 2) for n in range(6)]

        def step(epoch: int, num_prefix_tokens: int, num_tokens: int, sampling: Sampling | None) -> Step:
            request = StepRequest(
                request_id=1,
                token_ids=prompt[num_prefix_tokens:num_tokens],
                num_prefix_tokens=num_prefix_tokens,
                blocks=blocks[: -(-num_tokens // 4)],
                sampling=sampling,
            )
            return Step(step_id=1, first_rank=0, degree=2, epoch=epoch, requests=[request])

        with listening() as sock:
            steps = [step(1, 0, 20, None), step(1, 20, 22, Sampling())]
            with Router(sock.fileno(), plain(model), geometry={0: 2}, steps=steps) as router:
                found = await router.found()
            pool = await attached(sock, model)
            try:
                await pool.activate(2, {0: 2})
                outputs = await pool.step(step(2, 20, 22, Sampling()))
                assert isinstance(outputs, list)
                assert [out.token_id for output in outputs for out in output.outputs] == found["tokens"]
                assert found["tokens"] == saved.greedy(prompt, 1)
            finally:
                await pool.close()

    run(test)


def test_a_step_under_way_runs_to_its_end_and_what_was_queued_behind_it_is_dropped(tmp_path):
    async def test():
        gate = str(tmp_path / "gate")
        held = [
            told(HOLD, 7, step_id=1, group=(0, 1), epoch=1, blocks=[(0, 3)], labels=LABELS[:1]),
            told(FILL, 9, step_id=2, group=(0, 1), epoch=1, blocks=[(0, 4)], labels=LABELS[:1]),
        ]
        told_config = config(2, options={"gate": gate})
        with listening() as sock:
            with Router(sock.fileno(), plain(told_config), geometry={0: 1, 1: 1}, steps=held, num_held=2) as router:
                await router.found()
            # Launcher and ranks have noticed that their router is gone, and dropped what was queued.
            while num_waiting(sock) < 3:
                await asyncio.sleep(0.01)
            attaching = asyncio.create_task(attached(sock, told_config))
            await asyncio.sleep(0)
            Path(gate).touch()
            pool = await attaching
            assert (await pool.status(0)).num_steps == 1
            assert await pool.labels(0) == [SlotLabel(3, LABELS[0], ROOT)]
            assert await _held_bytes(pool, 0, 3) == filled(7)
            await pool.close()

    run(test)


def test_a_group_that_hangs_in_a_step_of_the_old_router_is_free_for_the_new_one():
    async def test():
        with listening() as sock:
            told_config = config(2, step_timeout_s=1000.0)
            with Router(sock.fileno(), plain(told_config), geometry={0: 2}) as router:
                found = await router.found()
                os.kill(found["ranks"][1], signal.SIGSTOP)
                # Rank 0 waits for rank 1, which has died when the next router comes.
            os.kill(found["ranks"][1], signal.SIGKILL)
            pool = await attached(sock, told_config)
            assert pool.roster.pids[0] == found["ranks"][0]
            assert pool.roster.pids[1] != found["ranks"][1]
            await pool.activate(2, {0: 2})
            assert len(await pool.step(told(MEET, group=(0, 2), epoch=2))) == 2
            await pool.close()

    run(test)


def test_ranks_that_died_or_stopped_meanwhile_are_replaced_and_their_numbers_go_on():
    async def test():
        with listening() as sock:
            told_config = config(4, control_timeout_s=1.0)
            with Router(sock.fileno(), plain(told_config)) as router:
                found = await router.found()
            os.kill(found["ranks"][1], signal.SIGKILL)
            os.kill(found["ranks"][2], signal.SIGSTOP)
            pool = await attached(sock, told_config)
            pids = pool.roster.pids
            assert [pids[rank] == found["ranks"][rank] for rank in range(4)] == [True, False, False, True]
            incarnations = [pool.roster.hello(rank).incarnation for rank in range(4)]
            # On a busy machine a start may take longer than its bound, and is tried again.
            assert incarnations[0] == incarnations[3] == 0 < min(incarnations[1:3])
            await pool.activate(1, {0: 4})
            pool.kill(2)
            await pool.events.get()
            await pool.whole()
            assert pool.roster.hello(2).incarnation > incarnations[2]
            await pool.close()
            await gone(*found["ranks"], *pids.values(), found["launcher"])

    run(test)


def test_routers_in_turn_leave_neither_processes_nor_descriptors():
    async def test():
        with listening() as sock:
            seen = []
            for turn in range(5):
                with Router(sock.fileno(), plain(config(2)), is_attaching=turn > 0, geometry={0: 2}) as router:
                    found = await router.found()
                    pids = [found["launcher"], *found["ranks"]]
                    children = Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split()
                    num_fds = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
                    num_threads = [len(os.listdir(f"/proc/{pid}/task")) for pid in pids]
                    seen.append((pids, sorted(children), num_fds, num_threads))
            assert seen[0][0] == seen[4][0]
            assert seen[0][1] == sorted(map(str, seen[0][0][1:]))
            # Groups that were given up close their sockets when their last thread has ended.
            assert seen[2][1:] == seen[4][1:]
        await gone(*seen[0][0])

    run(test)


_HOLDER = """
import asyncio, json, sys
from tests.engine.routers import Router, listening
async def main():
    with listening() as sock:
        router = Router(sock.fileno(), json.loads(sys.argv[1]))
        print(json.dumps(await router.found()), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("first", ["router", "holder"])
def test_when_the_router_and_who_holds_its_socket_are_killed_nothing_is_left(first):
    async def test():
        command = [sys.executable, "-c", _HOLDER, json.dumps(plain(config(2, orphan_timeout_s=1000.0)))]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            found = json.loads(await asyncio.to_thread(holder.stdout.readline))
            pids = [found["launcher"], *found["ranks"]]
            for who in (first, *({"router", "holder"} - {first})):
                assert all(map(is_alive, pids))
                os.kill(found["router"] if who == "router" else holder.pid, signal.SIGKILL)
        await gone(*pids)

    run(test)


def test_ranks_that_no_router_comes_for_end_by_themselves():
    async def test():
        with listening() as sock:
            with Router(sock.fileno(), plain(config(2, orphan_timeout_s=0.5))) as router:
                found = await router.found()
            await gone(found["launcher"], *found["ranks"])

    run(test)


def test_an_attach_where_nobody_is_or_something_else_runs_says_so():
    async def test():
        with listening() as sock:
            with pytest.raises(PoolError, match="no ranks to attach to"):
                await attached(sock, config(2, control_timeout_s=0.2))
            with pytest.raises(ConfigError, match="token"):
                await RankPool.attach(config(2, listen_fd=sock.fileno()))
            with Router(sock.fileno(), plain(config(2))) as router:
                found = await router.found()
            with pytest.raises(ConfigError, match="num_slots of the ranks there is 16"):
                await attached(sock, config(2, num_slots=4))
            await gone(found["launcher"], *found["ranks"])
        with socket.socket() as unbound, pytest.raises(ConfigError, match="listen_fd"):
            await RankPool.start(config(2, listen_fd=unbound.fileno()))

    run(test)


def test_a_new_start_ends_what_another_pool_has_left():
    async def test():
        with listening() as sock:
            with Router(sock.fileno(), plain(config(2))) as router:
                found = await router.found()
            pool = await RankPool.start(config(2, listen_fd=sock.fileno(), token=TOKEN))
            await gone(found["launcher"], *found["ranks"])
            await pool.activate(1, {0: 2})
            assert len(await pool.step(told(MEET, group=(0, 2), epoch=1))) == 2
            await pool.close()

    run(test)
