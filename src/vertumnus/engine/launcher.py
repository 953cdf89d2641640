"""Starts the ranks of one host: loads everything once, then forks a rank whenever the pool asks for one.

Forks share what was loaded, page by page, so eight ranks cost one model and a rank that died is back at once. To be
safe to fork, this process stays single-threaded for good: it loads with one thread, touches no GPU and waits in one
place. It outlives the pool that started it as its ranks do (`pool_door`), for the next one to find them; the ranks end
with this process, however it ends.
"""

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import sys
import time
import traceback
from dataclasses import dataclass

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # re-exported without saying so

from vertumnus.engine.errors import WireError
from vertumnus.engine.messages import (
    Dismiss,
    Ended,
    Fork,
    Forked,
    Launch,
    LaunchedRank,
    LauncherHello,
    LaunchFailed,
    Loaded,
    decode,
)
from vertumnus.engine.pool_door import enter
from vertumnus.engine.rank_process import StepperSource, load_source, run_rank
from vertumnus.engine.wire import Connection
from vertumnus.errors import VertumnusError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    pid_fd: int
    rank: int
    incarnation: int


class Launcher:
    """Owns the ranks' processes."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._source: StepperSource | None = None
        self._load_s: float | None = None
        # Where groups find their members: a file without a name that all forks inherit and no rank's death harms.
        self._store_fd = os.memfd_create("vertumnus-rendezvous")
        self._selector = selectors.DefaultSelector()
        self._connection: Connection | None = None
        self._children: dict[int, _Child] = {}
        self._incarnations: dict[int, int] = {}

    def run(self) -> None:
        """Until the pool dismisses it, or is gone and no other comes."""
        try:
            self._connection = enter(self._launch, self._hello)
            if self._connection is not None and self._load():
                while self._connection is not None:
                    self._serve(self._connection)
        finally:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)
            for child in self._children.values():
                os.waitpid(child.pid, 0)

    def _load(self) -> bool:
        assert self._connection is not None
        start_s = time.monotonic()
        try:
            self._source = load_source(self._launch)
        except Exception as error:  # the pool raises it
            reason = str(error) if isinstance(error, VertumnusError) else f"{type(error).__name__}: {error}"
            self._tell(LaunchFailed(reason=reason))
            return False
        gc.collect()
        gc.freeze()  # what was loaded stays shared: the collector would write to every object
        self._load_s = time.monotonic() - start_s
        self._tell(Loaded(load_s=self._load_s))
        return True

    def _hello(self) -> LauncherHello:
        pids = {child.rank: child.pid for child in self._children.values()}
        return LauncherHello(
            launch=self._launch,
            pid=os.getpid(),
            load_s=self._load_s,
            ranks=tuple(
                LaunchedRank(rank=rank, incarnation=incarnation, pid=pids.get(rank))
                for rank, incarnation in sorted(self._incarnations.items())
            ),
        )

    def _serve(self, connection: Connection) -> None:
        """Until the connection ends; then there is another one, or none."""
        self._selector.register(connection, selectors.EVENT_READ)
        is_dismissed = False
        try:
            while not is_dismissed:
                for key, _ in self._selector.select():
                    if key.fileobj is not connection:
                        self._reap(self._children[key.fd])
                    elif self._receive(connection):
                        is_dismissed = True
        except (EOFError, OSError, WireError):
            pass  # the pool is gone
        self._selector.unregister(connection)
        connection.close()
        self._connection = None if is_dismissed else enter(self._launch, self._hello)

    def _receive(self, connection: Connection) -> bool:
        """Does what the pool asks; whether that is to end."""
        call_id, message = connection.receive()
        if isinstance(message, Dismiss):
            return True
        assert isinstance(message, Fork)
        pid = self._fork(message)
        pid_fd = os.pidfd_open(pid)
        self._children[pid_fd] = _Child(pid, pid_fd, message.rank, message.incarnation)
        self._incarnations[message.rank] = message.incarnation
        self._selector.register(pid_fd, selectors.EVENT_READ)
        connection.send(call_id, Forked(pid=pid))
        return False

    def _tell(self, message: Ended | Loaded | LaunchFailed) -> None:
        assert self._connection is not None
        with contextlib.suppress(OSError):  # the pool is gone: that is seen where messages are received
            self._connection.send(0, message)

    def _reap(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pid_fd)
        os.close(child.pid_fd)
        del self._children[child.pid_fd]
        exit_code = os.waitstatus_to_exitcode(status)
        self._tell(Ended(rank=child.rank, incarnation=child.incarnation, exit_code=exit_code))

    def _fork(self, wanted: Fork) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        exit_code = 1
        try:
            _die_with(parent)
            assert self._connection is not None
            assert self._source is not None
            os.close(self._connection.fileno())
            self._selector.close()
            for pid_fd in self._children:
                os.close(pid_fd)
            store = FileStore(f"/proc/self/fd/{self._store_fd}", -1)
            run_rank(self._launch, wanted.rank, wanted.incarnation, self._source, store)
            exit_code = 0
        except VertumnusError as error:
            print(f"rank {wanted.rank}: {error}", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(exit_code)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that
        os._exit(1)


def main() -> None:
    """`python -m vertumnus.engine.launcher`, with the message `Launch` on its standard input."""
    _, launch = decode(sys.stdin.buffer.read())
    assert isinstance(launch, Launch)
    torch.set_num_threads(1)
    Launcher(launch).run()


if __name__ == "__main__":
    main()
