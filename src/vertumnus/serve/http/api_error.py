"""Errors as clients see them: OpenAI's JSON object, and the status that goes with it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic_core import to_json

from vertumnus.errors import ConfigError, VertumnusError
from vertumnus.serve.errors import (
    DeadlineExceeded,
    Overloaded,
    PoolFailed,
    RequestTooLarge,
    ServeError,
    ShuttingDown,
)

__all__ = ["ApiError", "ClientGone", "invalid", "seen_by_client"]

INVALID = "invalid_request_error"


class ClientGone(Exception):
    """The client closed its connection: nobody is left to be told anything."""


@dataclass(eq=False)
class ApiError(Exception):
    """`param` names the field of the request that is at fault; `code` is for programs."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown_code(self) -> str:
        """What logs and metrics call it."""
        return self.code or self.type

    def to_json(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return to_json({"error": error})


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def seen_by_client(error: VertumnusError) -> ApiError:
    """What becomes of an error of the pool. A ServeError's and a ConfigError's words are meant for the client."""
    if isinstance(error, Overloaded):
        headers = {
            "retry-after": str(max(1, math.ceil(error.retry_after_s))),
            "retry-after-ms": str(max(1, math.ceil(1000 * error.retry_after_s))),
        }
        return ApiError(429, str(error), "rate_limit_error", code="overloaded", headers=headers)
    if isinstance(error, RequestTooLarge):
        return invalid(str(error), code="context_length_exceeded")
    if isinstance(error, DeadlineExceeded):
        return ApiError(504, str(error), "timeout_error", code="deadline_exceeded")
    if isinstance(error, ShuttingDown):
        return ApiError(503, str(error), "server_error", code="shutting_down", headers={"retry-after": "1"})
    if isinstance(error, PoolFailed):
        return ApiError(503, str(error), "server_error", code="pool_failed")
    if isinstance(error, ServeError):
        return ApiError(500, str(error), "server_error")
    if isinstance(error, ConfigError):
        return invalid(str(error))
    return internal_error()


def internal_error() -> ApiError:
    return ApiError(500, "something broke here; the server's log says what", "server_error", code="internal_error")
