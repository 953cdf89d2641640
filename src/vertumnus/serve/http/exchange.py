"""One HTTP request and its response: the headers that matter, the body within its limit, the ways to answer."""

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from vertumnus.serve.errors import Overloaded
from vertumnus.serve.http.api_error import ApiError, ClientGone, invalid

__all__ = ["BodyRoom", "Exchange", "HEARTBEAT", "Receive", "Scope", "Send"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
MAX_PRIORITY = 1 << 31

JSON = (b"content-type", b"application/json")
EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)

HEARTBEAT = b": waiting\n\n"
"""A comment among server-sent events, which clients skip."""


class BodyRoom:
    """What the bodies that are being read may take of memory, all together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded, having taken them all the same: they are here; `give_back` counts them too."""
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes:
            raise Overloaded("too many large requests are being read", retry_after_s=1.0)

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class Exchange:
    """`status` is None until an answer has begun. `num_sends` counts the calls of `send_events`; `is_sending` is true
    within one, and for good after the last."""

    __slots__ = (
        "_headers",
        "_send",
        "body_bytes",
        "is_sending",
        "num_sends",
        "receive",
        "request_id",
        "scope",
        "started_s",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self.receive, self._send = scope, receive, send
        self.started_s = time.monotonic()
        self.status: int | None = None
        self.body_bytes = self.num_sends = 0
        self.is_sending = False
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self._headers.get(b"x-request-id", b"")
        self.request_id = given.decode("ascii") if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    def header(self, name: bytes) -> bytes | None:
        """By its name in small letters; of several, the last."""
        return self._headers.get(name)

    @property
    def bearer(self) -> bytes | None:
        """What `Authorization: Bearer` carries."""
        scheme, _, credentials = self._headers.get(b"authorization", b"").partition(b" ")
        return credentials.strip() if scheme.lower() == b"bearer" and credentials.strip() else None

    @property
    def deadline_s(self) -> float | None:
        """From `x-request-deadline-ms`: seconds from `started_s`. ApiError unless it is a number above 0."""
        given = self._headers.get(b"x-request-deadline-ms")
        return None if given is None else self._integer("x-request-deadline-ms", given, 1, MAX_DEADLINE_MS) / 1000

    @property
    def priority(self) -> int:
        given = self._headers.get(b"x-priority")
        return 0 if given is None else self._integer("x-priority", given, -MAX_PRIORITY, MAX_PRIORITY - 1)

    @staticmethod
    def _integer(name: str, given: bytes, lowest: int, highest: int) -> int:
        digits = given.strip()
        if re.fullmatch(rb"[+-]?[0-9]{1,18}", digits) and lowest <= int(digits) <= highest:
            return int(digits)
        raise invalid(f"header {name} must be a whole number from {lowest} to {highest}", name)

    async def read_json_body(self, max_bytes: int, room: "BodyRoom | None" = None) -> bytes:
        """The whole body, not parsed. ApiError 413 beyond `max_bytes`, 415 where it says that it is no JSON; Overloaded
        where it finds no `room`; ClientGone where the client leaves before it is whole."""
        content_type = self._headers.get(b"content-type")
        if content_type is not None and content_type.partition(b";")[0].strip().lower() != b"application/json":
            # Also what keeps a web page elsewhere from posting here through its reader's browser.
            await self._discard_body(max_bytes)
            raise ApiError(415, "the body must be application/json", code="unsupported_media_type")
        length = self._headers.get(b"content-length", b"")
        if length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
            await self._discard_body(max_bytes)
            raise too_large(max_bytes)
        pieces = None
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            self.body_bytes += len(piece)
            if room is not None:
                room.take(len(piece))
            is_last = not message.get("more_body", False)
            if self.body_bytes > max_bytes:
                if not is_last:
                    await self._discard_body(max_bytes)
                raise too_large(max_bytes)
            if is_last:
                if pieces is None:
                    return bytes(piece)
                pieces += piece
                return bytes(pieces)
            if pieces is None:
                pieces = bytearray()
            pieces += piece

    async def _discard_body(self, max_bytes: int) -> None:
        """Reads on for a while, so that a client that writes first and reads then gets to see why it was refused."""
        num_bytes = 0
        while num_bytes <= max_bytes:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            num_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                return

    async def answer(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (JSON,)) -> None:
        """The whole response."""
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    *headers,
                    (b"content-length", b"%d" % len(body)),
                    (b"x-request-id", self.request_id.encode()),
                ],
            }
        )
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: ApiError) -> None:
        """The error as the whole response. The connection ends with it where the body was not read to its end."""
        headers = [
            JSON,
            *((name.encode(), value.encode("latin-1", "replace")) for name, value in error.headers.items()),
        ]
        if error.status in (413, 415):
            headers.append((b"connection", b"close"))
        await self.answer(error.status, error.to_json(), headers)

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Further server-sent events, as they go over the wire; the first call begins the response.

        Waits while the client has some 64 KiB unread.
        """
        self.is_sending = True
        if self.status is None:
            self.status = 200
            headers = [*EVENT_STREAM, (b"x-request-id", self.request_id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": not is_last})
        self.is_sending = is_last
        self.num_sends += 1


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
