"""What the official client gets from /v1/chat/completions, and /v1/models."""

import asyncio
import contextlib
import http.client
import json

import openai
import pytest
from tests.serve.http.fake_backend import answers, silent
from tests.serve.http.servers import MODEL, WAIT_S, events_of, serving, tokeniser

TEXT = "Paris — 東京 🙂"


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(server):
    server.backend.__init__(answers(tokens(TEXT), cached_tokens=2))


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def tokens(text):
    return list(tokeniser().encode_now(text, has_special_tokens=False))


USER = {"role": "user", "content": "Where?"}


def test_conversation_becomes_the_model_s_own_prompt(client, server):
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "system", "content": "Be short."}, USER])
    prompt = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    request = server.backend.requests[0]
    assert list(request.token_ids) == tokens(prompt)
    assert request.max_tokens == 8192 - len(tokens(prompt))
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.total_tokens == len(tokens(prompt)) + len(tokens(TEXT))


def test_parts_of_text_are_one_text(client, server):
    parts = [{"type": "text", "text": "Whe"}, {"type": "text", "text": "re?"}]
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Whe\nre?"}])
    first, second = server.backend.requests
    assert first.token_ids == second.token_ids


def test_stream_with_usage_and_logprobs(client):
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[USER],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=3,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == TEXT
    assert chunks[-1].usage.completion_tokens == len(tokens(TEXT))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    entries = [
        entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    assert [entry.logprob for entry in entries] == [-n / 10 for n in range(len(tokens(TEXT)))]
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == TEXT
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_logprobs_without_alternatives(client):
    answer = client.chat.completions.create(model=MODEL, messages=[USER], logprobs=True)
    assert all(entry.top_logprobs == [] for entry in answer.choices[0].logprobs.content)
    assert len(answer.choices[0].logprobs.content) == len(tokens(TEXT))


def test_token_bounds_under_both_names(client, server):
    client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=4)
    client.chat.completions.create(model=MODEL, messages=[USER], max_completion_tokens=5)
    assert [request.max_tokens for request in server.backend.requests] == [4, 5]
    with pytest.raises(openai.BadRequestError, match="differ"):
        client.chat.completions.create(model=MODEL, messages=[USER], max_completion_tokens=5, max_tokens=4)


def test_template_s_own_options(client, server):
    options = {"add_generation_prompt": False, "chat_template_kwargs": {"self": 1, "a b": None}}
    client.chat.completions.create(model=MODEL, messages=[USER], extra_body=options)
    shown = tokeniser().decode(list(server.backend.requests[0].token_ids))
    assert not shown.endswith("assistant\n")


def test_many_streams_at_once_keep_apart(server):
    def answer(generation):
        answers([*generation.request.token_ids])(generation)

    async def run():
        server.backend.answer = answer
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(n):
                stream = await client.completions.create(
                    model=MODEL, prompt=f"number {n} of many", max_tokens=50, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(40)))

    assert asyncio.run(run()) == [f"number {n} of many" for n in range(40)]


def test_first_event_names_the_role_and_the_last_the_reason(server):
    body = {"model": MODEL, "messages": [USER], "stream": True}
    _, _, stream = server.request("POST", "/v1/chat/completions", body)
    *events, done = events_of(stream)
    assert done == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_stream_that_waits_long_says_so_and_goes_on():
    with serving(heartbeat_s=0.05) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        server.backend.answer = silent
        # The response begins with the first heartbeat: no token exists yet.
        stream = client.chat.completions.create(model=MODEL, messages=[USER], max_tokens=99, stream=True)
        (generation,) = server.backend.generations
        server.call(answers(tokens(TEXT)), generation)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TEXT


def test_heartbeats_are_comments_between_events(server):
    with serving(heartbeat_s=0.02) as server:
        server.backend.answer = silent
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as connection:
            body = json.dumps({"model": MODEL, "prompt": [5], "stream": True})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            assert [response.readline() for _ in range(4)] == [b": waiting\n", b"\n", b": waiting\n", b"\n"]
            server.call(answers(tokens(TEXT)), server.backend.generations[0])
            rest = response.read()
    events = b"\n\n".join(part for part in rest.split(b"\n\n") if not part.startswith(b":"))
    assert events_of(events)[-1] == "[DONE]"
