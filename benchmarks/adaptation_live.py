"""Whether adapting pays on the live pool: the same phased traffic against fixed compositions and an adaptive one.

    python benchmarks/adaptation_live.py [--virtual] [--plot FILE]

16 stub ranks that sleep E_C (H20-3e profile, estimated coefficients) behind the real pool and its HTTP front end; load
by the machinery of `vertumnus replay`. Phases of many short prompts and phases of fewer long ones, in turn. All pools
run at the same time, each with a router and a load generator of its own, so that what else goes on on the machine meets
all of them alike. Writes benchmarks/results/adaptation-live.json and, of it, a plot.
"""

import argparse
import asyncio
import json
from array import array
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from vertumnus import Trace, synthesise
from vertumnus.bench.environment import environment
from vertumnus.bench.stub_router import VOCAB_SIZE, StubRouterSpec, stub_pool, stub_router
from vertumnus.engine.step import Sampling
from vertumnus.replay.blocks import fully_named
from vertumnus.replay.prompts import Prompts
from vertumnus.replay.run import ReplaySettings, replay
from vertumnus.serve.generation import GenerationRequest
from vertumnus.serve.live_backend import Watch
from vertumnus.serve.virtual_time import run_virtually
from vertumnus.workload.trace import FloatArray

RESULT = Path(__file__).parent / "results" / "adaptation-live.json"
VARIANTS = (("adaptive", "16x1", True), ("16x1", "16x1", False), ("8x2", "8x2", False), ("4x4", "4x4", False))
PHASE_S = 75.0
NUM_PHASES = 4
TRANSIENT_S = 20.0
"""After each change of the traffic: left out where it is said so."""
BIN_S = 5.0
TRAFFIC = {"short_rate_per_s": 28.0, "short_tokens": 3500.0, "long_rate_per_s": 1.2, "long_tokens": 30000.0}
WINDOW_S = 3.0


def traffic(seed: int) -> Trace:
    return synthesise("phases", seed=seed, duration_s=NUM_PHASES * PHASE_S, phase_s=PHASE_S, **TRAFFIC)


def spec_of(composition: str, is_adaptive: bool) -> StubRouterSpec:
    return StubRouterSpec(
        composition=composition,
        has_service_time=True,
        num_decode_ranks=4,
        decode_step_s=0.03,
        copy_s_per_block=512 * 98304 / 2.29e11,
        switch_s=0.8,
        block_tokens=512,
        blocks_per_rank=1400,
        controller="lookahead" if is_adaptive else None,
        window_s=WINDOW_S,
    )


