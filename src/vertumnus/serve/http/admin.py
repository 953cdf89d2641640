"""The operator's endpoints. All of them need the control token; the front end has checked it already."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import APIRouter, Query
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse

from vertumnus.serve.http.api_error import ApiError
from vertumnus.serve.http.backend import Backend, Facts
from vertumnus.serve.http.exchange import HEARTBEAT
from vertumnus.serve.http.schemas import CompositionRequest, DrainRequest, PauseRequest, ResumeRequest

__all__ = ["admin_routes"]

MAX_DECISIONS = 10_000


def admin_routes(backend: Backend, is_over: asyncio.Event, heartbeat_s: float) -> APIRouter:
    """`is_over` ends what would never end by itself."""
    router = APIRouter(prefix="/admin", tags=["operator"])

    @router.get("/state", summary="Composition, workers, queues, index and controller")
    async def state() -> Response:
        return _json(backend.describe())

    @router.get("/decisions", summary="The last decisions, newest first")
    async def decisions(limit: int = Query(100, ge=1, le=MAX_DECISIONS)) -> Response:
        return _json({"decisions": backend.decisions(limit)})

    @router.get(
        "/events",
        summary="What happens, as server-sent events",
        responses={200: EVENT_STREAM},
        response_class=StreamingResponse,
    )
    async def events() -> Response:
        stream = _events(backend, is_over, heartbeat_s)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

    @router.post("/composition", summary="Asks for a composition, as COUNTxDEGREE,...")
    async def composition(asked: CompositionRequest) -> Response:
        return _outcome(await backend.set_composition(asked.composition))

    @router.post("/drain", summary="Gives a worker, or the whole pool, no new requests")
    async def drain(asked: DrainRequest) -> Response:
        return _outcome(await backend.drain(asked.worker_id))

    @router.post("/resume", summary="Takes new requests again, after a drain of the whole pool")
    async def resume(asked: ResumeRequest) -> Response:
        return _outcome(backend.resume())

    @router.post("/pause-controller", summary="Stops the controller from changing the composition, or lets it again")
    async def pause_controller(asked: PauseRequest) -> Response:
        return _outcome(backend.pause_controller(asked.paused))

    return router


EVENT_STREAM: dict[str, Any] = {
    "description": "An endless stream; each event is one JSON object.",
    "content": {"text/event-stream": {}},
}


async def _events(backend: Backend, is_over: asyncio.Event, heartbeat_s: float) -> AsyncIterator[bytes]:
    events = backend.events()
    over = asyncio.ensure_future(is_over.wait())
    coming: asyncio.Future[Any] | None = None
    try:
        while True:
            if coming is None:
                coming = asyncio.ensure_future(_next(events))
            await asyncio.wait((coming, over), timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                return
            if not coming.done():
                yield HEARTBEAT
                continue
            event, coming = coming.result(), None
            if event is None:
                return
            yield b"data: " + to_json(event, inf_nan_mode="null") + b"\n\n"
    finally:
        over.cancel()
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, over, return_exceptions=True)
        if isinstance(events, AsyncGenerator):
            await events.aclose()


async def _next(events: AsyncIterator[Facts]) -> Facts | None:
    return await anext(events, None)


def _outcome(facts: dict[str, Any]) -> Response:
    """What was done; 409 where it can't be done now."""
    if "refused" in facts:
        raise ApiError(409, str(facts["refused"]), code="refused")
    return _json(facts)


def _json(value: Any) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")
