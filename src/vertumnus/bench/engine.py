"""Prefill and decode of real ranks: seconds by prompt length, cached prefix and degree, and where they go.

All ratios come from one run: degrees take turns on the same two ranks, threads per rank fixed, medians over rounds.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np

from vertumnus.core.cost import attention_pairs
from vertumnus.engine.messages import Refusal
from vertumnus.engine.pool import RankPool
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.engine.step import Address, PrefixPath, Sampling, Step, StepOutput, StepRequest
from vertumnus.errors import VertumnusError

BLOCK_TOKENS = 64
DECODE_CONTEXT_TOKENS = 256

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One prompt of `prompt_tokens`, of which `prefix_tokens` are cached, at a degree."""

    prompt_tokens: int
    prefix_tokens: int
    degree: int
    path: PrefixPath = PrefixPath.AUTO


def prompts_within(max_positions: int) -> tuple[int, ...]:
    """The lengths that a model is timed at: up to its positions, at most 8K tokens."""
    return tuple(n for n in (512, 2048, 8192) if n <= max_positions) or (max_positions,)


def run(
    folder: Path,
    *,
    dtype: str = "float32",
    prompts: Sequence[int] = (512, 2048, 8192),
    short_suffix_tokens: int = 64,
    num_rounds: int = 3,
    name: str | None = None,
    with_transformers: bool = False,
) -> list[dict[str, Any]]:
    """Entries `model, prompt_tokens, prefix_tokens, degree, dtype, p50_s` and the stages of the slowest rank.

    Cold cells of degree 2 have `ceiling` beside their speed-up: what two ranks that run the same prompt at the same
    time, each by itself, get done in the time of one alone. Where it is below 2 the cores share something.

    A cell with a prefix of half the prompt has `predicted_s` beside it: what the cold runs of its degree say of its
    own tokens and attention pairs (eq. 1), fitted as d + c*R + alpha*W.
    """
    cells = [Cell(prompt_tokens=n, prefix_tokens=p, degree=c) for n in prompts for p in (0, n // 2) for c in (1, 2)]
    longest = max(prompts)
    cells += [
        Cell(prompt_tokens=longest, prefix_tokens=longest - suffix, degree=2, path=path)
        for suffix in (short_suffix_tokens, longest // 2)
        for path in (PrefixPath.PASS_KV, PrefixPath.PASS_Q)
    ]
    measured, at_once = asyncio.run(_measure(folder, dtype, cells, longest, num_rounds))
    reference = _transformers(folder, dtype, prompts, num_rounds) if with_transformers else {}
    entries: list[dict[str, Any]] = []
    for cell, outputs in measured.items():
        seconds = [max(output.timings.total_s for output in each) for each in outputs]
        middle = outputs[int(np.argsort(seconds)[len(seconds) // 2])]
        slowest = max(middle, key=lambda output: output.timings.total_s)
        timings = slowest.timings
        entries.append(
            {
                "model": name or folder.name,
                "prompt_tokens": cell.prompt_tokens,
                "prefix_tokens": cell.prefix_tokens,
                "degree": cell.degree,
                "path": cell.path.value,
                "dtype": dtype,
                "p50_s": statistics.median(seconds),
                "min_s": min(seconds),
                "gather_s": timings.gather_s,
                "attention_s": timings.attention_s,
                "mlp_s": timings.mlp_s,
                "projection_s": timings.projection_s,
                "wait_s": timings.wait_s,
                "other_s": timings.other_s,
                "received_bytes": slowest.received_bytes,
                "rounds_s": seconds,
            }
        )
    _add_ratios(entries, at_once)
    for prompt_tokens, seconds in reference.items():
        entries.append(
            {
                "model": f"{name or folder.name}, transformers with sdpa",
                "prompt_tokens": prompt_tokens,
                "prefix_tokens": 0,
                "degree": 1,
                "dtype": dtype,
                "p50_s": statistics.median(seconds),
                "min_s": min(seconds),
                "rounds_s": seconds,
            }
        )
    return entries


def run_decode(
    folder: Path, *, dtype: str = "bfloat16", num_streams: Sequence[int] = (1, 16), num_steps: int = 40
) -> list[dict[str, Any]]:
    """Entries `model, streams, dtype, p50_s, tokens_per_s` of one-token steps behind 256 tokens of context."""
    found = asyncio.run(_measure_decode(folder, dtype, num_streams, num_steps))
    fewest = min(found)
    fewest_per_s = fewest / statistics.median(found[fewest])
    entries = []
    for streams, seconds in found.items():
        p50_s = statistics.median(seconds)
        entries.append(
            {
                "model": folder.name,
                "streams": streams,
                "dtype": dtype,
                "p50_s": p50_s,
                "tokens_per_s": streams / p50_s,
                "throughput_ratio": streams / p50_s / fewest_per_s,
            }
        )
    return entries


def write_two_layer_model(source: Path, folder: Path, max_positions: int) -> None:
    """A random model of two layers, each shaped like `source`'s, for prompts beyond its positions."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "max_position_embeddings": max_positions}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.randn(value.shape, generator=generator).mul_(0.02).to(value.dtype)
        for key, value in load_file(source / "model.safetensors").items()
        if ".layers." not in key or key.split(".layers.")[1].split(".")[0] in ("0", "1")
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run_large(
    source: Path,
    *,
    dtype: str = "float32",
    prompts: Sequence[int] = (16384, 32768),
    num_rounds: int = 3,
    with_transformers: bool = False,
) -> list[dict[str, Any]]:
    """`run` on a random model of two layers shaped like `source`'s, with prompts that the real one cannot hold."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_two_layer_model(source, folder, max(prompts) + 1)
        return run(
            folder,
            dtype=dtype,
            prompts=prompts,
            num_rounds=num_rounds,
            name=f"two random layers like {source.name}",
            with_transformers=with_transformers,
        )


async def _measure(
    folder: Path, dtype: str, cells: Sequence[Cell], longest: int, num_rounds: int
) -> tuple[dict[Cell, list[list[StepOutput]]], dict[int, list[float]]]:
    """The outputs of every cell; and by prompt length the seconds of two cold steps of degree 1 at the same time."""
    pool = await start_pool(folder, dtype, num_ranks=2, num_slots=longest // BLOCK_TOKENS + 1)
    found: dict[Cell, list[list[StepOutput]]] = {cell: [] for cell in cells}
    at_once: dict[int, list[float]] = {cell.prompt_tokens: [] for cell in cells if not cell.prefix_tokens}
    try:
        driver = Driver(pool)
        for cell in cells[:4]:
            await driver.prefill(cell)  # warms caches and allocators
        for _ in range(num_rounds):
            for cell in cells:
                # Short steps are soon done, and noisy.
                is_short = cell.prompt_tokens - cell.prefix_tokens < BLOCK_TOKENS * 4
                for _ in range(7 if is_short else 1):
                    found[cell].append(await driver.prefill(cell))
            for prompt_tokens, seconds in at_once.items():
                seconds.append(await driver.prefill_on_both(prompt_tokens))
    finally:
        await pool.close()
    return found, at_once


async def _measure_decode(
    folder: Path, dtype: str, num_streams: Sequence[int], num_steps: int
) -> dict[int, list[float]]:
    blocks_per_stream = -(-(DECODE_CONTEXT_TOKENS + num_steps + 1) // BLOCK_TOKENS)
    pool = await start_pool(folder, dtype, num_ranks=1, num_slots=max(num_streams) * blocks_per_stream)
    found: dict[int, list[float]] = {streams: [] for streams in num_streams}
    try:
        driver = Driver(pool)
        tables = {
            stream: [(0, stream * blocks_per_stream + block) for block in range(blocks_per_stream)]
            for stream in range(max(num_streams))
        }
        for stream, table in tables.items():
            await driver.step(1, [request_for(stream, DECODE_CONTEXT_TOKENS, 0, table)])
        for number in range(num_steps):
            num_tokens = DECODE_CONTEXT_TOKENS + number + 1
            for streams in num_streams:
                batch = [request_for(stream, num_tokens, num_tokens - 1, tables[stream]) for stream in range(streams)]
                outputs = await driver.step(1, batch)
                found[streams].append(outputs[0].timings.total_s)
    finally:
        await pool.close()
    return found


async def start_pool(folder: Path, dtype: str, *, num_ranks: int, num_slots: int) -> RankPool:
    options = {"folder": str(folder), "dtype": dtype, "block_tokens": BLOCK_TOKENS}
    return await RankPool.start(
        PoolConfig(
            source="vertumnus.engine.model_source:load",
            num_ranks=num_ranks,
            num_slots=num_slots,
            options=options,
            step_timeout_s=600,
        )
    )


class Driver:
    """Activates whatever degree a cell asks for and runs its step."""

    def __init__(self, pool: RankPool) -> None:
        self._pool = pool
        self._epoch = 0
        self._step_id = 0
        self._degree: int | None = None

    async def prefill(self, cell: Cell) -> list[StepOutput]:
        """The outputs of the step that computes what is not cached. What the prefix's blocks hold, the last that was
        written there, makes no difference to the time."""
        blocks = laid(cell.prefix_tokens, cell.prompt_tokens - cell.prefix_tokens, cell.degree)
        request = request_for(0, cell.prompt_tokens, cell.prefix_tokens, blocks, path=cell.path)
        return await self.step(cell.degree, [request])

    async def prefill_on_both(self, prompt_tokens: int) -> float:
        """Mean seconds of two ranks that run the same cold prompt at the same time, each by itself."""
        await self._take_up(1)
        blocks = laid(0, prompt_tokens, 1)
        both = await asyncio.gather(
            *(
                self.step(1, [request_for(rank, prompt_tokens, 0, [(rank, slot) for _, slot in blocks])], rank=rank)
                for rank in (0, 1)
            )
        )
        return statistics.fmean(outputs[0].timings.total_s for outputs in both)

    async def step(self, degree: int, requests: Sequence[StepRequest], *, rank: int = 0) -> list[StepOutput]:
        """On the group that `rank` is the first of."""
        await self._take_up(degree)
        self._step_id += 1
        step = Step(step_id=self._step_id, first_rank=rank, degree=degree, epoch=self._epoch, requests=requests)
        return _accepted(await self._pool.step(step))

    async def _take_up(self, degree: int) -> None:
        if degree != self._degree:
            self._epoch += 1
            geometry = dict.fromkeys(range(0, self._pool.config.num_ranks, degree), degree)
            _accepted(await self._pool.activate(self._epoch, geometry))
            self._degree = degree


def laid(num_prefix: int, num_new: int, degree: int) -> list[Address]:
    """Blocks of a prefix and of what follows it, each in even runs over the ranks, as a pool lays them."""
    num_cached = -(-num_prefix // BLOCK_TOKENS)
    num_blocks = -(-(num_prefix + num_new) // BLOCK_TOKENS)
    ranks = [block * degree // num_cached for block in range(num_cached)]
    ranks += [block * degree // (num_blocks - num_cached) for block in range(num_blocks - num_cached)]
    return [(rank, slot) for slot, rank in enumerate(ranks)]


def _accepted(answer: Answer | Refusal) -> Answer:
    if isinstance(answer, Refusal):
        raise VertumnusError(f"rank {answer.rank} refuses: {answer.detail}")
    return answer


def request_for(
    request_id: int,
    num_tokens: int,
    num_prefix: int,
    blocks: Sequence[Address],
    *,
    path: PrefixPath = PrefixPath.AUTO,
    has_logits: bool = True,
) -> StepRequest:
    return StepRequest(
        request_id=request_id,
        token_ids=[(7 * position + request_id) % 32000 for position in range(num_prefix, num_tokens)],
        num_prefix_tokens=num_prefix,
        blocks=blocks[: -(-num_tokens // BLOCK_TOKENS)],
        sampling=Sampling() if has_logits else None,
        prefix_path=path,
    )


def _add_ratios(entries: list[dict[str, Any]], at_once: dict[int, list[float]]) -> None:
    """Speed-up over degree 1 and its ceiling, and what the cold runs of the same degree predict for a hit."""
    for entry in entries:
        if entry["path"] != PrefixPath.AUTO.value:
            continue
        of_one = [
            other
            for other in entries
            if other["degree"] == 1
            and all(other[key] == entry[key] for key in ("prompt_tokens", "prefix_tokens", "path"))
        ]
        entry["speedup"] = of_one[0]["p50_s"] / entry["p50_s"]
        if entry["degree"] == 2 and not entry["prefix_tokens"]:
            entry["ceiling"] = 2 * of_one[0]["p50_s"] / statistics.median(at_once[entry["prompt_tokens"]])
        cold = [other for other in entries if other["degree"] == entry["degree"] and not other["prefix_tokens"]]
        if entry["prefix_tokens"] and len(cold) >= 2:
            entry["predicted_s"] = _predict(
                cold, entry["prompt_tokens"] - entry["prefix_tokens"], entry["prefix_tokens"]
            )
            entry["over_predicted"] = entry["p50_s"] / entry["predicted_s"]


def _predict(cold: Sequence[dict[str, Any]], suffix_tokens: int, prefix_tokens: int) -> float:
    """c*R + alpha*W(R, P) with c and alpha of least relative error over the cold runs, both >= 0."""
    from scipy.optimize import nnls

    seconds = np.array([entry["p50_s"] for entry in cold])
    lengths = np.array([entry["prompt_tokens"] for entry in cold], dtype=float)
    terms = np.stack([lengths, [attention_pairs(length, 0.0) for length in lengths]], axis=1)
    coefficients, _ = nnls(terms / seconds[:, None], np.ones(len(seconds)))
    return float(coefficients @ np.array([suffix_tokens, attention_pairs(suffix_tokens, prefix_tokens)]))


def _transformers(folder: Path, dtype: str, prompts: Sequence[int], num_rounds: int) -> dict[int, list[float]]:
    """The same prompts through transformers with sdpa attention, one thread, logits of the last position only."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    found: dict[int, list[float]] = {}
    with torch.inference_mode():
        for prompt_tokens in prompts:
            token_ids = torch.tensor([request_for(0, prompt_tokens, 0, []).token_ids])
            found[prompt_tokens] = []
            for _ in range(num_rounds):
                start_s = time.perf_counter()
                model(token_ids, use_cache=True, logits_to_keep=1)
                found[prompt_tokens].append(time.perf_counter() - start_s)
    return found
