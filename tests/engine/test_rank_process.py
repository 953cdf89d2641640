"""Ranks in processes of their own, without losses: what they are asked, and what they must not take."""

import asyncio
import contextlib
import gc
import json
import os
import random
import resource
import socket
import struct
import sys

import msgpack
import pytest
from tests.engine.pools import FILL, MEET, RAISE, TIMEOUT_S, config, open_pool, run, told

from vertumnus.engine.errors import PoolError, RankFailed, WireError
from vertumnus.engine.geometry import GroupKey
from vertumnus.engine.messages import Dismiss, Done, Hello, Refusal, RefusalReason, Welcome
from vertumnus.engine.pool import GroupsFormed, RankBack, RankGone, RankPool
from vertumnus.engine.roster import Roster
from vertumnus.engine.step import Step
from vertumnus.engine.wire import Connection, frame
from vertumnus.errors import ConfigError


def hello_of(roster: Roster) -> bytes:
    """What rank 0 says when it comes."""
    parts = {"incarnation": 0, "pid": 1, "num_slots": 1, "block_bytes": 1, "block_tokens": 1}
    return frame(0, Hello(token=roster.token, rank=0, **parts))


def test_geometries_follow_each_other_and_groups_step_at_the_same_time():
    async def test():
        async with open_pool(8) as pool:
            for epoch, geometry in enumerate(({0: 8}, {0: 4, 4: 4}, {0: 2, 2: 1, 3: 1, 4: 4}, {0: 8}), start=1):
                assert len(await pool.activate(epoch, geometry)) == 8
                outputs = await asyncio.gather(
                    *(pool.step(told(MEET, group=group, epoch=epoch)) for group in geometry.items())
                )
                assert [output.rank for group in outputs for output in group] == list(range(8))
            # A switch of one half leaves the other at its epoch.
            await pool.activate(5, {0: 4, 4: 4})
            await pool.activate(6, {0: 2, 2: 2})
            assert len(await pool.step(told(MEET, group=(4, 4), epoch=5))) == 4
            assert (await pool.status(4)).group == GroupKey(4, 4)

    run(test)


def test_what_a_group_cannot_do_is_refused_by_all_and_changes_nothing():
    async def test():
        async with open_pool(4) as pool:
            await pool.activate(3, {0: 4})
            cases = [
                (told(MEET, group=(0, 4), epoch=2), RefusalReason.STALE_EPOCH),
                (told(MEET, group=(0, 4), epoch=4), RefusalReason.STALE_EPOCH),
                (told(MEET, group=(0, 2), epoch=3), RefusalReason.NOT_A_MEMBER),
                (told(FILL, group=(0, 4), epoch=3, blocks=[(1, 16)]), RefusalReason.INVALID),
                (told(FILL, group=(0, 4), epoch=3, blocks=[(4, 0)]), RefusalReason.INVALID),
                (told(FILL, group=(0, 4), epoch=3, blocks=[(2, 1), (2, 1)]), RefusalReason.INVALID),
            ]
            for step, reason in cases:
                refusal = await pool.step(step)
                assert isinstance(refusal, Refusal)
                assert refusal.reason is reason
            stale = await pool.activate(3, {0: 4})
            assert isinstance(stale, Refusal)
            assert stale.reason is RefusalReason.STALE_EPOCH
            assert len(await pool.step(told(MEET, group=(0, 4), epoch=3))) == 4
            for rank in range(4):
                assert (await pool.status(rank)).num_steps == 1

    run(test)


def test_a_rank_outlives_every_message():
    async def test():
        async with open_pool(2) as pool:
            await pool.activate(1, {0: 2})
            pids, peer = pool.roster.pids, pool.roster.peer(1)
            assert peer is not None
            draw = random.Random(5)
            bodies = [draw.randbytes(draw.randrange(60)) for _ in range(50)]
            bodies += [msgpack.packb([0, "RunStep", {"step": None}]), msgpack.packb([0, "Nonsense", {}]), b""]
            for body in bodies:
                peer._writer.write(struct.pack(">I", len(body)) + body)
            with pytest.raises(WireError, match="nothing that a rank is asked"):
                await pool._ask(1, Done(), 10.0)
            with pytest.raises(WireError, match="RunStep"):
                await pool.step(Step(step_id=1, first_rank=0, degree=2, epoch=2**70, requests=[]))
            assert (await pool.status(1)).num_wire_errors == len(bodies) + 1
            assert len(await pool.step(told(MEET, group=(0, 2), epoch=1))) == 2
            assert pool.roster.pids == pids

    run(test)


