"""Memory of a step: what a rank's process takes at the most, beside what `engine.step_memory` says.

Every cell has processes of its own. Steps that touch the same code, weights and KV have run there before; and the C
library gives back at once what is freed, so that what those took does not hide what this one takes.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vertumnus.bench.engine import BLOCK_TOKENS, Driver, laid, request_for, start_pool, write_two_layer_model
from vertumnus.engine.kv_memory import bytes_in
from vertumnus.engine.model_config import Dtype, ModelConfig
from vertumnus.engine.pool import RankPool
from vertumnus.engine.step import Address, PrefixPath
from vertumnus.errors import VertumnusError

Cells = Sequence[tuple[int, int]]
"""(new tokens, prefix tokens)"""

_WARM_TOKENS = 16384
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def run(source: Path, *, dtype: str = "float32") -> list[dict[str, Any]]:
    """`run_cells` on two random layers shaped like the model `source`; and on two narrow ones, up to 128K tokens."""
    results: list[dict[str, Any]] = []
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "wide"
        folder.mkdir()
        write_two_layer_model(source, folder, 32768)
        wide: Cells = ((1024, 0), (2048, 0), (8192, 0), (16384, 0), (8192, 8192), (4096, 12288), (512, 15872))
        results += run_cells(folder, f"two random layers like {source.name}", wide, dtype=dtype)
        folder = Path(scratch) / "narrow"
        folder.mkdir()
        write_narrow_model(folder, 131072)
        narrow: Cells = ((16384, 0), (131072, 0), (4096, 126976))
        return results + run_cells(folder, "two narrow random layers", narrow, dtype=dtype)


def write_narrow_model(folder: Path, max_positions: int) -> None:
    """A random model that is quick enough for prompts of any length."""
    import torch
    from safetensors.torch import save_file

    hidden, mlp, heads, vocab = 64, 128, 32, 32000
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": heads // 2,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        of_layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads, hidden),
            "self_attn.k_proj": (heads, hidden),
            "self_attn.v_proj": (heads, hidden),
            "self_attn.o_proj": (hidden, heads),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).mul_(0.1) for name, shape in shapes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run_cells(
    folder: Path, name: str, cells: Cells, *, dtype: str = "float32", degrees: Sequence[int] = (1, 2)
) -> list[dict[str, Any]]:
    """Entries `model, new_tokens, prefix_tokens, degree, dtype, peak_bytes, formula_bytes`: of the rank that takes
    most in a step (pass-KV), beside what its process keeps anyhow."""
    before = {name: os.environ.get(name) for name in _ALLOCATOR}
    os.environ.update(_ALLOCATOR)  # ranks inherit it
    try:
        return asyncio.run(_measure(folder, name, cells, dtype, degrees))
    finally:
        for variable, value in before.items():
            os.environ.pop(variable)
            if value is not None:
                os.environ[variable] = value


async def _measure(folder: Path, name: str, cells: Cells, dtype: str, degrees: Sequence[int]) -> list[dict[str, Any]]:
    from vertumnus.engine.step_memory import step_bytes

    config = ModelConfig.from_folder(folder)
    entries: list[dict[str, Any]] = []
    for num_new, num_prefix in cells:
        for degree in degrees:
            blocks = laid(num_prefix, num_new, degree)
            pool = await start_pool(folder, dtype, num_ranks=degree, num_slots=len(blocks))
            try:
                peak_bytes = await _peak_bytes(pool, blocks, num_new, num_prefix)
            finally:
                await pool.close()
            formula_bytes = step_bytes(config, Dtype(dtype), num_new, num_prefix, degree)
            entries.append(
                {
                    "model": name,
                    "new_tokens": num_new,
                    "prefix_tokens": num_prefix,
                    "degree": degree,
                    "dtype": dtype,
                    "peak_bytes": peak_bytes,
                    "formula_bytes": formula_bytes,
                    "over_formula": peak_bytes / formula_bytes,
                }
            )
    return entries


async def _peak_bytes(pool: RankPool, blocks: Sequence[Address], num_new: int, num_prefix: int) -> int:
    driver, degree = Driver(pool), pool.config.num_ranks

    async def step(new: int, prefix: int) -> None:
        request = request_for(0, new + prefix, prefix, blocks, has_logits=False, path=PrefixPath.PASS_KV)
        await driver.step(degree, [request])

    if num_new <= _WARM_TOKENS:
        await step(num_new, num_prefix)
    else:  # the same pages, and the same code, in less time
        await step(BLOCK_TOKENS, num_new - BLOCK_TOKENS)
        await step(_WARM_TOKENS, 0)
    before_bytes = {pid: _reset_peak(pid) for pid in pool.roster.pids.values()}
    await step(num_new, num_prefix)
    return max(_status_bytes(pid, "VmHWM") - before for pid, before in before_bytes.items())


def _reset_peak(pid: int) -> int:
    """The process's resident bytes, from which its peak counts from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status_bytes(pid, "VmRSS")


def _status_bytes(pid: int, field: str) -> int:
    found = bytes_in(Path(f"/proc/{pid}/status"), field)
    if found is None:
        raise VertumnusError(f"the system does not tell {field} of a process")
    return found
