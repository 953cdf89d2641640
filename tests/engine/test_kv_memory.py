import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vertumnus.engine.errors import CopyFailed
from vertumnus.engine.kv_memory import KvMemory, MappedMemory, available_bytes
from vertumnus.engine.messages import MemoryHandle
from vertumnus.engine.slot_use import SlotUse
from vertumnus.errors import ConfigError


def test_what_one_writes_another_reads_and_nothing_has_a_name():
    before = set(os.listdir("/dev/shm"))
    memory = KvMemory(4, 100)
    mapped = MappedMemory(memory.handle, 100)
    memory.block(2)[:] = b"x" * 100
    assert mapped.part(2, 10, 20) == b"x" * 10
    assert mapped.part(1, 0, 100) == bytes(100)
    mapped.close()
    assert set(os.listdir("/dev/shm")) <= before


def test_memory_that_the_host_has_not_is_a_named_error():
    available = available_bytes()
    assert available is not None
    with pytest.raises(ConfigError, match="shared memory"):
        KvMemory(1, 2 * available)
    with pytest.raises(ConfigError, match="at least 1"):
        KvMemory(0, 1)


@pytest.mark.parametrize(
    ("limit", "available"), [("max", 8 << 20), (str(5 << 20), 2 << 20), (str(1 << 20), 0), (str(64 << 20), 8 << 20)]
)
def test_a_container_has_no_more_than_its_control_group(tmp_path, limit, available):
    (tmp_path / "meminfo").write_text(f"MemTotal: 99999 kB\nMemAvailable: {8 << 10} kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 20}\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == available
    assert available_bytes(tmp_path / "nothing", tmp_path / "nothing") is None


def test_memory_of_a_process_that_is_gone_or_another_one_is_a_named_error():
    handle = KvMemory(1, 1).handle
    with pytest.raises(CopyFailed, match="gone"):
        MappedMemory(MemoryHandle(host_id=handle.host_id, pid=2**22 + 1, fd=3, inode=1), 1)
    with pytest.raises(CopyFailed, match="another"):
        MappedMemory(MemoryHandle(host_id=handle.host_id, pid=handle.pid, fd=handle.fd, inode=handle.inode + 1), 1)


slots = st.sets(st.integers(0, 4), max_size=3)


class SlotUseMachine(RuleBasedStateMachine):
    """Readers, writers and leases as a naive list of who has what."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.use = SlotUse(5, lambda: self.now_s)
        self.leases = {}
        self.users = []

    def _held(self):
        self.leases = {key: value for key, value in self.leases.items() if value[1] > self.now_s}
        read = {slot for taken, _ in self.users for slot in taken} | {
            s for each, _ in self.leases.values() for s in each
        }
        return read, {slot for _, taken in self.users for slot in taken}

    @rule(read=slots, written=slots)
    def begin(self, read, written):
        read -= written
        reading, writing = self._held()
        refusal = self.use.begin(read=read, written=written)
        assert (refusal is None) == (not read & writing and not written & (reading | writing))
        if refusal is None:
            self.users.append((read, written))

    @rule(data=st.data())
    def end(self, data):
        if self.users:
            read, written = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
            self.use.end(read=read, written=written)

    @rule(leased=slots, lease_s=st.integers(1, 5))
    def lease(self, leased, lease_s):
        _, writing = self._held()
        found = self.use.lease(sorted(leased), lease_s)
        assert isinstance(found, str) == bool(leased & writing)
        if isinstance(found, int):
            self.leases[found] = leased, self.now_s + lease_s

    @rule(lease_id=st.integers(1, 9))
    def release(self, lease_id):
        self._held()
        self.use.release(lease_id)
        self.leases.pop(lease_id, None)

    @rule(elapsed_s=st.integers(1, 4))
    def advance(self, elapsed_s):
        self.now_s += elapsed_s

    @invariant()
    def agrees(self):
        self._held()
        assert self.use.num_leases == len(self.leases)
        self.use.check_invariants()


TestSlotUse = SlotUseMachine.TestCase
TestSlotUse.settings = settings(max_examples=40, stateful_step_count=25)
