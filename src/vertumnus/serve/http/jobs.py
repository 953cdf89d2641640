"""From a request's body to what the pool is asked: parsed, checked against the limits, tokenised."""

import gc
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from vertumnus.engine.step import Sampling
from vertumnus.serve.errors import DeadlineExceeded
from vertumnus.serve.generation import GenerationRequest
from vertumnus.serve.http.api_error import ApiError, invalid
from vertumnus.serve.http.chat_template import ChatTemplateRefusal
from vertumnus.serve.http.config import HttpConfig
from vertumnus.serve.http.exchange import Exchange
from vertumnus.serve.http.schemas import ChatRequest, CompletionRequest, neutral_values
from vertumnus.serve.http.tokeniser import Tokeniser

__all__ = ["Job", "JobReader", "parse"]

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for /v1/completions only: a chat's answer may fill the context."""

MIN_TEMPERATURE = 1e-4
"""Below, logits divided by it overflow, and nothing but the most likely token has a chance: taken as greedy."""

LARGE_BODY_BYTES = 1 << 17

NEUTRAL = {model: neutral_values(model) for model in (CompletionRequest, ChatRequest)}

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`request` goes to the pool; the rest is how its answer is shown."""

    request: GenerationRequest
    is_chat: bool
    is_stream: bool
    has_usage_event: bool
    stops: tuple[str, ...]


def parse(model: type[Model], body: bytes) -> Model:
    """ApiError 400, naming the first field at fault, where the body is not such an object."""
    try:
        if len(body) < LARGE_BODY_BYTES:
            return model.model_validate_json(body)
        with _no_collection():
            return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        if first["type"] == "json_invalid":
            raise invalid(f"the body is no JSON that can be read: {first['msg']}", code="invalid_json") from None
        raise invalid(f"{param or 'the body'}: {first['msg']}", param) from None


@contextmanager
def _no_collection() -> Iterator[None]:
    """A large body of many small lists would set off the garbage collector again and again, with nothing to find:
    most of the time that it holds the loop up."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class JobReader:
    """Holds no state of its own."""

    def __init__(self, tokeniser: Tokeniser, config: HttpConfig) -> None:
        self._tokeniser, self._config = tokeniser, config
        room = config.max_context_tokens - 1
        self._max_prompt_tokens = min(config.max_prompt_tokens or room, room)

    async def completion(self, exchange: Exchange, body: bytes, tenant: bytes) -> Job:
        """Raises ApiError for what is wrong with the request, ServeError where it cannot be taken now."""
        asked = parse(CompletionRequest, body)
        self._check(asked)
        token_ids = await self._prompt_token_ids(asked.prompt)
        return self._job(
            exchange, asked, token_ids, tenant, asked.max_tokens or DEFAULT_COMPLETION_TOKENS, asked.logprobs, False
        )

    async def chat(self, exchange: Exchange, body: bytes, tenant: bytes) -> Job:
        """As `completion`."""
        asked = parse(ChatRequest, body)
        self._check(asked)
        if self._tokeniser.chat_template is None:
            raise invalid("the model has no chat template; use /v1/completions")
        if asked.top_logprobs is not None and not asked.logprobs:
            raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
        if (
            None not in (asked.max_tokens, asked.max_completion_tokens)
            and asked.max_tokens != asked.max_completion_tokens
        ):
            raise invalid("max_tokens and max_completion_tokens differ; use the latter", "max_tokens")
        messages = [_checked_message(message, n) for n, message in enumerate(asked.messages)]
        options = dict(asked.chat_template_kwargs or {})
        for name in ("messages", "tools", "documents"):
            if name in options:
                raise invalid(f"chat_template_kwargs cannot set {name}", "chat_template_kwargs")
        options["add_generation_prompt"] = asked.add_generation_prompt is not False
        try:
            token_ids = await self._tokeniser.encode_chat(messages, options)
        except ChatTemplateRefusal as error:
            raise invalid(f"messages: {error}", "messages") from error
        num_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        max_tokens = asked.max_completion_tokens or asked.max_tokens
        return self._job(exchange, asked, token_ids, tenant, max_tokens, num_logprobs, True)

    def _check(self, asked: CompletionRequest | ChatRequest) -> None:
        if asked.model != self._config.model_name:
            message = f"there is no model {asked.model[:80]!r} here; /v1/models says which there is"
            raise ApiError(404, message, param="model", code="model_not_found")
        neutral = NEUTRAL[type(asked)]
        for name in asked.model_fields_set & neutral.keys():
            value = getattr(asked, name)
            if value is not None and not any(_is_same(value, each) for each in neutral[name]):
                raise invalid(f"{name} is not supported here{_allowed(neutral[name])}", name, "unsupported_field")

    async def _prompt_token_ids(self, prompt: Any) -> "array[int]":
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            if len(prompt) > 1:
                raise invalid("several prompts in one request are not supported; send one each", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return await self._tokeniser.encode(prompt, has_special_tokens=True)
        if not isinstance(prompt, list):
            raise invalid("prompt must be a text or a list of token ids", "prompt")
        vocab_size = self._config.vocab_size
        try:
            token_ids = array("I", prompt)
        except (TypeError, OverflowError):
            raise invalid(f"prompt's token ids must be whole numbers from 0 to {vocab_size - 1}", "prompt") from None
        ids = np.frombuffer(token_ids, np.uint32)
        # Python takes true for 1 and false for 0: only where one of those stands need it be looked at.
        if any(isinstance(prompt[place], bool) for place in np.flatnonzero(ids < 2).tolist()):
            raise invalid("prompt's token ids must be numbers", "prompt")
        if len(ids) and int(ids.max()) >= vocab_size:
            raise invalid(f"prompt has a token id outside the vocabulary; accepted: 0 to {vocab_size - 1}", "prompt")
        return token_ids

    def _job(
        self,
        exchange: Exchange,
        asked: CompletionRequest | ChatRequest,
        token_ids: "array[int]",
        tenant: bytes,
        max_tokens: int | None,
        num_logprobs: int | None,
        is_chat: bool,
    ) -> Job:
        config = self._config
        if num_logprobs is not None and num_logprobs > config.max_top_logprobs:
            name = "top_logprobs" if is_chat else "logprobs"
            raise invalid(f"{name} is {num_logprobs}; accepted: up to {config.max_top_logprobs}", name)
        if asked.stream_options is not None and not asked.stream:
            raise invalid("stream_options needs stream to be true", "stream_options")
        stop_token_ids = frozenset() if asked.ignore_eos else config.stop_token_ids
        if asked.stop_token_ids:
            stop_token_ids |= frozenset(asked.stop_token_ids)
        deadline_s = exchange.deadline_s
        if deadline_s is not None:
            deadline_s -= time.monotonic() - exchange.started_s
            if deadline_s <= 0:
                raise DeadlineExceeded("the request's deadline passed while it was read")
        return Job(
            request=GenerationRequest(
                request_id=exchange.request_id,
                token_ids=token_ids,
                max_tokens=self._answer_tokens(len(token_ids), max_tokens, is_chat),
                sampling=_sampling(asked, config.vocab_size),
                stop_token_ids=stop_token_ids,
                num_top_logprobs=num_logprobs,
                tenant=tenant,
                priority=exchange.priority,
                deadline_s=deadline_s,
            ),
            is_chat=is_chat,
            is_stream=bool(asked.stream),
            has_usage_event=bool(asked.stream_options and asked.stream_options.include_usage),
            stops=self._stops(asked.stop),
        )

    def _answer_tokens(self, num_prompt_tokens: int, max_tokens: int | None, is_chat: bool) -> int:
        config, param = self._config, "messages" if is_chat else "prompt"
        if num_prompt_tokens == 0:
            raise invalid("the prompt has no token", param)
        if num_prompt_tokens > self._max_prompt_tokens:
            message = f"the prompt has {num_prompt_tokens} tokens; accepted: up to {self._max_prompt_tokens}"
            raise invalid(message, param, "context_length_exceeded")
        room = config.max_context_tokens - num_prompt_tokens
        limit = min(room, config.max_answer_tokens or room)
        if max_tokens is None:
            return limit
        if max_tokens > limit:
            why = (
                f"accepted: up to {limit} behind a prompt of {num_prompt_tokens}, in a context of "
                f"{config.max_context_tokens}"
                if limit == room
                else f"accepted: up to {limit}"
            )
            raise invalid(f"max_tokens is {max_tokens}; {why}", "max_tokens", "context_length_exceeded")
        return max_tokens

    def _stops(self, asked: str | list[str] | None) -> tuple[str, ...]:
        stops = (asked,) if isinstance(asked, str) else tuple(asked or ())
        if len(stops) > self._config.max_stop_strings:
            raise invalid(f"stop has {len(stops)} strings; accepted: up to {self._config.max_stop_strings}", "stop")
        for stop in stops:
            if not 0 < len(stop) <= self._config.max_stop_chars:
                raise invalid(
                    f"stop has a string of {len(stop)} characters; accepted: 1 to {self._config.max_stop_chars}", "stop"
                )
        return stops


def _is_same(value: Any, neutral: Any) -> bool:
    """As JSON has it: 1 and 1.0 are the same, true is neither."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _allowed(values: Sequence[Any]) -> str:
    return f"; it can only be {' or '.join(map(repr, values))}" if values else ""


def _sampling(asked: CompletionRequest | ChatRequest, vocab_size: int) -> Sampling:
    temperature = 1.0 if asked.temperature is None else asked.temperature
    if temperature < MIN_TEMPERATURE:
        return Sampling()
    # Without a seed every request draws its own.
    seed = random.getrandbits(63) if asked.seed is None else asked.seed & ((1 << 63) - 1)
    return Sampling(
        temperature=temperature,
        # As much as there is, however large: a number beyond 64 bits could not be sent to the ranks.
        top_k=min(asked.top_k, vocab_size) if asked.top_k is not None and asked.top_k > 0 else None,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        seed=seed,
    )


def _checked_message(message: dict[str, Any], number: int) -> dict[str, Any]:
    """With its content as one text, which is what templates of text models read."""
    where = f"messages.{number}"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise invalid(f"{where}.role must be a text", f"{where}.role")
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise invalid(f"{where}.{name} is not supported here", f"{where}.{name}", "unsupported_field")
    if isinstance(content, list) and content:
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            if not isinstance(text, str):
                raise invalid(f"{where}.content may have parts of type text only", f"{where}.content")
            texts.append(text)
        content = "\n".join(texts)
    if not isinstance(content, str):
        raise invalid(f"{where}.content must be a text or a list of text parts", f"{where}.content")
    return {**message, "content": content}
