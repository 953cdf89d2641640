"""Attention on CPUs by blocks of large matrix products, with an online softmax in float32.

Shapes: T queries, S keys, H query heads, K key/value heads, G = H / K query heads to a key head, D head dimension; a
block of scores has Q queries of G heads, M = G * Q rows, and B keys.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vertumnus.engine.linear import linear

BLOCK_ROWS = 768
"""Rows of a block of scores. Query heads that share a key head are rows of the same block."""

BLOCK_KEYS = 1024
"""Keys of a block of scores. With fewer, the calls cost more; with more, scores outgrow the cache."""

_LOG2_E = math.log2(math.e)


def attend_by_blocks(
    q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [T, H, D] in the type of the inputs, and log-sum-exp [T, H] in float32; S >= 1, if causal S = T.

    Scores are float32 whatever the type: products of 16-bit numbers lose nothing, and no score is rounded before it is
    exponentiated. Weights are rounded to the type for their product with the values, as flash kernels do. Blocks above
    the diagonal are never computed. Beside the result it takes one key head's keys (float32) and values, and the
    scores of one block.
    """
    num_queries, num_heads, head_dim = q_THD.shape
    num_keys, num_kv_heads, _ = k_SKD.shape
    group = num_heads // num_kv_heads
    step = queries_of_block(group)
    q_TKGD = q_THD.reshape(num_queries, num_kv_heads, group, head_dim)
    out_TKGD = torch.empty_like(q_TKGD, memory_format=torch.contiguous_format)
    lse_TKG = q_THD.new_empty((num_queries, num_kv_heads, group), dtype=torch.float32)
    future_QQ = torch.full((step, step), float("-inf")).triu_(1) if is_causal else None
    for kv_head in range(num_kv_heads):
        k_SD, v_SD = k_SKD[:, kv_head].contiguous().float(), v_SKD[:, kv_head].contiguous()
        whole = [_KeyBlock.of(k_SD, v_SD, first, first + BLOCK_KEYS) for first in range(0, num_keys, BLOCK_KEYS)]
        for start in range(0, num_queries, step):
            end = min(start + step, num_queries)
            # Scores in powers of two: `exp2` is several times as fast as `exp`, which is MKL's.
            q_GQD = q_TKGD[start:end, kv_head].transpose(0, 1).float() * (scale * _LOG2_E)
            rows = _Rows(q_GQD.flatten(0, 1))
            if future_QQ is None:
                for block in whole:
                    rows.add(block)
            else:
                num_whole = start // BLOCK_KEYS
                for block in whole[:num_whole]:
                    rows.add(block)
                if num_whole * BLOCK_KEYS < start:
                    rows.add(_KeyBlock.of(k_SD, v_SD, num_whole * BLOCK_KEYS, start))
                rows.add(_KeyBlock.of(k_SD, v_SD, start, end), future_QQ[: end - start, : end - start])
            out_MD, lse_M = rows.result()
            out_TKGD[start:end, kv_head] = out_MD.view(group, -1, head_dim).transpose(0, 1)
            lse_TKG[start:end, kv_head] = lse_M.view(group, -1).transpose(0, 1)
    return out_TKGD.view(q_THD.shape), lse_TKG.view(num_queries, num_heads)


def queries_of_block(group: int) -> int:
    """Q: few enough that little is computed above the diagonal, enough that a product is worth its call."""
    return max(64, min(512, BLOCK_ROWS // group // 64 * 64))


class _KeyBlock(NamedTuple):
    """Keys with their values, these as `linear` takes weights in float32: dense, without gaps between the rows."""

    k_BD: Tensor
    values: Tensor

    @classmethod
    def of(cls, k_SD: Tensor, v_SD: Tensor, start: int, end: int) -> "_KeyBlock":
        v_BD = v_SD[start:end]
        return cls(k_SD[start:end], v_BD.t().contiguous() if v_BD.dtype is torch.float32 else v_BD)

    def weighted(self, weights_MB: Tensor) -> Tensor:
        """[M, D]"""
        if self.values.dtype is torch.float32:
            return linear(weights_MB, self.values)
        return torch.mm(weights_MB.to(self.values.dtype), self.values)


class _Rows:
    """Rows of queries on their way along the keys.

    With h the highest score so far, `sums` and `out` are the sums over the keys of 2 ** (score - h), and of that times
    the value.
    """

    def __init__(self, q_MD: Tensor) -> None:
        self._q_MD = q_MD
        self._highest: Tensor | None = None
        self._sums = self._out_MD = q_MD

    def add(self, block: _KeyBlock, mask_QB: Tensor | None = None) -> None:
        """Every row must see one of the block's keys at least."""
        scores_MB = linear(self._q_MD, block.k_BD)
        if mask_QB is not None:
            scores_MB.view(-1, *mask_QB.shape).add_(mask_QB)
        highest = scores_MB.amax(-1, keepdim=True)
        if self._highest is not None:
            highest = torch.maximum(highest, self._highest)
        weights_MB = scores_MB.sub_(highest).exp2_()
        sums, out_MD = weights_MB.sum(-1, keepdim=True), block.weighted(weights_MB)
        if self._highest is None:
            self._sums, self._out_MD = sums, out_MD.float()
        else:
            faded = self._highest.sub_(highest).exp2_()
            self._sums.mul_(faded).add_(sums)
            self._out_MD.mul_(faded).add_(out_MD)
        self._highest = highest

    def result(self) -> tuple[Tensor, Tensor]:
        """Output [M, D] and log-sum-exp [M]; behind it, the rows are spent."""
        assert self._highest is not None
        lse_M = self._sums.log2().add_(self._highest).div_(_LOG2_E).squeeze(-1)
        return self._out_MD.div_(self._sums), lse_M
