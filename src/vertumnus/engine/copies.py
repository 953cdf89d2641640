"""Block copies between ranks: the destination pulls what the source has leased to it.

    pool                source                                destination
    TakeLease  ------>  keeps the slots, checksums
               <------  Lease
    Pull(lease) ---------------------------------------------> reads the source's memory, or asks its copy server,
                                                               part by part; compares the checksums
               <---------------------------------------------  Pulled
    ReleaseLease ---->  lets the slots go

The source's steps go on meanwhile, and so do the destination's: nothing here waits for a step, and a step waits for
nothing here, so no order of copies, nor two ranks that copy from each other, can block.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from blake3 import blake3

from vertumnus.engine.errors import CopyFailed, WireError
from vertumnus.engine.kv_memory import MappedMemory, host_id
from vertumnus.engine.messages import (
    CopySource,
    Granted,
    Lease,
    MemoryHandle,
    Pull,
    Pulled,
    ReadBlocks,
    Refusal,
    RefusalReason,
)
from vertumnus.engine.slot_use import SlotUse
from vertumnus.engine.wire import Connection, is_token, listener_at

PART_BYTES = 2 << 20
"""Copied at once; a step that runs beside a copy is held up by one part at most."""
CHECKSUM_BYTES = 16
MAX_READERS = 16
"""Connections that a copy server answers at the same time."""


class BlockMemory(Protocol):
    """KV memory as copies see it. On a GPU `part` would be a pinned host buffer and there would be no handle."""

    num_slots: int
    block_bytes: int

    @property
    def handle(self) -> MemoryHandle | None: ...

    def part(self, slot: int, start: int, end: int) -> memoryview: ...

    def block(self, slot: int) -> memoryview: ...


class Copies:
    """Both ends of one rank's copies. Methods may be called from any thread, and take as long as the copy does."""

    def __init__(self, rank: int, memory: BlockMemory, slot_use: SlotUse, server: "CopyServer", timeout_s: float):
        self._rank = rank
        self._memory = memory
        self._slot_use = slot_use
        self._server = server
        self._timeout_s = timeout_s

    def lease(self, slots: tuple[int, ...], lease_s: float) -> Lease | Refusal:
        """Keeps the slots for `lease_s` and sums them."""
        wrong = self._invalid(slots)
        if wrong is not None:
            return wrong
        lease_id = self._slot_use.lease(slots, lease_s)
        if isinstance(lease_id, str):
            return self._refusal(RefusalReason.SLOT_IN_USE, lease_id)
        return Lease(
            lease_id=lease_id,
            rank=self._rank,
            slots=slots,
            checksums=tuple(checksum(self._memory.block(slot)) for slot in slots),
            tags=self._slot_use.tags_of(slots),
            block_bytes=self._memory.block_bytes,
            source=CopySource(host=self._server.host, port=self._server.port, memory=self._memory.handle),
        )

    def pull(self, pull: Pull) -> Pulled | Refusal:
        """Installs the blocks, and the labels of those that arrived as they were. Raises CopyFailed if the source is
        gone; its blocks' slots then hold nothing of use."""
        lease, slots = pull.lease, pull.slots
        wrong = self._invalid(slots)
        if wrong is not None:
            return wrong
        if not len(slots) == len(lease.slots) == len(lease.checksums) == len(lease.tags):
            return self._refusal(
                RefusalReason.INVALID, f"{len(slots)} slots for {len(lease.slots)} blocks; accepted: as many"
            )
        if lease.block_bytes != self._memory.block_bytes:
            return self._refusal(
                RefusalReason.INVALID,
                f"blocks of {lease.block_bytes} bytes; accepted: {self._memory.block_bytes}, of the same model",
            )
        in_use = self._slot_use.begin(written=slots)
        if in_use is not None:
            return self._refusal(RefusalReason.SLOT_IN_USE, in_use)
        tags: dict[int, bytes] = {}
        try:
            handle = lease.source.memory
            is_tcp = pull.is_tcp or handle is None or handle.host_id != host_id()
            if is_tcp:
                self._fetch(lease, slots)
            else:
                assert handle is not None
                self._read_mapped(handle, lease, slots)
            is_installed = tuple(
                checksum(self._memory.block(slot)) == expected
                for slot, expected in zip(slots, lease.checksums, strict=True)
            )
            tags = {
                slot: tag for slot, tag, is_good in zip(slots, lease.tags, is_installed, strict=True) if is_good and tag
            }
        finally:
            self._slot_use.end(written=slots, tags=tags)
        return Pulled(is_installed=is_installed, is_tcp=is_tcp)

    def _read_mapped(self, handle: MemoryHandle, lease: Lease, slots: tuple[int, ...]) -> None:
        source = MappedMemory(handle, lease.block_bytes)
        try:
            for from_slot, to_slot in zip(lease.slots, slots, strict=True):
                if not 0 <= from_slot < source.num_slots:
                    raise CopyFailed(f"the lease names slot {from_slot}, which the source has not")
                for start, end in parts(lease.block_bytes):
                    # By NumPy, which lets other threads run during the move.
                    np.frombuffer(self._memory.part(to_slot, start, end), np.uint8)[:] = np.frombuffer(
                        source.part(from_slot, start, end), np.uint8
                    )
        finally:
            source.close()

    def _fetch(self, lease: Lease, slots: tuple[int, ...]) -> None:
        address = (lease.source.host, lease.source.port)
        connection: Connection | None = None
        try:
            sock = socket.create_connection(address, self._timeout_s)
            connection = Connection(sock)
            connection.send(0, ReadBlocks(token=self._server.token, lease_id=lease.lease_id, slots=lease.slots))
            _, answer = connection.receive()
            if not isinstance(answer, Granted):
                detail = answer.detail if isinstance(answer, Refusal) else f"it answers {type(answer).__name__}"
                raise CopyFailed(f"rank {lease.rank} does not give the blocks: {detail}")
            for slot in slots:
                for start, end in parts(lease.block_bytes):
                    connection.receive_into(self._memory.part(slot, start, end))
        except (OSError, EOFError, WireError) as error:
            raise CopyFailed(f"rank {lease.rank} broke off a copy: {error}") from error
        finally:
            if connection is not None:
                connection.close()

    def _invalid(self, slots: tuple[int, ...]) -> Refusal | None:
        missing = self._slot_use.out_of_range(slots)
        if missing is not None:
            detail = f"slot {missing} is out of range; accepted: 0 to {self._slot_use.num_slots - 1}"
            return self._refusal(RefusalReason.INVALID, detail)
        if len(set(slots)) != len(slots):
            return self._refusal(RefusalReason.INVALID, "a slot is named twice; accepted: each slot once")
        return None

    def _refusal(self, reason: RefusalReason, detail: str) -> Refusal:
        return Refusal(rank=self._rank, reason=reason, detail=detail)


