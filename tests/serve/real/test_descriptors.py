"""Shells and service managers give processes 1024 file descriptors unless they ask for more."""

import contextlib
import resource
import socket

from tests.serve.real.live_server import WAIT_S, LiveServer, serving

FEW = 200


def restart_router_with_limit(server: LiveServer, soft: int, hard: int) -> None:
    """The next router inherits what its supervisor has."""
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    dead = server.kill_router()
    server.until(lambda state: state["held"]["router_pid"] != dead, "another one serves")


def health(connection: socket.socket) -> bytes:
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    return connection.recv(1 << 16).partition(b"\r\n")[0]


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def test_connections_are_bounded_by_descriptors_and_never_run_out_of_them():
    with serving(ranks=1, composition="1x1") as server, contextlib.ExitStack() as stack:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        restart_router_with_limit(server, FEW, hard)
        for _ in range(2 * FEW):
            assert health(stack.enter_context(connect(server))) == b"HTTP/1.1 200 OK", "the soft limit is no limit"
        stack.close()
        restart_router_with_limit(server, FEW, FEW)
        answers = [health(stack.enter_context(connect(server))) for _ in range(2 * FEW)]
        num_answered = answers.count(b"HTTP/1.1 200 OK")
        assert 0 < num_answered < FEW
        assert set(answers[num_answered:]) == {b"HTTP/1.1 503 Service Unavailable"}, "refused, and told so"
        assert any("max_connections" in line for line in server.lines), "the operator gets to know"
