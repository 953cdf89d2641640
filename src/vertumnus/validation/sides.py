"""What became of every request, in the simulator and in the live pool: one entry per request, in order of the trace."""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vertumnus.bench.stub_router import VOCAB_SIZE, StubRouterSpec, stub_pool, stub_router
from vertumnus.core.profile import Profile
from vertumnus.demo.server import running_server
from vertumnus.engine.step import Sampling
from vertumnus.replay.blocks import fully_named
from vertumnus.replay.prompts import Prompts
from vertumnus.replay.report import Report
from vertumnus.replay.run import ReplaySettings, replay
from vertumnus.serve.generation import GenerationRequest
from vertumnus.serve.live_backend import Watch
from vertumnus.serve.live_request import LiveRequest
from vertumnus.serve.telemetry import Telemetry, together
from vertumnus.sim.simulate import Pulls, SimulationSettings, simulate
from vertumnus.validation.virtual_time import run_virtually
from vertumnus.workload.trace import FloatArray, Trace

ANSWER_TOKENS = 2
"""So that every prompt's KV is handed over to a decode rank, as T_ext counts it."""

COPY_LATENCY_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two pools. ttft_s is nan for a request without an answer; degree 0 where nobody has seen it.

    transitions: (seconds since the first arrival, kind) of every split and merge.
    """

    name: str
    arrival_s: FloatArray
    ttft_s: FloatArray
    reused_tokens: FloatArray
    input_tokens: FloatArray
    degree: FloatArray
    num_transitions: int
    lags: dict[str, float]
    """What of the times may be the machine's: how late the load generator and the event loop came, seconds."""


def as_stubs_behave(profile: Profile) -> Profile:
    """The profile with the hardware that stub ranks have: one rate for all copies, no latency before a hand-over, and a
    first token that the prefill step has sampled already."""
    rate = profile.intra_node_bytes_per_s
    return replace(
        profile,
        inter_node_bytes_per_s=rate,
        decode_bytes_per_s=rate,
        copy_latency_s=COPY_LATENCY_S,
        decode_latency_s=0.0,
        first_token_s=0.0,
    )


