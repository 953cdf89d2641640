"""Answers in OpenAI's two shapes, whole and as server-sent events."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from vertumnus.serve.generation import FinishReason
from vertumnus.serve.http.api_error import ApiError
from vertumnus.serve.http.tokeniser import Tokeniser
from vertumnus.serve.http.transcript import ShownToken

__all__ = ["ChatFormat", "CompletionFormat", "DONE", "WireFormat", "error_event", "usage_of"]

DONE = b"data: [DONE]\n\n"

LOWEST_LOGPROB = -9999.0
"""Instead of minus infinity, which JSON does not have; OpenAI's choice."""


def usage_of(num_prompt_tokens: int, num_answer_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_answer_tokens,
        "total_tokens": num_prompt_tokens + num_answer_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def _shown(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.to_json() + b"\n\n"


class WireFormat(ABC):
    """One answer's. What never changes between its events is encoded once."""

    whole_object: str
    event_object: str
    id_prefix: str

    def __init__(
        self, request_id: str, model_name: str, tokeniser: Tokeniser, *, has_usage_event: bool = False
    ) -> None:
        self._tokeniser = tokeniser
        self._head = {"id": self.id_prefix + request_id, "created": int(time.time()), "model": model_name}
        head = to_json({**self._head, "object": self.event_object})
        self._event_head = b"data: " + head[:-1] + b',"choices":'
        self._event_tail = b',"usage":null}\n\n' if has_usage_event else b"}\n\n"

    def whole(
        self, text: str, shown: Sequence[ShownToken] | None, reason: FinishReason, usage: dict[str, Any]
    ) -> bytes:
        """`shown`: the tokens, where log-probabilities were asked for."""
        choice = self._whole_choice(text, self._logprobs(shown), reason.value)
        return to_json({**self._head, "object": self.whole_object, "choices": [choice], "usage": usage})

    def opening(self) -> bytes:
        """The events before the first text."""
        return b""

    def event(self, text: str, shown: Sequence[ShownToken] | None = None, reason: FinishReason | None = None) -> bytes:
        """Further text; with `reason`, the last."""
        logprobs = b"null" if shown is None else to_json(self._logprobs(shown))
        finish = b"null" if reason is None else b'"' + reason.value.encode() + b'"'
        choice = self._event_choice(to_json(text), logprobs, finish)
        return b"".join((self._event_head, choice, self._event_tail))

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        return b"".join((self._event_head, b'[],"usage":', to_json(usage), b"}\n\n"))

    def _logprobs(self, shown: Sequence[ShownToken] | None) -> dict[str, Any] | None:
        return None if shown is None else self._shown_logprobs(shown)

    def _token_text(self, token_id: int) -> str:
        """The token alone; one that is no text by itself by its bytes."""
        token_bytes = self._tokeniser.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    @abstractmethod
    def _whole_choice(self, text: str, logprobs: dict[str, Any] | None, reason: str) -> dict[str, Any]: ...

    @abstractmethod
    def _event_choice(self, text: bytes, logprobs: bytes, reason: bytes) -> bytes:
        """A list of one choice; all arguments are JSON already."""

    @abstractmethod
    def _shown_logprobs(self, shown: Sequence[ShownToken]) -> dict[str, Any]: ...


class CompletionFormat(WireFormat):
    """Of /v1/completions."""

    whole_object = event_object = "text_completion"
    id_prefix = "cmpl-"

    def _whole_choice(self, text: str, logprobs: dict[str, Any] | None, reason: str) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _event_choice(self, text: bytes, logprobs: bytes, reason: bytes) -> bytes:
        return b'[{"index":0,"text":%b,"logprobs":%b,"finish_reason":%b}]' % (text, logprobs, reason)

    def _shown_logprobs(self, shown: Sequence[ShownToken]) -> dict[str, Any]:
        return {
            "tokens": [self._token_text(each.token.token_id) for each in shown],
            "token_logprobs": [_shown(each.token.logprob) for each in shown],
            "top_logprobs": [self._by_text(each.token.top_logprobs) for each in shown],
            "text_offset": [each.start for each in shown],
        }

    def _by_text(self, alternatives: Sequence[tuple[int, float]]) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in alternatives:
            found.setdefault(
                self._token_text(token_id), max(logprob, LOWEST_LOGPROB)
            )  # of two tokens with one text, the likelier
        return found


class ChatFormat(WireFormat):
    """Of /v1/chat/completions."""

    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def opening(self) -> bytes:
        choice = b'[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return b"".join((self._event_head, choice, self._event_tail))

    def _whole_choice(self, text: str, logprobs: dict[str, Any] | None, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _event_choice(self, text: bytes, logprobs: bytes, reason: bytes) -> bytes:
        delta = b'{"content":%b}' % text if text != b'""' or logprobs != b"null" else b"{}"
        return b'[{"index":0,"delta":%b,"logprobs":%b,"finish_reason":%b}]' % (delta, logprobs, reason)

    def _shown_logprobs(self, shown: Sequence[ShownToken]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(each.token.token_id, each.token.logprob),
                    "top_logprobs": [self._entry(*alternative) for alternative in each.token.top_logprobs],
                }
                for each in shown
            ],
            "refusal": None,
        }

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        token_bytes = self._tokeniser.token_bytes(token_id)
        return {"token": self._token_text(token_id), "logprob": _shown(logprob), "bytes": list(token_bytes)}
