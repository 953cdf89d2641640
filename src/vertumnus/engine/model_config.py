"""What a model is, read from its Hugging Face folder: config.json and, for the stop tokens, generation_config.json.

Whatever could change the mathematics and is not built here is refused by name, at start. No torch in this file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any

from vertumnus.errors import ConfigError

DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_RMS_NORM_EPS = 1e-6
QWEN3_HEAD_DIM = 128
"""What a Qwen3 configuration means when it says no head_dim."""

MAX_LAYERS = 1024
MAX_EXPERTS = 4096
MAX_SIZE = 1 << 31
MAX_NUMBER = 1e15


class Family(Enum):
    """The architectures that the engine runs, by the name they have in config.json."""

    LLAMA = "LlamaForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    QWEN3_MOE = "Qwen3MoeForCausalLM"


MODEL_TYPES = {Family.LLAMA: "llama", Family.QWEN3: "qwen3", Family.QWEN3_MOE: "qwen3_moe"}


class Dtype(Enum):
    """The number formats of weights, activations and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is Dtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a smooth passage between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN: dimensions between `beta_slow` and `beta_fast` rotations pass from divided to kept frequencies.

    attention_factor scales cos and sin; where None, mscale and mscale_all_dim (both given) or `factor` set it.
    is_truncated: the bounds of the passage are rounded outwards to whole dimensions.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    is_truncated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over all `head_dim` dimensions with base `theta`; scaling None for the plain one."""

    theta: float
    head_dim: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts in the layers `sparse_layers`; all other layers have a dense MLP.

    has_normalised_weights: the chosen experts' routing weights are divided by their sum.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    has_normalised_weights: bool
    sparse_layers: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder with grouped-query attention, RMS norms and SwiGLU MLPs; no projection has a bias.

    max_positions: the longest sequence, prompt and output together. dtype: what the folder says its weights are.
    stop_token_ids: sorted, possibly empty.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    has_tied_embeddings: bool
    rope: RopeConfig
    experts: ExpertsConfig | None
    stop_token_ids: tuple[int, ...]
    dtype: Dtype

    @classmethod
    def from_folder(cls, folder: str | PathLike[str]) -> "ModelConfig":
        """Reads a model folder as transformers 4 or 5 writes it; ConfigError where anything is not supported."""
        return _read(Path(folder))

    @property
    def has_qk_norm(self) -> bool:
        """Each query and key head is normalised before its rotation."""
        return self.family is not Family.LLAMA

    @property
    def num_heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    def is_sparse_layer(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.sparse_layers

    def kv_bytes_per_token_layer(self, dtype: Dtype) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype.num_bytes

    def kv_bytes_per_token(self, dtype: Dtype) -> int:
        """Bytes of one token's keys and values in all layers."""
        return self.num_layers * self.kv_bytes_per_token_layer(dtype)

    @property
    def num_parameters(self) -> int:
        """Weights in all, tied embeddings counted once."""
        projections = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.has_qk_norm else 0)
        num_sparse = len(self.experts.sparse_layers) if self.experts else 0
        total = self.num_layers * (projections + norms)
        total += (self.num_layers - num_sparse) * 3 * self.hidden_size * self.intermediate_size
        if self.experts:
            expert = 3 * self.hidden_size * self.experts.intermediate_size
            total += num_sparse * self.experts.num_experts * (expert + self.hidden_size)
        return total + self.hidden_size * (1 + self.vocab_size * (1 if self.has_tied_embeddings else 2))


NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attention_chunk_size": (),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "auto_map": (),
    "clip_qkv": (),
    "compression_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "hidden_act": ("silu", "swish"),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "n_group": (1,),
    "n_shared_experts": (0,),
    "no_rope_layers": ([],),
    "norm_type": ("rms_norm", "rmsnorm"),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (0, 1),
    "qk_layernorm": (False,),
    "qkv_bias": (False,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "routed_scaling_factor": (1,),
    "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (0,),
    "topk_group": (1,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Fields that would change the mathematics, with the values that leave it as built here (null does always)."""

# fmt: off
ROPE_KEYS = frozenset({
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
    "truncate", "finetuned",
})
# fmt: on
"""All that the built kinds of RoPE scaling know; any other field belongs to a kind that is not built."""


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a JSON object, checked as they are read; null counts as absent."""

    source: str
    values: Mapping[str, Any]

    @classmethod
    def of_file(cls, path: Path) -> "_Fields":
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror or error}); accepted: a model's folder"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not JSON ({error}); accepted: a model's configuration") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds {type(values).__name__}; accepted: one JSON object")
        return cls(str(path), values)

    def refusal(self, name: str, accepted: str) -> ConfigError:
        value = self.values.get(name)
        shown = "missing" if value is None else f"{value!r:.200}"
        return ConfigError(f"{self.source}: {name} is {shown}; accepted: {accepted}")

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refusal(name, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.optional_number(name)
        if value is not None:
            return value
        if default is None:
            raise self.refusal(name, "a number above 0")
        return default

    def optional_number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < MAX_NUMBER:
            raise self.refusal(name, f"a number above 0, below {MAX_NUMBER:.0e}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def integers(self, name: str, *, below: int) -> list[int]:
        """A list of whole numbers from 0 to below - 1; one alone counts as a list."""
        value = self.values.get(name)
        found = [] if value is None else value if isinstance(value, list) else [value]
        for item in found:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < below:
                raise self.refusal(name, f"whole numbers from 0 to {below - 1}")
        return found


def _read(folder: Path) -> ModelConfig:
    if not folder.is_dir():
        raise ConfigError(f"model folder is {str(folder)!r}; accepted: an existing folder with config.json and weights")
    fields = _Fields.of_file(folder / "config.json")
    family = _read_family(fields)
    _refuse_other_mathematics(fields, family)
    vocab_size = fields.integer("vocab_size")
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", _default_head_dim(fields, family, hidden_size, num_heads))
    if head_dim % 2:
        raise fields.refusal("head_dim", "an even number, as rotations need pairs")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if family is Family.LLAMA else None)
    if num_heads % num_kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of the {num_heads} num_attention_heads")
    stated_positions = fields.integer("max_position_embeddings")
    rope = _read_rope(fields, head_dim, stated_positions)
    scaling = rope.scaling
    # YaRN is often added to a folder without raising its stated positions.
    extended = int(scaling.original_max_positions * scaling.factor) if isinstance(scaling, YarnScaling) else 0
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", DEFAULT_RMS_NORM_EPS),
        max_positions=max(stated_positions, extended),
        has_tied_embeddings=fields.flag("tie_word_embeddings", False),
        rope=rope,
        experts=_read_experts(fields, num_layers) if family is Family.QWEN3_MOE else None,
        stop_token_ids=_read_stop_token_ids(fields, folder / "generation_config.json", vocab_size),
        dtype=_read_dtype(fields),
    )


def _read_family(fields: _Fields) -> Family:
    supported = ", ".join(family.value for family in Family)
    architectures = fields.values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise fields.refusal("architectures", f"one of {supported}")
    try:
        family = Family(architectures[0])
    except ValueError:
        raise fields.refusal("architectures", f"one of {supported}") from None
    if fields.values.get("model_type") not in (None, MODEL_TYPES[family]):
        raise fields.refusal("model_type", f"{MODEL_TYPES[family]} with architecture {family.value}")
    return family


def _refuse_other_mathematics(fields: _Fields, family: Family) -> None:
    for name, neutral in NEUTRAL_VALUES.items():
        value = fields.values.get(name)
        if value is not None and value not in neutral:
            raise fields.refusal(name, " or ".join(["none", *map(repr, neutral)]))
    # Qwen3 files carry a window beside use_sliding_window false; elsewhere a window alone means that it is in use.
    is_window_in_use = family is Family.LLAMA and "use_sliding_window" not in fields.values
    if is_window_in_use and fields.values.get("sliding_window") is not None:
        raise fields.refusal("sliding_window", "none: every layer attends to the whole sequence")
    layer_types = fields.values.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise fields.refusal("layer_types", "full_attention in every layer")


