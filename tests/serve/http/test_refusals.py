"""Every refusal and failure has its status, OpenAI's shape, and names the field; nothing reaches the pool."""

import json

import pytest
from tests.serve.http.fake_backend import fails, refuses
from tests.serve.http.servers import MODEL, events_of, serving

from vertumnus.serve import errors


@pytest.fixture(scope="module")
def server():
    with serving(max_body_bytes=200_000, max_answer_tokens=500, max_prompt_tokens=1000) as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(server):
    server.backend.__init__()


def check_shape(answer):
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    return answer["error"]


COMPLETION = {"model": MODEL, "prompt": [1, 2, 3]}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
DEEP = b'{"model":"smollm2","prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"


def merged(base, **changes):
    return json.dumps(base | changes).encode()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"{", None),
        (b"\xff\xfe{}", None),
        (b'{"model":"smollm2","prompt":"\xff"}', None),
        (b'{"model":"smollm2","prompt":"\\ud800"}', None),
        (DEEP, None),
        (merged(COMPLETION, model=5), "model"),
        (b'{"model":"smollm2"}', "prompt"),
        (merged(COMPLETION, prompt=""), "prompt"),
        (merged(COMPLETION, prompt=[]), "prompt"),
        (merged(COMPLETION, prompt={}), "prompt"),
        (merged(COMPLETION, prompt=None), "prompt"),
        (merged(COMPLETION, prompt=["a", "b"]), "prompt"),
        (merged(COMPLETION, prompt=[[1], [2]]), "prompt"),
        (merged(COMPLETION, prompt=[[[1]]]), "prompt"),
        (merged(COMPLETION, prompt=[1, "a"]), "prompt"),
        (merged(COMPLETION, prompt=[1.0]), "prompt"),
        (merged(COMPLETION, prompt=[5, True]), "prompt"),
        (merged(COMPLETION, prompt=[False]), "prompt"),
        (merged(COMPLETION, prompt=[-1]), "prompt"),
        (merged(COMPLETION, prompt=[49152]), "prompt"),
        (merged(COMPLETION, prompt=[2**70]), "prompt"),
        (merged(COMPLETION, prompt=[1] * 1001), "prompt"),
        (merged(COMPLETION, max_tokens=0), "max_tokens"),
        (merged(COMPLETION, max_tokens=-1), "max_tokens"),
        (merged(COMPLETION, max_tokens=501), "max_tokens"),
        (merged(COMPLETION, max_tokens=2**70), "max_tokens"),
        (merged(COMPLETION, max_tokens=1.5), "max_tokens"),
        (b'{"model":"smollm2","prompt":[1],"max_tokens":' + b"9" * 9000 + b"}", None),
        (b'{"model":"smollm2","prompt":[1],"temperature":1e400}', "temperature"),
        (b'{"model":"smollm2","prompt":[1],"temperature":NaN}', "temperature"),
        (b'{"model":"smollm2","prompt":[1],"temperature":-Infinity}', "temperature"),
        (merged(COMPLETION, temperature=-0.1), "temperature"),
        (merged(COMPLETION, temperature=2.1), "temperature"),
        (merged(COMPLETION, temperature="1"), "temperature"),
        (merged(COMPLETION, top_p=0), "top_p"),
        (merged(COMPLETION, top_p=1.1), "top_p"),
        (merged(COMPLETION, top_k=-2), "top_k"),
        (merged(COMPLETION, seed=2**63), "seed"),
        (merged(COMPLETION, stop=["a"] * 5), "stop"),
        (merged(COMPLETION, stop=""), "stop"),
        (merged(COMPLETION, stop="a" * 257), "stop"),
        (merged(COMPLETION, stop=[1]), "stop"),
        (merged(COMPLETION, stop_token_ids=[1] * 65), "stop_token_ids"),
        (merged(COMPLETION, logprobs=21), "logprobs"),
        (merged(COMPLETION, logprobs=-1), "logprobs"),
        (merged(COMPLETION, stream="yes"), "stream"),
        (merged(COMPLETION, stream_options={"include_usage": True}), "stream_options"),
        (merged(COMPLETION, n=2), "n"),
        (merged(COMPLETION, best_of=3), "best_of"),
        (merged(COMPLETION, echo=True), "echo"),
        (merged(COMPLETION, suffix="x"), "suffix"),
        (merged(COMPLETION, logit_bias={"5": 1}), "logit_bias"),
        (merged(COMPLETION, presence_penalty=0.5), "presence_penalty"),
        (merged(COMPLETION, frequency_penalty=-1), "frequency_penalty"),
        (merged(COMPLETION, response_format={"type": "json_object"}), "response_format"),
        (merged(COMPLETION, guided_regex="a+"), "guided_regex"),
    ],
)
def test_completion_that_makes_no_sense(server, body, param):
    status, _, answer = server.request("POST", "/v1/completions", body)
    error = check_shape(json.loads(answer))
    assert status == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert server.backend.requests == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"smollm2"}', "messages"),
        (merged(CHAT, messages=[]), "messages"),
        (merged(CHAT, messages=[1] * 50_000), "messages"),
        (merged(CHAT, messages=[{}] * 8193), "messages"),
        (merged(CHAT, messages=[{"role": "user"}]), "messages"),
        (merged(CHAT, messages=[{"role": 1, "content": "x"}]), "messages"),
        (merged(CHAT, messages=[{"role": "user", "content": None}]), "messages"),
        (merged(CHAT, messages=[{"role": "user", "content": []}]), "messages"),
        (merged(CHAT, messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages"),
        (merged(CHAT, messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}]), "messages"),
        (merged(CHAT, tools=[{"type": "function"}]), "tools"),
        (merged(CHAT, tool_choice="required"), "tool_choice"),
        (merged(CHAT, top_logprobs=2), "top_logprobs"),
        (merged(CHAT, logprobs=True, top_logprobs=21), "top_logprobs"),
        (merged(CHAT, logprobs=3), "logprobs"),
        (merged(CHAT, reasoning_effort="high"), "reasoning_effort"),
        (merged(CHAT, chat_template="{{ x }}"), "chat_template"),
        (merged(CHAT, chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
        (merged(CHAT, chat_template_kwargs=[]), "chat_template_kwargs"),
    ],
)
def test_chat_that_makes_no_sense(server, body, param):
    status, _, answer = server.request("POST", "/v1/chat/completions", body)
    error = check_shape(json.loads(answer))
    assert status == 400, error
    assert error["param"].split(".")[0] == param
    assert server.backend.requests == []


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1, "best_of": None, "echo": False, "logit_bias": {}, "presence_penalty": 0.0, "suffix": None},
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "what_is_this": [1]},
        {"stop": [], "temperature": None, "stream": None, "max_tokens": None, "stream_options": None, "top_k": 0},
    ],
)
def test_what_changes_nothing_is_accepted(server, harmless):
    assert server.post("/v1/completions", prompt=[5], **harmless)[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/none", 404),
        ("GET", "/dashboard", 404),
        ("GET", "/dashboard/..%2fsecret.html", 404),
        ("GET", "/v1/%ff%00", 404),
    ],
)
def test_paths_and_methods_that_are_not_there(server, method, path, status):
    found, headers, answer = server.request(method, path, b"{}" if method == "POST" else None)
    assert found == status
    check_shape(json.loads(answer))
    assert headers["x-request-id"]
    assert status != 405 or headers["allow"]


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-request-deadline-ms": "soon"}, "x-request-deadline-ms"),
        ({"x-request-deadline-ms": "0"}, "x-request-deadline-ms"),
        ({"x-request-deadline-ms": "9" * 40}, "x-request-deadline-ms"),
        ({"x-priority": "1.5"}, "x-priority"),
        ({"x-priority": str(2**31)}, "x-priority"),
    ],
)
def test_headers_that_make_no_sense(server, headers, param):
    status, _, answer = server.request("POST", "/v1/completions", COMPLETION, headers)
    assert status == 400
    assert check_shape(json.loads(answer))["param"] == param


