"""The ranks' processes as the pool sees them: who is there, who is not, and how to get them back."""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterable

from vertumnus.engine.errors import PoolError, WireError
from vertumnus.engine.messages import (
    Dismiss,
    Ended,
    Fork,
    Forked,
    Hello,
    Launch,
    LauncherHello,
    LaunchFailed,
    Loaded,
    Message,
    Unfit,
    Welcome,
    encode,
)
from vertumnus.engine.peer import Peer, PeerGone
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.engine.wire import frame, is_token, listener_at, receive_from
from vertumnus.errors import ConfigError

LOG = logging.getLogger(__name__)

_HELLO_BYTES = 1 << 16
_ACCEPT_PAUSE_S = 1.0
_CLOSE_TIMEOUT_S = 10.0
_SAME_FIELDS = ("source", "options", "num_ranks", "num_slots", "num_threads")
"""In which a launch that is found must be the one that would have been made."""


class Roster:
    """Listens for ranks, starts them through a launcher, or finds both where an earlier pool has left them, and says at
    once when one is gone.

    on_lost is called with the number of a rank whose connection has ended, and why.
    """

    def __init__(self, config: PoolConfig, on_lost: Callable[[int, str], None]) -> None:
        self._config = config
        self._on_lost = on_lost
        self._token = config.token or secrets.token_hex(16)
        self._peers: dict[int, Peer] = {}
        self._hellos: dict[int, Hello] = {}
        self._expected: dict[int, asyncio.Future[Hello]] = {}
        self._incarnations: dict[int, int] = {}
        """Of ranks that the launcher has started."""
        self._left: dict[int, int] = {}
        """pids of the ranks of an earlier pool that have not ended, as far as the launcher has said."""
        self._listener: socket.socket | None = None
        self._launcher: Peer | None = None
        self._launcher_hello: LauncherHello | None = None
        self._launcher_came = asyncio.Event()
        self._loaded: asyncio.Future[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        """The launcher's, if this pool has started it."""
        self._is_finding = False
        self._greetings: dict[asyncio.Task[None], socket.socket] = {}
        """With the connection that each is about."""
        self._is_closing = False
        self.num_turned_away = 0
        """Connections closed for a wrong token, or for what was no greeting."""

    @property
    def address(self) -> tuple[str, int]:
        """Where ranks connect to."""
        assert self._listener is not None
        host, port = self._listener.getsockname()[:2]
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
        return None if self._launcher_hello is None else self._launcher_hello.pid

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
        """Raises ConfigError if the address cannot be listened on, or the descriptor is no listening socket."""
        config = self._config
        if config.listen_fd is not None:
            self._listener = _listening(config.listen_fd)
        else:
            try:
                self._listener = listener_at(config.host, config.port)
            except OSError as error:
                raise ConfigError(
                    f"host {config.host}, port {config.port}: {error.strerror}; accepted: an address of this machine "
                    "that is free"
                ) from error
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def launch(self) -> None:
        """Starts the launcher and waits until it has loaded. Raises ConfigError with what it did not like, PoolError
        if it ended or took too long."""
        # Its own session: an interrupt at the terminal is the pool's to deal with.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vertumnus.engine.launcher"),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # its threads would not survive a fork
        )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # it has ended already, which is said below
            self._process.stdin.write(encode(0, self._launch_message()))
            self._process.stdin.close()
        came = asyncio.create_task(self._launcher_came.wait())
        ended = asyncio.create_task(self._process.wait())
        timeout_s = self._config.start_timeout_s
        try:
            await asyncio.wait([came, ended], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not came.done():
                raise PoolError(f"the launcher ended with code {self._process.returncode} before it could be asked")
        finally:
            came.cancel()
            ended.cancel()
        await self._until_loaded()

    async def find(self) -> None:
        """Waits for the launcher that an earlier pool has left, and for its ranks; those that do not come are killed,
        for `bring` to start them again. Raises PoolError where nobody is, ConfigError where they run something else."""
        if not self._config.is_launched:
            return
        self._is_finding = True
        timeout_s = self._config.control_timeout_s
        try:
            await asyncio.wait_for(self._launcher_came.wait(), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            raise PoolError(f"no launcher has come within {timeout_s} s: there are no ranks to attach to") from None
        assert self._launcher_hello is not None
        self._check_launch(self._launcher_hello.launch)
        await self._until_loaded()
        self._is_finding = False
        for rank in list(self._peers):  # of one that has ended the connection may still have been waiting here
            if self._hellos[rank].incarnation != self._incarnations.get(rank):
                await self._peers[rank].close()
        late = [rank for rank in self._left if rank not in self._peers]
        if late:
            await asyncio.wait([self._expect(rank) for rank in late], timeout=timeout_s)
        for rank in late:
            if rank not in self._peers and rank in self._left:
                _kill(self._left[rank])
            self._expected.pop(rank).cancel()

    async def bring(self, ranks: Iterable[int], timeout_s: float) -> None:
        """Starts the ranks, or expects another supervisor to, and returns when all are there. Raises ConfigError if
        one says that it is unfit, PoolError if one ended or did not come in time."""
        ranks = list(ranks)
        arrivals = [self._expect(rank) for rank in ranks]
        try:
            if self._config.is_launched:
                for rank in ranks:
                    self._incarnations[rank] = self._incarnations.get(rank, -1) + 1
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
        """Ends a rank that does not answer; of one that another supervisor has started, the connection. If it lives it
        comes again then, and is settled like a new one."""
        if rank not in self._peers:
            return
        if self._config.is_launched:
            _kill(self._hellos[rank].pid)
        else:
            self._peers[rank].drop()

    async def close(self) -> None:
        """Ends all processes. Bounded: what does not end by itself is killed."""
        if self._listener is not None and not self._is_closing:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        self._is_closing = True
        for connection in self._greetings.values():  # a task that is cancelled before it begins would leave it open
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        await asyncio.gather(*self._greetings, return_exceptions=True)
        # The launcher last: it kills the ranks that are left.
        peers = [*self._peers.values(), *([self._launcher] if self._launcher is not None else [])]
        for peer in peers:
            peer.tell(Dismiss())
            await peer.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), _CLOSE_TIMEOUT_S)
            except (asyncio.TimeoutError, TimeoutError):
                self._process.kill()  # and the ranks end with it
                await self._process.wait()
        elif self._launcher_hello is not None:
            await _end(self._launcher_hello.pid)
        for peer in peers:
            peer.abort()

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
            orphan_timeout_s=config.orphan_timeout_s,
        )

    def _check_launch(self, found: Launch) -> None:
        wanted = self._launch_message()
        for name in _SAME_FIELDS:
            if getattr(found, name) != getattr(wanted, name):
                raise ConfigError(
                    f"{name} of the ranks there is {getattr(found, name)!r}; accepted: {getattr(wanted, name)!r}, or a "
                    "new start"
                )

    async def _until_loaded(self) -> None:
        timeout_s = self._config.start_timeout_s
        if self._loaded is None:
            raise PoolError(f"the launcher has not come within {timeout_s} s")
        try:
            await asyncio.wait_for(asyncio.shield(self._loaded), timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            raise PoolError(f"the launcher has not loaded within {timeout_s} s") from None

    async def _ask_launcher(self, message: Message, timeout_s: float) -> Message:
        if self._launcher is None:
            raise PoolError("the launcher is gone")
        try:
            return await asyncio.wait_for(self._launcher.ask(message), timeout_s)
        except PeerGone:
            raise PoolError("the launcher is gone") from None
        except (asyncio.TimeoutError, TimeoutError):
            raise PoolError(f"the launcher has not answered within {timeout_s} s") from None

    def _on_launcher_gone(self) -> None:
        self._not_loaded(PoolError("the launcher is gone"))
        self._fail_expected(PoolError("the launcher is gone"), self._expected)

    def _on_launcher_message(self, message: Message) -> None:
        match message:
            case Loaded():
                if self._loaded is not None and not self._loaded.done():
                    self._loaded.set_result(None)
            case LaunchFailed(reason=reason):
                self._not_loaded(ConfigError(reason))
            case Ended(rank=rank) if message.incarnation == self._incarnations.get(rank):
                self._left.pop(rank, None)
                error = PoolError(f"rank {rank} ended with code {message.exit_code} before it was ready")
                self._fail_expected(error, [rank])

    def _not_loaded(self, error: Exception) -> None:
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_exception(error)
            self._loaded.exception()  # nobody may be waiting

    def _expect(self, rank: int) -> asyncio.Future[Hello]:
        return self._expected.setdefault(rank, asyncio.get_running_loop().create_future())

    def _fail_expected(self, error: Exception, ranks: Iterable[int]) -> None:
        for rank in ranks:
            arrival = self._expected.get(rank)
            if arrival is not None and not arrival.done():
                arrival.set_exception(error)
                arrival.exception()  # `bring` raises the first of them only

    def _accept(self) -> None:
        """Takes one connection. asyncio's own server leaves one open that is on its way in when it is closed."""
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # another process that has the socket was faster, or the other end has thought better of it
        except OSError as error:
            LOG.warning("no connection is taken for %g s: %s", _ACCEPT_PAUSE_S, error.strerror)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
            return
        connection.setblocking(False)
        greeting = asyncio.create_task(self._greet(connection))
        self._greetings[greeting] = connection
        greeting.add_done_callback(self._greeted)

    def _greeted(self, greeting: asyncio.Task[None]) -> None:
        self._greetings.pop(greeting, None)
        if not greeting.cancelled() and (error := greeting.exception()) is not None:
            LOG.error("a connection was closed over a fault of this program", exc_info=error)

    def _accept_again(self) -> None:
        if self._listener is not None and not self._is_closing:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def _greet(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            await self._meet(reader, writer)
        except BaseException:
            writer.close()
            raise

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes in who says rightly who it is, and turns everybody else away."""
        try:
            _, message = await asyncio.wait_for(receive_from(reader, _HELLO_BYTES), self._config.control_timeout_s)
        except (EOFError, WireError, asyncio.TimeoutError, TimeoutError):
            self.num_turned_away += 1
            writer.close()
            return
        greeting = asyncio.current_task()
        assert greeting is not None
        self._greetings.pop(greeting, None)  # from here on the connection is a peer's, or closed
        if not is_token(_token_of(message), self._token):
            self.num_turned_away += 1
            writer.close()
        elif isinstance(message, Unfit):
            self._fail_expected(ConfigError(f"rank {message.rank}: {message.reason}"), [message.rank])
            writer.close()
        elif isinstance(message, Hello) and self._is_wanted(message):
            self._take_in(message, reader, writer)
        elif isinstance(message, LauncherHello) and self._is_wanted_launcher(message):
            self._take_in_launcher(message, reader, writer)
        else:
            self.num_turned_away += 1
            writer.write(frame(0, Dismiss()))
            writer.close()

    def _is_wanted(self, hello: Hello) -> bool:
        rank = hello.rank
        if not 0 <= rank < self._config.num_ranks or rank in self._peers or self._is_closing:
            return False
        # What another pool has left is welcome only where it is looked for; `find` sorts out what has ended.
        return self._is_finding or not self._config.is_launched or hello.incarnation == self._incarnations.get(rank)

    def _is_wanted_launcher(self, hello: LauncherHello) -> bool:
        is_ours = self._process is not None and hello.pid == self._process.pid
        is_known = self._launcher_hello is not None and hello.pid == self._launcher_hello.pid
        has_none = self._launcher is None or self._launcher.is_gone
        return (is_ours or is_known or self._is_finding) and has_none and not self._is_closing

    def _take_in_launcher(
        self, hello: LauncherHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._launcher_hello = hello
        self._loaded = asyncio.get_running_loop().create_future()
        if hello.load_s is not None:
            self._loaded.set_result(None)
        if self._is_finding:
            self._incarnations = {each.rank: each.incarnation for each in hello.ranks}
            self._left = {each.rank: each.pid for each in hello.ranks if each.pid is not None}
        self._launcher = Peer(reader, writer, self._on_launcher_gone, self._on_launcher_message)
        self._launcher.tell(Welcome())
        self._launcher_came.set()

    def _take_in(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = hello.rank
        self._hellos[rank] = hello
        self._peers[rank] = peer = Peer(reader, writer, lambda: self._on_gone(rank), lambda message: None)
        peer.tell(Welcome())
        arrival = self._expected.get(rank)
        if arrival is not None and not arrival.done():
            arrival.set_result(hello)

    def _on_gone(self, rank: int) -> None:
        del self._peers[rank]
        if not self._is_closing:
            self._on_lost(rank, "is gone: its connection has closed")


def _token_of(message: Message) -> str:
    match message:
        case Hello(token=token) | Unfit(token=token) | LauncherHello(launch=Launch(token=token)):
            return token
    return ""


def _listening(listen_fd: int) -> socket.socket:
    """A socket of its own over the same listening one, which goes on when this one is closed."""
    try:
        sock = socket.socket(fileno=os.dup(listen_fd))
    except OSError as error:
        raise ConfigError(f"listen_fd is {listen_fd}: {error.strerror}; accepted: a listening socket") from error
    if sock.type != socket.SOCK_STREAM or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise ConfigError(f"listen_fd is {listen_fd}, which does not listen; accepted: a listening socket")
    os.set_inheritable(listen_fd, False)  # ranks that had it would wait at it for each other
    return sock


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def _end(pid: int) -> None:
    """Waits for a process that is nobody's child here, and kills it when that takes too long."""
    try:
        pid_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    has_ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pid_fd, has_ended.set)
    try:
        await asyncio.wait_for(has_ended.wait(), _CLOSE_TIMEOUT_S)
    except (asyncio.TimeoutError, TimeoutError):
        _kill(pid)
    finally:
        loop.remove_reader(pid_fd)
        os.close(pid_fd)
