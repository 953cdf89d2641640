"""A whole run from a trace: its figures, its settings, and what it must not depend on."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders import T_EXT_S, profile
from tests.workload.trace_strategies import trace_of, traces

from vertumnus.core.composition import Composition
from vertumnus.core.policies import POLICIES
from vertumnus.core.profile import load_profile
from vertumnus.core.queueing import Discipline
from vertumnus.core.slo import Slo
from vertumnus.errors import ConfigError
from vertumnus.sim.pool import Failure
from vertumnus.sim.requests import prefill_requests
from vertumnus.sim.simulate import Pulls, SimulationResult, SimulationSettings, simulate
from vertumnus.workload.synthesis import synthesise
from vertumnus.workload.trace import Trace

FIXED = SimulationSettings(
    num_gpus=4,
    composition=Composition.parse("2x1,1x2"),
    is_fixed=True,
    has_replication=False,
    discipline=Discipline.FIFO,
    blocks_per_rank=50,
)
PROFILE = profile()


@pytest.fixture(scope="module")
def conversation() -> Trace:
    """Some two minutes of conversations, as fast as eight GPUs just take."""
    return synthesise("conversation", seed=3, duration_s=120.0).rescaled(4.0)


def document(result: SimulationResult) -> str:
    """Everything that a run gave but the wall clock, as text."""
    return json.dumps(result.to_json() | {"wall_s": 0, "ttft_s": result.records.ttft_s}, sort_keys=True)


def test_the_papers_system_is_one_name_for_its_placement_queue_controller_and_copies(conversation):
    eight = SimulationSettings(num_gpus=8, composition=Composition.parse("4x1,1x4"), blocks_per_rank=400)
    spelt_out = replace(
        eight,
        discipline=Discipline.FIFO,
        controller="threshold",
        pulls=Pulls.NONE,
        has_moves=False,
        has_waits=False,
    )
    named = simulate(conversation, load_profile(), "vertumnus-paper", eight)
    assert named.policy == "vertumnus-paper"
    assert document(named) == document(simulate(conversation, load_profile(), "paper", spelt_out)).replace(
        '"paper"', '"vertumnus-paper"'
    )
    assert named.num_splits + named.num_merges, "a run in which the controller matters"
    assert named.records.ttft_s != simulate(conversation, load_profile(), "paper", eight).records.ttft_s


@settings(max_examples=25)
@given(traces(), st.sampled_from(sorted(POLICIES)), st.sampled_from(Discipline), st.integers(0, 3))
def test_every_request_of_any_trace_is_counted_once(trace, policy, discipline, seed):
    result = simulate(trace, PROFILE, policy, replace(FIXED, discipline=discipline, seed=seed))
    assert result.num_requests == trace.num_requests == result.num_completed + result.num_rejected
    assert sorted(result.records.request_id) == list(range(trace.num_requests))
    assert (result.num_splits, result.num_merges, result.num_replications) == (0, 0, 0)
    assert result.policy == policy
    assert result.composition == result.final_composition == "2x1,1x2"


@given(traces())
def test_the_hashes_of_a_trace_are_equal_exactly_where_its_blocks_are(trace):
    hash_of: dict[int, bytes] = {}
    for index, each in enumerate(prefill_requests(trace)):
        ids = trace.full_blocks(index).tolist()
        assert len(each.blocks) == len(ids) == each.input_tokens // trace.block_tokens
        assert all(len(block) == 16 and any(block) for block in each.blocks)
        for block_id, block in zip(ids, each.blocks, strict=True):
            assert hash_of.setdefault(block_id, block) == block
    assert len(set(hash_of.values())) == len(hash_of)


@settings(max_examples=15)
@given(traces(), st.permutations(range(60)))
def test_renaming_the_blocks_of_a_trace_changes_no_figure(trace, names):
    distinct = np.unique(trace.block_ids)
    renamed_ids = np.array([1000 + names[int(position) % 60] * 1000 + position for position in range(len(distinct))])
    renamed = replace(trace, block_ids=renamed_ids[np.searchsorted(distinct, trace.block_ids)])
    first, second = (simulate(each, PROFILE, "vertumnus", FIXED) for each in (trace, renamed))
    assert document(first) == document(second)


@pytest.mark.parametrize("policy", ["vertumnus", "flexlb"])
def test_the_same_input_and_seed_give_the_same_bytes(conversation, policy):
    eager = SimulationSettings(num_gpus=8, composition=Composition.parse("4x1,2x2"), noise_ratio=0.2, seed=4)
    first, second = (simulate(conversation, load_profile(), policy, eager) for _ in range(2))
    assert document(first) == document(second)
    other = simulate(conversation, load_profile(), policy, replace(eager, seed=5))
    assert document(first) != document(other), "the seed does matter where there is noise"


def test_a_run_with_everything_on_completes_and_reports_finite_figures(conversation):
    everything = SimulationSettings(
        num_gpus=8,
        composition=Composition.parse("8x1"),
        step_tokens=8192,
        pulls=Pulls.ANY,
        noise_ratio=0.1,
        report_delay_s=0.05,
        failures=(Failure(7, 30.0, recovers_s=60.0), Failure(1, 45.0)),
        warmup_s=20.0,
    )
    result = simulate(conversation, load_profile(), "vertumnus", everything)
    assert result.num_completed == conversation.num_requests
    figures = result.to_json()
    assert all(math.isfinite(value) for value in figures.values() if isinstance(value, float))
    assert 0 < figures["slo_attainment_ratio"] <= 1
    assert 0 <= figures["token_hit_ratio"] < 1
    assert json.loads(json.dumps(figures)) == figures
    assert json.dumps(everything.to_json())


def test_every_name_that_scripts_rely_on_is_in_the_result():
    names = (
        "policy composition rate_per_s num_requests num_completed num_rejected mean_ttft_s p50_ttft_s p90_ttft_s "
        "p99_ttft_s slo_attainment_ratio token_hit_ratio num_splits num_merges num_replications wall_s"
    )
    result = simulate(trace_of([[0]]), PROFILE, "paper", FIXED).to_json()
    assert set(names.split()) <= set(result)


def test_idle_requests_take_their_service_and_the_transfer():
    # 8 and 4 tokens on the degree-2 worker (1 s + 10 ms a token shared by two), far apart.
    trace = trace_of([[0] * 8, [1] * 4], arrival_s=[0.0, 100.0])
    result = simulate(trace, PROFILE, "min-ttft", FIXED)
    assert result.records.ttft_s == pytest.approx([1.04 + T_EXT_S, 1.02 + T_EXT_S])
    assert result.latency.mean_wait_s == pytest.approx(0.0)
    assert result.records.degree == [2, 2]


def test_a_rejected_request_weighs_against_the_attainment():
    trace = trace_of([[0] * 8, [1] * 24], arrival_s=[0.0, 1.0])
    short = profile(
        max_sequence_tokens=10,
        provenance=PROFILE.provenance | {"max_sequence_tokens": next(iter(PROFILE.provenance.values()))},
    )
    result = simulate(trace, short, "paper", replace(FIXED, slo=Slo(100.0, 0.0)))
    assert (result.num_completed, result.num_rejected) == (1, 1)
    assert result.latency.slo_attainment_ratio == pytest.approx(8 / 32)
    after = simulate(trace, short, "paper", replace(FIXED, slo=Slo(100.0, 0.0), warmup_s=0.5))
    assert after.latency.num_measured == 0


def test_the_progress_counts_up_to_the_number_of_requests():
    seen: list[int] = []
    simulate(trace_of([[0]] * 5), PROFILE, "paper", FIXED, on_progress=seen.append)
    assert seen == [1, 2, 3, 4, 5]


def test_a_composition_is_chosen_where_none_is_given(conversation):
    result = simulate(conversation, load_profile(), "vertumnus", SimulationSettings(num_gpus=8, is_fixed=True))
    assert Composition.parse(result.composition).num_gpus == 8


@pytest.mark.parametrize(
    ("composition", "accepted"),
    [("4x1,1x2", "4 GPUs"), ("1x8", "degrees up to 4"), ("2x1", "all 4 GPUs")],
)
def test_a_composition_that_does_not_fit_the_pool_is_refused(composition, accepted):
    with pytest.raises(ConfigError, match=f"composition is .*{accepted}"):
        simulate(trace_of([[0]]), PROFILE, "paper", replace(FIXED, composition=Composition.parse(composition)))


def test_a_degree_that_the_profile_lacks_is_refused_with_those_it_has():
    two_degrees = profile(degrees=(1, 2), coefficients={degree: PROFILE.coefficients[degree] for degree in (1, 2)})
    wide = replace(FIXED, composition=Composition.parse("1x4"))
    with pytest.raises(ConfigError, match=r"composition is 1x4; accepted: degrees of profile .*\(1, 2\)"):
        simulate(trace_of([[0]]), two_degrees, "paper", wide)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match=r"policy is 'best'.*vertumnus"):
        simulate(trace_of([[0]]), PROFILE, "best", FIXED)
