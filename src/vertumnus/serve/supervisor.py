"""Keeps a router process running: makes the sockets that outlive it, starts it again when it dies, ends it in order.

    supervisor --- listening sockets, secrets ---> router --- steps, copies ---> ranks
         ^                                            |                            |
         '------ ready, calibrated, ordered, failed --'      (they outlive it) ----'

While no router lives, clients and ranks wait in the sockets' backlogs. The supervisor remembers what a router measured
and what an operator ordered, for the next; when it ends, the router does, and with it the ranks.
"""

import contextlib
import io
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from vertumnus.errors import ConfigError, VertumnusError
from vertumnus.serve.config import ServeConfig
from vertumnus.serve.router_spec import RouterReport, RouterSpec

HTTP_BACKLOG = 2048
RESTART_WINDOW_S = 60.0
KILL_AFTER_S = 15.0
"""Beyond the drain's own bound."""


class ServerFailed(VertumnusError):
    """The server could not start, or could not go on."""


class Supervisor:
    """`run` blocks until SIGTERM, SIGINT or a failure that a restart does not mend."""

    def __init__(
        self, config: ServeConfig, on_ready: Callable[["Supervisor"], None], *, control_token: str | None = None
    ) -> None:
        self.config = config
        self.control_token = config.control_token or control_token or secrets.token_urlsafe(24)
        self._on_ready = on_ready
        self._restarts: deque[float] = deque()
        self._router: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    @property
    def address(self) -> tuple[str, int]:
        """Where HTTP is served."""
        host, port = self._http.getsockname()[:2]
        return host, port

    @property
    def router_pid(self) -> int | None:
        return None if self._router is None else self._router.pid

    def run(self) -> None:
        """Raises ConfigError for what cannot be served as configured, ServerFailed where it could not go on."""
        with contextlib.ExitStack() as stack:
            self._http = stack.enter_context(_listen(self.config.host, self.config.port, HTTP_BACKLOG, "port"))
            config = self.config
            pool = stack.enter_context(_listen(config.pool_host, config.pool_port, 256, "pool_port"))
            if config.launcher == "external":
                host, port = pool.getsockname()[:2]
                num_ranks = config.ranks + config.decode_ranks
                print(f"waiting for {num_ranks} ranks at {host}, port {port}", file=sys.stderr, flush=True)
            spec = RouterSpec(
                config=self.config,
                http_fd=self._http.fileno(),
                pool_fd=pool.fileno(),
                hash_key=secrets.token_bytes(32),
                pool_token=config.pool_token or secrets.token_hex(16),
                control_token=self.control_token,
                is_first=True,
            )
            stack.enter_context(_signals(self._stop))
            while not self._is_stopping:
                is_ended, spec = self._run_router(spec)
                if is_ended:
                    return
                self._note_restart()

    def _run_router(self, spec: RouterSpec) -> tuple[bool, RouterSpec]:
        """(whether it ended in order, what to tell the next). Raises where another would not do better."""
        following = replace(spec, is_first=False)
        is_ready = False
        failure: RouterReport | None = None
        said, report_fd = os.pipe()
        try:
            router = self._router = subprocess.Popen(
                [sys.executable, "-m", "vertumnus.serve.router"],
                stdin=subprocess.PIPE,
                bufsize=0,  # what a dead router did not take must not come up again when the pipe is closed
                stdout=sys.stderr.fileno(),
                pass_fds=[spec.http_fd, spec.pool_fd, report_fd],
                start_new_session=True,  # an interrupt at the terminal is ours to deal with
            )
        finally:
            os.close(report_fd)
        with open(said, "rb", buffering=0) as pipe, router:
            assert router.stdin is not None
            if self._is_stopping:  # since before it was known whom to tell
                router.send_signal(signal.SIGTERM)
            try:
                with contextlib.suppress(BrokenPipeError):
                    untold = memoryview(replace(spec, report_fd=report_fd).to_line())
                    while untold:
                        untold = untold[router.stdin.write(untold) :]
                for line in self._lines(router, pipe):
                    report = RouterReport.from_line(line)
                    if report.kind == "ready":
                        is_ready = True
                        self._on_ready(self)
                    elif report.kind == "calibrated":
                        following = replace(following, calibration=report.calibration)
                    elif report.kind == "ordered":
                        following = replace(following, orders=report.orders)
                    else:
                        failure = report
                status = router.wait()
            except BaseException:
                router.kill()
                raise
        if status == 0 or self._is_stopping:
            return True, following
        if failure is not None and failure.is_input:
            raise ConfigError(failure.message)
        if not is_ready and spec.is_first:
            reason = failure.message if failure is not None else f"the router ended with {_shown(status)}"
            raise ServerFailed(f"the server could not start: {reason}")
        detail = f": {failure.message}" if failure is not None else ""
        print(f"the router ended with {_shown(status)}{detail}; starting another", file=sys.stderr, flush=True)
        return False, following

    def _lines(self, router: subprocess.Popen[bytes], pipe: io.FileIO) -> Iterator[bytes]:
        """What the router says, line by line, until it ends. Signals are taken in between."""
        rest = b""
        kill_at_s: float | None = None
        with selectors.DefaultSelector() as selector, _end_fd(router) as end_fd:
            selector.register(pipe, selectors.EVENT_READ)
            selector.register(end_fd, selectors.EVENT_READ)
            while True:
                if self._is_stopping and kill_at_s is None:
                    kill_at_s = time.monotonic() + self.config.drain_timeout_s + KILL_AFTER_S
                if kill_at_s is not None and time.monotonic() > kill_at_s:
                    router.kill()
                ready = {key.fd for key, _ in selector.select(0.5)}
                if pipe.fileno() in ready:
                    chunk = pipe.read(65536)
                    if chunk:
                        *lines, rest = (rest + chunk).split(b"\n")
                        yield from lines
                        continue
                    selector.unregister(pipe)
                if end_fd in ready:
                    return

    def _note_restart(self) -> None:
        now_s = time.monotonic()
        self._restarts.append(now_s)
        while self._restarts[0] < now_s - RESTART_WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) > self.config.max_router_deaths:
            raise ServerFailed(f"the router died {len(self._restarts)} times within {RESTART_WINDOW_S:g} s")

    def _stop(self) -> None:
        """Once: the router drains. Again: it is killed."""
        router = self._router
        if router is not None:
            with contextlib.suppress(ProcessLookupError):
                router.send_signal(signal.SIGKILL if self._is_stopping else signal.SIGTERM)
        self._is_stopping = True


@contextlib.contextmanager
def _end_fd(process: "subprocess.Popen[bytes]") -> Iterator[int]:
    """Readable once the process has ended, be it reaped already: its id may be another's by then."""
    try:
        fd = os.eventfd(1) if process.poll() is not None else os.pidfd_open(process.pid)
    except ProcessLookupError:  # a signal that came just now has looked, and reaped it
        fd = os.eventfd(1)
    try:
        yield fd
    finally:
        os.close(fd)


def _listen(host: str, port: int, backlog: int, name: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(backlog)
    except (OSError, OverflowError) as error:
        listening.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"{name} is {port} at host {host}: {reason}; accepted: a free address of this machine, port 0 for any"
        ) from error
    return listening


@contextlib.contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    handled = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: stop()) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shown(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
