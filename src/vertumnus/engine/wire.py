"""Frames over a socket: four bytes of length, most significant first, and then a message of `messages`.

Ranks and launcher use a plain socket (`Connection`), the pool asyncio streams.
"""

import asyncio
import contextlib
import secrets
import socket
import struct
import threading

from vertumnus.engine.errors import WireError
from vertumnus.engine.messages import Message, decode, encode

MAX_FRAME_BYTES = 256 << 20
"""Of one message; larger ones are neither sent nor kept when they come."""
_LENGTH = struct.Struct(">I")
_DRAIN_BYTES = 1 << 20


def is_token(given: str, expected: str) -> bool:
    """In a time that does not tell where they differ."""
    return secrets.compare_digest(given.encode("utf-8", "surrogatepass"), expected.encode())


def frame(call_id: int, message: Message) -> bytes:
    """Raises WireError if the message is too large or does not fit the wire."""
    body = encode(call_id, message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"{type(message).__name__} has {len(body)} bytes; accepted: at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Connection:
    """One end of a connected socket. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._send_lock = threading.Lock()
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, call_id: int, message: Message) -> None:
        """Raises OSError if the other end is gone, WireError if the message cannot be sent at all."""
        self.send_raw(frame(call_id, message))

    def send_raw(self, data: memoryview | bytes) -> None:
        """Bytes that belong to no frame."""
        with self._send_lock:
            self._socket.sendall(data)

    def receive_frame(self) -> bytes:
        """The body of the next frame. Raises EOFError at the end of the stream; WireError if the frame is too large,
        after which the next one can be received."""
        (num_bytes,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        if num_bytes <= MAX_FRAME_BYTES:
            return bytes(self._receive(num_bytes))
        scrap = bytearray(_DRAIN_BYTES)
        left = num_bytes
        while left:
            part = memoryview(scrap)[: min(left, _DRAIN_BYTES)]
            self.receive_into(part)
            left -= len(part)
        raise WireError(f"a frame has {num_bytes} bytes; accepted: at most {MAX_FRAME_BYTES}")

    def receive(self) -> tuple[int, Message]:
        """The next message. Raises EOFError or WireError."""
        return decode(self.receive_frame())

    def receive_into(self, view: memoryview) -> None:
        """Fills `view`. Raises EOFError at the end of the stream."""
        while view:
            num_bytes = self._socket.recv_into(view)
            if not num_bytes:
                raise EOFError("the other end has closed the connection")
            view = view[num_bytes:]

    def close(self) -> None:
        """Also ends a `receive` that another thread is waiting in."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.receive_into(memoryview(data))
        return data


def listener_at(host: str, port: int) -> socket.socket:
    """A listening socket at an address or name of this machine, over IPv4 where it has both. Raises OSError."""
    families = {found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return socket.create_server((host, port), family=socket.AF_INET if socket.AF_INET in families else families.pop())


async def receive_from(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> tuple[int, Message]:
    """The next message. Raises EOFError at the end of the stream, WireError on what is no message or too large."""
    try:
        (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if num_bytes > max_bytes:
            raise WireError(f"a frame has {num_bytes} bytes; accepted: at most {max_bytes}")
        body = await reader.readexactly(num_bytes)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise EOFError("the other end has closed the connection") from error
    return decode(body)
