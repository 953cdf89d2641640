"""How ranks that somebody else has started come to their pool."""

import socket
import threading

import pytest

from vertumnus.engine.messages import Hello, Launch, Welcome
from vertumnus.engine.pool_door import enter
from vertumnus.engine.rank_process import read_launch
from vertumnus.engine.wire import Connection
from vertumnus.errors import ConfigError

TOKEN = "0123456789abcdef"
TIMEOUT_S = 30.0


def launch(**changes) -> Launch:
    plain = {
        "source": "tests.engine.pools:load",
        "options": "{}",
        "pool_host": "127.0.0.1",
        "pool_port": 1,
        "num_ranks": 1,
        "num_slots": 1,
        "num_threads": 1,
        "connect_timeout_s": 5.0,
        "step_timeout_s": 5.0,
        "orphan_timeout_s": TIMEOUT_S,
    }
    return read_launch({**plain, **changes}, TOKEN)


def hello() -> Hello:
    return Hello(token=TOKEN, rank=0, incarnation=0, pid=1, num_slots=1, block_bytes=1, block_tokens=1)


def test_a_rank_that_no_pool_has_started_waits_for_one_to_listen():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))  # nobody else takes the port, and whoever connects is refused
        there = launch(pool_port=listening.getsockname()[1])
        assert enter(there, hello) is None
        found: list[Connection | None] = []
        waiting = threading.Thread(target=lambda: found.append(enter(there, hello, is_patient=True)))
        waiting.start()
        listening.listen()
        connection = Connection(listening.accept()[0])
        assert connection.receive() == (0, hello())
        connection.send(0, Welcome())
        waiting.join(TIMEOUT_S)
        assert found[0] is not None
        found[0].close()
        connection.close()


def test_it_does_not_wait_for_ever():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        there = launch(pool_port=bound.getsockname()[1], orphan_timeout_s=0.1)
        assert enter(there, hello, is_patient=True) is None


def test_it_is_reached_where_it_faces_the_pool_unless_told_otherwise():
    assert launch().interface_host == "127.0.0.1"
    assert launch(interface_host="10.1.2.3").interface_host == "10.1.2.3"
    with pytest.raises(ConfigError, match="pool_host is 'xxx"):
        launch(pool_host="x" * 70)  # no name, so that nobody is asked for it
