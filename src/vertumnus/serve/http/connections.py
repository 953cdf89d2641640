"""Connections that take too long: heads and bodies that do not come, answers that are not read."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from vertumnus.serve.http.api_error import ApiError
from vertumnus.serve.http.config import HttpConfig

__all__ = ["GuardedProtocol", "end_unfinished", "guarded_by", "sweep"]

MAX_HEAD_BYTES = 1 << 16
"""Request line and headers together."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's, which waits for ever for a request that has begun, with bounds. `sweep` looks at the clock."""

    limits: HttpConfig
    note_error: Callable[[int, str], None]
    """Told of the status and code of every refusal here."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._due_s: float | None = None
        self._unread_since_s: float | None = None
        self._unread_bytes = 0
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            error = ApiError(503, "too many connections", "server_error", code="too_many_connections")
            self._refuse(503, b"Service Unavailable", error)
            return
        self._due_s = self.loop.time() + self.limits.header_timeout_s

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        if self._due_s is None and self._is_idle:
            self._due_s = self.loop.time() + self.limits.header_timeout_s
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            error = ApiError(431, "the request's head is too large", code="head_too_large")
            self._refuse(431, b"Request Header Fields Too Large", error)

    def on_headers_complete(self) -> None:
        self._due_s = self.loop.time() + self.limits.body_timeout_s
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._due_s = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._unread_since_s = self.loop.time()
        self._unread_bytes = self.transport.get_write_buffer_size()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since_s = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, b"Bad Request", ApiError(400, "this is no HTTP request", code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Any client could fill the log with it; the request is answered as if it asked for no upgrade."""

    def check_time(self, now_s: float) -> None:
        """Ends the connection where a bound has passed."""
        if self._unread_since_s is not None:
            unread_bytes = self.transport.get_write_buffer_size()
            if unread_bytes != self._unread_bytes:
                self._unread_since_s, self._unread_bytes = now_s, unread_bytes
            elif now_s - self._unread_since_s > self.limits.unread_timeout_s:
                self.transport.abort()
        elif self._due_s is not None and now_s > self._due_s:
            if self._is_idle:
                self._refuse(
                    408, b"Request Timeout", ApiError(408, "the request took too long", code="request_timeout")
                )
            else:
                self.transport.abort()

    def end_unless_answering(self) -> None:
        """Ends the connection where its request has not come whole; idle ones are closed by uvicorn."""
        if self._due_s is not None:
            self.transport.abort()

    @property
    def _is_idle(self) -> bool:
        """No request is being answered."""
        cycle: RequestResponseCycle | None = self.cycle  # declared without its None
        return cycle is None or cycle.response_complete

    def _refuse(self, status: int, phrase: bytes, error: ApiError) -> None:
        self.note_error(error.status, error.shown_code)
        body = error.to_json()
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, phrase, len(body)) + body)
        self.transport.close()


def guarded_by(config: HttpConfig, note_error: Callable[[int, str], None]) -> type[GuardedProtocol]:
    parts = {"limits": config, "note_error": staticmethod(note_error)}
    return type("LimitedProtocol", (GuardedProtocol,), parts)


async def sweep(state: ServerState, interval_s: float) -> None:
    """Runs until cancelled. One look at every connection costs less than a timer for each request."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(interval_s)
        now_s = loop.time()
        for connection in tuple(state.connections):
            if isinstance(connection, GuardedProtocol):
                connection.check_time(now_s)


def end_unfinished(state: ServerState) -> None:
    """Ends the connections whose request has not come whole, so that nobody waits for it."""
    for connection in tuple(state.connections):
        if isinstance(connection, GuardedProtocol):
            connection.end_unless_answering()
