"""Block copies inside one process, between processes that share nothing, and between ranks that step meanwhile."""

import asyncio
import os
import select
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest
from tests.engine.pools import FILL, MEET, open_pool, run, told

from vertumnus.engine.copies import Copies, CopyServer, checksum
from vertumnus.engine.errors import CopyFailed
from vertumnus.engine.kv_memory import KvMemory
from vertumnus.engine.messages import Lease, Pull, Pulled, ReadBlocks, Refusal, RefusalReason, decode
from vertumnus.engine.slot_use import SlotUse
from vertumnus.engine.wire import Connection

TOKEN = "0123456789abcdef"
BLOCK_BYTES = (2 << 20) + 12345  # more than one part


class Clock:
    now_s = 0.0


class End:
    """One rank's end of copies, on an address of this machine."""

    def __init__(self, rank: int, num_slots: int = 4, host: str = "127.0.0.1", block_bytes: int = BLOCK_BYTES):
        self.clock = Clock()
        self.memory = KvMemory(num_slots, block_bytes)
        self.slot_use = SlotUse(num_slots, lambda: self.clock.now_s)
        self.server = CopyServer(rank, self.memory, self.slot_use, TOKEN, host, 10.0)
        self.copies = Copies(rank, self.memory, self.slot_use, self.server, 10.0)

    def lease(self, *slots: int) -> Lease:
        lease = self.copies.lease(slots, 30.0)
        assert isinstance(lease, Lease)
        return lease


@contextmanager
def ends():
    source, destination = End(0), End(1)
    for slot in range(4):
        source.memory.block(slot)[:] = os.urandom(BLOCK_BYTES)
    yield source, destination
    source.server.close()
    destination.server.close()


@pytest.mark.parametrize("is_tcp", [False, True])
def test_blocks_arrive_as_they_were_in_the_order_of_the_lease(is_tcp):
    with ends() as (source, destination):
        pulled = destination.copies.pull(Pull(lease=source.lease(3, 0), slots=(1, 2), is_tcp=is_tcp))
        assert pulled == Pulled(is_installed=(True, True), is_tcp=is_tcp)
        assert destination.memory.block(1) == source.memory.block(3)
        assert destination.memory.block(2) == source.memory.block(0)


@pytest.mark.parametrize("is_tcp", [False, True])
def test_a_block_that_changed_is_reported_and_the_others_are_good(is_tcp):
    with ends() as (source, destination):
        lease = source.lease(0, 1, 2)
        source.memory.block(1)[BLOCK_BYTES - 1] ^= 1
        pulled = destination.copies.pull(Pull(lease=lease, slots=(0, 1, 2), is_tcp=is_tcp))
        assert pulled == Pulled(is_installed=(True, False, True), is_tcp=is_tcp)


def test_a_leased_slot_is_not_written_until_it_is_released_or_the_lease_expires():
    with ends() as (source, _):
        lease = source.lease(2)
        assert source.slot_use.begin(written={2}) is not None
        source.slot_use.release(lease.lease_id)
        assert source.slot_use.begin(written={2}) is None
        source.slot_use.end(written={2})
        source.lease(2)
        source.clock.now_s = 31.0
        assert source.slot_use.begin(written={2}) is None


def test_a_copy_server_gives_nothing_without_token_or_lease():
    with ends() as (source, destination):
        lease = source.lease(0)
        for token, slots in (("guess", (0,)), (TOKEN, (1,)), (TOKEN, ())):
            with socket.create_connection((source.server.host, source.server.port), 10.0) as sock:
                connection = Connection(sock)
                connection.send(0, ReadBlocks(token=token, lease_id=lease.lease_id, slots=slots))
                if token == TOKEN:
                    _, answer = connection.receive()
                    assert isinstance(answer, Refusal)
                with pytest.raises(EOFError):
                    connection.receive()
        with socket.create_connection((source.server.host, source.server.port), 10.0) as sock:
            sock.sendall(b"GET /kv HTTP/1.1\r\n\r\n")
            sock.shutdown(socket.SHUT_WR)
            assert sock.recv(10) == b""
        source.slot_use.release(lease.lease_id)
        with pytest.raises(CopyFailed, match="expired"):
            destination.copies.pull(Pull(lease=lease, slots=(0,), is_tcp=True))
        assert source.server.num_turned_away >= 1


def test_a_copy_that_makes_no_sense_is_refused():
    with ends() as (source, destination):
        lease = source.lease(0, 1)
        other = End(2, block_bytes=64)
        for end, slots in ((destination, (0,)), (destination, (0, 4)), (destination, (1, 1)), (other, (0, 1))):
            refusal = end.copies.pull(Pull(lease=lease, slots=slots))
            assert isinstance(refusal, Refusal)
            assert refusal.reason is RefusalReason.INVALID
        other.server.close()
        assert destination.slot_use.begin(read={2}) is None
        refusal = destination.copies.pull(Pull(lease=lease, slots=(2, 3)))
        assert isinstance(refusal, Refusal)
        assert refusal.reason is RefusalReason.SLOT_IN_USE


