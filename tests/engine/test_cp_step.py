"""Steps of whole models, at every degree, against transformers in float32."""

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.models import VOCAB_SIZE, SavedModel, tiny_llama, tiny_model, tiny_qwen3, tiny_qwen3_moe
from tests.engine.thread_ranks import ThreadRanks

from vertumnus.engine.model_config import Family
from vertumnus.engine.step import PrefixPath, Sampling, StepRequest

FAMILIES = {"llama": tiny_llama, "qwen3": tiny_qwen3, "qwen3_moe": tiny_qwen3_moe}
DEGREES = [1, 2, 4, 8]
TOLERANCE = 1e-4
"""Of the reference's largest logit."""


def tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=num_tokens)


@cache
def reference_logits(saved: SavedModel, prompt: tuple[int, ...]) -> torch.Tensor:
    return saved.logits(list(prompt))


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert float((got - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


def request(request_id, prompt, num_prefix, blocks, **options) -> StepRequest:
    return StepRequest(
        request_id=request_id, token_ids=prompt[num_prefix:], num_prefix_tokens=num_prefix, blocks=blocks, **options
    )


@pytest.mark.parametrize("path", [PrefixPath.PASS_KV, PrefixPath.PASS_Q], ids=lambda path: path.value)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_reference_at_every_chunk_boundary(family, degree, path):
    """Prefixes of none, one and many blocks, suffixes around each chunk boundary, all in one mixed batch."""
    saved = FAMILIES[family]()
    ranks = ThreadRanks(saved, degree, num_slots=512 // degree + 64)
    group = range(degree)
    prompts, requests, prefills = {}, [], []
    suffixes = sorted({1, 2, max(2 * degree - 1, 1), 2 * degree, 2 * degree + 1, 4 * degree, 4 * degree + 3, 37})
    for num_prefix in (0, 4, 40):
        for num_new in suffixes:
            request_id = len(requests)
            prompts[request_id] = prompt = tokens(num_prefix + num_new, seed=request_id)
            held = ranks.new_blocks(group, num_prefix)
            blocks = ranks.new_blocks(group, len(prompt), given=held)
            if num_prefix:
                prefills.append(request(request_id, prompt[:num_prefix], 0, held))
            requests.append(request(request_id, prompt, num_prefix, blocks, prefix_path=path))
    ranks.step(0, degree, prefills)
    for request_id, logits in ranks.logits(0, degree, requests).items():
        expected = reference_logits(saved, tuple(prompts[request_id]))
        assert_close(logits, expected[-len(logits) :])


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_continuation_after_a_chunked_prefill_is_the_reference_s(family, degree):
    saved = FAMILIES[family]()
    ranks = ThreadRanks(saved, degree)
    prompt = tokens(61, seed=3)
    blocks = ranks.new_blocks(range(degree), len(prompt) + 32)

    def table(num_tokens):
        return blocks[: -(-num_tokens // ranks.block_tokens)]

    ranks.step(0, degree, [request(0, prompt[:17], 0, table(17))])  # a chunk need not end with a block
    ranks.step(0, degree, [request(0, prompt[:44], 17, table(44))])
    found = list(prompt)
    num_done = 44
    while len(found) < len(prompt) + 32:
        this = request(0, found, num_done, table(len(found)), sampling=Sampling(), num_top_logprobs=3)
        out = ranks.sampled(0, degree, [this])[0]
        num_done = len(found)
        found.append(out.token_id)
        logits = reference_logits(saved, tuple(found[:-1]))[-1]
        logprobs = torch.log_softmax(logits, -1)
        assert out.logprob == pytest.approx(float(logprobs[out.token_id]), abs=1e-3)
        assert [logprob for _, logprob in out.top_logprobs] == pytest.approx(logprobs.topk(3).values.tolist(), abs=1e-3)
        assert out.top_logprobs[0] == (out.token_id, out.logprob)
    assert found[len(prompt) :] == saved.greedy(prompt, 32)


@pytest.mark.parametrize("degree", [2, 8])
def test_kv_blocks_equal_those_of_a_single_rank(degree):
    saved = tiny_qwen3()
    prompt = tokens(45)
    kv = []
    for num_ranks in (1, degree):
        ranks = ThreadRanks(saved, num_ranks)
        blocks = ranks.new_blocks(range(num_ranks), len(prompt))
        ranks.step(0, num_ranks, [request(0, prompt, 0, blocks)])
        kv.append(ranks.kv(blocks, len(prompt)))
    torch.testing.assert_close(kv[0], kv[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_rope_variants_and_gqa_ratios_at_degree_two(rope, heads):
    num_heads, num_kv_heads = heads
    saved = tiny_model(
        Family.LLAMA,
        rope=rope,
        hidden_size=48,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        is_tied=num_kv_heads == 1,
    )
    ranks = ThreadRanks(saved, 2)
    prompt = tokens(150)
    blocks = ranks.new_blocks(range(2), len(prompt))
    logits = ranks.logits(0, 2, [request(0, prompt, 0, blocks)])[0]
    assert_close(logits, reference_logits(saved, tuple(prompt)))


@st.composite
def journeys(draw):
    """A prompt that grows turn by turn while the pool is re-shaped: (degree, group, new tokens, path) of each turn."""
    return [
        (
            degree := draw(st.sampled_from(DEGREES)),
            draw(st.integers(0, 8 // degree - 1)),
            draw(st.integers(1, 40)),
            draw(st.sampled_from(PrefixPath)),
        )
        for _ in range(draw(st.integers(2, 6)))
    ]


@given(journey=journeys(), seed=st.integers(0, 5))
@settings(max_examples=15)
def test_prefixes_computed_at_another_degree_are_reused_exactly(journey, seed):
    check_journey(journey, seed)


def test_prefix_survives_splits_down_to_one_and_the_merge_back():
    auto = PrefixPath.AUTO
    check_journey([(8, 0, 60, auto), (4, 0, 9, auto), (2, 1, 5, auto), (1, 2, 8, auto), (8, 0, 20, auto)], 0)


def check_journey(journey, seed):
    """Each turn reuses as long a prefix as the group's ranks hold of all that was ever computed, in any mixture."""
    saved = tiny_llama()
    ranks = ThreadRanks(saved, 8)
    shuffled = random.Random(seed)
    copies: dict[int, list[tuple[int, int]]] = {}
    prompt: list[int] = []
    for turn, (degree, group, num_new, path) in enumerate(journey):
        prompt = prompt + tokens(num_new, seed=turn)
        members = list(range(group * degree, (group + 1) * degree))
        held = []
        while held_here := [address for address in copies.get(len(held), []) if address[0] in members]:
            held.append(shuffled.choice(held_here))
        num_prefix = min(len(held) * ranks.block_tokens, len(prompt) - 1)
        num_prefix -= num_prefix % ranks.block_tokens
        held = held[: num_prefix // ranks.block_tokens]
        shuffled.shuffle(members)
        blocks = ranks.new_blocks(members, len(prompt), given=held)
        logits = ranks.logits(group * degree, degree, [request(0, prompt, num_prefix, blocks, prefix_path=path)])[0]
        assert_close(logits, reference_logits(saved, tuple(prompt))[num_prefix:])
        for number in range(len(held), len(prompt) // ranks.block_tokens):
            copies.setdefault(number, []).append(blocks[number])


@pytest.mark.parametrize("degree", [1, 2])
def test_a_batch_changes_no_other_request_s_logits(degree):
    saved = tiny_qwen3_moe()
    prompt = tokens(33, seed=1)
    alone = ThreadRanks(saved, degree)
    expected = alone.logits(0, degree, [request(0, prompt, 0, alone.new_blocks(range(degree), 33))])[0]
    ranks = ThreadRanks(saved, degree)
    batch = [
        request(
            n,
            prompt if n == 1 else tokens(9 * n + 1, seed=n),
            0,
            ranks.new_blocks(range(degree), 33 if n == 1 else 9 * n + 1),
        )
        for n in range(4)
    ]
    assert_close(ranks.logits(0, degree, batch)[1], expected)


def test_decode_of_many_streams_of_unequal_length_is_each_stream_s_own():
    saved = tiny_llama()
    ranks = ThreadRanks(saved, 1)
    prompts = {n: tokens(1 + 7 * n, seed=n) for n in range(6)}
    blocks = {n: ranks.new_blocks([0], len(prompt) + 8) for n, prompt in prompts.items()}

    def requests(found, num_done):
        return [
            request(n, found[n], num_done[n], blocks[n][: -(-len(found[n]) // 4)], sampling=Sampling()) for n in found
        ]

    found = {n: list(prompt) for n, prompt in prompts.items()}
    num_done = dict.fromkeys(found, 0)
    for _ in range(8):
        outputs = ranks.sampled(0, 1, requests(found, num_done))
        num_done = {n: len(found[n]) for n in found}
        for n, out in outputs.items():
            found[n].append(out.token_id)
    for n, prompt in prompts.items():
        assert found[n][len(prompt) :] == saved.greedy(prompt, 8)


def test_seeded_sampling_does_not_depend_on_the_degree():
    saved = tiny_llama()
    prompt = tokens(30)
    drawn = set()
    for degree in DEGREES:
        ranks = ThreadRanks(saved, degree)
        this = request(0, prompt, 0, ranks.new_blocks(range(degree), 30), sampling=Sampling(temperature=1.0, seed=11))
        drawn.add(ranks.sampled(0, degree, [this])[0].token_id)
    assert len(drawn) == 1


def test_auto_takes_pass_q_for_a_short_suffix_behind_a_long_prefix_and_pass_kv_otherwise():
    ranks = ThreadRanks(tiny_llama(), 2)
    prompt = tokens(260)
    held = ranks.new_blocks(range(2), 160)
    ranks.step(0, 2, [request(0, prompt[:160], 0, held)])
    for num_tokens, num_pass_q in ((162, 1), (260, 0)):
        blocks = ranks.new_blocks(range(2), num_tokens, given=held)
        outputs = ranks.step(0, 2, [request(0, prompt[:num_tokens], 160, blocks)])
        assert [output.num_pass_q for output in outputs] == [num_pass_q] * 2
