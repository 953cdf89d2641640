"""What a client has got to see of an answer so far: text, and log-probabilities in step with it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vertumnus.serve.generation import Token
from vertumnus.serve.http.stop_strings import StopStrings
from vertumnus.serve.http.tokeniser import Tokeniser

__all__ = ["ShownToken", "Transcript"]


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token with the range of the answer's characters that appeared when it came; empty while a character grows."""

    token: Token
    start: int
    end: int


class Transcript:
    """Feed it tokens as they come. `shown` are the tokens whose text is out since it was last taken; only kept where
    `has_tokens`."""

    def __init__(self, tokeniser: Tokeniser, stops: Sequence[str] = (), *, has_tokens: bool = False) -> None:
        self._detokeniser = tokeniser.detokeniser()
        self._stops = StopStrings(stops) if stops else None
        self._has_tokens = has_tokens
        self._held: list[ShownToken] = []
        self._num_chars = 0
        """Of the answer's text, visible or held back."""
        self._num_visible = 0
        self._is_finished = False
        self.num_tokens = 0
        """That the answer took: those after a stop string do not count."""

    @property
    def is_stopped(self) -> bool:
        """A stop string has ended the answer."""
        return self._stops is not None and self._stops.is_stopped

    def feed(self, tokens: Iterable[Token]) -> str:
        """The text that becomes visible."""
        if self._stops is None and not self._has_tokens:
            token_ids = [token.token_id for token in tokens]
            self.num_tokens += len(token_ids)
            return self._detokeniser.feed(token_ids)
        visible = []
        for token in tokens:
            if self.is_stopped:
                break
            self.num_tokens += 1
            text = self._detokeniser.feed((token.token_id,))
            if self._has_tokens:
                self._held.append(ShownToken(token, self._num_chars, self._num_chars + len(text)))
            visible.append(self._see(text))
        return "".join(visible)

    def finish(self) -> str:
        """The rest, once no token comes any more."""
        if self.is_stopped:
            return ""
        self._is_finished = True
        rest = self._see(self._detokeniser.finish())
        if self._stops is not None and not self.is_stopped:
            rest += self._stops.finish()
            self._num_visible = self._num_chars
        return rest

    def take_shown(self) -> list[ShownToken]:
        """The tokens whose text is out; each is given once. Of a stop string's tokens, the one that it starts in."""
        limit = self._num_visible
        if self.is_stopped or self._is_finished:
            shown, self._held = self._held, []
            return [each for each in shown if each.start < limit or not self.is_stopped]
        num_shown = next((n for n, held in enumerate(self._held) if held.end > limit), len(self._held))
        while num_shown and self._held[num_shown - 1].start == self._held[num_shown - 1].end:
            num_shown -= 1  # the beginning of a character, which may yet be a stop string's
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        return shown

    def _see(self, text: str) -> str:
        self._num_chars += len(text)
        visible = text if self._stops is None else self._stops.feed(text)
        self._num_visible += len(visible)
        return visible
