"""Small models of every family in Hugging Face folders, with transformers' own model beside them as the reference.

Each is made once per process and removed at its end. The real one, SmolLM2, is converted once per checkout.
"""

import atexit
import fcntl
import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from vertumnus.engine import smollm2
from vertumnus.engine.model_config import Dtype, Family, ModelConfig

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 128
MAX_POSITIONS = 512

CLASSES = {
    Family.LLAMA: (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    Family.QWEN3: (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    Family.QWEN3_MOE: (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
"""What `rope_parameters` says, by kind; original lengths so short that the scaling shows within the positions."""


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A model's folder, what it says, and the reference (float32, or the dtype asked for) that was saved there."""

    folder: Path
    config: ModelConfig
    reference: Any

    @property
    def dtype(self) -> Dtype:
        return self.config.dtype

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """The reference's logits [T, V] of every position, in float32."""
        with torch.inference_mode():
            return self.reference(torch.tensor([token_ids])).logits[0].float()

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """The reference's most likely continuation, never stopping early."""
        found = list(token_ids)
        for _ in range(num_tokens):
            found.append(int(self.logits(found)[-1].argmax()))
        return found[len(token_ids) :]


def tiny_llama(**options: Any) -> SavedModel:
    """See `tiny_model`."""
    return tiny_model(Family.LLAMA, **options)


def tiny_qwen3(**options: Any) -> SavedModel:
    """See `tiny_model`."""
    return tiny_model(Family.QWEN3, **options)


def tiny_qwen3_moe(**options: Any) -> SavedModel:
    """See `tiny_model`; four experts of which two are chosen, and a dense layer first."""
    return tiny_model(Family.QWEN3_MOE, **options)


@cache
def tiny_model(
    family: Family,
    *,
    num_layers: int = 2,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    rope: str = "default",
    is_tied: bool = False,
    dtype: Dtype = Dtype.FLOAT32,
    seed: int = 0,
    max_shard_bytes: int | None = None,
) -> SavedModel:
    """A random model whose logits lie apart and whose every weight matters to them; the same for the same options."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": is_tied,
        "rope_parameters": dict(ROPES[rope]),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family is Family.QWEN3_MOE:
        fields |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden_size,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        }
    config_class, model_class = CLASSES[family]
    reference = model_class(config_class(**fields)).eval()
    _fill(reference, seed)
    reference.to(getattr(torch, dtype.value)).requires_grad_(False)
    folder = new_folder(f"{family.name.lower()}-")
    reference.save_pretrained(folder, max_shard_size=max_shard_bytes or "1GB")
    return SavedModel(folder=folder, config=ModelConfig.from_folder(folder), reference=reference)


def _fill(model: Any, seed: int) -> None:
    """Norms around 1, embedding and head wide, all else so that a unit input gives a unit output.

    The last norm has random signs: else a tied model repeats its input for ever.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
                if name == "model.norm.weight":
                    parameter.mul_(torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.normal_(0, 0.5, generator=generator)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)


def new_folder(prefix: str = "model-") -> Path:
    """An empty folder that is gone when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix=f"vertumnus-{prefix}"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def copy_of(model: SavedModel) -> Path:
    """A copy of its folder, to be broken."""
    folder = new_folder("copy-")
    shutil.copytree(model.folder, folder, dirs_exist_ok=True)
    return folder


@cache
def smollm2_folder(dtype: Dtype = Dtype.FLOAT32) -> Path:
    """SmolLM2-135M in a folder below .cache/, converted at first use: half a minute. Safe with several processes.

    The folder's name follows the converter's text, so that a change of it is seen.
    """
    version = hashlib.sha256(Path(smollm2.__file__).read_bytes()).hexdigest()[:8]
    folder = ROOT / ".cache" / f"smollm2-{dtype.value}-{version}"
    folder.parent.mkdir(exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for outdated in folder.parent.glob(f"smollm2-{dtype.value}-*"):
                if outdated.is_dir():
                    shutil.rmtree(outdated)
            smollm2.convert(folder, dtype=dtype)
    return folder