def _default_head_dim(fields: _Fields, family: Family, hidden_size: int, num_heads: int) -> int | None:
    if family is Family.QWEN3:
        return QWEN3_HEAD_DIM
    return hidden_size // num_heads if hidden_size % num_heads == 0 else None


def _read_rope(fields: _Fields, head_dim: int, stated_positions: int) -> RopeConfig:
    """From `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5)."""
    older, newer = (fields.values.get(name) or None for name in ("rope_scaling", "rope_parameters"))
    if older is not None and newer is not None and older != newer:
        raise fields.refusal("rope_scaling", "none beside a different rope_parameters")
    name, values = ("rope_scaling", older) if older is not None else ("rope_parameters", newer or {})
    if not isinstance(values, dict):
        raise fields.refusal(name, "an object")
    rope = _Fields(f"{fields.source}, {name}", values)
    for key in values:
        if key not in ROPE_KEYS:
            raise rope.refusal(key, f"of these fields only: {', '.join(sorted(ROPE_KEYS))}")
    if values.get("partial_rotary_factor") not in (None, 1):
        raise rope.refusal("partial_rotary_factor", "none or 1")
    theta = rope.number("rope_theta", fields.number("rope_theta", DEFAULT_ROPE_THETA))
    if theta <= 1:
        raise (rope if values.get("rope_theta") is not None else fields).refusal("rope_theta", "a number above 1")
    return RopeConfig(theta=theta, head_dim=head_dim, scaling=_read_scaling(fields, rope, stated_positions))


def _read_scaling(
    fields: _Fields, rope: _Fields, stated_positions: int
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    key = "rope_type" if rope.values.get("rope_type") is not None else "type"
    kind = rope.values.get(key)
    if kind in (None, "default"):
        return None
    if kind == "linear":
        return LinearScaling(rope.number("factor"))
    # A field beside the rope's own wins, as in transformers.
    positions = fields if fields.values.get("original_max_position_embeddings") is not None else rope
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_positions=positions.integer("original_max_position_embeddings"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise rope.refusal("high_freq_factor", f"above low_freq_factor, {scaling.low_freq_factor}")
        return scaling
    if kind == "yarn":
        original = positions.integer("original_max_position_embeddings", stated_positions)
        return YarnScaling(
            factor=rope.number("factor", stated_positions / original),
            original_max_positions=original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.optional_number("attention_factor"),
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            is_truncated=rope.flag("truncate", True),
        )
    raise rope.refusal(key, "default, linear, llama3 or yarn")


def _read_experts(fields: _Fields, num_layers: int) -> ExpertsConfig:
    name = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    num_experts = fields.integer(name, most=MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers", below=num_layers)
    return ExpertsConfig(
        num_experts=num_experts,
        num_experts_per_token=fields.integer("num_experts_per_tok", most=num_experts),
        intermediate_size=fields.integer("moe_intermediate_size"),
        has_normalised_weights=fields.flag("norm_topk_prob", False),
        sparse_layers=frozenset(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense),
    )


def _read_stop_token_ids(fields: _Fields, generation_path: Path, vocab_size: int) -> tuple[int, ...]:
    """What either file calls an end of sequence: chat models often list more in generation_config.json."""
    found = fields.integers("eos_token_id", below=vocab_size)
    if generation_path.exists():
        found = found + _Fields.of_file(generation_path).integers("eos_token_id", below=vocab_size)
    return tuple(sorted(set(found)))


def _read_dtype(fields: _Fields) -> Dtype:
    """The stated format of the weights; float32 where nothing is stated."""
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    try:
        return Dtype(fields.values.get(name) or Dtype.FLOAT32.value)
    except ValueError:
        raise fields.refusal(name, ", ".join(dtype.value for dtype in Dtype)) from None