class CopyServer:
    """Gives leased blocks to whoever shows the token, over TCP: a thread that accepts, and one per connection."""

    def __init__(self, rank: int, memory: BlockMemory, slot_use: SlotUse, token: str, host: str, timeout_s: float):
        self.token = token
        self.num_turned_away = 0
        """Connections closed for a wrong token, or for what was no request."""
        self._rank = rank
        self._memory = memory
        self._slot_use = slot_use
        self._timeout_s = timeout_s
        self._slots_free = threading.BoundedSemaphore(MAX_READERS)
        self._listener = listener_at(host, 0)
        self.host: str = host
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="copy-server", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._slots_free.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            sock.settimeout(self._timeout_s)
            threading.Thread(target=self._serve, args=(Connection(sock),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            _, request = connection.receive()
            if not isinstance(request, ReadBlocks) or not is_token(request.token, self.token):
                self.num_turned_away += 1
                return
            slots = request.slots
            if not slots or not self._slot_use.leased(request.lease_id).issuperset(slots):
                detail = f"lease {request.lease_id} has expired or has not these slots"
                connection.send(0, Refusal(rank=self._rank, reason=RefusalReason.INVALID, detail=detail))
                return
            connection.send(0, Granted(num_bytes=len(slots) * self._memory.block_bytes))
            for slot in slots:
                for start, end in parts(self._memory.block_bytes):
                    connection.send_raw(self._memory.part(slot, start, end))
        except WireError:
            self.num_turned_away += 1
        except (OSError, EOFError):
            pass  # the reader is gone, and its own error says so
        finally:
            connection.close()
            self._slots_free.release()


def checksum(block: memoryview) -> bytes:
    return bytes(blake3(block).digest(CHECKSUM_BYTES))


def parts(num_bytes: int) -> Iterator[tuple[int, int]]:
    """[start, end) of the parts that a block is copied in."""
    for start in range(0, num_bytes, PART_BYTES):
        yield start, min(start + PART_BYTES, num_bytes)
