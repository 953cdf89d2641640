"""A model's weights, from the safetensors files of a Hugging Face folder.

On the CPU and in the files' own format nothing is copied: the tensors lie in private mappings of the files, and all
processes that load the same folder share one copy of it in the page cache. What has to be converted, or experts that
lie one by one in the file, is copied once; processes forked afterwards share that copy.

Shapes: V vocabulary, E hidden size, H query heads, K key/value heads, D head dimensions, I intermediate size (of one
expert in a mixture), X experts.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from vertumnus.engine.model_config import Dtype, ModelConfig
from vertumnus.errors import ConfigError

__all__ = ["DenseMlp", "LayerWeights", "ModelWeights", "MoeMlp", "check_tokenizer", "load_weights", "torch_dtype"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

FILE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""By the names that safetensors files give them."""

MAX_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseMlp:
    """down(silu(gate x) * up x): gate [I, E], up [I, E], down [E, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoeMlp:
    """One MLP per expert: router [X, E], gate_up [X, 2I, E] with the gate's rows first, down [X, E, I]."""

    router: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """input_norm [E], q_proj [H*D, E], k_proj and v_proj [K*D, E], o_proj [E, H*D], q_norm and k_norm [D] or None,
    post_attention_norm [E].
    """

    input_norm: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    o_proj: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_attention_norm: Tensor
    mlp: DenseMlp | MoeMlp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelWeights:
    """embedding and lm_head [V, E], the same tensor where they are tied; final_norm [E]. Not to be written to."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Tensor


def torch_dtype(dtype: Dtype) -> torch.dtype:
    return {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}[dtype]


def load_weights(
    folder: str | PathLike[str], config: ModelConfig, dtype: Dtype, device: torch.device | str = "cpu"
) -> ModelWeights:
    """The weights of a folder that holds model.safetensors, or shards and their index, in `dtype` on `device`.

    Names, shapes and formats are checked before anything is read, then every value is read once to see that it is
    finite. ConfigError where a file is missing or cut short, or a tensor missing, unexpected or unusable.
    """
    checkpoint = _Checkpoint(Path(folder))
    experts = config.experts
    has_stacked_experts = experts is not None and any(
        f"{_mlp(layer)}.experts.gate_up_proj" in checkpoint for layer in experts.sparse_layers
    )
    shapes = dict(_expected_shapes(config, has_stacked_experts))
    checkpoint.check(shapes, is_head_optional=config.has_tied_embeddings)
    reader = _Reader(checkpoint, torch_dtype(dtype), torch.device(device))

    def layer_weights(layer: int) -> LayerWeights:
        attention = f"model.layers.{layer}.self_attn"
        if not config.is_sparse_layer(layer):
            mlp: DenseMlp | MoeMlp = reader.dense_mlp(_mlp(layer))
        else:
            assert experts is not None
            mlp = reader.moe_mlp(_mlp(layer), None if has_stacked_experts else experts.num_experts)
        return LayerWeights(
            input_norm=reader.read(f"model.layers.{layer}.input_layernorm.weight"),
            q_proj=reader.read(f"{attention}.q_proj.weight"),
            k_proj=reader.read(f"{attention}.k_proj.weight"),
            v_proj=reader.read(f"{attention}.v_proj.weight"),
            o_proj=reader.read(f"{attention}.o_proj.weight"),
            q_norm=reader.read(f"{attention}.q_norm.weight") if config.has_qk_norm else None,
            k_norm=reader.read(f"{attention}.k_norm.weight") if config.has_qk_norm else None,
            post_attention_norm=reader.read(f"model.layers.{layer}.post_attention_layernorm.weight"),
            mlp=mlp,
        )

    embedding = reader.read(EMBEDDING)
    if not config.has_tied_embeddings:
        lm_head = reader.read(LM_HEAD)
    else:
        lm_head = embedding
        if LM_HEAD in checkpoint and not torch.equal(checkpoint.tensor(LM_HEAD), checkpoint.tensor(EMBEDDING)):
            raise checkpoint.refusal(LM_HEAD, "differs from the embedding", "the same with tie_word_embeddings")
    return ModelWeights(
        embedding=embedding,
        layers=tuple(layer_weights(layer) for layer in range(config.num_layers)),
        final_norm=reader.read(FINAL_NORM),
        lm_head=lm_head,
    )


def check_tokenizer(folder: str | PathLike[str], config: ModelConfig) -> None:
    """Refuses a tokenizer.json, where the folder has one, that knows token ids beyond the model's embedding.

    A smaller one is accepted: many models round their embedding up.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        return
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
        raise ConfigError(f"{path} is no tokenizer ({error}); accepted: one that fits the model") from None
    num_ids = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if num_ids > config.vocab_size:
        raise ConfigError(
            f"{path} has {num_ids} token ids; accepted: at most the {config.vocab_size} of the model's vocab_size"
        )


