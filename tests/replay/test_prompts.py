"""Prompts share what the trace shares, exactly, and nothing else."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.workload.trace_strategies import trace_of, traces

from vertumnus.errors import ConfigError
from vertumnus.replay import prompts as prompts_module
from vertumnus.replay.blocks import fully_named, scaled_lengths
from vertumnus.replay.prompts import MIN_VOCAB, Prompts
from vertumnus.workload.readers import read_trace
from vertumnus.workload.trace import Trace

FACTORS = st.sampled_from([0.01, 0.25, 0.5, 0.75, 1.0, 1.3, 4.0])


@st.composite
def partly_named(draw):
    """Traces that name all blocks, the full ones only, or none: what the readers give."""
    trace = draw(traces())
    kind = draw(st.sampled_from(["all", "full", "none"]))
    if kind == "all":
        return trace
    kept = [trace.full_blocks(i) if kind == "full" else trace.blocks(i)[:0] for i in range(trace.num_requests)]
    offsets = np.concatenate(([0], np.cumsum([len(ids) for ids in kept])))
    return replace(trace, has_block_ids=kind == "full", block_ids=np.concatenate(kept), block_offsets=offsets)


def cut(tokens, block_tokens):
    return [tuple(tokens[start : start + block_tokens]) for start in range(0, len(tokens), block_tokens)]


def num_common(one, other):
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def assert_shared_as_named(trace: Trace, prompts: Prompts) -> None:
    blocks = [cut(prompts.tokens(i).tolist(), trace.block_tokens) for i in range(trace.num_requests)]
    for i in range(trace.num_requests):
        for j in range(i):
            ids = num_common(trace.blocks(i).tolist(), trace.blocks(j).tolist())
            assert num_common(blocks[i], blocks[j]) == ids


@given(trace=partly_named(), factor=FACTORS, seed=st.integers(0, 5))
def test_two_prompts_share_exactly_the_leading_blocks_that_their_ids_share(trace, factor, seed):
    named = scaled_lengths(fully_named(trace), factor)
    prompts = Prompts(named, seed=seed)
    assert_shared_as_named(named, prompts)
    tokens = [prompts.tokens(i) for i in range(named.num_requests)]
    for i, mine in enumerate(tokens):
        for j in range(i):
            blocks = num_common(named.blocks(i).tolist(), named.blocks(j).tolist())
            shared = min(blocks * named.block_tokens, len(mine), len(tokens[j]))
            assert num_common(mine.tolist(), tokens[j].tolist()) == shared, "they part at the first differing block"


@given(trace=partly_named(), factor=FACTORS, vocab=st.integers(MIN_VOCAB, 24))
def test_a_vocabulary_of_a_few_tokens_tells_blocks_apart_or_is_refused(trace, factor, vocab):
    named = scaled_lengths(fully_named(trace), factor)
    try:
        prompts = Prompts(named, vocab=vocab)
    except ConfigError:
        assume(False)
    assert_shared_as_named(named, prompts)


@given(trace=partly_named(), factor=FACTORS, seed=st.integers(0, 5), vocab=st.sampled_from([64, 32_000, 1 << 20]))
def test_prompts_have_the_length_of_the_trace_and_only_allowed_tokens(trace, factor, seed, vocab):
    named = scaled_lengths(fully_named(trace), factor)
    prompts = Prompts(named, seed=seed, vocab=vocab)
    for index in range(named.num_requests):
        tokens = prompts.tokens(index)
        assert len(tokens) == named.input_tokens[index] >= 1
        assert tokens.min() >= prompts.low > 0
        assert tokens.max() < vocab
        text = b"".join(prompts.text_pieces(index))
        assert json.loads(b"[" + text + b"]") == tokens.tolist()


@given(trace=partly_named(), piece_tokens=st.integers(1, 12))
def test_pieces_join_to_the_same_prompt_however_small(trace, piece_tokens):
    named = scaled_lengths(fully_named(trace), 2)
    prompts = Prompts(named)
    whole = [prompts.tokens(i).tolist() for i in range(named.num_requests)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts_module, "PIECE_TOKENS", piece_tokens)
        for index, tokens in enumerate(whole):
            pieces = list(prompts._pieces(index))
            assert np.concatenate(pieces).tolist() == tokens
            assert max(map(len, pieces)) <= max(piece_tokens, 1)
            assert json.loads(b"[" + b"".join(prompts.text_pieces(index)) + b"]") == tokens


@given(trace=partly_named())
def test_same_seed_same_prompts_and_another_seed_others(trace):
    named = scaled_lengths(fully_named(trace), 8)
    one, same, other = Prompts(named, seed=1), Prompts(named, seed=1), Prompts(named, seed=2)
    assert one.tokens(0).tolist() == same.tokens(0).tolist()
    if named.input_tokens[0] >= 8:
        assert one.tokens(0).tolist() != other.tokens(0).tolist()


@given(trace=partly_named(), factor=FACTORS)
def test_scaling_keeps_the_blocks_and_their_order(trace, factor):
    named = fully_named(trace)
    scaled = scaled_lengths(named, factor)
    assert scaled.block_ids.tolist() == named.block_ids.tolist()
    assert scaled.block_offsets.tolist() == named.block_offsets.tolist()
    assert scaled.output_tokens.min() >= 1
    ratio = scaled.block_tokens / named.block_tokens
    assert (scaled.input_tokens - named.input_tokens * ratio < 1).all()
    assert (scaled.input_tokens >= named.input_tokens * ratio).all()
    assert scaled_lengths(named, 1.0).input_tokens.tolist() == named.input_tokens.tolist()


def test_more_first_blocks_than_tokens_are_told_apart_by_two():
    named = trace_of([[i, 0, 0, 0] for i in range(200)])
    prompts = Prompts(named, vocab=MIN_VOCAB)
    assert len({tuple(prompts.tokens(i)[:3]) for i in range(200)}) == 200
    assert_shared_as_named(named, prompts)


def test_blocks_that_cannot_be_told_apart_are_refused():
    named = scaled_lengths(trace_of([[i, 0, 0, 0] for i in range(200)]), 0.01)
    with pytest.raises(ConfigError, match=r"192 different blocks of 1 tokens .*accepted: a larger vocab"):
        Prompts(named, vocab=MIN_VOCAB)


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf"), 1e9])
def test_absurd_factor_is_refused(factor):
    with pytest.raises(ConfigError, match=r"scale-lengths is .*accepted"):
        scaled_lengths(trace_of([[0, 1]]), factor)


@pytest.mark.parametrize("vocab", [-1, 0, MIN_VOCAB - 1, 1 << 30])
def test_absurd_vocabulary_is_refused(vocab):
    with pytest.raises(ConfigError, match=r"vocab is .*accepted"):
        Prompts(trace_of([[0, 1]]), vocab=vocab)


FORMATS = {
    "Mooncake": [
        {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [5, 6, 7]},
        {"timestamp": 9, "input_length": 1030, "output_length": 0, "hash_ids": [5, 6, 8]},
    ],
    "Bailian": [
        {"chat_id": 1, "timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [5, 6, 7]},
        {"chat_id": 2, "timestamp": 1, "input_length": 39, "output_length": 3, "hash_ids": [5, 6]},
    ],
    "RTP-LLM": [
        {"ts": 0, "il": 2100, "ol": 1, "bh": ["a", "b"]},
        {"ts": 1, "il": 3000, "ol": 1, "bh": ["a", "b"]},
    ],
    "own": [
        {"schema": "vertumnus-trace", "version": 1, "block_tokens": 10},
        {"arrival_s": 0, "input_tokens": 25, "output_tokens": 1, "block_ids": [0, 1]},
        {"arrival_s": 1, "input_tokens": 29, "output_tokens": 1, "block_ids": [0, 1, 2]},
    ],
}


@pytest.mark.parametrize("rows", FORMATS.values(), ids=FORMATS.keys())
def test_every_format_gives_prompts_that_share_two_blocks(rows, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = fully_named(read_trace(path))
    prompts = Prompts(trace)
    one, other = prompts.tokens(0).tolist(), prompts.tokens(1).tolist()
    assert num_common(one, other) == 2 * trace.block_tokens
    assert [len(one), len(other)] == trace.input_tokens.tolist()


def test_without_prefix_information_nothing_is_shared(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04.03,3180,8\n"
    )
    prompts = Prompts(fully_named(read_trace(path)))
    assert num_common(prompts.tokens(0).tolist(), prompts.tokens(1).tolist()) == 0


def test_repeated_plays_share_nothing():
    named = fully_named(trace_of([[0] * 9, [0] * 11]).repeated(2))
    prompts = Prompts(named)
    assert num_common(prompts.tokens(0).tolist(), prompts.tokens(1).tolist()) == 8
    assert num_common(prompts.tokens(0).tolist(), prompts.tokens(2).tolist()) == 0
