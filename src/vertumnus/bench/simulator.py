"""How many requests the simulator replays per second, and in how much memory; each run in a process of its own."""

import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from vertumnus.core.composition import Composition
from vertumnus.core.profile import load_profile
from vertumnus.sim.simulate import SimulationSettings, simulate
from vertumnus.workload.readers import read_trace
from vertumnus.workload.synthesis import synthesise

NUM_GPUS = 40
RATE_PER_S = 15.0
COMPOSITION = "8x2,4x4,1x8"
BLOCKS_PER_RANK = 1_400
SMALL_REQUESTS = (12_000, 50_000)
LARGE_REQUESTS = (200_000, 1_000_000)


def run(*, trace: str | None = None, seed: int = 0, with_large: bool = False) -> list[dict[str, Any]]:
    """Placement alone, then everything on, at rising numbers of requests; the trace (else a synthesised conversation
    hour) is repeated until there are enough."""
    sizes = SMALL_REQUESTS + (LARGE_REQUESTS if with_large else ())
    return [
        _in_own_process(trace, seed, num_requests, everything) for everything in (False, True) for num_requests in sizes
    ]


def _in_own_process(trace: str | None, seed: int, num_requests: int, everything: bool) -> dict[str, Any]:
    """A fresh process, so that its peak memory is this run's alone."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(_measured, trace, seed, num_requests, everything).result()


def _measured(path: str | None, seed: int, num_requests: int, everything: bool) -> dict[str, Any]:
    trace = synthesise("conversation", seed=seed) if path is None else read_trace(path, seed=seed)
    name = trace.name
    trace = trace.rescaled(RATE_PER_S).repeated(-(-num_requests // trace.num_requests)).limited(num_requests)
    before_bytes = _peak_rss_bytes()
    settings = SimulationSettings(
        num_gpus=NUM_GPUS,
        composition=Composition.parse(COMPOSITION),
        is_fixed=not everything,
        has_replication=everything,
        blocks_per_rank=BLOCKS_PER_RANK,
        seed=seed,
    )
    begin_s = time.perf_counter()
    result = simulate(trace, load_profile(), "vertumnus", settings)
    wall_s = time.perf_counter() - begin_s
    return {
        "num_requests": result.num_requests,
        "num_gpus": NUM_GPUS,
        "wall_s": wall_s,
        "requests_per_s": result.num_requests / wall_s,
        "peak_rss_bytes": _peak_rss_bytes(),
        "trace_rss_bytes": before_bytes,
        "variant": "everything on" if everything else "placement alone",
        "trace": name,
        "rate_per_s": RATE_PER_S,
        "composition": COMPOSITION,
        "mean_ttft_s": result.latency.mean_ttft_s,
    }


def _peak_rss_bytes() -> int:
    """Highest resident set so far; the system counts in KiB, on macOS in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
