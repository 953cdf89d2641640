"""The simulator beside a live pool: on a virtual clock, where only decisions differ, and once over HTTP."""

import numpy as np
import pytest
from tests.validation.builders import PROFILE, TRACE, spec

from vertumnus.core.topology import Topology
from vertumnus.errors import ConfigError
from vertumnus.serve.stub_links import StubLinks
from vertumnus.validation.choice import ChosenPool
from vertumnus.validation.live import play_live
from vertumnus.validation.overheads import measured_overheads, transfer_s
from vertumnus.validation.run import OUTPUT_TOKENS, as_validated, check_prompts, validate
from vertumnus.validation.spec import PoolSpec
from vertumnus.validation.stub_pool import VOCAB_SIZE
from vertumnus.workload.synthesis import synthesise

POOLS = {
    "fixed": {"composition": "2x1,3x2"},
    "fixed, in chunks": {"composition": "2x1,3x2", "step_tokens": 4096},
    "adaptive": {"composition": "16x1", "controller": "lookahead"},
}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_the_simulator_tells_what_a_live_pool_does(pool):
    found = validate(TRACE, ChosenPool(spec=spec(**pool)), seed=0, is_virtual=True).to_json()
    assert found["num_measured"] == TRACE.num_requests
    assert abs(found["difference"]["mean_ttft_ratio"]) < 0.1
    assert abs(found["difference"]["p90_ttft_ratio"]) < 0.1
    assert abs(found["difference"]["token_hit_ratio"]) < 0.01
    assert found["within_target"]
    assert found["live"]["token_hit_ratio"] > 0.05, "the trace has something to find"


def test_an_adaptive_pool_takes_the_same_way_in_both():
    found = validate(TRACE, ChosenPool(spec=spec(**POOLS["adaptive"])), seed=0, is_virtual=True).to_json()
    live, simulated = found["compositions"]["live"], found["compositions"]["simulated"]
    assert len(live) > 1, "the composition changes"
    assert [each["composition"] for each in live] == [each["composition"] for each in simulated]
    # A switch waits for handoffs under way, which the simulator lets be.
    assert [each["s"] for each in live] == pytest.approx([each["s"] for each in simulated], abs=0.5)


def test_a_live_pool_over_http_is_what_the_simulator_is_told_of():
    trace = as_validated(synthesise("conversation", seed=2).limited(12), rate_per_s=8.0, length_scale=0.05)
    pool = spec("1x1,1x2").of(spec("1x1,1x2").composition)
    pool = PoolSpec(
        profile=PROFILE,
        composition=pool.composition,
        block_tokens=trace.block_tokens,
        blocks_per_rank=1000,
    )
    run = play_live(trace, pool, seed=0, vocab=VOCAB_SIZE)
    side = run.side()
    assert np.isfinite(side.ttft_s).all()
    assert all(group is not None for group in side.groups)
    assert {(group.first_rank, group.degree) for group in side.groups} <= {(0, 2), (2, 1), (0, 1), (1, 2)}
    assert side.compositions == ((0.0, "1x1,1x2"),)
    alone_s = [PROFILE.cost_model().prefill_s(int(each), 0, 2) for each in trace.input_tokens]
    assert (side.ttft_s > 0.5 * np.array(alone_s)).all()
    assert run.lead_s > 0
    found = measured_overheads(run, PROFILE)
    assert all(value >= 0 for value in found.to_json().values())
    lags = run.lags()
    assert lags["pool_cpu_ratio"] > 0
    assert lags["mean_step_excess_s"] is not None


def test_a_trace_is_made_ready_once_for_both():
    trace = as_validated(synthesise("conversation", seed=2), rate_per_s=5.0, length_scale=0.1, duration_s=20.0)
    assert (trace.output_tokens == OUTPUT_TOKENS).all(), "with one there is no handoff"
    assert trace.duration_s <= 20.0
    assert (np.diff(trace.block_offsets) == -(-trace.input_tokens // trace.block_tokens)).all()


def test_prompts_beyond_the_pool_are_refused_before_anything_starts():
    small = PoolSpec(
        profile=PROFILE, composition=spec().composition, block_tokens=TRACE.block_tokens, blocks_per_rank=4
    )
    with pytest.raises(ConfigError, match=r"prompt of .* tokens .*accepted"):
        check_prompts(TRACE, small)


@pytest.mark.parametrize("controller", [None, "lookahead"])
def test_a_specification_survives_the_way_to_another_process(controller):
    given = spec("2x1,1x2", controller=controller, step_tokens=2048)
    assert PoolSpec.from_line(given.to_line()) == given


def test_copies_wait_for_their_links_and_handoffs_for_nobody():
    links = StubLinks(PROFILE, Topology(16), block_tokens=512)
    first_s = links.end_s(0.0, 0, 1, 10)
    assert links.end_s(0.0, 2, 3, 10) == pytest.approx(first_s), "other ranks of the node"
    assert links.end_s(0.0, 0, 1, 10) == pytest.approx(2 * first_s), "the same two ranks"
    across_s = links.end_s(0.0, 4, 12, 10)
    assert across_s > first_s, "a slower link"
    assert links.end_s(0.0, 5, 13, 10) == pytest.approx(2 * across_s), "one link between nodes"


def test_a_handoff_takes_t_ext_from_however_many_ranks_it_comes():
    links = StubLinks(PROFILE, Topology(16), block_tokens=512)
    expected_s = transfer_s(PROFILE, 10 * 512)
    assert links.end_s(1.0, 0, 16, 10) == pytest.approx(1.0 + expected_s)
    assert links.end_s(1.001, 1, 16, 10) == pytest.approx(1.001 + expected_s), "it waits for no other"
    assert max(links.end_s(2.0, rank, 16, count) for rank, count in ((0, 7), (1, 3))) == pytest.approx(2.0 + expected_s)
