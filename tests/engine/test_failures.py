"""What is left when ranks, launcher or pool die: bounded errors, everyone else alive, and nothing behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.pools import DIE, FILL, MEET, RAISE, STOP, gone, open_pool, run, told
from tests.engine.routers import begun

from vertumnus.engine.errors import CopyFailed, PoolError, RankError, RankLost
from vertumnus.engine.geometry import groups_with
from vertumnus.engine.messages import Lease, Pulled, Refusal, RefusalReason
from vertumnus.engine.pool import RankBack, RankGone, RankPool


async def _goes_on(pool: RankPool, lost: set[int], epoch: int, pids: dict[int, int]) -> None:
    """The lost ranks come back with all their groups, the others are the same as before, and all of them step."""
    await pool.whole()
    events = [pool.events.get_nowait() for _ in range(pool.events.qsize())]
    assert {event.rank for event in events if isinstance(event, RankGone)} == lost
    assert {event.rank for event in events if isinstance(event, RankBack)} == lost
    num_ranks = pool.config.num_ranks
    for rank in range(num_ranks):
        assert (pool.roster.pids[rank] != pids[rank]) == (rank in lost)
        assert list((await pool.status(rank)).groups) == sorted(groups_with([rank], num_ranks))
    await pool.activate(epoch, {0: num_ranks})
    assert len(await pool.step(told(MEET, group=(0, num_ranks), epoch=epoch))) == num_ranks


async def _until_given_up(pool: RankPool) -> None:
    while True:
        await pool.whole()
        await asyncio.sleep(0)


def test_an_idle_rank_that_is_killed_comes_back():
    async def test():
        async with open_pool(8) as pool:
            pids = pool.roster.pids
            os.kill(pids[5], signal.SIGKILL)
            assert isinstance(await pool.events.get(), RankGone)
            pool.events.put_nowait(RankGone(5, "seen"))
            with pytest.raises(RankLost, match="rank 5"):
                await pool.status(5)
            await _goes_on(pool, {5}, 1, pids)

    run(test)


def test_a_rank_killed_in_a_collective_fails_the_step_by_name_and_only_its_group():
    async def test():
        async with open_pool(8) as pool:
            pids = pool.roster.pids
            await pool.activate(1, {0: 4, 4: 4})
            with pytest.raises(RankLost, match="rank 3") as raised:
                await pool.step(told(DIE, 3, group=(0, 4), epoch=1))
            assert raised.value.rank == 3
            # The other half knows nothing of it.
            assert len(await pool.step(told(MEET, group=(4, 4), epoch=1))) == 4
            await pool.whole()
            stale = await pool.step(told(MEET, group=(0, 4), epoch=1))
            assert isinstance(stale, Refusal)
            assert stale.reason is RefusalReason.STALE_EPOCH  # the new rank has not seen any
            await _goes_on(pool, {3}, 2, pids)

    run(test)


def test_survivors_keep_their_blocks():
    async def test():
        async with open_pool(2) as pool:
            await pool.activate(1, {0: 1, 1: 1})
            await pool.step(told(FILL, 7, group=(0, 1), epoch=1, blocks=[(0, 2)]))
            before = await pool.lease(0, [2])
            os.kill(pool.roster.pids[1], signal.SIGKILL)
            assert isinstance(await pool.events.get(), RankGone)
            await pool.whole()
            after = await pool.lease(0, [2])
            assert isinstance(before, Lease)
            assert isinstance(after, Lease)
            assert after.checksums == before.checksums

    run(test)


def test_several_ranks_killed_at_once_and_again_while_they_come_back():
    async def test():
        async with open_pool(8, connect_timeout_s=1.0) as pool:
            pids = pool.roster.pids
            for rank in (1, 2, 6):
                os.kill(pids[rank], signal.SIGKILL)
            while len(pool.roster.pids) == 8:
                await asyncio.sleep(0)
            while 1 not in pool.roster.pids or pool.roster.pids[1] == pids[1]:
                await asyncio.sleep(0)
            killed = pool.roster.pids[1]
            os.kill(killed, signal.SIGKILL)
            while pool.roster.pids.get(1) == killed:
                await asyncio.sleep(0)
            await _goes_on(pool, {1, 2, 6}, 1, pids)

    run(test)


def test_a_rank_killed_in_the_middle_of_a_switch_fails_it():
    async def test():
        async with open_pool(4) as pool:
            pids = pool.roster.pids
            await pool.activate(1, {0: 4})
            os.kill(pids[2], signal.SIGSTOP)
            switch = asyncio.create_task(pool.activate(2, {0: 4}))
            while (await pool.status(0)).epoch != 1:
                pass
            os.kill(pids[2], signal.SIGKILL)
            with pytest.raises(RankLost, match="rank 2"):
                await switch
            await _goes_on(pool, {2}, 3, pids)

    run(test)


def test_a_rank_that_dies_while_its_groups_form_holds_nobody_up():
    async def test():
        # Nobody waits for a member that is gone until the time is over: that would be longer than this test may take.
        async with open_pool(4, connect_timeout_s=1000.0) as pool:
            pids = pool.roster.pids
            os.kill(pids[3], signal.SIGSTOP)
            pool.kill(2)
            while (await pool.status(0)).generation < 2:
                await asyncio.sleep(0)
            pool.kill(3)
            await asyncio.sleep(0)
            await gone(pids[3])
            while 3 in pool.roster.pids and pool.roster.pids[3] == pids[3]:
                await asyncio.sleep(0)
            await _goes_on(pool, {2, 3}, 1, pids)

    run(test)


def test_a_rank_that_stops_is_a_bounded_error_and_is_replaced():
    async def test():
        async with open_pool(2, step_timeout_s=1.0, control_timeout_s=1.0, connect_timeout_s=1.0) as pool:
            pids = pool.roster.pids
            await pool.activate(1, {0: 2})
            with pytest.raises(RankError):
                await pool.step(told(STOP, 1, group=(0, 2), epoch=1))
            await gone(pids[1])
            while 1 in pool.roster.pids and pool.roster.pids[1] == pids[1]:
                await asyncio.sleep(0)
            await _goes_on(pool, {1}, 2, pids)

    run(test)


@pytest.mark.parametrize("is_tcp", [False, True])
def test_a_source_killed_before_or_during_a_copy_leaves_the_destination_alive(is_tcp):
    async def test():
        async with open_pool(2) as pool:
            pids = pool.roster.pids
            lease = await pool.lease(0, range(16))
            assert isinstance(lease, Lease)
            copy = asyncio.create_task(pool.pull(1, lease, range(16), is_tcp=is_tcp))
            await asyncio.sleep(0)
            os.kill(pids[0], signal.SIGKILL)
            try:
                found = await copy
                assert isinstance(found, Pulled)
                assert all(found.is_installed)  # it was quicker
            except CopyFailed:
                pass
            lost = await pool.events.get()
            await pool.whole()
            pool.events.put_nowait(lost)
            with pytest.raises(CopyFailed):
                await pool.pull(1, lease, range(16), is_tcp=is_tcp)
            await _goes_on(pool, {0}, 1, pids)

    run(test)


async def _until(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_tcp", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_copy_leaves_the_other_with_whole_blocks_or_none(tmp_path, lost, is_tcp):
    """Rank 0 gives and rank 1 takes; over the network rank 0 holds what it sends, else rank 1 what it reads."""

    async def test():
        gate = tmp_path / "gate"
        options = {"gate": str(gate), "copy_rank": 0 if is_tcp else 1}
        async with open_pool(2, source="tests.engine.held:load", options=options) as pool:
            pids = pool.roster.pids
            await pool.activate(1, {0: 1, 1: 1})
            labels = [bytes([n]) * 16 for n in range(4)]
            blocks = [(0, slot) for slot in range(4)]
            await pool.step(told(FILL, 7, group=(0, 1), epoch=1, blocks=blocks, labels=labels))
            copy = asyncio.create_task(pool.copy_blocks(0, range(4), 1, range(4), is_tcp=is_tcp))
            await _until(begun(str(gate)))
            pool.kill(lost)
            assert isinstance(await pool.events.get(), RankGone)
            gate.touch()
            if lost == 1:
                with pytest.raises(RankLost, match="rank 1"):
                    await copy
                assert (await pool.status(0)).num_leases == 0
                assert len(await pool.labels(0)) == 4
            elif is_tcp:
                with pytest.raises(CopyFailed, match="rank 0"):
                    await copy
                assert await pool.labels(1) == []
            else:  # what is mapped outlives its owner
                found = await copy
                assert isinstance(found, Pulled)
                assert all(found.is_installed)
                assert len(await pool.labels(1)) == 4
            pool.events.put_nowait(RankGone(lost, "seen"))
            await _goes_on(pool, {lost}, 2, pids)

    run(test)


@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_killed_while_its_group_agrees_to_a_switch_fails_it_and_nobody_has_taken_it_up(tmp_path, lost):
    """Rank 0 holds before the exchange in which the others wait for it."""

    async def test():
        gate = tmp_path / "gate"
        options = {"gate": str(gate), "is_switching": True}
        async with open_pool(4, source="tests.engine.held:load", options=options) as pool:
            pids = pool.roster.pids
            await pool.activate(1, {0: 1, 1: 1, 2: 1, 3: 1})
            switch = asyncio.create_task(pool.activate(2, {0: 4}))
            await _until(*(begun(f"{gate}.{rank}") for rank in range(4)))
            pool.kill(lost)
            assert isinstance(await pool.events.get(), RankGone)
            gate.touch()
            with pytest.raises(RankLost, match=f"rank {lost}"):
                await switch
            await pool.whole()
            for rank in range(4):
                assert (await pool.status(rank)).epoch == (0 if rank == lost else 1)
            pool.events.put_nowait(RankGone(lost, "seen"))
            await _goes_on(pool, {lost}, 3, pids)

    run(test)


def test_when_the_launcher_is_killed_its_ranks_go_with_it_and_the_pool_says_so():
    async def test():
        async with open_pool(2) as pool:
            assert pool.roster.launcher_pid is not None
            pids = pool.roster.pids
            os.kill(pool.roster.launcher_pid, signal.SIGKILL)
            await gone(*pids.values())
            with pytest.raises(PoolError, match="launcher"):
                await _until_given_up(pool)

    run(test)


_OWNER = """
import asyncio, json
from tests.engine.pools import config
from vertumnus.engine.pool import RankPool
async def main():
    pool = await RankPool.start(config(2))
    print(json.dumps([pool.roster.launcher_pid, *pool.roster.pids.values()]), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_when_the_pool_is_killed_nothing_is_left():
    async def test():
        with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            pids = json.loads(await asyncio.to_thread(owner.stdout.readline))
            owner.kill()
        await gone(*pids)

    run(test)


def test_no_failure_of_many_leaves_a_group_unusable():
    async def test():
        async with open_pool(4) as pool:
            for epoch in range(1, 9):
                await pool.activate(epoch, {0: 4})
                with pytest.raises(RankError):
                    await pool.step(told(DIE if epoch % 2 else RAISE, epoch % 4, group=(0, 4), epoch=epoch))
                await pool.whole()
            await pool.activate(9, {0: 4})
            assert len(await pool.step(told(FILL, 1, group=(0, 4), epoch=9, blocks=[(r, 0) for r in range(4)]))) == 4

    run(test)
