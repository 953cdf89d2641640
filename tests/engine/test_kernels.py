import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vertumnus.engine import block_attention
from vertumnus.engine.block_attention import attend_by_blocks, queries_of_block
from vertumnus.engine.kernels import CpuBlocks, CpuFlash, Partial, merge

_HEADS = st.sampled_from([(1, 1), (4, 4), (9, 3), (8, 1), (12, 3)])
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of outputs, whose scale is 1."""


def _near(length: int) -> st.SearchStrategy[int]:
    """Lengths at the border of one block, or of several."""
    return st.builds(lambda blocks, more: max(1, blocks * length + more), st.integers(0, 3), st.integers(-2, 2))


def _drawn(seed: int, num_queries: int, num_keys: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_queries, heads[0], 16), (num_keys, heads[1], 16), (num_keys, heads[1], 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _exact(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Partial:
    q, (k, v) = q.double(), (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    if is_causal:
        scores += torch.full(scores.shape[1:], float("-inf"), dtype=torch.float64).triu(1)
    return Partial(torch.einsum("hts,shd->thd", scores.softmax(-1), v), scores.logsumexp(-1).t())


def _assert_same(found: Partial, wanted: Partial, dtype: torch.dtype) -> None:
    assert found.out.dtype is dtype
    assert found.lse.dtype is torch.float32
    assert (found.out - wanted.out).abs().max() <= _ROUNDING[dtype]
    assert (found.lse - wanted.lse).abs().max() <= 1e-5


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    heads=_HEADS,
    num_queries=st.one_of(st.integers(1, 40), _near(64), _near(256)),
    num_keys=st.one_of(st.integers(1, 40), _near(block_attention.BLOCK_KEYS)),
    is_causal=st.booleans(),
    scale=st.sampled_from([0.05, 0.25, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(seed=0, heads=(3, 1), num_queries=1537, num_keys=0, is_causal=True, scale=0.25, dtype=torch.float32)
@example(seed=0, heads=(2, 1), num_queries=1025, num_keys=0, is_causal=True, scale=0.25, dtype=torch.bfloat16)
def test_attention_by_blocks_is_attention(seed, heads, num_queries, num_keys, is_causal, scale, dtype):
    q, k, v = _drawn(seed, num_queries, num_queries if is_causal else num_keys, heads, dtype)
    before = q.clone(), k.clone(), v.clone()
    found = Partial(*attend_by_blocks(q, k, v, is_causal=is_causal, scale=scale))
    assert all(map(torch.equal, (q, k, v), before))
    _assert_same(found, _exact(q, k, v, is_causal=is_causal, scale=scale), dtype)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1 << 30), num_new=_near(256), num_prefix=_near(block_attention.BLOCK_KEYS))
def test_a_prefix_and_new_keys_merge_to_attention_over_both(seed, num_new, num_prefix):
    q, k, v = _drawn(seed, num_prefix + num_new, num_prefix + num_new, (2, 1), torch.float32)
    new, old = slice(num_prefix, None), slice(num_prefix)
    found = merge(
        Partial(*attend_by_blocks(q[new], k[old], v[old], is_causal=False, scale=0.25)),
        Partial(*attend_by_blocks(q[new], k[new], v[new], is_causal=True, scale=0.25)),
    )
    out, lse = _exact(q, k, v, is_causal=True, scale=0.25)
    _assert_same(found, Partial(out[new], lse[new]), torch.float32)


def test_scores_far_beyond_the_range_of_exponentials_stay_exact():
    q, k, v = _drawn(0, 300, 2100, (4, 2), torch.float32)
    k[::7] *= 40  # scores of some thousands, of both signs, the highest anywhere
    found = Partial(*attend_by_blocks(q * 20, k, v, is_causal=False, scale=1.0))
    wanted = _exact(q * 20, k, v, is_causal=False, scale=1.0)
    assert torch.allclose(found.lse.double(), wanted.lse, rtol=1e-6)
    assert found.out.isfinite().all()


def test_keys_and_values_may_be_views_of_one_tensor():
    q, k, v = _drawn(1, 300, 700, (6, 2), torch.bfloat16)
    kv = torch.stack((k, v), 1)
    views = attend_by_blocks(q, kv[:, 0], kv[:, 1], is_causal=False, scale=0.25)
    assert all(map(torch.equal, views, attend_by_blocks(q, k, v, is_causal=False, scale=0.25)))


@given(group=st.integers(1, 128))
def test_a_block_of_scores_is_bounded_whatever_the_heads(group):
    assert 64 <= queries_of_block(group) <= 512
    assert queries_of_block(group) * group <= max(block_attention.BLOCK_ROWS, 64 * group)


def test_both_cpu_kernels_agree_where_the_choice_between_them_falls():
    for num_queries in (63, 64, 65):
        for num_keys in (1023, 1024, 1025):
            q, k, v = _drawn(2, num_queries, num_keys, (9, 3), torch.float32)
            found, wanted = (c().attend(q, k, v, is_causal=False, scale=0.25) for c in (CpuBlocks, CpuFlash))
            assert (found.out - wanted.out).abs().max() <= 2e-6
            assert (found.lse - wanted.lse).abs().max() <= 2e-6
