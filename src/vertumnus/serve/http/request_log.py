"""One JSON line per finished request: who, how much, how long. Never a prompt, a token or a key."""

import logging
import time
from typing import Any

from pydantic_core import to_json

from vertumnus.serve.generation import FinishReason, Generation
from vertumnus.serve.http.exchange import Exchange

__all__ = ["REQUESTS", "log_request"]

REQUESTS = logging.getLogger("vertumnus.serve.requests")
"""The message is the whole line; whoever configures logging adds nothing to it."""


def log_request(
    exchange: Exchange,
    *,
    tenant_name: str | None,
    generation: Generation | None,
    first_token_s: float | None,
    num_tokens: int,
    finish_reason: FinishReason | None,
    error_code: str | None,
) -> None:
    """`error_code`: of what the client was told, or `client_gone`; None for a full answer."""
    if not REQUESTS.isEnabledFor(logging.INFO):
        return
    line: dict[str, Any] = {
        "event": "request",
        "time": round(time.time(), 3),
        "request_id": exchange.request_id,
        "path": exchange.path,
        "status": exchange.status,
        "error": error_code,
        "tenant": tenant_name,
        "total_s": round(time.monotonic() - exchange.started_s, 6),
    }
    if generation is not None:
        line |= {
            "prompt_tokens": len(generation.request.token_ids),
            "cached_tokens": generation.cached_tokens,
            "answer_tokens": num_tokens,
            "first_token_s": None if first_token_s is None else round(first_token_s, 6),
            "finish_reason": None if finish_reason is None else finish_reason.value,
        }
    REQUESTS.info(to_json(line).decode())
