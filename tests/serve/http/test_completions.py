"""What the official client gets from /v1/completions, whole and streamed."""

import json

import openai
import pytest
from tests.serve.http.fake_backend import answers
from tests.serve.http.servers import MODEL, events_of, serving, tokeniser

from vertumnus.serve.generation import FinishReason, Token


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(server):
    server.backend.__init__()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


TEXT = "Once upon a time there was a naïve 東京 café 🙂 at the sea."


def tokens(text):
    return list(tokeniser().encode_now(text, has_special_tokens=True))


def test_text_goes_in_as_tokens_and_comes_out_as_text(client, server):
    server.backend.answer = answers([*tokens(TEXT), 2, 5], cached_tokens=3)
    answer = client.completions.create(model=MODEL, prompt="Hello there", max_tokens=100)
    assert list(server.backend.requests[0].token_ids) == tokens("Hello there")
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(tokens("Hello there"))
    assert answer.usage.completion_tokens == len(tokens(TEXT))
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.model == MODEL
    assert answer.object == "text_completion"


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: [ids]])
def test_token_ids_go_in_as_they_are(client, server, wrap):
    token_ids = [5, 49151, 0, 17]
    answer = client.completions.create(model=MODEL, prompt=wrap(token_ids), max_tokens=4)
    assert list(server.backend.requests[0].token_ids) == token_ids
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4


def test_stream_says_the_same_as_the_whole_answer(client, server):
    server.backend.answer = answers(tokens(TEXT))
    whole = client.completions.create(model=MODEL, prompt="Hi", max_tokens=200)
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="Hi", max_tokens=200, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text == TEXT
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_tokens_are_streamed_as_they_come(client, server):
    """Each token's text is out before the next token exists."""
    expected = tokens(" a b c d")
    server.backend.answer = lambda generation: generation.put(Token(expected[0]))
    seen = []
    for chunk in client.completions.create(model=MODEL, prompt="Hi", max_tokens=9, stream=True):
        seen.append(chunk.choices[0].text)
        generation = server.backend.generations[0]
        if len(seen) < len(expected):
            server.call(generation.put, Token(expected[len(seen)]))
        elif len(seen) == len(expected):
            server.call(generation.end, FinishReason.LENGTH)
    assert seen == [" a", " b", " c", " d", ""]


def test_framing_of_a_stream(server):
    server.backend.answer = answers(tokens("one two"))
    body = {"model": MODEL, "prompt": "Hi", "stream": True}
    status, headers, stream = server.request("POST", "/v1/completions", body)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    events = events_of(stream)
    assert events[-1] == "[DONE]"
    assert all(set(event) == {"id", "object", "created", "model", "choices"} for event in events[:-1])


def test_fields_reach_the_pool(client, server):
    client.completions.create(
        model=MODEL,
        prompt=[1, 2],
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        logprobs=2,
        user="me",
        extra_body={"top_k": 11, "stop_token_ids": [9]},
        extra_headers={"x-request-id": "mine", "x-priority": "-3", "x-request-deadline-ms": "60000"},
    )
    request = server.backend.requests[0]
    assert (request.request_id, request.max_tokens, request.priority) == ("mine", 3, -3)
    assert 0 < request.deadline_s <= 60
    assert (request.sampling.temperature, request.sampling.top_p) == (0.5, 0.9)
    assert (request.sampling.top_k, request.sampling.seed) == (11, 7)
    assert request.stop_token_ids == {2, 9}
    assert request.num_top_logprobs == 2


@pytest.mark.parametrize("top_k", [49152, 49153, 1 << 64, 10**400])
def test_any_top_k_is_one_that_ranks_can_be_told(client, server, top_k):
    """Beyond 64 bits, the step that carries it could not be sent, and its ranks would be taken for broken."""
    client.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_body={"top_k": top_k})
    assert server.backend.requests[0].sampling.top_k == 49152


def test_absent_fields_mean_what_openai_says(client, server):
    client.completions.create(model=MODEL, prompt=[1])
    client.completions.create(model=MODEL, prompt=[1], extra_body={"ignore_eos": True})
    request, ignoring = server.backend.requests
    assert request.max_tokens == 16
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, None)
    assert request.sampling.seed != ignoring.sampling.seed
    assert request.stop_token_ids == {2}
    assert ignoring.stop_token_ids == frozenset()
    assert (request.num_top_logprobs, request.deadline_s, request.priority, request.tenant) == (None, None, 0, b"")


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_string_ends_the_answer_and_frees_the_request(client, server, is_stream):
    def unending(generation):
        for token_id in tokens(" one two three four"):
            generation.put(Token(token_id))

    server.backend.answer = unending
    answer = client.completions.create(model=MODEL, prompt="Hi", max_tokens=99, stop=["thr", "xyz"], stream=is_stream)
    if is_stream:
        chunks = list(answer)
        assert "".join(chunk.choices[0].text for chunk in chunks) == " one two "
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert answer.choices[0].text == " one two "
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == 3
    server.until(lambda: len(server.backend.cancelled) == 1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs_are_in_step_with_the_text(client, server, is_stream):
    token_ids = tokens(TEXT)
    server.backend.answer = answers(token_ids)
    answer = client.completions.create(
        model=MODEL, prompt="Hi", max_tokens=99, logprobs=2, stop="zzz", stream=is_stream
    )
    parts = [chunk.choices[0].logprobs for chunk in answer] if is_stream else [answer.choices[0].logprobs]
    found = [
        row
        for part in parts
        if part
        for row in zip(part.tokens, part.token_logprobs, part.text_offset, part.top_logprobs, strict=True)
    ]
    assert [row[1] for row in found] == [-n / 10 for n in range(len(token_ids))]
    assert [row[0] for row in found if not row[0].startswith("bytes:")]
    assert b"".join(tokeniser().token_bytes(token_id) for token_id in token_ids).decode() == TEXT
    assert [row[2] for row in found] == sorted(row[2] for row in found)
    assert all(1 <= len(row[3]) <= 2 for row in found)


def test_request_id_is_echoed_or_made(server):
    body = {"model": MODEL, "prompt": [1]}
    _, headers, answer = server.request("POST", "/v1/completions", body, {"x-request-id": "abc-1"})
    assert headers["x-request-id"] == "abc-1"
    assert json.loads(answer)["id"] == "cmpl-abc-1"
    made = {server.request("POST", "/v1/completions", body)[1]["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    odd = server.request("POST", "/v1/completions", body, {"x-request-id": "a b" + "c" * 500})[1]["x-request-id"]
    assert " " not in odd


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_impossible_tokens_are_still_json(server, path):
    def answer(generation):
        generation.put(Token(504, float("-inf"), ((504, float("-inf")),)))
        generation.end(FinishReason.LENGTH)

    server.backend.answer = answer
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 1}
    status, found = server.post(path, **(chat if "chat" in path else {"prompt": [1], "logprobs": 1}))
    assert status == 200
    assert json.dumps(found["choices"][0]["logprobs"]).count("-9999.0") == 2
