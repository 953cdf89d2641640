"""Clients that leave, dawdle or talk nonsense: what they held is free again, and nobody else notices."""

import json
import logging
import socket
from contextlib import closing, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.serve.http.fake_backend import echo, scripted_token, silent
from tests.serve.http.servers import MODEL, WAIT_S, serving

from vertumnus.serve.generation import Token


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(server, caplog):
    server.backend.__init__()
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def connect(server):
    return closing(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))


def request_bytes(path="/v1/completions", headers=(), **body):
    body = json.dumps({"model": MODEL, **body}).encode()
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*head, *headers, "", ""]).encode() + body


def read_to_end(connection):
    received = b""
    while piece := connection.recv(1 << 16):
        received += piece
    return received


def read_response(connection):
    """Of one response with a known length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1)
    head = received.lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    return int(head.split()[1]), body


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_request_of_a_client_that_leaves_is_freed(server, is_stream, num_tokens):
    server.backend.answer = silent
    with connect(server) as connection:
        connection.sendall(request_bytes(prompt=[1], stream=is_stream, max_tokens=50))
        server.until(lambda: len(server.backend.generations) == 1)
        generation = server.backend.generations[0]
        for _ in range(num_tokens):
            server.call(generation.put, Token(504))
        if is_stream and num_tokens:
            assert b"text/event-stream" in connection.recv(1 << 16)
        assert server.backend.cancelled == []
    server.until(lambda: server.backend.cancelled == [generation.request.request_id])
    server.until(lambda: server.app.answering.num_active == 0)


def test_client_that_leaves_amid_its_body_reaches_no_pool(server):
    with connect(server) as connection:
        connection.sendall(request_bytes(prompt=[1])[:-5])
        server.until(lambda: server.app.answering.num_active == 1)
    server.until(lambda: server.app.answering.num_active == 0)
    assert server.backend.requests == []


def test_whoever_finishes_cancels_nothing(server):
    assert server.post("/v1/completions", prompt=[1])[0] == 200
    assert server.post("/v1/completions", prompt=[1], stop="zzzz")[0] == 200
    assert server.backend.cancelled == []


def test_connection_serves_one_request_after_another(server):
    with connect(server) as connection:
        connection.sendall(
            request_bytes(prompt=[1]) + request_bytes(prompt=[], max_tokens=2) + request_bytes(prompt=[3])
        )
        assert [read_response(connection)[0] for _ in range(3)] == [200, 400, 200]
        connection.sendall(request_bytes(prompt=[4]))
        assert read_response(connection)[0] == 200


def test_reader_that_stops_is_cut_off_and_holds_nobody_up():
    with serving(unread_timeout_s=0.3, max_context_tokens=1_000_000, max_body_bytes=10_000) as server:
        server.backend.answer = silent
        with closing(socket.socket()) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(request_bytes(prompt=[1], stream=True, max_tokens=900_000, logprobs=20))
            server.until(lambda: len(server.backend.generations) == 1)
            generation = server.backend.generations[0]
            server.backend.answer = echo

            def put_some():
                if not server.backend.cancelled:
                    for _ in range(100):
                        generation.put(scripted_token(generation, 1, 504))
                return bool(server.backend.cancelled)

            def largest_buffer():
                return max((each.transport.get_write_buffer_size() for each in server.app.connections), default=0)

            for _ in range(400):  # some 20 MB, which no socket buffer swallows
                if server.call(put_some):
                    break
            assert server.post("/v1/completions", prompt=[1])[0] == 200
            server.until(lambda: server.backend.cancelled == [generation.request.request_id])
            server.until(lambda: largest_buffer() == 0)


@pytest.mark.parametrize("begun", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a: "])
def test_head_that_does_not_come_is_not_waited_for(begun):
    with serving(header_timeout_s=0.2) as server, connect(server) as connection:
        connection.sendall(begun)
        received = read_to_end(connection)
        assert received.startswith(b"HTTP/1.1 408 ")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_body_that_does_not_come_is_not_waited_for():
    with serving(body_timeout_s=0.2) as server, connect(server) as connection:
        connection.sendall(request_bytes(prompt=[1])[:-1])
        with suppress(ConnectionResetError):
            assert not read_to_end(connection)
        server.until(lambda: server.app.answering.num_active == 0)


def test_slow_answers_are_not_slow_requests():
    """The bounds are on what the client does, never on how long the pool takes."""
    with serving(header_timeout_s=0.1, body_timeout_s=0.1, unread_timeout_s=0.1, keep_alive_s=0.1) as server:
        server.backend.answer = silent
        with connect(server) as connection:
            connection.sendall(request_bytes(prompt=[1], max_tokens=2))
            server.until(lambda: len(server.backend.generations) == 1)
            with connect(server) as dawdler:  # once this one is turned away, every bound has passed
                assert read_to_end(dawdler).startswith(b"HTTP/1.1 408 ")
            with connect(server) as dawdler:
                assert read_to_end(dawdler).startswith(b"HTTP/1.1 408 ")
            server.call(echo, server.backend.generations[0])
            assert read_response(connection)[0] == 200


def test_connections_beyond_the_bound_are_turned_away():
    with serving(max_connections=2) as server:
        with connect(server), connect(server):
            server.until(lambda: len(server.app.connections) == 2)
            with connect(server) as third:
                received = read_to_end(third)
                assert received.startswith(b"HTTP/1.1 503 ")
                assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        server.until(lambda: not server.app.connections)
        assert server.post("/v1/completions", prompt=[1])[0] == 200


def test_bodies_that_are_being_read_share_a_bound():
    with serving(max_buffered_body_bytes=50_000) as server, connect(server) as first, connect(server) as second:
        large = request_bytes(prompt=[1], user="x" * 30_000)
        first.sendall(large[:-1])
        server.until(lambda: server.app.answering.num_buffered_body_bytes > 30_000)
        second.sendall(large)
        assert json.loads(read_response(second)[1])["error"]["code"] == "overloaded"
        first.sendall(large[-1:])
        assert read_response(first)[0] == 200
        server.until(lambda: server.app.answering.num_buffered_body_bytes == 0)
        second.sendall(large)
        assert read_response(second)[0] == 200


def test_huge_head_is_refused(server):
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        try:
            for n in range(100):
                connection.sendall(b"x-%d: " % n + b"a" * 4000 + b"\r\n")
            received = read_to_end(connection)
        except (BrokenPipeError, ConnectionResetError):
            received = b"HTTP/1.1 431 "  # it was told, and wrote on regardless
        assert received.startswith(b"HTTP/1.1 431 ")
    assert server.request("GET", "/health")[0] == 200


PARTS = st.sampled_from(
    [
        *(
            b"GET /health HTTP/1.1\r\n",
            b"POST /v1/completions HTTP/1.1\r\n",
            b"HEAD /ready HTTP/1.0\r\n",
            b"PRI * HTTP/2.0\r\n",
        ),
        *(
            b"host: x\r\n",
            b"content-length: 5\r\n",
            b"content-length: -1\r\n",
            b"content-length: 99999999999999999999\r\n",
        ),
        *(b"transfer-encoding: chunked\r\n", b"content-type: application/json\r\n", b"expect: 100-continue\r\n"),
        *(b"upgrade: websocket\r\nconnection: upgrade\r\n", b"x-request-id: \xff\xfe\r\n", b"connection: close\r\n"),
        *(
            b"\r\n",
            b"5\r\nhello\r\n",
            b"0\r\n\r\n",
            b"fffffffff\r\n",
            b"{}",
            b"\x00",
            b"\x16\x03\x01",
            b"GET \xff HTTP/1.1\r\n",
        ),
        *(
            b"GET http://[ HTTP/1.1\r\n",
            b"GET /%zz?%00 HTTP/1.1\r\n",
            b"authorization: Bearer\r\n",
            b'cookie: "=;;\r\n',
        ),
        request_bytes(prompt=[1]),
    ]
)


@given(parts=st.lists(PARTS | st.binary(max_size=20), max_size=8))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nonsense_and_half_closed_sockets_end_in_an_answer_or_a_closed_connection(server, parts):
    with connect(server) as connection:
        try:
            connection.sendall(b"".join(parts))
            connection.shutdown(socket.SHUT_WR)
            received = read_to_end(connection)
        except (BrokenPipeError, ConnectionResetError, OSError):
            received = b""
    assert not received or received.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4", b"HTTP/1.1 100"))
    assert b" 500 " not in received


def test_server_is_well_after_all_that(server):
    server.until(lambda: server.app.answering.num_active == 0)
    assert server.post("/v1/completions", prompt=[1])[0] == 200
