"""Every error that a client gets is told to the pool's metrics once, whoever found it."""

import json

import pytest
from tests.serve.http.fake_backend import fails, refuses, silent
from tests.serve.http.servers import MODEL, serving
from tests.serve.http.test_connections import connect, read_to_end, request_bytes

from vertumnus.serve import errors

COMPLETION = json.dumps({"model": MODEL, "prompt": [1]}).encode()


@pytest.fixture(scope="module")
def server():
    with serving(api_keys={"key": "us"}, control_token="control-secret", max_body_bytes=10_000) as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(server):
    server.backend.__init__()


@pytest.mark.parametrize(
    ("method", "path", "body", "token", "expected"),
    [
        ("POST", "/v1/completions", COMPLETION, "other", (401, "invalid_api_key")),
        ("POST", "/v1/completions", b"{", "key", (400, "invalid_json")),
        ("POST", "/v1/completions", b"{}", "key", (400, "invalid_request_error")),
        ("POST", "/v1/completions", b" " * 10_001, "key", (413, "body_too_large")),
        ("GET", "/v1/completions", None, "key", (405, "method_not_allowed")),
        ("GET", "/v1/models/none", None, "key", (404, "model_not_found")),
        ("GET", "/nothing", None, "key", (404, "not_found")),
        ("GET", "/admin/state", None, "key", (403, "invalid_control_token")),
        ("POST", "/admin/composition", b'{"composition": "busy"}', "control-secret", (409, "refused")),
        ("POST", "/admin/composition", b"{}", "control-secret", (400, "invalid_request_error")),
    ],
)
def test_what_the_front_end_refuses_is_counted(server, method, path, body, token, expected):
    status, _, _ = server.request(method, path, body, {"authorization": f"Bearer {token}"})
    assert status == expected[0]
    assert server.backend.http_errors == [expected]


@pytest.mark.parametrize("behave", [refuses, fails, lambda error: fails(error, token_ids=[504])])
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_the_pool_refuses_is_counted_under_its_status(server, behave, is_stream):
    server.backend.answer = behave(errors.Overloaded("full", retry_after_s=1.0))
    body = {"model": MODEL, "prompt": [1], "stream": is_stream}
    server.request("POST", "/v1/completions", body, {"authorization": "Bearer key"})
    assert server.backend.http_errors == [(429, "overloaded")]


def test_a_whole_answer_is_no_error(server):
    status, _, _ = server.request("POST", "/v1/completions", COMPLETION, {"authorization": "Bearer key"})
    assert (status, server.backend.http_errors) == (200, [])


def test_what_is_no_http_is_counted(server):
    with connect(server) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert b" 400 " in read_to_end(connection)
    assert server.backend.http_errors == [(400, "invalid_http")]


def test_a_client_that_leaves_is_counted(server):
    server.backend.answer = silent
    with connect(server) as connection:
        connection.sendall(request_bytes(headers=["authorization: Bearer key"], prompt=[1]))
        server.until(lambda: len(server.backend.generations) == 1)
    server.until(lambda: server.app.answering.num_active == 0)
    assert server.backend.http_errors == [(499, "client_gone")]
