"""The OpenAPI document: FastAPI's own, with the models' endpoints that FastAPI does not see."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from vertumnus.serve.http.config import HttpConfig
from vertumnus.serve.http.schemas import ChatRequest, CompletionRequest, prompt_schemas

__all__ = ["openapi_document"]

ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

HEADERS = [
    {
        "name": "x-request-id",
        "in": "header",
        "schema": {"type": "string"},
        "description": "Used where it has 1 to 128 visible ASCII characters.",
    },
    {
        "name": "x-request-deadline-ms",
        "in": "header",
        "schema": {"type": "integer", "minimum": 1, "maximum": 604800000},
    },
    {"name": "x-priority", "in": "header", "schema": {"type": "integer", "minimum": -1000000, "maximum": 1000000}},
]

USAGE = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"],
    "properties": {
        **{name: {"type": "integer", "minimum": 0} for name in ("prompt_tokens", "completion_tokens", "total_tokens")},
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": {"type": "integer"}}},
    },
}


def openapi_document(api: FastAPI, config: HttpConfig) -> dict[str, Any]:
    """Made once, then kept."""
    if api.openapi_schema is None:
        api.openapi_schema = _make(api, config)
    return api.openapi_schema


def _make(api: FastAPI, config: HttpConfig) -> dict[str, Any]:
    document = get_openapi(title=api.title, version="1", routes=api.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    _, found = models_json_schema(
        [(CompletionRequest, "validation"), (ChatRequest, "validation")], ref_template="#/components/schemas/{model}"
    )
    schemas.update(found["$defs"])
    for name in ("CompletionRequest", "ChatRequest"):
        schemas[name]["properties"]["model"]["enum"] = [config.model_name]
    schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"] = prompt_schemas(config.vocab_size)
    schemas["Error"] = ERROR_SCHEMA
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own shape of errors, which nobody gets here
        schemas.pop(name, None)

    paths = document["paths"]
    paths["/v1/completions"] = {"post": _generation("Continues a prompt", "CompletionRequest")}
    paths["/v1/chat/completions"] = {"post": _generation("Answers a conversation", "ChatRequest")}
    document["components"]["securitySchemes"] = {
        "api_key": {"type": "http", "scheme": "bearer", "description": "Needed where the server was given API keys."},
        "control_token": {"type": "http", "scheme": "bearer", "description": "The server's control token."},
    }
    for path, operations in paths.items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status in _refusals(path, operation, config):
                responses.setdefault(status, _error(status))
            if path.startswith("/admin"):
                operation["security"] = [{"control_token": []}]
            elif path.startswith("/v1/") and config.api_keys:
                operation["security"] = [{"api_key": []}]
    return document


def _refusals(path: str, operation: dict[str, Any], config: HttpConfig) -> list[str]:
    statuses = ["500"]
    if path.startswith("/admin") or (path == "/metrics" and not config.has_public_metrics):
        statuses += ["401", "403"]
    if path.startswith("/v1/") and config.api_keys:
        statuses += ["401"]
    if path.startswith("/v1/models/"):
        statuses += ["404"]
    if operation.get("parameters") and "400" not in statuses:
        statuses += ["400"]
    if "requestBody" in operation:
        statuses += ["400", "413", "415"]
        statuses += ["409", "429", "503", "504"] if path.startswith("/admin") else ["404", "429", "503", "504"]
    return statuses


def _error(status: str) -> dict[str, Any]:
    return {
        "description": "Refused" if status < "500" else "Failed",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }


def _generation(summary: str, model: str) -> dict[str, Any]:
    answer = {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            **{name: {"type": "string"} for name in ("id", "object", "model")},
            "created": {"type": "integer"},
            "choices": {"type": "array", "minItems": 1, "maxItems": 1, "items": {"type": "object"}},
            "usage": USAGE,
        },
    }
    return {
        "tags": ["models"],
        "summary": summary,
        "parameters": HEADERS,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{model}"}}},
        },
        "responses": {
            "200": {
                "description": "The whole answer; server-sent events where `stream` is true.",
                "content": {
                    "application/json": {"schema": answer},
                    "text/event-stream": {},
                },
            }
        },
    }
