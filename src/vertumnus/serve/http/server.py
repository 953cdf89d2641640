"""Runs the front end in the caller's event loop, and ends it without breaking answers off."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Sequence

import uvicorn

from vertumnus.serve.http.app import HttpApp
from vertumnus.serve.http.config import HttpConfig
from vertumnus.serve.http.connections import end_unfinished, guarded_by, sweep

__all__ = ["serve_http", "stop_on_signals"]

LOG = logging.getLogger(__name__)

POLL_S = 0.02
CLOSING_S = 5
"""For connections to close once the last answer is written."""


async def serve_http(
    app: HttpApp,
    sockets: Sequence[socket.socket],
    config: HttpConfig,
    stop: asyncio.Event,
    *,
    started: asyncio.Event | None = None,
) -> None:
    """Serves on listening sockets, which it closes in the end, until `stop` is set and the accepted requests are
    answered or `drain_timeout_s` is over.

    While it drains, it still listens: /ready says 503 and new requests are refused with 503, as a load balancer needs
    it. `started` is set once requests are taken.
    """
    server = _Server(
        uvicorn.Config(
            app,
            http=guarded_by(config, app.note_error),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=CLOSING_S,
        )
    )
    app.connections = server.server_state.connections
    shortest_s = min(config.header_timeout_s, config.body_timeout_s, config.unread_timeout_s)
    serving = asyncio.ensure_future(server.serve(list(sockets)))
    sweeping = asyncio.ensure_future(sweep(server.server_state, min(1.0, shortest_s / 4)))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(POLL_S)
        if started is not None:
            started.set()
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        await _drain(app, config.drain_timeout_s)
        app.is_over.set()
        end_unfinished(server.server_state)
        server.should_exit = True
        await serving
    finally:
        server.should_exit = True
        for task in (stopping, sweeping):
            task.cancel()
        await asyncio.gather(stopping, sweeping, return_exceptions=True)


async def _drain(app: HttpApp, timeout_s: float) -> None:
    answering = app.answering
    answering.is_draining = True
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + timeout_s
    LOG.info("draining: %d requests are open", answering.num_active)
    while answering.num_active and loop.time() < give_up_s:
        await asyncio.sleep(POLL_S)
    if answering.num_active:
        LOG.warning("giving %d requests up: they took longer than %g s to drain", answering.num_active, timeout_s)
        answering.give_up()


@contextlib.contextmanager
def stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop` within the block; for the main thread's running loop."""
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are the process's business, not one of its parts'.
        yield
