"""The endpoint that is asked: found, checked with one small request, and the bodies that it accepts."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from vertumnus.errors import ConfigError
from vertumnus.replay.answer import Answer, message_of

FIND_TIMEOUT_S = 60.0
"""For the list of models and the first small request; or the timeout of requests, if that is less."""

ACCEPTED = "the address of a running OpenAI-compatible endpoint, such as http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where completions are asked for, of which model, and whether `ignore_eos` may be sent along."""

    base_url: str
    model: str
    accepts_ignore_eos: bool = True

    @property
    def completions_url(self) -> str:
        return f"{self.base_url}/v1/completions"

    def body(self, prompt: Iterator[bytes], max_tokens: int) -> Iterator[bytes]:
        """The JSON of a streamed, greedy completion of exactly `max_tokens`, in pieces; `prompt` is its token ids."""
        options: dict[str, object] = {
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.accepts_ignore_eos:
            options["ignore_eos"] = True
        yield b'{"model":' + json.dumps(self.model).encode() + b',"prompt":['
        yield from prompt
        yield b"]," + json.dumps(options, separators=(",", ":")).encode()[1:]


def base_of(url: str) -> str:
    """The address without a trailing /v1. Raises ConfigError for what is no HTTP address."""
    text = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or parts.query or parts.fragment:
        raise ConfigError(f"url is {url!r}; accepted: {ACCEPTED}")
    return text


async def find_endpoint(
    session: aiohttp.ClientSession, url: str, model: str | None, probe_tokens: Sequence[int]
) -> Endpoint:
    """The endpoint behind an address, after one request for one token with `probe_tokens` as the prompt.

    Raises ConfigError where there is none, where the model is not among those it lists or must be chosen, and where
    it refuses such a request. `ignore_eos` is left out if only without it the request is accepted. An endpoint that
    is merely overloaded or failing (429, 5xx) is taken: that is for the replay to show.
    """
    base_url = base_of(url)
    try:
        models = await _models(session, base_url)
        endpoint = Endpoint(base_url=base_url, model=_chosen(base_url, model, models))
        return await _probed(session, endpoint, probe_tokens)
    except asyncio.TimeoutError:
        raise ConfigError(f"url is {url!r}, which does not answer in time; accepted: {ACCEPTED}") from None
    except aiohttp.ClientError as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"url is {url!r}, which cannot be talked to ({reason}); accepted: {ACCEPTED}") from None


async def _models(session: aiohttp.ClientSession, base_url: str) -> list[str] | None:
    """Names of the models that the endpoint lists; None where it has no list."""
    url = f"{base_url}/v1/models"
    async with session.get(url, timeout=_timeout(session)) as response:
        text = await response.text(errors="replace")
        if response.status in (401, 403):
            raise _refused(base_url, response.status, text)
        if response.status != 200:
            return None
    try:
        names = [entry["id"] for entry in json.loads(text)["data"]]
        if all(isinstance(name, str) for name in names):
            return names
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ConfigError(f"url is {base_url!r}, whose /v1/models is no list of models; accepted: {ACCEPTED}")


def _chosen(base_url: str, model: str | None, models: list[str] | None) -> str:
    if model is not None:
        if models and model not in models:
            raise ConfigError(f"model is {model!r}; accepted by {base_url}: {_shown(models)}")
        return model
    if models is None:
        raise ConfigError(f"url is {base_url!r}, which lists no models; accepted: {ACCEPTED}, or --model with a name")
    if len(models) != 1:
        raise ConfigError(f"model is not given; accepted by {base_url}: {_shown(models) or 'none, it lists no model'}")
    return models[0]


def _shown(models: list[str]) -> str:
    return ", ".join(models[:10]) + (f" and {len(models) - 10} more" if len(models) > 10 else "")


async def _probed(session: aiohttp.ClientSession, endpoint: Endpoint, tokens: Sequence[int]) -> Endpoint:
    status, text = await _asked(session, endpoint, tokens)
    if status in (400, 422):
        plain = Endpoint(base_url=endpoint.base_url, model=endpoint.model, accepts_ignore_eos=False)
        if (await _asked(session, plain, tokens))[0] == 200:
            return plain
    if 400 <= status < 500 and status not in (408, 425, 429):
        raise _refused(endpoint.base_url, status, text)
    if status < 400 and status != 200:
        raise ConfigError(f"url is {endpoint.base_url!r}, which redirects (HTTP {status}); accepted: {ACCEPTED}")
    return endpoint


async def _asked(session: aiohttp.ClientSession, endpoint: Endpoint, tokens: Sequence[int]) -> tuple[int, str]:
    body = b"".join(endpoint.body(iter([",".join(map(str, tokens)).encode()]), 1))
    headers = {"Content-Type": "application/json"}
    async with session.post(
        endpoint.completions_url, data=body, headers=headers, allow_redirects=False, timeout=_timeout(session)
    ) as response:
        content = await response.read()
        if response.status == 200:
            answer = Answer()
            answer.feed(content, 0.0)
            if response.content_type != "text/event-stream" or answer.is_malformed:
                raise ConfigError(
                    f"url is {endpoint.base_url!r}, which does not stream its completions; accepted: {ACCEPTED}"
                )
        return response.status, content.decode(errors="replace")


def _timeout(session: aiohttp.ClientSession) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=min(FIND_TIMEOUT_S, session.timeout.total or FIND_TIMEOUT_S))


def _refused(base_url: str, status: int, text: str) -> ConfigError:
    try:
        said = message_of(json.loads(text))
    except (ValueError, RecursionError):
        said = message_of(text)
    remedy = {
        401: "an API key that it takes (--api-key-env)",
        403: "an API key that it takes (--api-key-env)",
        404: "an endpoint with /v1/completions, and a model that it serves (--model)",
    }.get(status, "a model that it serves (--model) and token ids below its vocabulary (--vocab)")
    return ConfigError(f"url is {base_url!r}, which refuses completions (HTTP {status}: {said}); accepted: {remedy}")