def test_who_does_not_show_the_token_is_turned_away():
    async def test():
        async with open_pool(1) as pool:
            hello = Hello(token="guess", rank=0, incarnation=0, pid=1, num_slots=1, block_bytes=1, block_tokens=1)
            for data in (frame(0, hello), frame(0, Done()), b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\5abcde"):
                reader, writer = await asyncio.open_connection(*pool.roster.address)
                writer.write(data)
                assert await reader.read() == b""
                writer.close()
            assert pool.roster.num_turned_away == 4
            assert (await pool.status(0)).rank == 0

    run(test)


def test_a_rank_that_has_just_come_when_the_roster_closes_is_dismissed():
    async def test():
        roster = Roster(config(1, is_launched=False), lambda rank, why: None)
        await roster.listen()
        with socket.create_connection(roster.address, TIMEOUT_S) as rank:
            rank.sendall(hello_of(roster))
            while roster.peer(0) is None:
                await asyncio.sleep(0)
            await roster.close()
            connection = Connection(rank)
            assert [connection.receive()[1] for _ in range(2)] == [Welcome(), Dismiss()]

    run(test)


def test_a_fault_over_a_greeting_is_logged_and_keeps_no_roster_from_closing(monkeypatch, caplog):
    def faulty(self, hello):
        raise ZeroDivisionError("no such hello")

    async def test():
        roster = Roster(config(1, is_launched=False), lambda rank, why: None)
        await roster.listen()
        with socket.create_connection(roster.address, TIMEOUT_S) as rank:
            rank.sendall(hello_of(roster))
            for _ in range(4):
                await asyncio.sleep(0)
            await roster.close()
            assert rank.recv(1) == b""

    monkeypatch.setattr(Roster, "_is_wanted", faulty)
    run(test)
    assert "no such hello" in caplog.text


@pytest.mark.parametrize("num_turns", range(6))
def test_connections_on_their_way_in_when_the_roster_closes_are_closed(num_turns):
    async def test():
        roster = Roster(config(1, is_launched=False), lambda rank, why: None)
        await roster.listen()
        clients = [socket.create_connection(roster.address, TIMEOUT_S) for _ in range(3)]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await roster.close()
        for client in clients:
            with contextlib.suppress(ConnectionResetError):  # nobody had taken it yet
                assert client.recv(1) == b""
            client.close()

    run(test)
    gc.collect()  # a transport or socket left open warns here, which fails the test


def test_a_roster_closes_though_a_rank_reads_nothing():
    rank = socket.socket()

    async def test():
        roster = Roster(config(1, is_launched=False), lambda rank, why: None)
        await roster.listen()
        rank.connect(roster.address)
        rank.sendall(hello_of(roster))
        while (peer := roster.peer(0)) is None:
            await asyncio.sleep(0.01)
        peer._writer.write(bytes(64 << 20))
        await roster.close()

    run(test)
    gc.collect()
    rank.close()


def test_without_descriptors_connections_wait_until_there_are_some(monkeypatch, caplog):
    monkeypatch.setattr("vertumnus.engine.roster._ACCEPT_PAUSE_S", 0.05)

    async def test():
        roster = Roster(config(1, is_launched=False), lambda rank, why: None)
        await roster.listen()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        client = socket.create_connection(roster.address, TIMEOUT_S)
        client.sendall(frame(0, Done()))
        os.close(lowest_free := os.dup(client.fileno()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            while "no connection is taken" not in caplog.text:
                await asyncio.sleep(0.001)
            assert roster.num_turned_away == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        while roster.num_turned_away == 0:
            await asyncio.sleep(0.01)
        client.close()
        await roster.close()

    run(test)
    assert "no connection is taken for 0.05 s: Too many open files" in caplog.text


def test_a_step_that_raises_gives_its_group_up_and_the_ranks_live_on():
    async def test():
        async with open_pool(4) as pool:
            await pool.activate(1, {0: 4})
            pids = pool.roster.pids
            with pytest.raises(RankFailed, match="rank 2 failed: ValueError: as told"):
                await pool.step(told(RAISE, 2, group=(0, 4), epoch=1))
            await pool.whole()
            assert pool.events.get_nowait() == GroupsFormed((GroupKey(0, 4),), 2)
            assert len(await pool.step(told(MEET, group=(0, 4), epoch=1))) == 4
            assert pool.roster.pids == pids

    run(test)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"source": "tests.engine.pools:nothing"}, "module:function"),
        ({"num_slots": 2**40}, "shared memory"),
        ({"host": "192.0.2.1"}, "address of this machine"),
    ],
)
def test_a_pool_that_cannot_start_says_why_and_leaves_nothing(changes, named):
    async def test():
        with pytest.raises(ConfigError, match=named):
            await RankPool.start(config(1, **changes))

    run(test)


def test_a_closed_pool_says_so():
    async def test():
        async with open_pool(1) as pool:
            pass
        with pytest.raises(PoolError, match="closed"):
            await pool.activate(1, {0: 1})

    run(test)


def test_ranks_run_under_torchrun(tmp_path):
    async def test():
        pool = await RankPool.listen(config(2, is_launched=False, token="0123456789abcdef"))
        host, port = pool.roster.address
        launch = {
            "source": "tests.engine.pools:load",
            "options": "{}",
            "pool_host": host,
            "pool_port": port,
            "num_ranks": 2,
            "num_slots": 4,
            "num_threads": 1,
            "connect_timeout_s": 20.0,
            "step_timeout_s": 20.0,
            "orphan_timeout_s": 20.0,
        }
        path = tmp_path / "launch.json"
        path.write_text(json.dumps(launch))
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *command, "-m", "vertumnus.engine.rank_process", str(path)),
            env={**os.environ, "VERTUMNUS_POOL_TOKEN": "0123456789abcdef"},
        )
        try:
            await pool.begin()
            await pool.activate(1, {0: 2})
            assert len(await pool.step(told(MEET, group=(0, 2), epoch=1))) == 2
            # What the pool cannot kill loses its connection, comes again and is settled like a new one.
            pids = pool.roster.pids
            pool.kill(1)
            assert isinstance(await pool.events.get(), RankGone)
            assert await pool.events.get() == RankBack(1, pool.generation)
            assert pool.roster.pids == pids
            await pool.activate(2, {0: 2})
            assert len(await pool.step(told(MEET, group=(0, 2), epoch=2))) == 2
        finally:
            await pool.close()
            assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0

    run(test)
