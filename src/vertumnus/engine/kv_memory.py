"""The memory of one rank's KV blocks, slot after slot, shared so that others on the host can read it.

It is an anonymous file: it has no name anywhere, belongs to whoever has it open or mapped, and is gone with the last
of them, however they end.
"""

import mmap
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from vertumnus.engine.errors import CopyFailed
from vertumnus.engine.messages import MemoryHandle
from vertumnus.errors import ConfigError


class KvMemory:
    """`num_slots` blocks of `block_bytes` each. Raises ConfigError if the host has not that much memory to give."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        if num_slots < 1 or block_bytes < 1:
            raise ConfigError(f"KV memory of {num_slots} slots of {block_bytes} bytes; accepted: at least 1 of each")
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        num_bytes = num_slots * block_bytes
        available = available_bytes()
        # Asked beforehand: what the kernel does to a process that takes too much is not an error but its end.
        if available is not None and num_bytes > available:
            raise ConfigError(_too_small(num_slots, num_bytes, f"{available} bytes are available"))
        fd = os.memfd_create("vertumnus-kv", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            os.close(fd)
            raise ConfigError(_too_small(num_slots, num_bytes, str(error.strerror))) from error
        self._fd = fd
        self.buffer = mmap.mmap(fd, num_bytes)
        self._view = memoryview(self.buffer)

    @property
    def handle(self) -> MemoryHandle:
        """How other processes of the host find it."""
        return MemoryHandle(host_id=host_id(), pid=os.getpid(), fd=self._fd, inode=os.fstat(self._fd).st_ino)

    def part(self, slot: int, start: int, end: int) -> memoryview:
        """Bytes [start, end) of a block, in place: to be read, or written into."""
        first = slot * self.block_bytes
        return self._view[first + start : first + end]

    def block(self, slot: int) -> memoryview:
        """A whole block, in place."""
        return self.part(slot, 0, self.block_bytes)


class MappedMemory:
    """Another rank's KV memory, to be read."""

    def __init__(self, handle: MemoryHandle, block_bytes: int) -> None:
        """Raises CopyFailed if the rank is gone."""
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CopyFailed(f"the source's memory is gone (process {handle.pid}: {error.strerror})") from error
        try:
            if os.fstat(fd).st_ino != handle.inode:
                raise CopyFailed(f"the source's memory is gone (process {handle.pid} is another one)")
            self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._block_bytes = block_bytes
        self._view = memoryview(self._map)
        self.num_slots = len(self._map) // block_bytes

    def part(self, slot: int, start: int, end: int) -> memoryview:
        first = slot * self._block_bytes
        return self._view[first + start : first + end]

    def close(self) -> None:
        self._view.release()
        self._map.close()


@cache
def host_id() -> str:
    """Equal for two processes exactly if one can open the other's descriptors by its pid."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the host could still give, and the control group that a container has; None where neither says."""
    found = []
    with suppress(OSError):
        found.append(bytes_in(meminfo, "MemAvailable"))
    with suppress(OSError, ValueError):  # "max", which is no number: without a limit
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        found.append(max(0, limit - int((cgroup / "memory.current").read_text(encoding="ascii"))))
    return min((each for each in found if each is not None), default=None)


def bytes_in(path: Path, field: str) -> int | None:
    """What a file of the kernel says in kB behind `field`; None where it says nothing. Raises OSError."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _too_small(num_slots: int, num_bytes: int, problem: str) -> str:
    return f"{num_slots} KV slots need {num_bytes} bytes of shared memory per rank but {problem}; accepted: fewer slots"
