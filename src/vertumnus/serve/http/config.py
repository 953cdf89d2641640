"""The front end's settings and limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vertumnus.errors import ConfigError

__all__ = ["HttpConfig"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """ConfigError where a field makes no sense.

    model_name: what clients put into `model`. max_context_tokens: prompt and answer together. vocab_size: token ids
    of prompts are below it. stop_token_ids: end an answer unless the request says `ignore_eos`.
    """

    model_name: str
    max_context_tokens: int
    vocab_size: int
    stop_token_ids: frozenset[int] = frozenset()

    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Key to the tenant's name in logs. Empty: everybody is served, as one tenant."""
    control_token: str | None = field(default=None, repr=False)
    """For /admin; None closes it to all."""
    has_public_metrics: bool = True
    """False: /metrics needs the control token too."""
    dashboard_cookie: str | None = None
    """Secret: what a browser holds instead of the control token; None: made up, and good for this process only."""
    dashboard_folder: Path | None = None
    """Its files are served under /dashboard, index.html first; None: there is no dashboard."""

    max_prompt_tokens: int | None = None
    """None: whatever leaves room for one token of answer."""
    max_answer_tokens: int | None = None
    """None: what the prompt leaves of the context."""
    max_body_bytes: int | None = None
    """None: 16 bytes for each token of the context, at least a mebibyte. A body is parsed in one go: 5 ms a mebibyte of
    token ids or text, up to 50 ms for the worst that can be made up."""
    max_buffered_body_bytes: int = 256 * MIB
    """Of all requests that are being read at one time; more are refused as overload."""
    max_stop_strings: int = 4
    max_stop_chars: int = 256
    max_top_logprobs: int = 20
    max_connections: int = 4096
    max_waiting_encodes: int = 256
    """Long texts waiting for the tokeniser's threads; more are refused as overload."""

    header_timeout_s: float = 10.0
    """For a request's head to arrive whole, and for the first one after a connection is made."""
    body_timeout_s: float = 60.0
    """For the body to arrive whole, from the head's end."""
    keep_alive_s: float = 75.0
    """For which an idle connection stays open."""
    unread_timeout_s: float = 30.0
    """A client that takes nothing of what waits for it for so long is cut off."""
    heartbeat_s: float = 15.0
    """A stream with nothing to say for so long sends a comment, so that no proxy takes it for dead."""
    drain_timeout_s: float = 60.0
    """For accepted requests to finish once the server stops."""

    @property
    def body_limit_bytes(self) -> int:
        return self.max_body_bytes or max(MIB, 16 * self.max_context_tokens)

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ConfigError("model_name is empty; accepted: the name clients ask for")
        for name in (
            *("max_context_tokens", "vocab_size", "max_prompt_tokens", "max_answer_tokens", "max_body_bytes"),
            "max_buffered_body_bytes",
            *("max_stop_strings", "max_stop_chars", "max_connections", "max_waiting_encodes"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; accepted: 1 or more")
        for name in ("header_timeout_s", "body_timeout_s", "keep_alive_s", "unread_timeout_s", "heartbeat_s"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value}; accepted: a positive number of seconds")
        if not 0 <= self.drain_timeout_s < float("inf"):
            raise ConfigError(f"drain_timeout_s is {self.drain_timeout_s}; accepted: 0 or more seconds")
        if self.max_top_logprobs < 0:
            raise ConfigError(f"max_top_logprobs is {self.max_top_logprobs}; accepted: 0 or more")
        if self.control_token is not None and not self.control_token:
            raise ConfigError("control_token is empty; accepted: a secret, or none to close /admin")
        if "" in self.api_keys:
            raise ConfigError("api_keys has an empty key; accepted: secrets only")
