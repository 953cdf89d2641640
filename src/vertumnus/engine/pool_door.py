"""How ranks and launcher come to their pool, and to the next one when that is gone."""

import contextlib
import socket
import time
from collections.abc import Callable

from vertumnus.engine.errors import WireError
from vertumnus.engine.messages import Hello, Launch, LauncherHello, Unfit, Welcome
from vertumnus.engine.wire import Connection

_PAUSE_S = 0.05


def enter(launch: Launch, hello: Callable[[], Hello | LauncherHello], *, is_patient: bool = False) -> Connection | None:
    """A connection over which the pool has welcomed this process; `hello` is asked again for each attempt.

    A pool that is gone may leave its listening socket to a successor: then connections wait there, and those that it
    had begun to take in are made again. None where that is in vain, so that the process has to end: nobody listens any
    more, the pool has no use for it, or none has taken it in within the launch's `orphan_timeout_s`. is_patient: it was
    not the pool that started this process, and somebody may yet listen.
    """
    deadline_s = time.monotonic() + launch.orphan_timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            sock = socket.create_connection((launch.pool_host, launch.pool_port), left_s)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) and not is_patient:
                return None
            # It does not take more at the moment.
            time.sleep(min(_PAUSE_S, left_s))
            continue
        connection = Connection(sock)
        try:
            connection.send(0, hello())
            _, answer = connection.receive()
        except (OSError, EOFError, WireError):
            connection.close()
            time.sleep(min(_PAUSE_S, left_s))
            continue
        if isinstance(answer, Welcome):
            sock.settimeout(None)
            return connection
        connection.close()
        return None
    return None


def say_unfit(launch: Launch, rank: int, reason: str) -> None:
    """Tells the pool why a rank cannot start, if it is there to hear it."""
    with contextlib.suppress(OSError):
        sock = socket.create_connection((launch.pool_host, launch.pool_port), launch.connect_timeout_s)
        connection = Connection(sock)
        connection.send(0, Unfit(token=launch.token, rank=rank, reason=reason))
        connection.close()
