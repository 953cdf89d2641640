"""Starts the ranks of one host: loads everything once, then forks a rank whenever the pool asks for one.

Forks share what was loaded, page by page, so eight ranks cost one model and a rank that died is back at once. To be
safe to fork, this process stays single-threaded for good: it loads with one thread, touches no GPU and waits in one
place. Whoever starts it (`RankPool`) passes the descriptor of a connected socket; when that closes, all ranks end, and
they end with this process, however it ends.
"""

import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]  # re-exported without saying so

from vertumnus.engine.messages import Ended, Fork, Forked, Launch, LaunchFailed, Loaded
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

    def __init__(self, connection: Connection, launch: Launch, source: StepperSource) -> None:
        self._connection = connection
        self._launch = launch
        self._source = source
        # Where groups find their members: a file without a name that all forks inherit and no rank's death harms.
        self._store_fd = os.memfd_create("vertumnus-rendezvous")
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._children: dict[int, _Child] = {}

    def run(self) -> None:
        """Until the pool closes the connection."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.fileobj is self._connection:
                        self._receive()
                    else:
                        self._reap(self._children[key.fd])
        except (EOFError, OSError):
            pass  # the pool is gone or done
        finally:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)
            for child in self._children.values():
                os.waitpid(child.pid, 0)

    def _receive(self) -> None:
        call_id, message = self._connection.receive()
        assert isinstance(message, Fork)
        pid = self._fork(message)
        pid_fd = os.pidfd_open(pid)
        self._children[pid_fd] = _Child(pid, pid_fd, message.rank, message.incarnation)
        self._selector.register(pid_fd, selectors.EVENT_READ)
        self._connection.send(call_id, Forked(pid=pid))

    def _reap(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pid_fd)
        os.close(child.pid_fd)
        del self._children[child.pid_fd]
        exit_code = os.waitstatus_to_exitcode(status)
        self._connection.send(0, Ended(rank=child.rank, incarnation=child.incarnation, exit_code=exit_code))

    def _fork(self, wanted: Fork) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        exit_code = 1
        try:
            _die_with(parent)
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
    """`python -m vertumnus.engine.launcher FD`"""
    connection = Connection(socket.socket(fileno=int(sys.argv[1])))
    torch.set_num_threads(1)
    start_s = time.monotonic()
    call_id, launch = connection.receive()
    assert isinstance(launch, Launch)
    try:
        source = load_source(launch)
    except Exception as error:  # the pool raises it
        reason = str(error) if isinstance(error, VertumnusError) else f"{type(error).__name__}: {error}"
        connection.send(call_id, LaunchFailed(reason=reason))
        return
    gc.collect()
    gc.freeze()  # what was loaded stays shared: the collector would write to every object
    launcher = Launcher(connection, launch, source)
    connection.send(call_id, Loaded(pid=os.getpid(), load_s=time.monotonic() - start_s))
    launcher.run()


if __name__ == "__main__":
    main()
