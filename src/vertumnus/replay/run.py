"""A replay from beginning to end: prompts, endpoint, event loop, report."""

import asyncio
import gc
import resource
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from secrets import token_hex
from time import perf_counter
from typing import Any, TypeVar

import aiohttp
import numpy as np

from vertumnus.core.slo import Slo
from vertumnus.errors import ConfigError
from vertumnus.replay.blocks import fully_named, scaled_lengths
from vertumnus.replay.endpoint import Endpoint, base_of, find_endpoint
from vertumnus.replay.load import Load, Progress
from vertumnus.replay.prompts import DEFAULT_VOCAB, Prompts
from vertumnus.replay.report import Report
from vertumnus.workload.trace import MAX_TOKENS, Trace

MAX_DURATION_S = 7 * 86_400
MAX_RATE_PER_S = 100_000.0

KEEP_ALIVE_S = 2.0
"""Idle connections are used again for so long only: common servers close theirs after 5 s, and a request that meets the
closing would count as a failure."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How a trace is played.

    rate_per_s: mean arrival rate to rescale to; None keeps the trace's.
    length_scale: see `blocks.scaled_lengths`. output_tokens: asked of every request; None asks what the trace says.
    model: None takes the one that the endpoint lists. vocab: prompts have token ids below it.
    concurrency_limit: requests under way at most; None leaves the loop open.
    warmup_s: requests scheduled earlier are sent and counted, but not measured.
    """

    url: str
    rate_per_s: float | None = None
    length_scale: float = 1.0
    output_tokens: int | None = None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    seed: int = 0
    vocab: int = DEFAULT_VOCAB
    concurrency_limit: int | None = None
    timeout_s: float = 600.0
    warmup_s: float = 0.0
    slo: Slo = field(default_factory=Slo)

    def __post_init__(self) -> None:
        base_of(self.url)
        if self.rate_per_s is not None and not 0 < self.rate_per_s <= MAX_RATE_PER_S:
            raise ConfigError(
                f"rate is {self.rate_per_s:g}; accepted: above 0, and at most {MAX_RATE_PER_S:,.0f} requests/s"
            )
        if self.output_tokens is not None and not 1 <= self.output_tokens <= MAX_TOKENS:
            raise ConfigError(f"output-tokens is {self.output_tokens}; accepted: 1 to {MAX_TOKENS:,}, or trace")
        if self.concurrency_limit is not None and self.concurrency_limit < 1:
            raise ConfigError(f"concurrency-limit is {self.concurrency_limit}; accepted: 1 or more")
        if not 0 < self.timeout_s <= MAX_DURATION_S:
            raise ConfigError(f"timeout is {self.timeout_s:g}; accepted: above 0 and at most {MAX_DURATION_S:,} s")

    def to_json(self) -> dict[str, Any]:
        """Without the key."""
        return {
            "length_scale": self.length_scale,
            "output_tokens": self.output_tokens or "trace",
            "seed": self.seed,
            "vocab": self.vocab,
            "concurrency_limit": self.concurrency_limit,
            "timeout_s": self.timeout_s,
            "warmup_s": self.warmup_s,
            "slo": str(self.slo),
        }


def as_played(trace: Trace, settings: ReplaySettings) -> Trace:
    """The trace with every block named, at the rate and lengths of the settings, and at least one token of output.

    Raises ConfigError where it would take longer than a week.
    """
    trace = scaled_lengths(fully_named(trace), settings.length_scale)
    if settings.rate_per_s is not None:
        trace = trace.rescaled(settings.rate_per_s)
    if settings.output_tokens is not None:
        trace = replace(trace, output_tokens=np.full(trace.num_requests, settings.output_tokens))
    if trace.duration_s > MAX_DURATION_S:
        raise ConfigError(
            f"trace lasts {trace.duration_s:,.0f} s as played; accepted: at most a week (--limit, or a higher --rate)"
        )
    return trace


def replay(
    trace: Trace,
    settings: ReplaySettings,
    *,
    on_start: Callable[[Endpoint], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Plays a trace against a live endpoint; blocks until the last answer, or until SIGINT or SIGTERM.

    Raises ConfigError, before anything of the trace is sent, for what cannot be played and for an address behind
    which no fitting endpoint answers.
    """
    played_trace = as_played(trace, settings)
    prompts = Prompts(played_trace, seed=settings.seed, vocab=settings.vocab)
    _allow_many_sockets()

    async def run() -> Report:
        async with _session(settings) as session:
            probe = (prompts.low, settings.vocab - 1)
            endpoint = await find_endpoint(session, settings.url, settings.model, probe)
            if on_start is not None:
                on_start(endpoint)
            load = Load(
                played_trace,
                prompts,
                endpoint,
                session,
                concurrency_limit=settings.concurrency_limit,
                request_id_prefix=f"replay-{token_hex(4)}",
            )
            start_s = perf_counter()
            with _interrupts() as interrupt, _few_collections():
                played = await load.play(interrupt, on_progress)
            wall_s = perf_counter() - start_s
        return Report(
            trace=played_trace,
            endpoint=endpoint,
            played=played,
            slo=settings.slo,
            warmup_s=settings.warmup_s,
            wall_s=wall_s,
        )

    return _run(run())


def _run(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs to the end on uvloop, which takes half the time of asyncio's own loop, or on that where it is missing."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def _session(settings: ReplaySettings) -> aiohttp.ClientSession:
    """Connections without a limit: how many requests are under way is for the trace to say."""
    headers = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def _allow_many_sockets() -> None:
    """Raises the soft limit of open files to the hard one: thousands of streams may be open at once."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _interrupts() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one ends the program as ever."""
    interrupt = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        interrupt.set()
        release()

    def release() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)

    # Only the main thread may, and elsewhere nobody sends signals.
    with suppress(ValueError, RuntimeError):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
    try:
        yield interrupt
    finally:
        release()


@contextmanager
def _few_collections() -> Iterator[None]:
    """Makes garbage collections rare: one over everything takes longer than a request may be late."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