def test_other_models_and_media_types(server):
    status, answer = server.post("/v1/completions", model="gpt", prompt=[1])
    assert (status, check_shape(answer)["code"]) == (404, "model_not_found")
    status, _, answer = server.request("POST", "/v1/completions", b"prompt=x", {"content-type": "text/plain"})
    assert (status, check_shape(json.loads(answer))["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_large_bodies_are_refused_in_full_view(server, path):
    status, _, answer = server.request("POST", path, b" " * 200_001)
    assert (status, check_shape(json.loads(answer))["code"]) == (413, "body_too_large")
    chunks = iter([b"2710\r\n" + b" " * 10_000 + b"\r\n"] * 21 + [b"0\r\n\r\n"])
    status, _, answer = server.request(
        "POST", path, chunks, {"transfer-encoding": "chunked", "content-type": "application/json"}
    )
    assert (status, check_shape(json.loads(answer))["code"]) == (413, "body_too_large")


FAILURES = [
    (errors.Overloaded("full", retry_after_s=1.2), 429, "overloaded"),
    (errors.RequestTooLarge("too long"), 400, "context_length_exceeded"),
    (errors.DeadlineExceeded("late"), 504, "deadline_exceeded"),
    (errors.ShuttingDown("bye"), 503, "shutting_down"),
    (errors.PoolFailed("gone"), 503, "pool_failed"),
    (errors.ServeError("odd"), 500, None),
    (RuntimeError("a bug with secrets"), 500, "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "code"), FAILURES)
@pytest.mark.parametrize("behave", [refuses, fails])
@pytest.mark.parametrize("is_stream", [False, True])
def test_failures_before_the_first_token_have_their_status(server, error, status, code, behave, is_stream):
    server.backend.answer = behave(error)
    found, headers, answer = server.request("POST", "/v1/completions", COMPLETION | {"stream": is_stream})
    problem = check_shape(json.loads(answer))
    assert (found, problem["code"]) == (status, code)
    assert ("retry-after" in headers) == (status == 429 or code == "shutting_down")
    if status == 429:
        assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1200")
    assert "secrets" not in problem["message"]


@pytest.mark.parametrize(("error", "status", "code"), FAILURES)
def test_failures_in_the_middle_of_a_stream_are_its_last_event(server, error, status, code):
    server.backend.answer = fails(error, token_ids=[504, 505])
    found, _, stream = server.request("POST", "/v1/completions", COMPLETION | {"stream": True})
    assert found == 200
    *first, last = events_of(stream)
    assert len(first) == 1
    assert check_shape(last)["code"] == code


def test_deadline_that_passed_before_the_pool_was_asked(server):
    server.backend.answer = refuses(AssertionError("it was asked"))
    text = "a deadline of one millisecond " * 3000
    status, _, answer = server.request(
        "POST", "/v1/completions", {"model": MODEL, "prompt": text}, {"x-request-deadline-ms": "1"}
    )
    assert status in (400, 504)  # too long a prompt, where a machine tokenises it within the deadline
    check_shape(json.loads(answer))