def _mlp(layer: int) -> str:
    return f"model.layers.{layer}.mlp"


def _expected_shapes(config: ModelConfig, has_stacked_experts: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that the folder must have, by name, but for the head of a tied model."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    yield EMBEDDING, (config.vocab_size, hidden)
    yield FINAL_NORM, (hidden,)
    if not config.has_tied_embeddings:
        yield LM_HEAD, (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{attention}.q_proj.weight", (q_size, hidden)
        yield f"{attention}.k_proj.weight", (kv_size, hidden)
        yield f"{attention}.v_proj.weight", (kv_size, hidden)
        yield f"{attention}.o_proj.weight", (hidden, q_size)
        if config.has_qk_norm:
            yield f"{attention}.q_norm.weight", (head_dim,)
            yield f"{attention}.k_norm.weight", (head_dim,)
        if config.experts is None or not config.is_sparse_layer(layer):
            yield from _mlp_shapes(_mlp(layer), config.intermediate_size, hidden)
            continue
        num_experts, size = config.experts.num_experts, config.experts.intermediate_size
        yield f"{_mlp(layer)}.gate.weight", (num_experts, hidden)
        if has_stacked_experts:
            yield f"{_mlp(layer)}.experts.gate_up_proj", (num_experts, 2 * size, hidden)
            yield f"{_mlp(layer)}.experts.down_proj", (num_experts, hidden, size)
        else:
            for expert in range(num_experts):
                yield from _mlp_shapes(f"{_mlp(layer)}.experts.{expert}", size, hidden)


def _mlp_shapes(prefix: str, size: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (size, hidden)
    yield f"{prefix}.up_proj.weight", (size, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, size)


class _Checkpoint:
    """The safetensors files of a folder, opened: only their headers have been read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in self._paths():
            file = _open(path)
            for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                if name in self._files:
                    raise self.refusal(name, f"is in {path.name} too", "each tensor once")
                self._files[name] = path, file

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        """The tensor as it lies in the file: mapped, not read."""
        tensor = self._files[name][1].get_tensor(name)
        assert isinstance(tensor, Tensor)
        return tensor

    def refusal(self, name: str, problem: str, accepted: str) -> ConfigError:
        path = self._files[name][0] if name in self._files else self._folder
        return ConfigError(f"{path}: tensor {name} {problem}; accepted: {accepted}")

    def check(self, shapes: dict[str, tuple[int, ...]], *, is_head_optional: bool) -> None:
        """Refuses tensors that are missing, unexpected, or have another shape or format than the engine takes."""
        missing = [name for name in shapes if name not in self._files]
        if missing:
            raise ConfigError(f"{self._folder} lacks {_listed(missing)}; accepted: every tensor of the architecture")
        # The frequencies of the rotary embedding, which old checkpoints store, follow from the configuration.
        known = {LM_HEAD} if is_head_optional else set()
        unexpected = [
            name
            for name in self._files
            if name not in shapes and name not in known and not name.endswith("rotary_emb.inv_freq")
        ]
        if unexpected:
            raise ConfigError(
                f"{self._folder} has {_listed(unexpected)} too; accepted: the tensors of the architecture only"
            )
        for name, shape in shapes.items():
            header = self._files[name][1].get_slice(name)
            if header.get_dtype() not in FILE_DTYPES:
                raise self.refusal(name, f"is {header.get_dtype()}", ", ".join(FILE_DTYPES))
            if tuple(header.get_shape()) != shape:
                raise self.refusal(
                    name, f"has shape {list(header.get_shape())}", f"{list(shape)}, by the fields of config.json"
                )

    def _paths(self) -> list[Path]:
        single, index = self._folder / SINGLE_FILE, self._folder / INDEX_FILE
        if single.exists():
            return [single]
        if not index.exists():
            raise ConfigError(f"{self._folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; accepted: one of them")
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"{index} cannot be read; accepted: JSON with a weight_map of tensors to files") from None
        for shard in shards:
            if not isinstance(shard, str) or not shard or Path(shard).name != shard:
                raise ConfigError(f"{index}: weight_map names {shard!r}; accepted: files of the same folder")
        return [self._folder / shard for shard in sorted(shards)]


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path} is missing; accepted: every file that {INDEX_FILE} names")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{path} is cut short or damaged ({error}); accepted: a whole safetensors file") from None


@dataclass(frozen=True, slots=True)
class _Reader:
    """Tensors as the engine uses them: in one format, on one device, finite."""

    checkpoint: _Checkpoint
    dtype: torch.dtype
    device: torch.device

    def read(self, name: str) -> Tensor:
        tensor = self.checkpoint.tensor(name).to(device=self.device, dtype=self.dtype)
        self._check_finite(tensor, [name])
        return tensor

    def stacked(self, rows: list[list[str]]) -> Tensor:
        """One tensor per row, its parts concatenated; filled part by part, so that nothing lies in memory twice."""
        parts = [[self.checkpoint.tensor(name) for name in row] for row in rows]
        num_lines, num_columns = sum(len(part) for part in parts[0]), parts[0][0].shape[1]
        stacked = torch.empty(len(rows), num_lines, num_columns, dtype=self.dtype, device=self.device)
        for target, row in zip(stacked, parts, strict=True):
            for lines, part in zip(target.split([len(part) for part in row]), row, strict=True):
                lines.copy_(part)
        self._check_finite(stacked, [name for row in rows for name in row])
        return stacked

    def dense_mlp(self, prefix: str) -> DenseMlp:
        gate, up, down = (self.read(f"{prefix}.{part}_proj.weight") for part in ("gate", "up", "down"))
        return DenseMlp(gate=gate, up=up, down=down)

    def moe_mlp(self, prefix: str, num_experts: int | None) -> MoeMlp:
        """num_experts: where they lie one by one in the file, None where they are stacked already."""
        router = self.read(f"{prefix}.gate.weight")
        if num_experts is None:
            gate_up, down = (self.read(f"{prefix}.experts.{part}_proj") for part in ("gate_up", "down"))
            return MoeMlp(router=router, gate_up=gate_up, down=down)
        experts = [f"{prefix}.experts.{expert}" for expert in range(num_experts)]
        return MoeMlp(
            router=router,
            gate_up=self.stacked([[f"{each}.gate_proj.weight", f"{each}.up_proj.weight"] for each in experts]),
            down=self.stacked([[f"{each}.down_proj.weight"] for each in experts]),
        )

    def _check_finite(self, tensor: Tensor, names: Iterable[str]) -> None:
        # NaN passes through min and max: one pass, no temporary.
        if _is_finite(tensor):
            return
        for name in names:
            source = self.checkpoint.tensor(name)
            if not _is_finite(source):
                raise self.checkpoint.refusal(name, "has NaN or infinite values", "finite weights")
            if not _is_finite(source.to(self.dtype)):
                raise self.checkpoint.refusal(name, f"overflows {self.dtype}", "a wider dtype: bfloat16 or float32")


def _is_finite(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:MAX_NAMES_SHOWN])
    left = len(names) - MAX_NAMES_SHOWN
    return f"{shown} and {left} more" if left > 0 else shown
