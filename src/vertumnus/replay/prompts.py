"""Token prompts whose sharing is a trace's: equal block ids give equal tokens, different ones part at once.

The tokens of a block follow from (seed, block id) alone. Its leading tokens spell the number that the block has among
those that come after the same block, so two prompts part exactly at the first block in which they differ, whatever
block size the cache of the endpoint has; the others are drawn at random.

Token ids come from [low, vocab): the lowest thousand is left out, where tokenizers keep beginnings, ends, padding and
bytes; the default vocab of 32,000 lies below the special tokens of the models whose own are at the top.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vertumnus.errors import ConfigError
from vertumnus.replay.blocks import siblings
from vertumnus.workload.trace import IntArray, Trace

DEFAULT_VOCAB = 32_000
MIN_VOCAB = 16
MAX_VOCAB = 1 << 20

RESERVED_TOKENS = 1_000
"""Lowest token ids, never used; of a vocabulary below twice as many, its lower half."""

PIECE_TOKENS = 8_192
"""Text is made so many tokens at a time: well below a millisecond's work."""

Words = NDArray[np.uint64]


class Prompts:
    """The prompts of a fully named trace (see `blocks.fully_named`), made when asked for; nothing is kept.

    Raises ConfigError for a vocabulary out of bounds, and where blocks of few tokens cannot all be told apart.
    """

    def __init__(self, trace: Trace, *, seed: int = 0, vocab: int = DEFAULT_VOCAB) -> None:
        if not MIN_VOCAB <= vocab <= MAX_VOCAB:
            raise ConfigError(f"vocab is {vocab}; accepted: {MIN_VOCAB} to {MAX_VOCAB:,} token ids")
        self.low = min(RESERVED_TOKENS, vocab // 2)
        self.span = vocab - self.low
        self._trace = trace
        parent, self._number, tokens = siblings(trace)
        self._num_digits = _num_digits(parent, self._number, self.span)
        spelled = np.minimum(tokens, self._num_digits[parent])
        if (crowded := self._number >= self.span**spelled).any():
            raise ConfigError(
                f"vocab is {vocab}, with which {int(crowded.sum()):,} different blocks of "
                f"{int(spelled[crowded].max())} tokens would come out alike; "
                "accepted: a larger vocab or a larger scale-lengths"
            )
        self._parent = parent
        seed_word = _mixed(np.array([seed], dtype=np.uint64))
        ids = np.arange(len(parent), dtype=np.uint64)
        self._key = _mixed(_mixed(ids + seed_word) ^ seed_word)
        # Where children of one block begin to count: that first children's first tokens are not the same everywhere.
        shift = np.append(self._key, _mixed(seed_word ^ np.uint64(1)))
        self._shift = (shift[parent] % np.uint64(self.span)).astype(np.int64)
        self._cells, self._cell_bytes = _cells(vocab)

    def tokens(self, index: int) -> IntArray:
        """Token ids of one request's prompt; as many as its input_tokens."""
        return np.concatenate(list(self._pieces(index)))

    def text_pieces(self, index: int) -> Iterator[bytes]:
        """The prompt as the inside of a JSON array, in pieces to be joined by nothing.

        Numbers have leading spaces to one width, so that the text comes from a table and not from a loop.
        """
        pending: bytes | None = None
        for tokens in self._pieces(index):
            if pending is not None:
                yield pending
            pending = self._cells[tokens].tobytes()
        assert pending is not None
        yield pending[:-1]  # without the last comma

    def _pieces(self, index: int) -> Iterator[IntArray]:
        """The tokens of a prompt in order, about PIECE_TOKENS at a time."""
        trace = self._trace
        ids = trace.blocks(index)
        num_left = int(trace.input_tokens[index])
        block_tokens = trace.block_tokens
        if block_tokens > PIECE_TOKENS:
            for block_id in ids:
                for start in range(0, min(block_tokens, num_left), PIECE_TOKENS):
                    end = min(start + PIECE_TOKENS, block_tokens, num_left)
                    yield self._block_tokens(np.array([block_id]), start, end)[0]
                num_left -= block_tokens
            return
        step = PIECE_TOKENS // block_tokens
        for first in range(0, len(ids), step):
            # A lone short block, as short prompts are, is made no longer than it is.
            length = min(block_tokens, num_left) if first + 1 == len(ids) else block_tokens
            tokens = self._block_tokens(ids[first : first + step], 0, length).ravel()[:num_left]
            num_left -= len(tokens)
            yield tokens

    def _block_tokens(self, ids: IntArray, start: int, end: int) -> IntArray:
        """Tokens `start` to `end` of each of the blocks; shape (blocks, end - start)."""
        positions = np.arange(start, end, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words = _mixed(self._key[ids][:, None] + positions[None, :])
        tokens = (((words >> np.uint64(32)) * np.uint64(self.span)) >> np.uint64(32)).astype(np.int64)
        num_digits = self._num_digits[self._parent[ids]]
        rest = self._number[ids]
        for place in range(min(end, int(num_digits.max()))):
            rest, digit = np.divmod(rest, self.span)
            if place >= start:
                spelled = (digit + self._shift[ids]) % self.span
                tokens[:, place - start] = np.where(place < num_digits, spelled, tokens[:, place - start])
        tokens += self.low
        return tokens


def _num_digits(parent: IntArray, number: IntArray, span: int) -> IntArray:
    """Per block id, and last for the root: how many tokens tell all that come after it apart."""
    largest = np.zeros(len(parent) + 1, dtype=np.int64)
    np.maximum.at(largest, parent, number)
    digits = np.ones_like(largest)
    while (more := largest >= span).any():
        digits[more] += 1
        largest //= span
    return digits


def _mixed(words: Words) -> Words:
    """Every bit of each word spread over all its bits (the finaliser of SplitMix64); a bijection."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _cells(vocab: int) -> tuple[NDArray[np.void], int]:
    """For every token id its number and a comma, as bytes of one width; and that width."""
    digits = len(str(vocab - 1))
    numbers = np.arange(vocab)
    cells = np.full((vocab, digits + 1), ord(","), dtype=np.uint8)
    for place in range(digits):
        power = 10**place
        digit = (numbers // power) % 10 + ord("0")
        cells[:, digits - 1 - place] = np.where((numbers >= power) | (place == 0), digit, ord(" "))
    return cells.view(np.dtype((np.void, digits + 1)))[:, 0], digits + 1
