"""The operator's endpoints. All of them need the control token; the front end has checked it already."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Query
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from vertumnus.serve.http.api_error import ApiError
from vertumnus.serve.http.backend import Backend
from vertumnus.serve.http.schemas import CompositionRequest, DrainRequest, PauseRequest

__all__ = ["admin_routes"]

MAX_DECISIONS = 10_000


def admin_routes(backend: Backend) -> APIRouter:
    router = APIRouter(prefix="/admin", tags=["operator"])

    @router.get("/state", summary="Composition, workers, queues, index and controller")
    async def state() -> Response:
        return _json(backend.describe())

    @router.get("/decisions", summary="The last decisions, newest first")
    async def decisions(limit: int = Query(100, ge=1, le=MAX_DECISIONS)) -> Response:
        return _json({"decisions": backend.decisions(limit)})

    @router.get("/events", summary="What happens, as server-sent events", responses={200: EVENT_STREAM})
    async def events() -> Response:
        return StreamingResponse(
            _events(backend), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    @router.post("/composition", summary="Asks for a composition, as COUNTxDEGREE,...")
    async def composition(asked: CompositionRequest) -> Response:
        return _outcome(await backend.set_composition(asked.composition))

    @router.post("/drain", summary="Gives a worker, or the whole pool, no new requests")
    async def drain(asked: DrainRequest) -> Response:
        return _outcome(await backend.drain(asked.worker_id))

    @router.post("/pause-controller", summary="Stops the controller from changing the composition, or lets it again")
    async def pause_controller(asked: PauseRequest) -> Response:
        return _outcome(backend.pause_controller(asked.paused))

    return router


EVENT_STREAM: dict[str, Any] = {
    "description": "An endless stream; each event is one JSON object.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


async def _events(backend: Backend) -> AsyncIterator[bytes]:
    async with aclosing(backend.events()) as events:  # type: ignore[type-var]
        async for event in events:
            yield b"data: " + to_json(event) + b"\n\n"


def _outcome(facts: dict[str, Any]) -> Response:
    """What was done; 409 where it can't be done now."""
    if "refused" in facts:
        raise ApiError(409, str(facts["refused"]), code="refused")
    return _json(facts)


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type="application/json")
