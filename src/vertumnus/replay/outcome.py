"""How one request of a replay ended, seen from the client."""

from dataclasses import dataclass

# Kinds of failure, beside `http_STATUS`.
CONNECT = "connect"  # no connection came about
DISCONNECTED = "disconnected"  # the connection ended before the head of an answer
BROKEN_STREAM = "broken_stream"  # the answer began and ended without [DONE]
SERVER_ERROR = "server_error"  # an error event in the stream
BAD_ANSWER = "bad_answer"  # no HTTP, no event stream, or an event that is none
TIMEOUT = "timeout"
GENERATOR = "generator"  # this machine had no socket or port left: nothing that the endpoint did


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request that was sent. Instants count from the start of the replay; durations from `sent_s`.

    scheduled_s: when the trace wanted it sent; ready_s: the same, or later where the concurrency limit held it back.
    sent_s: when it was handed to the connection (or a connection began to be made for it).
    ttft_s, last_token_s, e2e_s: until the first token, the last token, and the end of the stream.
    output_tokens, prompt_tokens, cached_tokens: as the endpoint's usage has them; None where it has none.
    error: None where the answer came in full; else the kind of failure.
    is_unfinished: the replay was interrupted while it was under way.
    """

    index: int
    scheduled_s: float
    ready_s: float
    sent_s: float
    input_tokens: int
    max_tokens: int
    ttft_s: float | None = None
    last_token_s: float | None = None
    e2e_s: float | None = None
    output_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    is_unfinished: bool = False

    @property
    def is_completed(self) -> bool:
        return self.error is None and not self.is_unfinished

    @property
    def lag_s(self) -> float:
        """How late the generator itself was."""
        return self.sent_s - self.ready_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for an answer of one token or without usage."""
        if self.output_tokens is None or self.output_tokens < 2 or self.last_token_s is None or self.ttft_s is None:
            return None
        return (self.last_token_s - self.ttft_s) / (self.output_tokens - 1)
