"""What a request can end with instead of an answer, and what a pool can fail to start with.

VertumnusError
└── ServeError
    ├── Overloaded          the queues are full: come again after `retry_after_s`
    ├── RequestTooLarge     longer than the model or than any worker's KV memory
    ├── DeadlineExceeded    the request's own deadline passed before it was answered
    ├── ShuttingDown        the server takes nothing new any more
    ├── PoolFailed          the ranks are gone for good
    └── PlanningFailed      an operator's composition, to which no way was planned over a fault of the program
"""

from vertumnus.errors import VertumnusError


class ServeError(VertumnusError):
    """The message is meant for the client: it names no path, token or prompt."""


class Overloaded(ServeError):
    """Nothing was reserved."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTooLarge(ServeError):
    """No worker will ever be able to serve the request."""


class DeadlineExceeded(ServeError):
    """What was reserved for the request has been freed."""


class ShuttingDown(ServeError):
    """Requests that were accepted before are still being answered."""


class PoolFailed(ServeError):
    """Nothing can be served until the server is started again."""


class PlanningFailed(ServeError):
    """The composition stays as it is, and the controller is paused."""
