"""Attention over one run of keys, with what it takes to merge it with attention over another run.

Shapes: T queries, S keys, H query heads, K key/value heads (H a multiple of K), D head dimension. Everything here is
exact: attention over a set of keys equals the merge of attention over any partition of them.
"""

from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from vertumnus.engine.block_attention import attend_by_blocks
from vertumnus.engine.linear import has_onednn

_LONG_ROWS = 256
"""From so many queries on, keys and queries are read so often that laying them out head by head pays."""


class Partial(NamedTuple):
    """Attention over some of the keys: `out` [T, H, D] is normalised over those keys alone; `lse` [T, H], float32, is
    the natural logarithm of the sum of their exponentiated scores."""

    out: Tensor
    lse: Tensor


class AttentionKernel(Protocol):
    """Narrow enough for any flash kernel: all of them take these tensors and return the log-sum-exp."""

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, is_causal: bool, scale: float) -> Partial:
        """Attention of T queries over S >= 1 keys; if causal, T equals S and query i sees the keys 0..i."""
        ...

    def attend_each(
        self, q_NHD: Tensor, k_NSKD: Tensor, v_NSKD: Tensor, mask_NS: Tensor | None, *, scale: float
    ) -> Tensor:
        """Attention of N queries, each over keys of its own: out [N, H, D]. The mask is added to the scores."""
        ...


class CpuFlash:
    """PyTorch's flash attention for CPUs (float32, bfloat16, float16); memory grows linearly with T and S."""

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, is_causal: bool, scale: float) -> Partial:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        q, k, v = _heads_first(q_THD), _heads_first(k_SKD), _heads_first(v_SKD)
        if q_THD.shape[0] == 1:  # as in `attend_each`
            out, lse = flash(q_THD.view(1, k_SKD.shape[1], -1, q_THD.shape[2]), k, v, 0.0, False, scale=scale)
            return Partial(out.reshape(q_THD.shape), lse.reshape(1, -1))
        if q_THD.shape[0] >= _LONG_ROWS:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = flash(q, k, v, 0.0, is_causal, scale=scale)
        return Partial(out[0].transpose(0, 1), lse[0].transpose(0, 1))

    def attend_each(
        self, q_NHD: Tensor, k_NSKD: Tensor, v_NSKD: Tensor, mask_NS: Tensor | None, *, scale: float
    ) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = None if mask_NS is None else mask_NS[:, None, None]
        # The heads that share a key head stand as one run of queries, so that each key is read once for all.
        q = q_NHD.view(q_NHD.shape[0], k_NSKD.shape[2], -1, q_NHD.shape[2])
        out, _ = flash(q, k_NSKD.transpose(1, 2), v_NSKD.transpose(1, 2), 0.0, False, attn_mask=mask, scale=scale)
        each: Tensor = out.reshape(q_NHD.shape)
        return each


_LEAST_ROWS = 192
_LEAST_SCORES = 192 * 1024
"""From so many rows (queries times the heads that share a key head) and scores of a key head on, products of whole
blocks beat the flash kernel: measured with 8 heads over 8 key heads, 9 over 3, 8 over 1 and 32 over 4."""


class CpuBlocks(CpuFlash):
    """Blocks of large matrix products where they are quicker than PyTorch's flash kernel: that one calls small ones,
    which miss what the processor has for bfloat16 and, on some makers', its widest instructions for float32."""

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, is_causal: bool, scale: float) -> Partial:
        num_rows, num_keys = q_THD.shape[0] * q_THD.shape[1] // k_SKD.shape[1], k_SKD.shape[0]
        is_large = num_rows >= _LEAST_ROWS and num_rows * num_keys >= _LEAST_SCORES
        if is_large and q_THD.dtype in _block_dtypes():
            return Partial(*attend_by_blocks(q_THD, k_SKD, v_SKD, is_causal=is_causal, scale=scale))
        return super().attend(q_THD, k_SKD, v_SKD, is_causal=is_causal, scale=scale)


@cache
def _block_dtypes() -> frozenset[torch.dtype]:
    """Types whose blocks are quicker here. Asked of the processor and not measured, so that every rank of a group and
    every start of a pool agree; what was not measured stays with the flash kernel."""
    if not has_onednn() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return frozenset()
    has_bfloat16 = torch.cpu._is_avx512_bf16_supported()
    return frozenset((torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,))


class CudaFlash:
    """PyTorch's CUDA kernels: flash for bfloat16 and float16, memory-efficient attention for float32."""

    def attend(self, q_THD: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, is_causal: bool, scale: float) -> Partial:
        num_queries, num_heads, _ = q_THD.shape
        repeats = num_heads // k_SKD.shape[1]
        q = _heads_first(q_THD)
        k = _heads_first(k_SKD.repeat_interleave(repeats, 1))
        v = _heads_first(v_SKD.repeat_interleave(repeats, 1))
        if q.dtype == torch.float32:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, is_causal, scale=scale
            )
        else:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
        return Partial(out[0].transpose(0, 1), lse[0, :, :num_queries].transpose(0, 1).float())

    def attend_each(
        self, q_NHD: Tensor, k_NSKD: Tensor, v_NSKD: Tensor, mask_NS: Tensor | None, *, scale: float
    ) -> Tensor:
        mask = None if mask_NS is None else mask_NS[:, None, None]
        k, v = k_NSKD.transpose(1, 2), v_NSKD.transpose(1, 2)
        return functional.scaled_dot_product_attention(
            q_NHD.unsqueeze(2), k, v, attn_mask=mask, scale=scale, enable_gqa=True
        ).squeeze(2)


def kernel_for(device: torch.device) -> AttentionKernel:
    return CudaFlash() if device.type == "cuda" else CpuBlocks()


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys.

    With l = log-sum-exp, the weights of the parts are exp(l1) and exp(l2) over their sum: the second's share is
    sigmoid(l2 - l1). A part over no keys has l = -inf and no weight; not both may be empty.
    """
    share = torch.sigmoid(second.lse - first.lse).unsqueeze(-1).to(first.out.dtype)
    return Partial(torch.lerp(first.out, second.out, share), torch.logaddexp(first.lse, second.lse))


def concatenate(first: Partial, second: Partial) -> Partial:
    """The attention of two runs of queries, one behind the other."""
    return Partial(torch.cat((first.out, second.out)), torch.cat((first.lse, second.lse)))


def _heads_first(x_THD: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D], a view."""
    return x_THD.transpose(0, 1).unsqueeze(0)
