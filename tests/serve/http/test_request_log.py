"""One line per request, as JSON, with nothing in it that a client said."""

import json
import logging

import pytest
from tests.serve.http.fake_backend import fails, refuses
from tests.serve.http.servers import MODEL, serving

from vertumnus.serve.errors import DeadlineExceeded, Overloaded

SECRET = "zanzibar"


@pytest.fixture(scope="module")
def server():
    with serving(api_keys={"key-" + SECRET: "anna"}) as server:
        yield server


def line_of(server, caplog, body, key="key-" + SECRET):
    with caplog.at_level(logging.INFO):
        caplog.clear()
        headers = {"authorization": f"Bearer {key}", "x-request-id": "r1"}
        server.request("POST", "/v1/completions", body, headers)
        server.until(lambda: any(record.name == "vertumnus.serve.requests" for record in caplog.records))
    assert SECRET not in caplog.text
    (line,) = [record.getMessage() for record in caplog.records if record.name == "vertumnus.serve.requests"]
    return json.loads(line)


def test_line_of_a_full_answer(server, caplog):
    server.backend.__init__()
    line = line_of(server, caplog, {"model": MODEL, "prompt": SECRET, "max_tokens": 3, "user": SECRET})
    assert {name: line[name] for name in ("event", "request_id", "path", "status", "error", "tenant")} == {
        "event": "request",
        "request_id": "r1",
        "path": "/v1/completions",
        "status": 200,
        "error": None,
        "tenant": "anna",
    }
    assert (line["answer_tokens"], line["cached_tokens"], line["finish_reason"]) == (3, 0, "length")
    assert line["prompt_tokens"] > 0
    assert 0 <= line["first_token_s"] <= line["total_s"]


@pytest.mark.parametrize(
    ("answer", "is_stream", "status", "error", "num_tokens"),
    [
        (refuses(Overloaded("full", 1)), False, 429, "overloaded", None),
        (fails(DeadlineExceeded("late")), True, 504, "deadline_exceeded", 0),
        (fails(DeadlineExceeded("late"), [504, 505]), True, 200, "deadline_exceeded", 2),
        (fails(RuntimeError("bug")), False, 500, "internal_error", 0),
    ],
)
def test_line_of_a_failure(server, caplog, answer, is_stream, status, error, num_tokens):
    server.backend.__init__(answer)
    line = line_of(server, caplog, {"model": MODEL, "prompt": [1], "stream": is_stream})
    assert (line["status"], line["error"], line.get("answer_tokens")) == (status, error, num_tokens)


def test_line_of_who_was_not_let_in(server, caplog):
    line = line_of(server, caplog, {"model": MODEL, "prompt": [1]}, key="other-" + SECRET)
    assert (line["status"], line["error"], line["tenant"]) == (401, "invalid_api_key", None)
