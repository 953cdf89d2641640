"""The ASGI application: who is asked what, and every refusal in OpenAI's shape."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from vertumnus.errors import VertumnusError
from vertumnus.serve.http.access import COOKIE_NAME, Access
from vertumnus.serve.http.admin import admin_routes
from vertumnus.serve.http.answering import Answering
from vertumnus.serve.http.api_error import ApiError, ClientGone, internal_error, invalid, seen_by_client
from vertumnus.serve.http.backend import Backend
from vertumnus.serve.http.config import HttpConfig
from vertumnus.serve.http.dashboard import dashboard_file
from vertumnus.serve.http.exchange import Exchange, Receive, Scope, Send
from vertumnus.serve.http.openapi import openapi_document
from vertumnus.serve.http.tokeniser import Tokeniser

__all__ = ["HttpApp", "create_app"]

LOG = logging.getLogger(__name__)

MAX_ADMIN_BODY_BYTES = 1 << 16

PROBED = frozenset({"/health", "/ready", "/metrics", "/v1/models"})
"""What load balancers and monitors also ask for by HEAD."""


def create_app(backend: Backend, tokeniser: Tokeniser, config: HttpConfig) -> "HttpApp":
    """The front end of a pool, to be run by `serve_http` or any ASGI server."""
    return HttpApp(backend, tokeniser, config)


class HttpApp:
    """Models' requests are answered here, as short as it goes; everything else is FastAPI's."""

    def __init__(self, backend: Backend, tokeniser: Tokeniser, config: HttpConfig) -> None:
        self._access = Access(config)
        self._config = config
        self.answering = Answering(backend, tokeniser, self._access, config)
        self.is_over = asyncio.Event()
        """Set when streams that have no end of their own are to end."""
        self.note_error = backend.http_error
        """Of what is refused before it is a request."""
        self.connections: Collection[Any] = ()
        """Those that are open, of the server that runs this."""
        self._posts: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "/v1/completions": self.answering.completion,
            "/v1/chat/completions": self.answering.chat,
        }
        self.api = _api(backend, self.answering, self._access, config, self.is_over)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] != "http":
            raise NotImplementedError(f"no {scope['type']} here")
        exchange = Exchange(scope, receive, send)
        post = self._posts.get(scope["path"])
        if post is not None and scope["method"] == "POST":
            return await post(exchange)
        try:
            await self._answer_other(exchange, send)
        except ClientGone:
            pass
        except (ApiError, VertumnusError) as error:
            await self._refuse(exchange, error if isinstance(error, ApiError) else seen_by_client(error))
        except Exception:
            LOG.exception("request %s failed", exchange.request_id)
            if exchange.status is not None:
                raise  # the server breaks the connection: nothing else tells the client that the answer is cut
            await self._refuse(exchange, internal_error())

    async def _refuse(self, exchange: Exchange, error: ApiError) -> None:
        self.note_error(error.status, error.shown_code)
        await exchange.refuse(error)

    async def _answer_other(self, exchange: Exchange, send: Send) -> None:
        path = exchange.path
        if path in self._posts:
            raise _wrong_method(exchange, "POST")
        if path.startswith("/v1/"):
            self._access.tenant(exchange)
        elif path.startswith("/admin") or (path == "/metrics" and not self._config.has_public_metrics):
            self._access.check_control(exchange)
        receive = exchange.receive
        if exchange.method == "POST":
            body = await exchange.read_json_body(MAX_ADMIN_BODY_BYTES)
            receive = _replay(body, exchange.receive)

        async def send_with_id(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", exchange.request_id.encode())]
            await send(message)

        exchange.scope["vertumnus"] = exchange
        scope = exchange.scope
        if exchange.method == "HEAD" and path in PROBED:
            scope = {**scope, "method": "GET"}  # whoever sends the answer knows that it goes without its body
        await self.api(scope, receive, send_with_id)


def _api(backend: Backend, answering: Answering, access: Access, config: HttpConfig, is_over: asyncio.Event) -> FastAPI:
    api = FastAPI(title="Vertumnus", docs_url=None, redoc_url=None, redirect_slashes=False)

    @api.get("/v1/models", tags=["models"], summary="The one model that is served")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(config)]})

    @api.get("/v1/models/{name:path}", tags=["models"], summary="The model, if it is the one that is served")
    async def model(name: str) -> Response:
        if name != config.model_name:
            raise ApiError(404, "there is no such model here", param="model", code="model_not_found")
        return _json(_model(config))

    @api.get("/health", tags=["probes"], summary="The process lives")
    async def health() -> Response:
        return _json({"status": "ok"})

    @api.get("/ready", tags=["probes"], summary="New requests are taken", responses={503: {"description": "Not now"}})
    async def ready() -> Response:
        if answering.is_draining:
            return _json({"status": "draining"}, 503)
        return _json({"status": "ok"}) if backend.is_ready else _json({"status": "not ready"}, 503)

    @api.get("/metrics", tags=["operator"], summary="In Prometheus' text format", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(backend.metrics_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/dashboard", include_in_schema=False)
    async def dashboard(request: Request, token: str | None = None) -> Response:
        if token is None:
            return dashboard_file(config.dashboard_folder, "index.html")
        if not access.is_control_token(token.encode()):
            raise ApiError(403, "the control token is not valid", "permission_error", code="invalid_control_token")
        # Onwards without it, so that it stays out of the address bar and the history.
        answer = RedirectResponse("/dashboard", status_code=303)
        answer.set_cookie(
            COOKIE_NAME, access.cookie, httponly=True, samesite="strict", secure=request.url.scheme == "https"
        )
        return answer

    @api.get("/dashboard/{name}", include_in_schema=False)
    async def dashboard_part(name: str) -> Response:
        return dashboard_file(config.dashboard_folder, name)

    api.include_router(admin_routes(backend, is_over, config.heartbeat_s))
    api.openapi = lambda: openapi_document(api, config)  # type: ignore[method-assign]

    @api.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        backend.http_error(error.status, error.shown_code)
        return Response(error.to_json(), error.status, dict(error.headers), media_type="application/json")

    @api.exception_handler(VertumnusError)
    async def failed(request: Request, error: VertumnusError) -> Response:
        return await refused(request, seen_by_client(error))

    @api.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"][1:])) or None
        return await refused(request, invalid(f"{param or 'the body'}: {first['msg']}", param))

    @api.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> Response:
        exchange: Exchange = request.scope["vertumnus"]
        if error.status_code == 405:
            return await refused(request, _wrong_method(exchange, (error.headers or {}).get("Allow", "")))
        code = "not_found" if error.status_code == 404 else None
        shown = "there is nothing at this path" if error.status_code == 404 else str(error.detail)
        return await refused(request, ApiError(error.status_code, shown, code=code))

    return api


def _model(config: HttpConfig) -> dict[str, Any]:
    return {
        "id": config.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "vertumnus",
        "max_model_len": config.max_context_tokens,
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _wrong_method(exchange: Exchange, allowed: str) -> ApiError:
    message = f"{exchange.path} does not take {exchange.method}"
    return ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body that was read already, then whatever comes after it."""
    is_given = False

    async def replay() -> Any:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
