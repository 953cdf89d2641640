"""The end of a server: what was accepted is answered, what comes later is refused, and it does end."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.serve.http.fake_backend import echo, silent
from tests.serve.http.servers import MODEL, WAIT_S, events_of, serving

from vertumnus.serve.generation import Token

ROOT = Path(__file__).resolve().parents[3]
BODY = {"model": MODEL, "prompt": [504], "max_tokens": 3}


class Asking(threading.Thread):
    """One request in the background."""

    def __init__(self, server, **body):
        super().__init__()
        self._server, self._body = server, body
        self.start()

    def run(self):
        self.status, self.headers, self.answer = self._server.request("POST", "/v1/completions", BODY | self._body)


@pytest.mark.parametrize("is_stream", [False, True])
def test_accepted_requests_are_answered_and_new_ones_refused(is_stream):
    with serving(drain_timeout_s=WAIT_S) as server:
        server.backend.answer = silent
        asking = Asking(server, stream=is_stream)
        server.until(lambda: len(server.backend.generations) == 1)
        server.begin_stop()
        server.until(lambda: server.app.answering.is_draining)
        assert server.request("GET", "/ready")[0] == 503
        assert server.request("GET", "/health")[0] == 200
        status, _, answer = server.request("POST", "/v1/completions", BODY)
        assert (status, json.loads(answer)["error"]["code"]) == (503, "shutting_down")
        assert len(server.backend.generations) == 1
        server.call(echo, server.backend.generations[0])
        asking.join(WAIT_S)
        assert asking.status == 200
        assert server.backend.cancelled == []


def test_what_takes_too_long_is_given_up_and_told_so():
    with serving(drain_timeout_s=0.1) as server:
        server.backend.answer = silent
        waiting, streaming = Asking(server), Asking(server, stream=True)
        server.until(lambda: len(server.backend.generations) == 2)
        for generation in server.backend.generations:
            server.call(generation.put, Token(504))
    for asking in (waiting, streaming):
        asking.join(WAIT_S)
    assert len(server.backend.cancelled) == 2
    assert (waiting.status, json.loads(waiting.answer)["error"]["code"]) == (503, "shutting_down")
    assert streaming.status == 200
    assert events_of(streaming.answer)[-1]["error"]["code"] == "shutting_down"


def test_idle_connections_do_not_hold_up_the_end():
    with serving() as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        connection.request("GET", "/health")
        assert connection.getresponse().read()
    connection.close()


@pytest.mark.parametrize("begun", [b"", b"POST /v1/c", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"])
def test_requests_that_never_come_whole_do_not_hold_up_the_end(begun, caplog):
    with serving(drain_timeout_s=0.05) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
        connection.sendall(begun)
        server.until(lambda: len(server.app.connections) == 1)
        if b"{" in begun:
            server.until(lambda: server.app.answering.num_active == 1)
    connection.close()
    assert server.app.answering.num_active == 0
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_signal_ends_a_process_after_its_answers_are_out():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "tests.serve.http.serve_on_fd", str(listener.fileno())]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        # The listener holds the connection until the process is up.
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            body = json.dumps(BODY | {"stream": True})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            begun = response.readline() + response.readline()
            process.send_signal(signal.SIGTERM)
            stream = begun + response.read()
        assert events_of(stream)[-1] == "[DONE]"
        _, complaints = process.communicate(timeout=WAIT_S)
        assert (process.returncode, complaints) == (0, "")
    finally:
        process.kill()
        process.communicate()
