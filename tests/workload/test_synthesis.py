"""Every generator, measured with `analyze`, is held to the figures it is made for. Tolerances are in each test."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.workload.trace_strategies import assert_same_requests

from vertumnus.errors import ConfigError
from vertumnus.workload.analysis import analyze
from vertumnus.workload.readers import read_trace
from vertumnus.workload.reuse import block_reuse
from vertumnus.workload.sampling import Quantiles, Streams, stratified
from vertumnus.workload.synthesis import KINDS, synthesise
from vertumnus.workload.writers import write_trace

SEEDS = (0, 1, 7)


@pytest.mark.parametrize("seed", SEEDS)
def test_conversation_is_like_the_mooncake_conversation_trace(seed):
    analysis = analyze(synthesise("conversation", seed=seed), window_s=300)
    lengths = analysis.input
    assert analysis.duration_s == pytest.approx(3600, rel=0.01)
    assert analysis.mean_rate_per_s == pytest.approx(3.40, rel=0.01)
    assert 2.5 < analysis.min_rate_per_s < analysis.max_rate_per_s < 4.0
    assert lengths.mean_tokens == pytest.approx(12035, rel=0.02)
    assert lengths.p50_tokens == pytest.approx(6909, rel=0.02)
    assert lengths.p90_tokens == pytest.approx(27367, rel=0.02)
    assert lengths.p99_tokens == pytest.approx(85400, rel=0.03)
    assert lengths.max_tokens <= 126195
    assert analysis.output.mean_tokens == pytest.approx(343, rel=0.02)
    assert analysis.long_request_ratio == pytest.approx(0.069, abs=0.003)
    assert analysis.long_token_ratio == pytest.approx(0.329, abs=0.01)
    assert analysis.reuse is not None
    assert analysis.reuse.ideal_token_hit_ratio == pytest.approx(0.374, abs=0.005)
    # The real trace finds 22.8% in a cache of this size: reuse lies as far back.
    assert analysis.reuse.finite_token_hit_ratio == pytest.approx(0.228, abs=0.03)


@pytest.mark.parametrize("seed", SEEDS)
def test_toolagent_is_as_published(seed):
    analysis = analyze(synthesise("toolagent", seed=seed))
    assert analysis.num_requests == 23608
    assert analysis.duration_s == pytest.approx(3600, rel=0.01)
    assert analysis.input.mean_tokens == pytest.approx(8596, rel=0.01)
    assert analysis.output.mean_tokens == pytest.approx(182, rel=0.01)
    assert analysis.reuse is not None
    assert analysis.reuse.ideal_block_hit_ratio == pytest.approx(0.59, abs=0.005)
    assert analysis.reuse.request_hit_ratio > 0.98, "nearly every request starts with a known system prompt"


@pytest.mark.parametrize("seed", SEEDS)
def test_every_hour_of_production_is_as_published(seed):
    # The day played six times as fast, at the default rate: the same curves with a sixth of the requests.
    trace = synthesise("production", seed=seed, duration_s=4 * 3600)
    analysis = analyze(trace, window_s=600)
    hours = [window for window in analysis.windows if window.length_s > 300]
    assert len(hours) == 24
    assert analysis.max_rate_per_s / analysis.min_rate_per_s > 3
    assert all(0.04 <= hour.long_request_ratio <= 0.08 for hour in hours)
    assert all(0.32 <= hour.long_token_ratio <= 0.54 for hour in hours)
    # The first minutes find an empty cache.
    assert all(0.35 <= hour.ideal_token_hit_ratio <= 0.55 for hour in hours[1:])
    assert analysis.reuse is not None
    assert 0.35 <= analysis.reuse.ideal_token_hit_ratio <= 0.55


@pytest.mark.parametrize("seed", SEEDS)
def test_agentic_is_as_published(seed):
    trace = synthesise("agentic", seed=seed)
    analysis = analyze(trace)
    lengths = analysis.input
    assert (lengths.mean_tokens, lengths.p50_tokens) == pytest.approx((70506, 46080), rel=0.01)
    assert (lengths.p90_tokens, lengths.p95_tokens) == pytest.approx((160256, 222720), rel=0.01)
    assert lengths.p99_tokens == pytest.approx(415744, rel=0.02)
    assert 0.8 * 1046528 < lengths.max_tokens <= 1046528
    assert analysis.reuse is not None
    assert analysis.reuse.ideal_token_hit_ratio == pytest.approx(0.845, abs=0.003)
    assert analysis.reuse.request_hit_ratio == pytest.approx(0.895, abs=0.01)
    shared = block_reuse(trace).found_tokens(None, trace.num_requests)
    assert float(shared.mean()) == pytest.approx(59601, rel=0.01)
    assert np.percentile(shared, (90, 95, 99)).tolist() == pytest.approx((146432, 202240, 391680), rel=0.05)
    assert float(np.median(shared)) == pytest.approx(31232, rel=0.2)


def test_agentic_families_follow_zipf():
    trace = synthesise("agentic", seed=0, rate_per_s=10)
    first_blocks = trace.block_ids[trace.block_offsets[:-1]]
    counts = np.sort(np.bincount(first_blocks))[::-1][3:60]
    slope = np.polyfit(np.log(np.arange(4, 61)), np.log(counts), 1)[0]
    assert slope == pytest.approx(-1.04, abs=0.12)


@pytest.mark.parametrize("seed", SEEDS)
def test_phases_alternate(seed):
    trace = synthesise(
        "phases",
        seed=seed,
        duration_s=1200,
        phase_s=300,
        short_rate_per_s=20,
        short_tokens=2000,
        long_rate_per_s=2,
        long_tokens=60000,
    )
    phase = (trace.arrival_s // 300).astype(int)
    for index, (rate_per_s, mean_tokens) in enumerate([(20, 2000), (2, 60000)] * 2):
        assert (phase == index).sum() / 300 == pytest.approx(rate_per_s, rel=0.2)
        assert trace.input_tokens[phase == index].mean() == pytest.approx(mean_tokens, rel=0.1)
    halved = synthesise("phases", seed=seed, duration_s=1200, phase_s=300, rate_per_s=4)
    assert halved.mean_rate_per_s == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_fixes_every_byte(kind, tmp_path):
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        write_trace(synthesise(kind, seed=seed, duration_s=300), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "same").read_bytes()
    assert (tmp_path / "one").read_bytes() != (tmp_path / "other").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_trace_is_mooncake_and_says_synthesised(kind, tmp_path):
    trace = synthesise(kind, duration_s=120)
    assert trace.synthesised
    assert trace.name == f"{kind} (synthesised, seed 0)"
    write_trace(trace, tmp_path / "t.jsonl", schema="mooncake")
    again = read_trace(tmp_path / "t.jsonl", spread=False)
    assert_same_requests(again, trace)
    assert again.synthesised
    assert again.name == trace.name
    assert "(synthesised)" in analyze(again).rows()[0][1]


@pytest.mark.parametrize("kind", KINDS)
@given(duration_s=st.floats(0.01, 120), rate_per_s=st.floats(0.01, 5), seed=st.integers(0, 2**64))
@settings(max_examples=10)
def test_any_duration_and_rate_give_a_consistent_trace(kind, duration_s, rate_per_s, seed):
    trace = synthesise(kind, seed=seed, duration_s=duration_s, rate_per_s=rate_per_s)
    trace.check_invariants()
    assert trace.num_requests == max(1, round(duration_s * rate_per_s))
    assert trace.duration_s <= duration_s
    prompts = trace.input_tokens
    assert (np.diff(trace.block_offsets) == -(-prompts // 512)).all()


def test_prompts_of_a_session_extend_the_last():
    trace = synthesise("conversation", duration_s=600)
    last_with: dict[int, int] = {}
    num_continued = 0
    for index in range(trace.num_requests):
        blocks = trace.full_blocks(index).tolist()
        before = last_with.get(blocks[1]) if len(blocks) > 1 else None
        if before is not None:
            num_continued += 1
            earlier = trace.full_blocks(before)
            assert blocks[: len(earlier)] == earlier.tolist()
            assert trace.input_tokens[index] > trace.input_tokens[before] + trace.output_tokens[before]
        if len(blocks) > 1:
            last_with[blocks[1]] = index
    assert num_continued > 0.2 * trace.num_requests


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("weather", {}, "kind is 'weather'; accepted: conversation, toolagent, production, agentic, phases"),
        ("conversation", {"seed": -1}, "seed is -1"),
        ("conversation", {"duration_s": 0}, "duration_s is 0"),
        ("production", {"rate_per_s": float("nan")}, "rate_per_s is nan"),
        ("agentic", {"rate_per_s": 1e9}, "accepted: at most 20,000,000"),
        ("toolagent", {"phase_s": 5}, "option 'phase_s' is not for kind 'toolagent'"),
        ("phases", {"phase_s": 0}, "phase_s is 0"),
        ("phases", {"phase_s": 1e-9}, "phase_s is 1e-09"),
        ("phases", {"duration_s": float("inf")}, "duration_s is inf"),
        ("phases", {"long_tokens": 0}, "long_tokens is 0"),
    ],
)
def test_options_out_of_range_say_what_is_accepted(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        synthesise(kind, **options)


@given(st.integers(1, 700), st.integers(0, 99))
def test_stratified_draws_cover_every_stratum(num_draws, seed):
    draws = stratified(np.random.default_rng(seed), num_draws)
    assert len(draws) == num_draws
    for start in range(0, num_draws, 200):
        batch = np.sort(draws[start : start + 200])
        assert (np.floor(batch * len(batch)) == np.arange(len(batch))).all()


def test_the_mean_of_a_quantile_table_is_that_of_its_draws():
    table = Quantiles.of({0: 10, 50: 100, 90: 100, 100: 5000})
    assert table.at(stratified(np.random.default_rng(0), 100_000)).mean() == pytest.approx(table.mean_tokens, rel=0.01)
    assert table.scaled_to(1000).mean_tokens == pytest.approx(1000)


def test_streams_are_independent_of_each_other():
    streams = Streams("some", 5)
    before = streams["lengths"].random(4).tolist()
    streams["arrivals"].random(100)
    assert streams["lengths"].random(4).tolist() == before
    assert Streams("other", 5)["lengths"].random(4).tolist() != before
