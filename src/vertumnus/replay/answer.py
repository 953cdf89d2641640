"""A streamed completion as it comes in: server-sent events, read at the price of a substring search each.

An event is one `data:` line that holds a JSON object, as all OpenAI-compatible endpoints send them, or `[DONE]`.
Lines that begin otherwise (comments, event names) and blank ones are passed over.
"""

import json
from typing import Any

MAX_LINE_BYTES = 1 << 24
"""A line that grows beyond this is no event any more."""


class Answer:
    """What one streamed completion has said so far; instants are those passed to `feed`.

    The first token counts as arrived with the first event that has a choice, whatever its text: a token may decode
    to nothing yet. An event may carry several tokens, so their number comes from the usage alone.
    """

    __slots__ = (
        "_rest",
        "cached_tokens",
        "done_s",
        "error",
        "first_s",
        "is_malformed",
        "last_s",
        "num_events",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.done_s: float | None = None
        self.num_events = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.error: str | None = None
        """What an error event said, in the endpoint's words."""
        self.is_malformed = False
        """Whether something that had to be an event was none; nothing is read after it."""
        self._rest = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes in the next bytes of the body, cut wherever they may be."""
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:") and self.done_s is None and not self.is_malformed:
                self._take(line, now_s)
        if len(self._rest) > MAX_LINE_BYTES:
            self.is_malformed = True
            self._rest = b""

    def end(self, now_s: float) -> None:
        """The body is over: a last `[DONE]` counts even without its line's end."""
        if self.done_s is None and self._rest.strip() in (b"data: [DONE]", b"data:[DONE]"):
            self.done_s = now_s

    def _take(self, line: bytes, now_s: float) -> None:
        if self.first_s is not None and b'"usage"' not in line and b'"error"' not in line and b"{" in line:
            # Text cannot look like these keys: its quotes are escaped.
            self.num_events += 1
            self.last_s = now_s
            return
        text = line[5:].strip()
        if text == b"[DONE]":
            self.done_s = now_s
            return
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            self.is_malformed = True
            return
        if event.get("error") or event.get("object") == "error":
            self.error = message_of(event)
            return
        if event.get("choices"):
            self.num_events += 1
            self.last_s = now_s
            if self.first_s is None:
                self.first_s = now_s
        if isinstance(usage := event.get("usage"), dict):
            self._take_usage(usage)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.output_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        self.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def message_of(answer: object) -> str:
    """The sentence in an error object of any of the usual shapes; at most 200 characters, on one line."""
    text = answer
    if isinstance(answer, dict):
        error = answer.get("error")
        text = error.get("message") if isinstance(error, dict) else error
        text = text or answer.get("message") or answer.get("detail") or answer
    line = " ".join(str(text).split())
    return line if len(line) <= 200 else f"{line[:197]}..."


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
