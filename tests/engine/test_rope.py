"""Rotary embedding, against transformers' own formulas and against the law that makes it useful."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.models import ROPES, tiny_llama
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from vertumnus.engine.model_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from vertumnus.engine.rope import RotaryTable, apply_rotary, attention_scale, inverse_frequencies

THETA = st.sampled_from([1e4, 5e5, 1e6])
HEAD_DIM = st.sampled_from([2, 16, 64, 128])
FACTOR = st.floats(0.5, 64)
LENGTH = st.sampled_from([16, 4096, 32768])


def expected(rope, head_dim):
    """(inverse frequencies, scale of cos and sin) by transformers."""
    config = LlamaConfig(head_dim=head_dim, hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters=rope)
    if rope["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)


def agrees(config, rope):
    frequencies, scale = expected(rope | {"rope_theta": config.theta}, config.head_dim)
    torch.testing.assert_close(inverse_frequencies(config), frequencies, rtol=1e-6, atol=0)
    assert attention_scale(config) == pytest.approx(scale)


@given(THETA, HEAD_DIM)
def test_plain_frequencies_are_those_of_transformers(theta, head_dim):
    agrees(RopeConfig(theta=theta, head_dim=head_dim), {"rope_type": "default"})


@given(THETA, HEAD_DIM, FACTOR)
def test_linear_frequencies_are_those_of_transformers(theta, head_dim, factor):
    config = RopeConfig(theta=theta, head_dim=head_dim, scaling=LinearScaling(factor))
    agrees(config, {"rope_type": "linear", "factor": factor})


@given(THETA, HEAD_DIM, FACTOR, LENGTH, st.floats(0.5, 2), st.floats(2.5, 8))
def test_llama3_frequencies_are_those_of_transformers(theta, head_dim, factor, length, low, high):
    scaling = Llama3Scaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_positions=length)
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }
    agrees(RopeConfig(theta=theta, head_dim=head_dim, scaling=scaling), rope)


@settings(max_examples=200)
@given(
    theta=THETA,
    head_dim=HEAD_DIM,
    factor=FACTOR,
    length=LENGTH,
    fast=st.sampled_from([None, 16.0, 32.0]),
    slow=st.sampled_from([None, 1.0, 2.0]),
    attention_factor=st.none() | st.floats(0.5, 2),
    mscales=st.tuples(st.none() | st.floats(0.5, 2), st.none() | st.floats(0.5, 2)),
    truncate=st.booleans(),
)
def test_yarn_frequencies_and_scale_are_those_of_transformers(
    theta, head_dim, factor, length, fast, slow, attention_factor, mscales, truncate
):
    scaling = YarnScaling(
        factor=factor,
        original_max_positions=length,
        beta_fast=fast or 32.0,
        beta_slow=slow or 1.0,
        attention_factor=attention_factor,
        mscale=mscales[0],
        mscale_all_dim=mscales[1],
        is_truncated=truncate,
    )
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": length,
        "beta_fast": fast,
        "beta_slow": slow,
        "attention_factor": attention_factor,
        "mscale": mscales[0],
        "mscale_all_dim": mscales[1],
        "truncate": truncate,
    }
    agrees(RopeConfig(theta=theta, head_dim=head_dim, scaling=scaling), rope)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotated_heads_are_those_of_transformers(rope, dtype):
    model = tiny_llama(rope=rope)
    positions_T = torch.tensor([0, 1, 2, 63, 64, 511, 100_000])
    generator = torch.Generator().manual_seed(0)
    # As the engine has them: heads within a wider projection.
    x_THD = torch.randn(7, 3, 40, generator=generator).to(dtype)[..., 8:24]
    kept = x_THD.clone()

    cos_1TD, sin_1TD = model.reference.model.rotary_emb(x_THD, positions_T[None])
    x_1HTD = x_THD.transpose(0, 1)[None]
    wanted_THD = apply_rotary_pos_emb(x_1HTD, x_1HTD, cos_1TD, sin_1TD)[0][0].transpose(0, 1)

    rotated_THD = apply_rotary(x_THD, *RotaryTable(model.config)(positions_T, dtype))
    assert rotated_THD.dtype is dtype
    assert torch.equal(x_THD, kept)
    # Ours rounds once where transformers rounds three times.
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(rotated_THD, wanted_THD, rtol=tolerance, atol=4 * tolerance)


@given(position=st.integers(0, 2000), distance=st.integers(0, 2000), shift=st.integers(0, 2000))
def test_scores_depend_on_the_distance_only(position, distance, shift):
    table = RotaryTable(tiny_llama().config)
    generator = torch.Generator().manual_seed(1)
    q_1HD, k_1HD = torch.randn(2, 1, 1, 16, generator=generator)

    def score(query, key):
        rotated_q = apply_rotary(q_1HD, *table(torch.tensor([query])))
        return float((rotated_q * apply_rotary(k_1HD, *table(torch.tensor([key])))).sum())

    assert score(position + distance, position) == pytest.approx(
        score(position + shift + distance, position + shift), abs=5e-3
    )


def test_rotation_keeps_lengths_but_for_the_scale_of_yarn():
    x_THD = torch.randn(50, 2, 16, generator=torch.Generator().manual_seed(2))
    for rope in ROPES:
        config = tiny_llama(rope=rope).config
        rotated_THD = apply_rotary(x_THD, *RotaryTable(config)(torch.arange(50)))
        torch.testing.assert_close(rotated_THD.norm(dim=-1), x_THD.norm(dim=-1) * attention_scale(config.rope))
