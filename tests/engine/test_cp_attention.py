"""Attention of a step over any group equals plain causal attention over the whole sequence."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.thread_group import on_every_rank
from torch import Tensor

from vertumnus.engine.collectives import GroupLink
from vertumnus.engine.cp_attention import CpAttention
from vertumnus.engine.decode_attention import DecodeAttention
from vertumnus.engine.kernels import CpuFlash
from vertumnus.engine.kv_store import KvStore
from vertumnus.engine.stages import Stages
from vertumnus.engine.step import PrefixPath, Step, StepRequest
from vertumnus.engine.step_plan import AttentionShape, ExchangeCosts, plan_step

BLOCK_TOKENS = 4
NUM_LAYERS = 2
NUM_SLOTS = 64
CPU = torch.device("cpu")


@st.composite
def steps(draw, max_degree=8):
    """A step of several requests whose blocks lie on any ranks of the group in any mixture."""
    degree = draw(st.sampled_from([d for d in (1, 2, 4, 8) if d <= max_degree]))
    first_rank = draw(st.integers(0, 1)) * degree
    free = {rank: list(range(NUM_SLOTS)) for rank in range(first_rank, first_rank + degree)}
    requests = []
    for number in range(draw(st.integers(1, 3))):
        num_new = draw(st.one_of(st.integers(1, 4 * degree + 2), st.integers(1, 40)))
        num_prefix = draw(st.one_of(st.just(0), st.integers(0, 8).map(lambda b: b * BLOCK_TOKENS), st.integers(0, 30)))
        num_blocks = -(-(num_prefix + num_new) // BLOCK_TOKENS)
        ranks = draw(st.lists(st.sampled_from(list(free)), min_size=num_blocks, max_size=num_blocks))
        requests.append(
            StepRequest(
                request_id=number,
                token_ids=[0] * num_new,
                num_prefix_tokens=num_prefix,
                blocks=[(rank, free[rank].pop()) for rank in ranks],
                prefix_path=draw(st.sampled_from(PrefixPath)),
            )
        )
    return Step(step_id=1, first_rank=first_rank, degree=degree, epoch=0, requests=requests)


def kv_store(num_kv_heads: int, head_dim: int) -> KvStore:
    shape = {"num_layers": NUM_LAYERS, "block_tokens": BLOCK_TOKENS, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    memory = torch.full((NUM_SLOTS * NUM_LAYERS * BLOCK_TOKENS * 2 * num_kv_heads * head_dim,), float("nan"))
    return KvStore(memory, num_slots=NUM_SLOTS, **shape)


def reference(q: Tensor, k: Tensor, v: Tensor, num_new: int) -> Tensor:
    """Plain attention of the last num_new queries in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    groups = q.shape[0] // k.shape[0]
    scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    out = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v.repeat_interleave(groups, 0)
    return out.transpose(0, 1)[-num_new:].float()


