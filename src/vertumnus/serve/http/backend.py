"""What the HTTP front end needs of a pool; `serve.live_pool` is one, the tests' scripted one another."""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from vertumnus.serve.generation import Generation, GenerationRequest

__all__ = ["Backend", "Facts"]

Facts = dict[str, Any]
"""What becomes one JSON object: strings, numbers, booleans, None, lists and further objects. Infinity and NaN are
shown as null."""


class Backend(Protocol):
    """Called from the event loop only; what is not `async` returns at once."""

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now has a worker to run on."""

    def submit(self, request: GenerationRequest) -> Generation:
        """Raises a ServeError where the request cannot be taken; nothing is reserved then."""

    def http_error(self, status: int, code: str) -> None:
        """A request over HTTP has got this error, whoever found it, or its client has left it (499, `client_gone`)."""

    def describe(self) -> Facts:
        """Composition, workers, queues, index and controller, for `GET /admin/state`."""

    def decisions(self, limit: int) -> list[Facts]:
        """The last decisions, newest first."""

    def metrics_text(self) -> bytes:
        """Prometheus' text format."""

    def events(self) -> AsyncIterator[Facts]:
        """What the dashboard follows, for as long as it is iterated over; a generator is closed then."""

    async def set_composition(self, text: str) -> Facts:
        """Returns when the change is under way. ConfigError where it can never be; with a string under `refused`, it
        cannot be now."""

    async def drain(self, worker_id: int | None) -> Facts:
        """Stops giving new requests to a worker, None: to any. `refused` as in `set_composition`."""

    def resume(self) -> Facts:
        """Undoes a drain of the whole pool."""

    def pause_controller(self, is_paused: bool) -> Facts:
        """Until it is called again, the composition changes by hand only, or by the controller again."""
