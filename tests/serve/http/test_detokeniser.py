"""Text that comes token by token is the text of all tokens, and never has half a character in it."""

from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.serve.http.servers import VOCAB_SIZE, tokeniser
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vertumnus.serve.http.detokeniser import MAX_HELD_TOKENS, WindowDetokeniser
from vertumnus.serve.http.tokeniser import Tokeniser

TOKEN_IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
BYTE_TOKENS = st.lists(st.integers(17, 17 + 255), max_size=40)  # the alphabet: whole and broken characters alike


@cache
def sentencepiece():
    """As Llama 2 has it: spaces as a low line at a word's start, single bytes for what is not in the vocabulary."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "at", "é", "▁\n", "."]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokeniser(tokenizer)


def pieces_of(detokeniser, token_ids):
    return [*(detokeniser.feed([token_id]) for token_id in token_ids), detokeniser.finish()]


@given(token_ids=TOKEN_IDS | BYTE_TOKENS)
@settings(max_examples=300)
def test_pieces_of_a_byte_level_model_are_its_whole_text(token_ids):
    pieces = pieces_of(tokeniser().detokeniser(), token_ids)
    assert "".join(pieces) == tokeniser().decode(token_ids)
    at_once = tokeniser().detokeniser()
    assert at_once.feed(token_ids) + at_once.finish() == tokeniser().decode(token_ids)


@given(text=st.text(st.characters(codec="utf-8", max_codepoint=0x2FFFF), max_size=60))
def test_no_text_is_ever_shown_with_half_a_character(text):
    token_ids = tokeniser().encode_now(text, has_special_tokens=False)
    assume(tokeniser().decode(token_ids) == text)  # some bytes are in no token of this model
    shown = ""
    for piece in pieces_of(tokeniser().detokeniser(), token_ids):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


def words_and_characters():
    """Token ids of the SentencePiece model: words, and characters of one to four bytes spelt out."""
    character = st.characters(codec="utf-8", exclude_characters="\N{REPLACEMENT CHARACTER}").map(
        lambda each: [1 + byte for byte in each.encode()]
    )
    word = st.integers(257, 264).map(lambda token_id: [token_id])
    return st.lists(character | word, max_size=20).map(lambda parts: [token_id for part in parts for token_id in part])


@given(token_ids=words_and_characters())
@settings(max_examples=300)
def test_pieces_of_a_sentencepiece_model_are_its_whole_text(token_ids):
    pieces = pieces_of(sentencepiece().detokeniser(), token_ids)
    assert "".join(pieces) == sentencepiece().decode(token_ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_sentencepiece_spaces_survive_between_tokens():
    token_ids = [258, 259, 260, 257, 257, 258, 263, 264]
    assert "".join(pieces_of(sentencepiece().detokeniser(), token_ids)) == sentencepiece().decode(token_ids)
    assert pieces_of(sentencepiece().detokeniser(), [258, 259]) == ["the", " cat", ""]


def test_special_tokens_are_left_out():
    assert "".join(pieces_of(tokeniser().detokeniser(), [1, 504, 2])) == tokeniser().decode([504]) != ""


def test_endless_broken_bytes_are_shown_after_a_while_and_kept_short():
    longest = 0

    def decode(token_ids):
        nonlocal longest
        longest = max(longest, len(token_ids))
        return sentencepiece().decode(token_ids)

    detokeniser = WindowDetokeniser(decode)
    for _ in range(50 * MAX_HELD_TOKENS):
        detokeniser.feed([1 + 0x80])
    assert longest <= 4 * MAX_HELD_TOKENS


@pytest.mark.parametrize("token_id", [17, 100, 504, 49151])
def test_bytes_of_a_token_are_its_text(token_id):
    assert tokeniser().token_bytes(token_id).decode(errors="replace") == tokeniser().decode([token_id])
