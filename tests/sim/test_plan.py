"""Plans, and what they rest on: kappa by a ramp, load by length, and the choice of a composition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vertumnus.core.capacity import LengthClass, LengthMix
from vertumnus.core.composition import Composition, Topology, compositions
from vertumnus.core.profile import load_profile
from vertumnus.core.slo import Slo
from vertumnus.errors import ConfigError
from vertumnus.sim.auto import auto_composition, by_rollout, candidates, history
from vertumnus.sim.headroom import load_ratio
from vertumnus.sim.kappa import RampSettings, measured_kappa
from vertumnus.sim.plan import Planner
from vertumnus.sim.simulate import SimulationSettings
from vertumnus.workload.synthesis import synthesise

PROFILE = load_profile()
COSTS = PROFILE.cost_model()
KAPPA = {1: 0.9, 2: 0.9, 4: 0.9, 8: 0.9}
POOLS = compositions(Topology(16), PROFILE.degrees)


def traffic(rate_per_s=4.0, duration_s=60):
    return synthesise("conversation", seed=1, duration_s=duration_s, rate_per_s=rate_per_s)


def planner(trace, **options):
    return Planner(trace=trace, profile=PROFILE, settings=SimulationSettings(blocks_per_rank=300), **options)


@st.composite
def mixes(draw):
    lengths = sorted(draw(st.sets(st.integers(500, 100_000), min_size=1, max_size=5)))
    return LengthMix(
        tuple(LengthClass(length, length * draw(st.floats(0.1, 1.0)), draw(st.floats(0.1, 20.0))) for length in lengths)
    )


@settings(max_examples=40)
@given(mixes(), st.sampled_from(POOLS), st.floats(1.1, 4.0))
def test_load_rises_with_traffic_and_falls_with_capacity_in_proportion(mix, composition, factor):
    load = load_ratio(mix, composition, COSTS, KAPPA)
    more = LengthMix(
        tuple(LengthClass(each.input_tokens, each.suffix_tokens, factor * each.arrivals_per_s) for each in mix.classes)
    )
    assert load_ratio(more, composition, COSTS, KAPPA) == pytest.approx(factor * load, rel=1e-6)
    stronger = {degree: factor * kappa for degree, kappa in KAPPA.items()}
    assert load_ratio(mix, composition, COSTS, stronger) == pytest.approx(load / factor, rel=1e-6)


@settings(max_examples=40)
@given(mixes(), st.sampled_from([1, 2, 4, 8]))
def test_load_of_a_pool_of_one_degree_is_its_work_over_its_capacity(mix, degree):
    composition = Composition.of({degree: 16 // degree})
    work = sum(
        each.arrivals_per_s * COSTS.prefill_s(each.suffix_tokens, each.input_tokens - each.suffix_tokens, degree)
        for each in mix.classes
    )
    assert load_ratio(mix, composition, COSTS, KAPPA) == pytest.approx(work / composition.capacity(KAPPA), rel=1e-6)


def test_a_pool_without_capacity_is_loaded_without_end():
    mix = LengthMix((LengthClass(1000, 1000, 1.0),))
    assert load_ratio(mix, Composition.parse("16x1"), COSTS, KAPPA | {1: 0.0}) == float("inf")


def test_rollouts_rank_compositions_best_first():
    arrivals = history(traffic(), 300, 8)
    ranked = by_rollout(POOLS, arrivals, PROFILE, num_best=5)
    predicted = [mean_s for _, mean_s in ranked]
    assert predicted == sorted(predicted)
    assert ranked[0] == by_rollout(POOLS, arrivals, PROFILE)[0]


def test_auto_takes_larger_degrees_when_traffic_is_light():
    def mean_degree(rate_per_s):
        chosen = auto_composition(traffic(rate_per_s), PROFILE, Topology(16), slo=Slo(), blocks_per_rank=300)
        return chosen.num_gpus / chosen.num_workers

    assert mean_degree(0.5) > mean_degree(8.0)


def test_candidates_hold_a_degree_for_every_length_that_some_degree_serves_in_time():
    trace = traffic()
    long = trace.selected(np.flatnonzero(trace.input_tokens > 40_000))
    choices = candidates(Topology(16), PROFILE, history(long, 300, 8), Slo())
    assert choices
    assert all(max(choice.degrees) > 1 for choice in choices)


@pytest.mark.parametrize("num_gpus", [6, 12, 96, 256])
def test_auto_uses_all_gpus_of_pools_of_any_size(num_gpus):
    chosen = auto_composition(traffic(), PROFILE, Topology(num_gpus), slo=Slo(), blocks_per_rank=300)
    assert chosen.num_gpus == num_gpus


def test_kappa_is_a_share_of_a_busy_worker_and_0_where_nothing_is_served_in_time():
    ramp = RampSettings(num_gpus=8, num_requests=150)
    kappa = measured_kappa(traffic(), PROFILE, ramp)
    assert all(0 < value <= 1 for value in kappa.values())
    assert measured_kappa(traffic(), PROFILE, ramp) == kappa
    hopeless = RampSettings(num_gpus=8, num_requests=150, slo=Slo(0.001, 0.0))
    assert set(measured_kappa(traffic(), PROFILE, hopeless).values()) == {0.0}


def test_a_worker_that_shares_sustains_more_than_one_by_itself():
    alone, shared = (
        measured_kappa(traffic(), PROFILE, RampSettings(num_gpus=num_gpus, num_requests=300))[1]
        for num_gpus in (None, 16)
    )
    assert alone < shared


def test_plan_simulates_what_it_recommends_and_one_node_fewer():
    plan = planner(traffic()).plan(16)
    roles = [(option.role, option.num_gpus) for option in plan.options]
    assert roles == [("recommended", 16), ("recommended, adaptive", 16), ("one node fewer", 8)]
    assert plan.options[0].composition == plan.composition
    assert plan.windows[0].start_s == 0
    assert all(before.end_s == after.start_s for before, after in zip(plan.windows, plan.windows[1:], strict=False))
    assert sum(window.num_requests for window in plan.windows) == 240


def test_fewest_gpus_meet_the_target_and_no_whole_node_less_does():
    plans = planner(traffic(6.0), target_ratio=0.9)
    num_gpus = plans.fewest_gpus()
    assert plans._meets(num_gpus)
    whole = -(-num_gpus // 8) * 8
    assert whole == 8 or not plans._meets(whole - 8)


@pytest.mark.parametrize("target_ratio", [0.0, 1.0, -1.0, float("nan")])
def test_a_target_outside_0_to_1_is_refused(target_ratio):
    with pytest.raises(ConfigError, match="target is"):
        planner(traffic(), target_ratio=target_ratio)


def test_a_target_that_no_pool_meets_is_refused(monkeypatch):
    monkeypatch.setattr("vertumnus.sim.plan.MAX_NODES", 2)
    impossible = Planner(
        trace=traffic(), profile=PROFILE, settings=SimulationSettings(slo=Slo(0.001, 0.0), blocks_per_rank=300)
    )
    with pytest.raises(ConfigError, match="2 nodes do not meet"):
        impossible.fewest_gpus()
