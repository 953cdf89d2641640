"""The public traces have the figures that are known of them. Skipped only where they are not at hand."""

import numpy as np
import pytest
from tests.workload.trace_strategies import PUBLIC_TRACES, needs_public_traces

from vertumnus.workload.analysis import analyze
from vertumnus.workload.readers import read_trace

pytestmark = needs_public_traces


@pytest.mark.parametrize(
    ("file", "num_requests", "rate_per_s", "input_tokens", "long_ratios", "token_hit", "output_mean"),
    [
        ("mooncake_conversation", 12031, 3.40, (12035, 6909, 27367, 85400, 126195), (0.069, 0.329), 0.374, 343),
        ("mooncake_synthetic", 3993, 3.91, (15325, 11587, 38611, 66456, 191378), (0.162, 0.493), 0.651, 149),
        ("rtpllm_v4flash", 8332, 10.5, (6068, 2926, 17353, 29789, 31971), (0, 0), None, 493),
        ("azure_2023_code", 8819, 2.57, (2048, 1469, 5188, 7436, 7437), (0, 0), None, 28),
        ("azure_2023_conv", 19366, 5.53, (1155, 1020, 2735, 4142, 14050), (0, 0), None, 211),
    ],
)
def test_known_figures(file, num_requests, rate_per_s, input_tokens, long_ratios, token_hit, output_mean):
    (path,) = PUBLIC_TRACES.glob(f"{file}.*")
    trace = read_trace(path)
    trace.check_invariants()
    assert trace.warnings == ()
    analysis = analyze(trace, window_s=300)
    assert analysis.num_requests == num_requests
    assert analysis.mean_rate_per_s == pytest.approx(rate_per_s, rel=0.005)
    lengths = analysis.input
    measured = (lengths.mean_tokens, lengths.p50_tokens, lengths.p90_tokens, lengths.p99_tokens, lengths.max_tokens)
    assert measured == pytest.approx(input_tokens, abs=2)
    assert (analysis.long_request_ratio, analysis.long_token_ratio) == pytest.approx(long_ratios, abs=0.0006)
    assert analysis.output.mean_tokens == pytest.approx(output_mean, abs=0.6)
    if token_hit is not None:
        assert analysis.reuse is not None
        assert analysis.reuse.ideal_token_hit_ratio == pytest.approx(token_hit, abs=0.0006)


def test_rate_of_the_conversation_trace_over_time():
    analysis = analyze(read_trace(PUBLIC_TRACES / "mooncake_conversation.jsonl.gz"), window_s=300)
    assert (analysis.min_rate_per_s, analysis.max_rate_per_s) == pytest.approx((2.77, 3.68), rel=0.02)


def test_blocks_of_the_rtp_llm_trace():
    trace = read_trace(PUBLIC_TRACES / "rtpllm_v4flash.jsonl.gz")
    reuse = analyze(trace).reuse
    assert trace.block_tokens == 1024
    assert reuse is not None
    assert reuse.ideal_block_hit_ratio == pytest.approx(0.22, abs=0.005)


def test_only_the_conversation_trace_has_coarse_stamps():
    for path in sorted(PUBLIC_TRACES.glob("*.gz")):
        kept, spread = read_trace(path, spread=False), read_trace(path)
        assert (spread.arrival_s.tolist() != kept.arrival_s.tolist()) == ("conversation" in path.name), path.name
        if "conversation" in path.name:
            offset_s = spread.arrival_s - kept.arrival_s
            assert offset_s.max() - offset_s.min() < 3.0
            assert len(np.unique(spread.arrival_s)) == spread.num_requests