@given(step=steps(), heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_any_degree_prefix_and_placement_equals_single_rank_attention(step, heads, seed):
    check_step(step, heads, seed)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@pytest.mark.parametrize("path", PrefixPath)
def test_every_chunk_boundary(degree, path):
    free = {rank: iter(range(NUM_SLOTS)) for rank in range(degree)}
    requests = []
    for number, num_new in enumerate({1, max(2 * degree - 1, 1), 2 * degree, 2 * degree + 1, 4 * degree + 1}):
        num_blocks = -(-(8 + num_new) // BLOCK_TOKENS)
        blocks = [(rank := j % degree, next(free[rank])) for j in range(num_blocks)]
        requests.append(
            StepRequest(
                request_id=number, token_ids=[0] * num_new, num_prefix_tokens=8, blocks=blocks, prefix_path=path
            )
        )
    check_step(Step(step_id=1, first_rank=0, degree=degree, epoch=0, requests=requests), (4, 2), 0)


def check_step(step: Step, heads: tuple[int, int], seed: int) -> None:
    num_heads, num_kv_heads = heads
    head_dim = 8
    torch.manual_seed(seed)
    sequences = [
        [
            (
                torch.randn(request.num_tokens, num_heads, head_dim),
                torch.randn(request.num_tokens, num_kv_heads, head_dim),
                torch.randn(request.num_tokens, num_kv_heads, head_dim),
            )
            for request in step.requests
        ]
        for _ in range(NUM_LAYERS)
    ]
    stores = [kv_store(num_kv_heads, head_dim) for _ in range(step.degree)]
    for layer, of_layer in enumerate(sequences):
        for request, (_, k, v) in zip(step.requests, of_layer, strict=True):
            for position in range(request.num_prefix_tokens):
                rank, slot = request.blocks[position // BLOCK_TOKENS]
                cell = stores[rank - step.first_rank].blocks[slot, layer, position % BLOCK_TOKENS]
                cell[0], cell[1] = k[position], v[position]
    shape = AttentionShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, element_bytes=4)

    def run(index: int, link: GroupLink) -> list[list[tuple[int, int, Tensor]]]:
        plan = plan_step(step, step.first_rank + index, BLOCK_TOKENS, shape, ExchangeCosts(), CPU)
        store = stores[index]
        if plan.is_decode:
            attention = DecodeAttention(plan, store, CpuFlash(), Stages(), head_dim**-0.5)
        else:
            attention = CpAttention(plan, link, store, CpuFlash(), Stages(), head_dim**-0.5)
        found = []
        for layer, of_layer in enumerate(sequences):
            mine: list[list[Tensor]] = [[torch.empty(0, h, head_dim)] for h in (num_heads, num_kv_heads, num_kv_heads)]
            where = []
            for number, planned in enumerate(plan.requests):
                for row in range(planned.local_start, planned.local_end):
                    position = int(plan.positions[row])
                    where.append((number, position))
                    for parts, whole in zip(mine, of_layer[number], strict=True):
                        parts.append(whole[position : position + 1])
            out = attention.attend(layer, *(torch.cat(parts) for parts in mine))
            found.append([(number, position, out[row]) for row, (number, position) in enumerate(where)])
        return found

    results = on_every_rank(step.degree, run)
    for layer, of_layer in enumerate(sequences):
        rows = {(n, position): out for found in results for n, position, out in found[layer]}
        for number, (request, (q, k, v)) in enumerate(zip(step.requests, of_layer, strict=True)):
            expected = reference(q, k, v, request.num_new_tokens)
            got = torch.stack([rows.pop((number, p)) for p in range(request.num_prefix_tokens, request.num_tokens)])
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
            # Every new key and value lies where the step put it, and nowhere is a padding row stored.
            for position in range(request.num_tokens):
                rank, slot = request.blocks[position // BLOCK_TOKENS]
                cell = stores[rank - step.first_rank].blocks[slot, layer, position % BLOCK_TOKENS]
                torch.testing.assert_close(cell, torch.stack((k[position], v[position])), atol=0, rtol=0)
        assert not rows
    num_written = sum(request.num_tokens for request in step.requests)
    assert sum(int((~store.blocks.isnan()).any(-1).any(-1).any(-1)[:, 0].sum()) for store in stores) == num_written


@given(
    prefixes=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_requests_that_decode_together_read_their_own_keys_only(prefixes, heads, seed):
    """Whatever their lengths; what nobody has written, in the last block and elsewhere, is not a number."""
    free = iter(random.Random(seed).sample(range(NUM_SLOTS), NUM_SLOTS))
    requests = [
        StepRequest(
            request_id=number,
            token_ids=[0],
            num_prefix_tokens=num_prefix,
            blocks=[(0, next(free)) for _ in range(num_prefix // BLOCK_TOKENS + 1)],
        )
        for number, num_prefix in enumerate(prefixes)
    ]
    check_step(Step(step_id=1, first_rank=0, degree=1, epoch=0, requests=requests), heads, seed)
