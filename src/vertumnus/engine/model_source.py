"""A model that is read once and that every rank of a host steps with."""

import torch

from vertumnus.engine.forward import Model
from vertumnus.engine.kv_memory import KvMemory
from vertumnus.engine.kv_store import KvStore
from vertumnus.engine.model_config import Dtype, ModelConfig
from vertumnus.engine.stepper import ModelStepper
from vertumnus.engine.weights import load_weights, torch_dtype


class ModelSource:
    """Weights in host memory, shared by all forks, and the shape of the KV blocks that go with them."""

    def __init__(self, folder: str, dtype: Dtype | None, block_tokens: int) -> None:
        config = ModelConfig.from_folder(folder)
        dtype = dtype or config.dtype
        self._model = Model(config, load_weights(folder, config, dtype))
        self._dtype = torch_dtype(dtype)
        self._config = config
        self.block_tokens = block_tokens
        self.block_bytes = block_tokens * config.kv_bytes_per_token(dtype)

    def stepper(self, rank: int, memory: KvMemory) -> ModelStepper:
        """Steps over a view of the rank's own memory."""
        store = KvStore(
            torch.frombuffer(memory.buffer, dtype=self._dtype),
            num_slots=memory.num_slots,
            num_layers=self._config.num_layers,
            block_tokens=self.block_tokens,
            num_kv_heads=self._config.num_kv_heads,
            head_dim=self._config.head_dim,
        )
        return ModelStepper(self._model, store, rank)


def load(folder: str, dtype: str | None = None, block_tokens: int = 64) -> ModelSource:
    """dtype: a value of `Dtype`, the checkpoint's own if None. Raises ConfigError for a model that cannot be used."""
    return ModelSource(folder, None if dtype is None else Dtype(dtype), block_tokens)
