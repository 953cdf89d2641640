"""The ranks' processes as the pool sees them: who is there, who is not, and how to get them back."""

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterable

from vertumnus.engine.errors import PoolError, WireError
from vertumnus.engine.messages import Ended, Fork, Forked, Hello, Launch, LaunchFailed, Loaded, Message, Unfit
from vertumnus.engine.peer import Peer, PeerGone
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.engine.wire import is_token, receive_from
from vertumnus.errors import ConfigError

_HELLO_BYTES = 4096
_CLOSE_TIMEOUT_S = 10.0


class Roster:
    """Listens for ranks, starts them through a launcher, and says at once when one is gone.

    on_lost is called with the number of a rank whose connection has ended, and why.
    """

    def __init__(self, config: PoolConfig, on_lost: Callable[[int, str], None]) -> None:
        self._config = config
        self._on_lost = on_lost
        self._token = config.token or secrets.token_hex(16)
        self._peers: dict[int, Peer] = {}
        self._hellos: dict[int, Hello] = {}
        self._expected: dict[int, asyncio.Future[Hello]] = {}
        self._incarnations = dict.fromkeys(range(config.num_ranks), -1)
        self._server: asyncio.Server | None = None
        self._launcher: Peer | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._greetings: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self.num_turned_away = 0
        """Connections closed for a wrong token, or for what was no greeting."""

    @property
    def address(self) -> tuple[str, int]:
        """Where ranks connect to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    @property
    def token(self) -> str:
        return self._token

    @property
    def pids(self) -> dict[int, int]:
        """Of the ranks that are there."""
        return {rank: self._hellos[rank].pid for rank in sorted(self._peers)}

    @property
    def launcher_pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def is_launcher_gone(self) -> bool:
        """Nobody can start ranks any more."""
        return self._launcher is not None and self._launcher.is_gone

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self._config.num_ranks) if rank not in self._peers]

    def peer(self, rank: int) -> Peer | None:
        return self._peers.get(rank)

    def hello(self, rank: int) -> Hello:
        """What the rank said about itself when it came."""
        return self._hellos[rank]

    async def listen(self) -> None:
        """Raises ConfigError if the address cannot be listened on."""
        config = self._config
        try:
            self._server = await asyncio.start_server(self._greet, config.host, config.port)
        except OSError as error:
            raise ConfigError(
                f"host {config.host}, port {config.port}: {error.strerror}; accepted: an address of this machine that "
                "is free"
            ) from error

    async def launch(self) -> None:
        """Starts the launcher and waits until it has loaded. Raises ConfigError with what it did not like, PoolError
        if it ended or took too long."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Its own session: an interrupt at the terminal is the pool's to deal with.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "vertumnus.engine.launcher", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would not survive a fork
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        self._launcher = Peer(reader, writer, self._on_launcher_gone, self._on_launcher_message)
        answer = await self._ask_launcher(self._launch_message(), self._config.start_timeout_s)
        if isinstance(answer, LaunchFailed):
            raise ConfigError(answer.reason)
        assert isinstance(answer, Loaded)

    async def bring(self, ranks: Iterable[int], timeout_s: float) -> None:
        """Starts the ranks, or expects another supervisor to, and returns when all are there. Raises ConfigError if
        one says that it is unfit, PoolError if one ended or did not come in time."""
        ranks = list(ranks)
        arrivals = [self._expected.setdefault(rank, asyncio.get_running_loop().create_future()) for rank in ranks]
        try:
            if self._config.is_launched:
                for rank in ranks:
                    self._incarnations[rank] += 1
                    forked = await self._ask_launcher(
                        Fork(rank=rank, incarnation=self._incarnations[rank]), self._config.control_timeout_s
                    )
                    assert isinstance(forked, Forked)
            await asyncio.wait_for(asyncio.gather(*arrivals), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            raise PoolError(f"ranks {self.missing} have not come within {timeout_s} s") from None
        finally:
            for rank in ranks:
                self._expected.pop(rank).cancel()

    def kill(self, rank: int) -> None:
        """Ends a rank that does not answer."""
        if self._config.is_launched and rank in self._peers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._hellos[rank].pid, signal.SIGKILL)

    async def close(self) -> None:
        """Ends all processes. Bounded: what does not end by itself is killed."""
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        for greeting in list(self._greetings):
            greeting.cancel()
        for peer in list(self._peers.values()):
            await peer.close()
        if self._launcher is not None:
            await self._launcher.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), _CLOSE_TIMEOUT_S)
            except (asyncio.TimeoutError, TimeoutError):
                self._process.kill()  # and the ranks end with it
                await self._process.wait()

    def _launch_message(self) -> Launch:
        config = self._config
        host, port = self.address
        return Launch(
            source=config.source,
            options=json.dumps(dict(config.options)),
            pool_host=host,
            pool_port=port,
            token=self._token,
            num_ranks=config.num_ranks,
            num_slots=config.num_slots,
            num_threads=config.threads_per_rank,
            interface_host=config.host,
            connect_timeout_s=config.connect_timeout_s,
            step_timeout_s=config.step_timeout_s,
        )

    async def _ask_launcher(self, message: Message, timeout_s: float) -> Message:
        assert self._launcher is not None
        try:
            return await asyncio.wait_for(self._launcher.ask(message), timeout_s)
        except PeerGone:
            raise PoolError("the launcher is gone") from None
        except (asyncio.TimeoutError, TimeoutError):
            raise PoolError(f"the launcher has not answered within {timeout_s} s") from None

    def _on_launcher_gone(self) -> None:
        self._fail_expected(PoolError("the launcher is gone"), self._expected)

    def _on_launcher_message(self, message: Message) -> None:
        if isinstance(message, Ended) and message.incarnation == self._incarnations[message.rank]:
            error = PoolError(f"rank {message.rank} ended with code {message.exit_code} before it was ready")
            self._fail_expected(error, [message.rank])

    def _fail_expected(self, error: Exception, ranks: Iterable[int]) -> None:
        for rank in ranks:
            arrival = self._expected.get(rank)
            if arrival is not None and not arrival.done():
                arrival.set_exception(error)
                arrival.exception()  # `bring` raises the first of them only

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._greetings.add(task)
        try:
            _, message = await asyncio.wait_for(receive_from(reader, _HELLO_BYTES), self._config.control_timeout_s)
        except (EOFError, WireError, asyncio.TimeoutError, TimeoutError, asyncio.CancelledError):
            self.num_turned_away += 1
            writer.close()
            return
        finally:
            self._greetings.discard(task)
        if not isinstance(message, Hello | Unfit) or not is_token(message.token, self._token):
            self.num_turned_away += 1
            writer.close()
        elif isinstance(message, Unfit):
            self._fail_expected(ConfigError(f"rank {message.rank}: {message.reason}"), [message.rank])
            writer.close()
        else:
            self._take_in(message, reader, writer)

    def _take_in(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = hello.rank
        is_old = self._config.is_launched and hello.incarnation != self._incarnations.get(rank)
        if not 0 <= rank < self._config.num_ranks or rank in self._peers or is_old or self._is_closing:
            self.num_turned_away += 1
            writer.close()
            return
        self._hellos[rank] = hello
        self._peers[rank] = Peer(reader, writer, lambda: self._on_gone(rank), lambda message: None)
        arrival = self._expected.get(rank)
        if arrival is not None and not arrival.done():
            arrival.set_result(hello)

    def _on_gone(self, rank: int) -> None:
        del self._peers[rank]
        if not self._is_closing:
            self._on_lost(rank, "is gone: its connection has closed")
