"""A pool without ranks: answers as it is told to, and remembers what it was asked."""

import asyncio

from vertumnus.errors import ConfigError
from vertumnus.serve.generation import FinishReason, Generation, Token


def echo(generation):
    """The prompt's own tokens, over and over."""
    prompt = generation.request.token_ids
    answers([prompt[n % len(prompt)] for n in range(generation.request.max_tokens)])(generation)


def answers(token_ids, cached_tokens=0):
    """These tokens at once, then the end. A token's log-probability is minus a tenth of its place."""

    def answer(generation):
        generation.cached_tokens = cached_tokens
        for n, token_id in enumerate(token_ids):
            if token_id in generation.request.stop_token_ids:
                return generation.end(FinishReason.STOP)
            if n == generation.request.max_tokens:
                break
            generation.put(scripted_token(generation, n, token_id))
        return generation.end(FinishReason.LENGTH)

    return answer


def scripted_token(generation, n, token_id):
    num_top = generation.request.num_top_logprobs
    if num_top is None:
        return Token(token_id)
    return Token(token_id, -n / 10, tuple((token_id + k, -n / 10 - k) for k in range(num_top)))


def silent(generation):
    """Nothing, until the test goes on by itself."""


def refuses(error):
    def answer(generation):
        raise error

    return answer


def fails(error, token_ids=()):
    """With an error after these tokens."""

    def answer(generation):
        for token_id in token_ids:
            generation.put(Token(token_id))
        generation.end(error)

    return answer


class FakeBackend:
    """`answer` is called with every new generation before `submit` returns it."""

    def __init__(self, answer=echo):
        self.answer = answer
        self.generations = []
        self.cancelled = []
        self.is_ready = True
        self.calls = []
        self.http_errors = []

    def submit(self, request):
        generation = Generation(request, lambda: self.cancelled.append(request.request_id))
        self.answer(generation)
        self.generations.append(generation)
        return generation

    @property
    def requests(self):
        return [generation.request for generation in self.generations]

    def http_error(self, status, code):
        self.http_errors.append((status, code))

    def describe(self):
        return {"composition": "1x1", "workers": []}

    def decisions(self, limit):
        return [{"decision": n} for n in range(3)][:limit]

    def metrics_text(self):
        return b"# HELP vertumnus_fake nothing\n"

    async def events(self):
        self.calls.append("events")
        try:
            yield {"event": "hello"}
            await asyncio.Event().wait()
        finally:
            self.calls.append("events closed")

    async def set_composition(self, text):
        self.calls.append(("composition", text))
        if text == "9x9":
            raise ConfigError("composition '9x9' has no room; accepted: up to 4 ranks")
        return {"refused": "a change is under way"} if text == "busy" else {"composition": text}

    async def drain(self, worker_id):
        self.calls.append(("drain", worker_id))
        return {"draining": worker_id}

    def resume(self):
        self.calls.append("resume")
        return {"draining": False}

    def pause_controller(self, is_paused):
        self.calls.append(("paused", is_paused))
        return {"paused": is_paused}
