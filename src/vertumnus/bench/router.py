"""What the router costs: the live pool and its HTTP front end over ranks that answer at once.

The router is a process of its own; the load comes from this one, by the machinery of `vertumnus replay`. All that a
request takes is then the router's, the generator's and the wire's. On a machine that others use too, CPU time per
request says more than any latency: `cpu_us_per_request` is the router's whole process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from vertumnus.bench.stub_router import VOCAB_SIZE, StubRouter, StubRouterSpec, stub_router
from vertumnus.replay.run import ReplaySettings, replay
from vertumnus.workload.trace import Trace

COMPOSITION = "4x2,2x4"
PROMPT_TOKENS = 4096
BLOCK_TOKENS = 512
TIME_SCALE = 0.001
"""Of the predicted times, so that the control plane expects ranks about as quick as they are, and no overload."""
NUM_SYSTEMS = 64
"""Different beginnings, of half the prompt each."""
ANSWER_TOKENS = 2
"""So that every request is handed over to a decode rank and takes part in one of its steps."""

RATES_PER_S = (100.0, 250.0, 400.0, 800.0)
WARMUP_S = 2.0
NUM_STREAMS = 2000
STREAM_STEP_S = 0.5
STREAM_TOKENS = 40
STREAM_RATE_PER_S = 200.0


def run(
    *, seed: int = 0, duration_s: float = 15.0, rates_per_s: tuple[float, ...] = RATES_PER_S
) -> list[dict[str, Any]]:
    """An entry per offered rate, and one with 2,000 streams open at a time."""
    rows = []
    for rate_per_s in rates_per_s:
        with _router(controller="lookahead", is_followed=False, window_s=5.0) as router:
            rows.append(_loaded(router, rate_per_s, duration_s, seed))
    rows.append(_streams(seed))
    return rows


@contextmanager
def _router(**options: Any) -> Iterator[StubRouter]:
    with stub_router(StubRouterSpec(composition=COMPOSITION, time_scale=TIME_SCALE, **options)) as router:
        yield router


def prompts(num_requests: int, rate_per_s: float, *, num_tokens: int, answer_tokens: int, seed: int) -> Trace:
    """Arrivals by chance; half of every prompt is one of a few beginnings, the other half its own."""
    rng = np.random.default_rng(seed)
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    num_shared = num_blocks // 2
    shared = rng.integers(NUM_SYSTEMS, size=num_requests)[:, None] * num_shared + np.arange(num_shared)
    own = NUM_SYSTEMS * num_shared + np.arange(num_requests * (num_blocks - num_shared)).reshape(num_requests, -1)
    arrival_s = np.cumsum(rng.exponential(1 / rate_per_s, num_requests))
    return Trace(
        name=f"{num_requests} prompts of {num_tokens} tokens",
        block_tokens=BLOCK_TOKENS,
        has_block_ids=True,
        arrival_s=arrival_s - arrival_s[0],
        input_tokens=np.full(num_requests, num_tokens),
        output_tokens=np.full(num_requests, answer_tokens),
        block_ids=np.hstack([shared, own]).ravel(),
        block_offsets=np.arange(num_requests + 1) * num_blocks,
        synthesised=True,
    )


def _loaded(router: StubRouter, rate_per_s: float, duration_s: float, seed: int) -> dict[str, Any]:
    num_requests = round(rate_per_s * (duration_s + WARMUP_S))
    trace = prompts(num_requests, rate_per_s, num_tokens=PROMPT_TOKENS, answer_tokens=ANSWER_TOKENS, seed=seed)
    router.figures()
    found = replay(trace, ReplaySettings(url=router.url, vocab=VOCAB_SIZE, warmup_s=WARMUP_S, seed=seed)).to_json()
    figures = router.figures()
    return {
        "measurement": "open loop",
        "rate_per_s": rate_per_s,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        **_client_side(found),
        **_router_side(figures, num_requests),
    }


def _streams(seed: int) -> dict[str, Any]:
    """Opens 2,000 streams, each of which gets a token twice a second."""
    trace = prompts(NUM_STREAMS, STREAM_RATE_PER_S, num_tokens=512, answer_tokens=STREAM_TOKENS, seed=seed)
    with _router(num_decode_ranks=8, decode_step_s=STREAM_STEP_S) as router:
        before = router.figures()
        found = replay(trace, ReplaySettings(url=router.url, vocab=VOCAB_SIZE, seed=seed)).to_json()
        figures = router.figures()
    return {
        "measurement": "streams held",
        "rate_per_s": STREAM_RATE_PER_S,
        "prompt_tokens": 512,
        "answer_tokens": STREAM_TOKENS,
        "max_in_flight": found["max_in_flight"],
        "rss_bytes_before": before["rss_bytes"],
        **_client_side(found),
        **_router_side(figures, NUM_STREAMS),
    }


def _client_side(found: dict[str, Any]) -> dict[str, Any]:
    names = ("p50_ttft_s", "p99_ttft_s", "p50_e2e_s", "p99_e2e_s", "num_completed", "num_failed", "errors")
    late = ("token_hit_ratio", "p99_lag_s", "p99_loop_stall_s", "generator_was_slow")
    return {name: found[name] for name in (*names, "achieved_rate_per_s", *late)}


def _router_side(figures: dict[str, Any], num_requests: int) -> dict[str, Any]:
    cpu_s = figures["cpu_s"] / num_requests
    left_out = ("now_s", "transitions", "proposals", "composition", "num_open")
    return {
        "cpu_us_per_request": 1e6 * cpu_s,
        "requests_per_cpu_s": 1 / cpu_s,
        **{name: value for name, value in figures.items() if name not in left_out},
    }