_SOURCE = """
import os
import sys
import tests.engine.test_copies as module
from vertumnus.engine.messages import Leased, encode
end = module.End(0, host=sys.argv[1])
for slot in range(4):
    end.memory.block(slot)[:] = bytes([slot + 1]) * module.BLOCK_BYTES
sys.stdout.buffer.write(encode(0, Leased(lease=end.lease(0, 1, 2, 3))))
sys.stdout.buffer.flush()
os.close(1)
sys.stdin.read()
"""
_DESTINATION = """
import sys
import tests.engine.test_copies as module
from vertumnus.engine.messages import decode, encode
_, leased = decode(sys.stdin.buffer.read())
end = module.End(1)
pulled = end.copies.pull(module.Pull(lease=leased.lease, slots=(3, 2, 1, 0), is_tcp=sys.argv[1] == "forced"))
assert [end.memory.block(slot)[0] for slot in range(4)] == [4, 3, 2, 1]
sys.stdout.buffer.write(encode(0, pulled))
"""


def _copied_between(source_prefix: list[str], destination_prefix: list[str], host: str, how: str) -> Pulled:
    source = [*source_prefix, sys.executable, "-c", _SOURCE, host]
    with subprocess.Popen(source, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], 30)
        assert readable
        lease = process.stdout.read()
        found = subprocess.run(
            [*destination_prefix, sys.executable, "-c", _DESTINATION, how],
            input=lease,
            capture_output=True,
            timeout=30,
        )
        process.kill()
    assert found.returncode == 0, found.stderr.decode()
    _, pulled = decode(found.stdout)
    assert isinstance(pulled, Pulled)
    return pulled


def test_two_processes_that_map_nothing_of_each_other_copy_over_the_network():
    assert _copied_between([], [], "127.0.0.1", "forced") == Pulled(is_installed=(True,) * 4, is_tcp=True)


def test_two_network_namespaces_with_their_own_processes_copy_over_the_network():
    """The destination has a pid namespace of its own too, as on another host, so that it chooses the network itself."""
    names = [f"vertumnus{os.getpid()}{side}" for side in "ab"]
    links = [f"vt{os.getpid() % 100000}{side}" for side in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
            for name, link, host in zip(names, links, ("10.254.77.1", "10.254.77.2"), strict=True):
                ip("-n", name, "addr", "add", f"{host}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.SubprocessError):
            pytest.skip("network namespaces need root; the test between two processes covers the same path")
        inside = [["ip", "netns", "exec", name] for name in names]
        inside[1] += ["unshare", "--pid", "--fork", "--mount-proc"]
        pulled = _copied_between(*inside, "10.254.77.1", "chosen")
        assert pulled == Pulled(is_installed=(True,) * 4, is_tcp=True)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


def test_ranks_copy_from_each_other_while_they_step():
    async def test():
        async with open_pool(2) as pool:
            await pool.activate(1, {0: 2})
            for rank in (0, 1):
                blocks = [(rank, slot) for slot in range(8)]
                await pool.step(told(FILL, 10 + rank, group=(0, 2), epoch=1, blocks=blocks))

            async def steps():
                for step_id in range(20):
                    step = told(MEET, step_id=step_id, group=(0, 2), epoch=1, blocks=[(0, 15)])
                    assert len(await pool.step(step)) == 2

            async def copies(source: int, slot: int, is_tcp: bool):
                return await pool.copy_blocks(source, [slot], 1 - source, [slot + 8 - slot % 2 * 4], is_tcp=is_tcp)

            *found, _ = await asyncio.gather(
                *(copies(source, slot, slot > 1) for slot in (0, 1, 2, 3) for source in (0, 1)), steps()
            )
            assert all(
                (isinstance(each, Pulled) and all(each.is_installed)) or isinstance(each, Refusal) for each in found
            )
            assert sum(isinstance(each, Pulled) for each in found) >= 6
            lease = await pool.lease(1, [8])
            assert isinstance(lease, Lease)
            assert lease.checksums[0] == checksum(memoryview(bytes([10]) * 4096))
            refusal = await pool.step(told(FILL, 1, group=(0, 2), epoch=1, blocks=[(1, 8)]))
            assert isinstance(refusal, Refusal)
            assert refusal.reason is RefusalReason.SLOT_IN_USE
            await pool.release(lease)
            assert len(await pool.step(told(FILL, 1, group=(0, 2), epoch=1, blocks=[(1, 8)]))) == 2

    run(test)
