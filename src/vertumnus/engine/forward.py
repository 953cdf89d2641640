"""The forward pass of Llama, Qwen3 and Qwen3-MoE on one rank's share of a step.

Suffixes: T rows of this rank, E hidden size, H query heads, K key/value heads, D head dimension, V vocabulary.
Everything but attention works on each row alone, so that it needs nobody else whatever the degree.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from vertumnus.engine.linear import linear
from vertumnus.engine.model_config import ModelConfig
from vertumnus.engine.rope import RotaryTable, apply_rotary
from vertumnus.engine.stages import Stages
from vertumnus.engine.weights import DenseMlp, LayerWeights, ModelWeights, MoeMlp

ROWS_AT_ONCE = 1024
"""Rows that go through norms, projections and the MLP at once: what is wide stays small, in time and in memory."""


class Attention(Protocol):
    """Causal attention of a step, asked layer by layer."""

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor: ...


class Model:
    """Weights with their forward pass. `config` and `weights` belong together."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self._rotary = RotaryTable(config)

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return float(self.config.head_dim**-0.5)

    def hidden_states(self, token_ids_T: Tensor, positions_T: Tensor, attention: Attention, stages: Stages) -> Tensor:
        """[T, E] behind the last layer, before the final norm."""
        x_TE = functional.embedding(token_ids_T, self.weights.embedding)
        cos, sin = self._rotary(positions_T, x_TE.dtype)
        for layer, weights in enumerate(self.weights.layers):
            x_TE = self._attend(layer, weights, x_TE, cos, sin, attention, stages)
            with stages.measure("mlp"):
                for rows_ME in torch.split(x_TE, ROWS_AT_ONCE):
                    rows_ME.add_(self._mlp(self._norm(rows_ME, weights.post_attention_norm), weights.mlp))
        return x_TE

    def logits(self, x_TE: Tensor) -> Tensor:
        """[T, V], float32."""
        return linear(self._norm(x_TE, self.weights.final_norm), self.weights.lm_head).float()

    def _attend(
        self,
        layer: int,
        weights: LayerWeights,
        x_TE: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: Attention,
        stages: Stages,
    ) -> Tensor:
        """x + attention(norm(x)), a new tensor."""
        with stages.measure("projection"):
            q_THD, k_TKD, v_TKD = self._project(x_TE, weights, cos, sin)
        attended_THD = attention.attend(layer, q_THD, k_TKD, v_TKD)
        with stages.measure("projection"):
            out_TE = torch.empty_like(x_TE)
            for start in range(0, x_TE.shape[0], ROWS_AT_ONCE):
                rows = slice(start, start + ROWS_AT_ONCE)
                torch.add(x_TE[rows], linear(attended_THD[rows].flatten(1), weights.o_proj), out=out_TE[rows])
            return out_TE

    def _project(self, x_TE: Tensor, weights: LayerWeights, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        num_rows = x_TE.shape[0]
        q_THD = x_TE.new_empty((num_rows, config.num_heads, config.head_dim))
        k_TKD = x_TE.new_empty((num_rows, config.num_kv_heads, config.head_dim))
        v_TKD = torch.empty_like(k_TKD)
        for start in range(0, num_rows, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            normed_ME = self._norm(x_TE[rows], weights.input_norm)
            q_THD[rows].flatten(1).copy_(linear(normed_ME, weights.q_proj))
            k_TKD[rows].flatten(1).copy_(linear(normed_ME, weights.k_proj))
            v_TKD[rows].flatten(1).copy_(linear(normed_ME, weights.v_proj))
        if weights.q_norm is not None and weights.k_norm is not None:
            q_THD, k_TKD = self._norm(q_THD, weights.q_norm), self._norm(k_TKD, weights.k_norm)
        return apply_rotary(q_THD, cos, sin), apply_rotary(k_TKD, cos, sin), v_TKD

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _mlp(self, x_TE: Tensor, mlp: DenseMlp | MoeMlp) -> Tensor:
        return self._dense(x_TE, mlp) if isinstance(mlp, DenseMlp) else self._moe(x_TE, mlp)

    @staticmethod
    def _dense(x_TE: Tensor, mlp: DenseMlp) -> Tensor:
        gated = functional.silu(linear(x_TE, mlp.gate), inplace=True)
        return linear(gated.mul_(linear(x_TE, mlp.up)), mlp.down)

    def _moe(self, x_TE: Tensor, mlp: MoeMlp) -> Tensor:
        """Each row through its few best experts, weighted by the router's probabilities. An expert's rows go
        through it together."""
        experts = self.config.experts
        assert experts is not None
        probabilities = torch.softmax(linear(x_TE, mlp.router), -1, dtype=torch.float32)
        shares, chosen = probabilities.topk(experts.num_experts_per_token, -1)
        if experts.has_normalised_weights:
            shares /= shares.sum(-1, keepdim=True)
        shares = shares.to(x_TE.dtype)
        out_TE = torch.zeros_like(x_TE)
        for expert in torch.unique(chosen).tolist():
            rows, place = torch.where(chosen == expert)
            gate, up = linear(x_TE[rows], mlp.gate_up[expert]).chunk(2, -1)
            gated = functional.silu(gate).mul_(up)
            out_TE.index_add_(0, rows, linear(gated, mlp.down[expert]).mul_(shares[rows, place, None]))
        return out_TE