def figures_of(label: str, arrival_s: FloatArray, ttft_s: FloatArray) -> dict[str, Any]:
    phase = np.minimum((arrival_s // PHASE_S).astype(int), NUM_PHASES - 1)
    is_steady = arrival_s - phase * PHASE_S >= TRANSIENT_S
    bins = (arrival_s // BIN_S).astype(int)
    return {
        "label": label,
        "num_measured": len(ttft_s),
        "mean_ttft_s": float(ttft_s.mean()),
        "p99_ttft_s": float(np.quantile(ttft_s, 0.99)),
        "mean_ttft_s_by_phase": [float(ttft_s[phase == each].mean()) for each in range(NUM_PHASES)],
        "mean_ttft_s_by_phase_without_transients": [
            float(ttft_s[(phase == each) & is_steady].mean()) for each in range(NUM_PHASES)
        ],
        "num_by_phase": [int((phase == each).sum()) for each in range(NUM_PHASES)],
        "mean_ttft_s_by_bin": [
            float(ttft_s[bins == each].mean()) if (bins == each).any() else None
            for each in range(int(NUM_PHASES * PHASE_S / BIN_S))
        ],
    }


def run_one(label: str, composition: str, is_adaptive: bool, seed: int) -> dict[str, Any]:
    """With HTTP, on the clock; in a process of its own."""
    with stub_router(spec_of(composition, is_adaptive)) as router:
        begin_s = router.figures()["now_s"]
        report = replay(traffic(seed), ReplaySettings(url=router.url, vocab=VOCAB_SIZE, output_tokens=2, seed=seed))
        figures = router.figures()
    measured = report.measured
    arrival_s = np.array([outcome.scheduled_s for outcome in measured])
    ttft_s = np.array([outcome.ttft_s for outcome in measured])
    found = report.to_json()
    return {
        **figures_of(label, arrival_s, ttft_s),
        "num_failed": found["num_failed"],
        "slo_attainment_ratio": found["slo_attainment_ratio"],
        "token_hit_ratio": found["token_hit_ratio"],
        "proposals": [
            {"s": each["time"], "composition": each["composition"]} for each in reversed(figures["proposals"])
        ],
        "transitions": [
            {**each, "committed_s": round(each["committed_s"] - begin_s, 2)} for each in figures["transitions"]
        ],
        "router_cpu_s": figures["cpu_s"],
        "max_loop_busy_cpu_s": figures["max_loop_busy_cpu_s"],
        "p99_lag_s": found["p99_lag_s"],
        "p99_loop_stall_s": found["p99_loop_stall_s"],
        "wall_s": found["wall_s"],
    }


def play_virtually(label: str, composition: str, is_adaptive: bool, seed: int) -> dict[str, Any]:
    """The same pool without HTTP, on a virtual clock: what the decisions alone make of it."""
    return run_virtually(_play_virtually(label, spec_of(composition, is_adaptive), seed))


async def _play_virtually(label: str, spec: StubRouterSpec, seed: int) -> dict[str, Any]:
    trace = fully_named(traffic(seed))
    prompts = Prompts(trace, seed=seed, vocab=VOCAB_SIZE)
    loop = asyncio.get_running_loop()
    pool, _ = stub_pool(spec, Watch())
    await pool.start()
    begin_s = loop.time()
    ttft_s = np.zeros(trace.num_requests)

    async def ask(index: int) -> None:
        tokens = array("I", prompts.tokens(index).astype(np.uint32).tobytes())
        sent_s = loop.time()
        asked = GenerationRequest(request_id=str(index), token_ids=tokens, max_tokens=2, sampling=Sampling())
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
    transitions = [
        {
            "committed_s": round(each.committed_s - begin_s, 2),
            "kind": each.operation.kind.value,
            "drain_s": each.drain_s,
        }
        for each in pool.control_plane.transitions
    ]
    await pool.close()
    return {**figures_of(label, trace.arrival_s, ttft_s), "transitions": transitions}


def draw(document: dict[str, Any], path: str) -> None:
    """Mean TTFT over time; the transitions of the adaptive pool below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 4.2), dpi=110)
    colours = {"adaptive": "#0b6e4f", "16x1": "#c05621", "8x2": "#2b6cb0", "4x4": "#805ad5"}
    for row in document["results"]:
        bins = row["mean_ttft_s_by_bin"]
        middle_s = (np.arange(len(bins)) + 0.5) * BIN_S
        values = np.array([np.nan if each is None else each for each in bins])
        is_adaptive = row["label"] == "adaptive"
        axes.plot(
            middle_s,
            values,
            color=colours[row["label"]],
            linewidth=2.4 if is_adaptive else 1.2,
            zorder=3 if is_adaptive else 2,
            label=f"{row['label']}: mean {row['mean_ttft_s']:.2f} s",
        )
        for each in row["transitions"]:
            axes.axvline(each["committed_s"], 0, 0.04, color=colours["adaptive"], linewidth=1.0)
    for number in range(1, NUM_PHASES, 2):
        axes.axvspan(number * PHASE_S, (number + 1) * PHASE_S, color="#00000010", zorder=0)
        axes.text(
            (number + 0.5) * PHASE_S, 0.97, "few long", transform=axes.get_xaxis_transform(), ha="center", va="top"
        )
        axes.text(
            (number - 0.5) * PHASE_S, 0.97, "many short", transform=axes.get_xaxis_transform(), ha="center", va="top"
        )
    axes.set_yscale("log")
    axes.set_xlim(0, NUM_PHASES * PHASE_S)
    axes.set_xlabel("s of traffic (ticks below: a split or merge of the adaptive pool commits)")
    axes.set_ylabel(f"mean TTFT of {BIN_S:.0f} s, s")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", help="write a plot of the record to FILE")
    parser.add_argument("--plot-only", action="store_true", help="of the record that is there")
    parser.add_argument("--virtual", action="store_true", help="the pool without HTTP, on a virtual clock")
    options = parser.parse_args()
    result = RESULT.with_name("adaptation-virtual.json") if options.virtual else RESULT
    if not options.plot_only:
        with ProcessPoolExecutor(2 if options.virtual else len(VARIANTS), mp_context=get_context("spawn")) as executor:
            run = play_virtually if options.virtual else run_one
            jobs = [executor.submit(run, *variant, options.seed) for variant in VARIANTS]
            rows = [job.result() for job in jobs]
        document = {
            "experiment": "adaptation-live",
            "traffic": {"kind": "phases", "phase_s": PHASE_S, "seed": options.seed, **TRAFFIC},
            "window_s": WINDOW_S,
            "transient_s": TRANSIENT_S,
            "bin_s": BIN_S,
            "environment": environment(
                f"python benchmarks/adaptation_live.py --seed {options.seed}{' --virtual' if options.virtual else ''}"
            ),
            "results": rows,
        }
        result.write_text(json.dumps(document, indent=1) + "\n")
    document = json.loads(result.read_text())
    for row in document["results"]:
        print({key: value for key, value in row.items() if not isinstance(value, list) or "phase" in key})
    if options.plot:
        draw(document, options.plot)


if __name__ == "__main__":
    main()