def spec_of(profile_name: str, profile: Profile, settings: SimulationSettings, block_tokens: int) -> StubRouterSpec:
    """The live pool over stub ranks that `settings` describe. The composition must be given."""
    assert settings.composition is not None
    return StubRouterSpec(
        composition=str(settings.composition),
        profile=profile_name,
        has_service_time=True,
        num_decode_ranks=max(1, settings.num_gpus // 4),
        decode_step_s=0.01,
        copy_s_per_block=block_tokens * profile.kv_bytes_per_token / profile.intra_node_bytes_per_s,
        switch_s=profile.switch_s,
        block_tokens=block_tokens,
        blocks_per_rank=settings.blocks_per_rank or profile.kv_capacity_blocks(block_tokens),
        step_tokens=settings.step_tokens,
        queue=settings.discipline.value,
        controller=None if settings.is_fixed else settings.controller,
        window_s=settings.window_s,
        has_replication=settings.has_replication,
        has_pulls=settings.pulls is Pulls.ANY or (settings.pulls is None and settings.has_replication),
        has_moves=settings.has_moves is not False,
    )


def simulated(trace: Trace, profile: Profile, settings: SimulationSettings) -> Side:
    """Raises ConfigError as `simulate`."""
    result = simulate(trace, profile, "vertumnus", settings)
    records = result.records
    columns = {name: np.full(trace.num_requests, np.nan) for name in ("ttft_s", "reused_tokens", "degree")}
    for name, values in columns.items():
        values[records.request_id] = getattr(records, name)
    return Side(
        name="simulated",
        arrival_s=trace.arrival_s,
        input_tokens=trace.input_tokens.astype(np.float64),
        num_transitions=result.num_splits + result.num_merges,
        lags={},
        **columns,
    )


class _Seen(Telemetry):
    """Where every request was served."""

    def __init__(self, num_requests: int) -> None:
        self.degree = np.zeros(num_requests)
        self.reused_tokens = np.zeros(num_requests)

    def request_ended(self, now_s: float, request: LiveRequest, outcome: str) -> None:
        index = int(request.generation.request.request_id)
        self.degree[index] = request.degree
        self.reused_tokens[index] = request.reused_tokens


def live_virtually(trace: Trace, spec: StubRouterSpec, seed: int) -> Side:
    """The live pool over stub ranks without HTTP, on a virtual clock: what the decisions make of it."""
    return run_virtually(_play_virtually(fully_named(trace), spec, seed))


async def _play_virtually(trace: Trace, spec: StubRouterSpec, seed: int) -> Side:
    prompts = Prompts(trace, seed=seed, vocab=VOCAB_SIZE)
    loop = asyncio.get_running_loop()
    watch, seen = Watch(), _Seen(trace.num_requests)
    object.__setattr__(watch, "telemetry", together([watch.telemetry, seen]))
    pool, _ = stub_pool(spec, watch)
    await pool.start()
    begin_s = loop.time()
    ttft_s = np.full(trace.num_requests, np.nan)

    async def ask(index: int) -> None:
        tokens = array("I", prompts.tokens(index).astype(np.uint32).tobytes())
        asked = GenerationRequest(
            request_id=str(index), token_ids=tokens, max_tokens=ANSWER_TOKENS, sampling=Sampling()
        )
        sent_s = loop.time()
        generation = pool.submit(asked)
        await generation.next_tokens()
        ttft_s[index] = loop.time() - sent_s
        while generation.finish_reason is None:
            await generation.next_tokens()

    tasks = []
    for index, arrival_s in enumerate(trace.arrival_s.tolist()):
        await asyncio.sleep(max(0.0, begin_s + arrival_s - loop.time()))
        tasks.append(loop.create_task(ask(index)))
    await asyncio.gather(*tasks)
    num_transitions = len(pool.control_plane.transitions)
    await pool.close()
    return Side(
        name="live, virtual clock",
        arrival_s=trace.arrival_s,
        ttft_s=ttft_s,
        reused_tokens=seen.reused_tokens,
        input_tokens=trace.input_tokens.astype(np.float64),
        degree=seen.degree,
        num_transitions=num_transitions,
        lags={},
    )


def live_stubs(trace: Trace, spec: StubRouterSpec, seed: int) -> Side:
    """The live pool and its HTTP front end over stub ranks, in a process of their own; seen from the client's side."""
    with stub_router(spec) as router:
        router.figures()
        report = replay(trace, ReplaySettings(url=router.url, vocab=VOCAB_SIZE, output_tokens=ANSWER_TOKENS, seed=seed))
        figures = router.figures()
    lags = {"max_loop_late_s": float(figures["max_loop_late_s"])}
    return _of_report("live, stub ranks", trace, report, len(figures["transitions"]), lags)


def live_model(trace: Trace, arguments: Sequence[str], vocab: int, seed: int, log: Path) -> Side:
    """`vertumnus serve` with these arguments on a real model; seen from the client's side."""
    with running_server([*arguments, "--port", "0"], log) as server:
        report = replay(trace, ReplaySettings(url=server.url, vocab=vocab, output_tokens=ANSWER_TOKENS, seed=seed))
    return _of_report("live, real model", trace, report, 0, {})


def _of_report(name: str, trace: Trace, report: Report, num_transitions: int, lags: dict[str, float]) -> Side:
    columns: dict[str, Any] = {key: np.full(trace.num_requests, np.nan) for key in ("ttft_s", "reused_tokens")}
    for outcome in report.measured:
        columns["ttft_s"][outcome.index] = outcome.ttft_s
        columns["reused_tokens"][outcome.index] = outcome.cached_tokens or 0
    found = report.to_json()
    return Side(
        name=name,
        arrival_s=trace.arrival_s,
        input_tokens=trace.input_tokens.astype(np.float64),
        degree=np.zeros(trace.num_requests),
        num_transitions=num_transitions,
        lags={"p99_lag_s": found["p99_lag_s"], "p99_loop_stall_s": found["p99_loop_stall_s"], **lags},
        **columns,
    )
