"""Server-sent events, however they are cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vertumnus.replay.answer import Answer, message_of

USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
TEXTS = st.text(st.sampled_from('usage"error:{}\\\n é[DONE]data'), max_size=12)


def stream_of(texts, newline="\n", usage=USAGE, ends=True):
    events = [{"choices": [{"index": 0, "text": text}], "usage": None} for text in texts]
    events += [{"choices": [], "usage": usage}] if usage else []
    lines = [f": ping{newline}", *(f"data: {json.dumps(event, ensure_ascii=False)}{newline * 2}" for event in events)]
    return "".join(lines + [f"data: [DONE]{newline * 2}"] * ends).encode()


def fed(data, cuts=()):
    """An answer that got the bytes cut at these places, a second apart."""
    answer = Answer()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for second, (start, end) in enumerate(pairwise(edges)):
        answer.feed(data[start:end], float(second))
    return answer


@given(
    texts=st.lists(TEXTS, min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
    newline=st.sampled_from(["\n", "\r\n"]),
    usage=st.sampled_from([USAGE, None]),
)
def test_cuts_change_nothing_but_the_instants(texts, cuts, newline, usage):
    answer = fed(stream_of(texts, newline, usage), cuts)
    assert answer.num_events == len(texts)
    assert (answer.output_tokens is not None) == (usage is not None)
    assert not answer.is_malformed
    assert answer.error is None
    assert answer.first_s <= answer.last_s <= answer.done_s
    if usage:
        assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (7, 5, 4)


@given(texts=st.lists(TEXTS, min_size=1, max_size=6), data=st.data())
def test_a_stream_cut_short_is_not_done(texts, data):
    whole = stream_of(texts)
    end = data.draw(st.integers(0, len(whole) - len("\n\n") - 1))
    assert fed(whole[:end]).done_s is None


def test_the_last_line_needs_no_end():
    answer = fed(stream_of(["a"]).rstrip())
    assert answer.done_s is None
    answer.end(3.0)
    assert answer.done_s == 3.0


def test_a_cut_event_at_the_end_is_no_end():
    answer = fed(stream_of(["a"])[:-4])
    answer.end(3.0)
    assert answer.done_s is None


@given(st.binary(max_size=200))
def test_garbage_never_raises(data):
    fed(b"data:" + data + b"\n")


def test_the_first_token_is_the_first_choice_even_if_its_text_is_empty():
    answer = Answer()
    answer.feed(b'data: {"choices": []}\n\n', 1.0)
    assert answer.first_s is None
    answer.feed(b'data: {"choices": [{"text": ""}]}\n\n', 2.0)
    answer.feed(b'data: {"choices": [{"text": "a b c"}]}\n\n', 5.0)
    assert (answer.first_s, answer.last_s) == (2.0, 5.0)


def test_usage_that_comes_with_every_event_is_the_last_one():
    answer = Answer()
    for count in (1, 2, 3):
        event = {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 9, "completion_tokens": count}}
        answer.feed(f"data: {json.dumps(event)}\n\n".encode(), float(count))
    assert (answer.output_tokens, answer.cached_tokens, answer.last_s) == (3, None, 3.0)


@pytest.mark.parametrize(
    "event",
    [{"error": {"message": "lost a rank"}}, {"error": "lost a rank"}, {"object": "error", "message": "lost a rank"}],
)
def test_error_events_of_every_shape_are_seen_before_and_after_the_first_token(event):
    line = f"data: {json.dumps(event)}\n\n".encode()
    for before in (b"", stream_of(["a", "b"], usage=None, ends=False)):
        assert fed(before + line).error == "lost a rank"


@pytest.mark.parametrize(
    "line", [b"data: {broken\n", b"data: [1]\n", b"data: \xff\n", b"data: " + b"[" * 100_000 + b"\n"]
)
def test_an_event_that_is_none_is_malformed(line):
    answer = fed(line)
    assert answer.is_malformed
    answer.feed(stream_of(["late"]), 9.0)
    assert answer.first_s is None


def test_messages_are_one_short_line():
    assert message_of({"detail": "no\n such  thing"}) == "no such thing"
    assert len(message_of("x" * 1000)) == 200
