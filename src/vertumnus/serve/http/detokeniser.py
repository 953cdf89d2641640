"""Token ids to text while they come: a character appears when it is complete, and never changes afterwards."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

__all__ = ["ByteDetokeniser", "Detokeniser", "WindowDetokeniser"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

MAX_HELD_TOKENS = 16
"""A character spans at most four tokens; a tail that is longer and still incomplete is none."""

_Utf8Decoder = getincrementaldecoder("utf-8")


class Detokeniser(Protocol):
    """For one answer. The pieces joined are the text of all tokens decoded at once."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""

    def finish(self) -> str:
        """What is left; broken bytes as replacement characters."""


class ByteDetokeniser:
    """For vocabularies whose every token is a string of bytes, whatever stands around it (byte-level BPE)."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = _Utf8Decoder("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokeniser:
    """For vocabularies where a token's text depends on its neighbours (SentencePiece's spaces and byte fallback).

    Decodes a window that begins a few tokens back: its text without the text of what is out already is new.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._num_out = 0
        """Leading tokens of the window whose text is out."""
        self._text_out = ""

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self._feed, token_ids))

    def _feed(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        num_held = len(self._token_ids) - self._num_out
        if text.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        new = text[len(self._text_out) :]
        if new:  # tokens without a text of their own (special ones) stay behind their neighbours
            del self._token_ids[: self._num_out]
            self._num_out = len(self._token_ids)
            self._text_out = self._decode(self._token_ids)
        elif len(self._token_ids) > 2 * MAX_HELD_TOKENS:
            del self._token_ids[self._num_out :]
        return new

    def finish(self) -> str:
        return self._decode(self._token_ids)[len(self._text_out) :]
