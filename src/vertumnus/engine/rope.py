"""Rotary position embedding, plain and scaled: frequencies, the cos and sin of given positions, the rotation.

Shapes: T tokens, H heads, D head dimensions. Pairs are (d, d + D/2), as in Hugging Face checkpoints.
"""

import math

import torch
from torch import Tensor

from vertumnus.engine.model_config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig, YarnScaling

__all__ = ["RotaryTable", "apply_rotary", "attention_scale", "inverse_frequencies"]


class RotaryTable:
    """The cos and sin of any positions, computed as asked, on their device: nothing grows with the longest sequence."""

    def __init__(self, config: ModelConfig) -> None:
        self._inverse_frequencies = inverse_frequencies(config.rope)
        self._scale = attention_scale(config.rope)

    def __call__(self, positions_T: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(cos_TD, sin_TD) of whole-number positions, for `apply_rotary`; computed in float32, returned in `dtype`.

        The first half of sin_TD is negated: it carries the sign with which the second half of a head enters.
        """
        self._inverse_frequencies = self._inverse_frequencies.to(positions_T.device)
        angles = positions_T.to(torch.float32)[:, None] * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._scale != 1:
            cos, sin = cos * self._scale, sin * self._scale
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rotary(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """x_THD rotated by what `RotaryTable` gave for its tokens, in x's dtype; x may be a strided view and is kept.

    Give cos and sin in x's dtype where several layers share them: they are converted here otherwise.
    """
    cos_T1D, sin_T1D = cos_TD.to(x_THD.dtype)[:, None], sin_TD.to(x_THD.dtype)[:, None]
    half = x_THD.shape[-1] // 2
    rotated = x_THD * cos_T1D
    rotated[..., :half].addcmul_(x_THD[..., half:], sin_T1D[..., :half])
    rotated[..., half:].addcmul_(x_THD[..., :half], sin_T1D[..., half:])
    return rotated


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """The D/2 angles per position, in radians, float32.

    Plain (Su et al., RoFormer, arXiv 2104.09864): f_d = theta^(-2d/D). The scaled kinds change f_d:
    linear (Chen et al., Position Interpolation, arXiv 2306.15595): f_d / factor; llama3 (Llama 3.1's reference code)
    and yarn (Peng et al., YaRN, arXiv 2309.00071): between f_d and f_d / factor, by wavelength.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    kept = 1.0 / config.theta**exponents
    scaling = config.scaling
    if scaling is None:
        return kept
    if isinstance(scaling, LinearScaling):
        return kept / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        return _llama3(kept, scaling)
    divided = 1.0 / (scaling.factor * config.theta**exponents)
    share_kept = 1 - _yarn_ramp(config, scaling)
    return divided * (1 - share_kept) + kept * share_kept


def attention_scale(config: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 but for yarn.

    YaRN (arXiv 2309.00071, eq. 22) heats the softmax by m(s) = 0.1 ln(s) + 1 at factor s > 1. With mscale and
    mscale_all_dim it is the ratio of 0.1 mscale ln(s) + 1 and 0.1 mscale_all_dim ln(s) + 1; attention_factor, where
    given, stands instead of both.
    """
    scaling = config.scaling
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def heat(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return heat(scaling.mscale) / heat(scaling.mscale_all_dim)
    return heat(1.0)


def _llama3(kept: Tensor, scaling: Llama3Scaling) -> Tensor:
    """With n = original positions per wavelength: divided at n < low, kept at n > high, linear in n between."""
    turns = scaling.original_max_positions / (2 * math.pi / kept)
    share_kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share_kept = share_kept.clamp(0, 1)
    return (1 - share_kept) * kept / scaling.factor + share_kept * kept


def _yarn_ramp(config: RopeConfig, scaling: YarnScaling) -> Tensor:
    """The share of each frequency that is divided: 0 up to the dimension that turns beta_fast times within the
    original positions, 1 from the one that turns beta_slow times, linear between.

    Dimension d turns n times where d = D ln(original / (2 pi n)) / (2 ln theta).
    """

    def dimension(num_turns: float) -> float:
        wavelength_ratio = scaling.original_max_positions / (num_turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength_ratio) / (2 * math.log(config.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    if low == high:
        high += 0.001  # a step rather than a division by zero
    ramp = (torch.arange(config.head_dim // 2, dtype=torch.float32) - low) / (high - low)
    return ramp.clamp(0, 1)
