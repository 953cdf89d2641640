"""The KV blocks of one rank as tensors: who reads and writes which slot is decided elsewhere."""

import torch
from torch import Tensor

from vertumnus.errors import ConfigError


class KvStore:
    """Paged keys and values over one flat piece of memory.

    Layout [num_slots, num_layers, block_tokens, 2, num_kv_heads, head_dim]: a block's bytes are one run, so that a copy
    to another rank is one move, and a layer's share of it is one run too, so that a gather is one move per block. The
    2 are key and value.
    """

    def __init__(
        self, memory: Tensor, *, num_slots: int, num_layers: int, block_tokens: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """`memory` is flat and of the model's dtype. Raises ConfigError if it is smaller than the slots need."""
        shape = (num_slots, num_layers, block_tokens, 2, num_kv_heads, head_dim)
        num_elements = num_slots * num_layers * block_tokens * 2 * num_kv_heads * head_dim
        if memory.numel() < num_elements:
            raise ConfigError(f"KV memory holds {memory.numel()} elements; accepted: {num_elements} or more")
        self.num_slots = num_slots
        self.num_layers = num_layers
        self.block_tokens = block_tokens
        self.blocks = memory[:num_elements].view(shape)
        self._rows = memory[:num_elements].view(num_slots * num_layers, block_tokens, 2, num_kv_heads, head_dim)
        self._cells = memory[:num_elements].view(num_slots * num_layers * block_tokens, 2, num_kv_heads, head_dim)

    @property
    def device(self) -> torch.device:
        return self._rows.device

    def read(self, layer: int, slots_N: Tensor) -> Tensor:
        """A layer's keys and values of whole blocks, copied: [N, block_tokens, 2, K, D]."""
        return self._rows.index_select(0, slots_N * self.num_layers + layer)

    def read_into(self, copy_NB2KD: Tensor, layer: int, slots_N: Tensor) -> None:
        """`read` into a tensor that is there already: new memory costs more than what is copied into it."""
        torch.index_select(self._rows, 0, slots_N * self.num_layers + layer, out=copy_NB2KD)

    def room_for(self, num_blocks: int) -> Tensor:
        """For `read_into`."""
        return self._rows.new_empty((num_blocks, *self._rows.shape[1:]))

    def write(self, layer: int, slots_T: Tensor, offsets_T: Tensor, kv_T2KD: Tensor) -> None:
        """Puts one layer's keys and values of T tokens at (slot, offset in the block)."""
        cells = (slots_T * self.num_layers + layer) * self.block_tokens + offsets_T
        self._cells.index_copy_(0, cells, kv_T2KD)
