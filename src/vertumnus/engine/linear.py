"""Products with the weights, by the quickest that PyTorch has."""

import torch
from torch import Tensor
from torch.nn import functional

_HAS_ONEDNN: bool = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def has_onednn() -> bool:
    return _HAS_ONEDNN


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """[T, I] times the transpose of [O, I]: [T, O].

    PyTorch multiplies float32 with MKL, which keeps its widest instructions for some makers' processors; oneDNN, which
    it uses for bfloat16 anyhow, takes what the processor has (1.1 to 2.2 times as fast on an AVX-512 machine by AMD).
    There, a float32 weight must be dense: with gaps between its rows it is a thousand times as slow.
    """
    if _HAS_ONEDNN and x_TI.dtype is torch.float32 and x_TI.device.type == "cpu" and x_TI.shape[0]:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, None, "none", [], "")
        return product
    return functional.linear(x_TI, weight_OI)
