"""Text and tokens of an answer go together, however the tokens come in batches."""

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.serve.http.servers import VOCAB_SIZE, tokeniser
from tests.serve.http.test_stop_strings import cut_at

from vertumnus.serve.generation import Token
from vertumnus.serve.http.transcript import Transcript

TEXTS = st.lists(st.sampled_from([" the", " cat", " sat.", "é", "東京", "🙂", "\n", "ab", "a", "b"]), max_size=12)
STOPS = st.lists(st.sampled_from(["cat", " c", "東", "京🙂", "aba", "bb", "t s", "🙂", "\n"]), max_size=3)
TOKEN_IDS = TEXTS.map(lambda parts: list(tokeniser().encode_now("".join(parts), has_special_tokens=False))) | st.lists(
    st.integers(0, VOCAB_SIZE - 1), max_size=12
)


@given(token_ids=TOKEN_IDS, stops=STOPS, batches=st.lists(st.integers(1, 4), min_size=12, max_size=12))
def test_batches_of_tokens_show_the_text_up_to_the_first_stop_string_and_its_tokens(token_ids, stops, batches):
    transcript = Transcript(tokeniser(), stops, has_tokens=True)
    tokens = [Token(token_id, -float(n)) for n, token_id in enumerate(token_ids)]
    text, shown = "", []
    for size in [*batches, len(tokens)]:
        batch, tokens = tokens[:size], tokens[size:]
        text += transcript.feed(batch)
        shown += (released := transcript.take_shown())
        assert transcript.is_stopped or all(each.end <= len(text) for each in released)
        if transcript.is_stopped:
            break
    text += transcript.finish()
    shown += transcript.take_shown()

    assert (text, transcript.is_stopped) == cut_at(tokeniser().decode(token_ids), stops)
    assert [each.token.logprob for each in shown] == [-float(n) for n in range(len(shown))]
    assert [each.start for each in shown] == sorted(each.start for each in shown)
    assert transcript.num_tokens >= len(shown)
    if transcript.is_stopped:
        assert all(each.start < len(text) for each in shown)
    else:
        assert len(shown) == transcript.num_tokens == len(token_ids)


@given(token_ids=TOKEN_IDS, stops=STOPS)
@settings(suppress_health_check=[HealthCheck.filter_too_much])
def test_tokens_behind_the_stop_string_do_not_count(token_ids, stops):
    whole = Transcript(tokeniser(), stops)
    whole.feed(map(Token, token_ids))
    assume(whole.is_stopped)  # most are not
    one_by_one = Transcript(tokeniser(), stops)
    num_fed = 0
    while not one_by_one.is_stopped:
        one_by_one.feed([Token(token_ids[num_fed])])
        num_fed += 1
    assert whole.num_tokens == one_by_one.num_tokens == num_fed
