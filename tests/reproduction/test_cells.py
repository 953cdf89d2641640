"""Cells: routers share the traffic and the pool without loss, and figures are those of the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from tests.builders import view

from vertumnus.core.composition import Composition
from vertumnus.core.placement import VertumnusPolicy
from vertumnus.core.profile import load_profile
from vertumnus.reproduction.cells import Cell, measured, series
from vertumnus.reproduction.experiments.ablations import TERMS, WithoutTerm, coarser, wrong_costs
from vertumnus.reproduction.traffic import Workload, halves
from vertumnus.sim.compare import policy_maker
from vertumnus.sim.metrics import RequestRecords
from vertumnus.sim.simulate import SimulationSettings, simulate
from vertumnus.workload.synthesis import synthesise

TRACE = synthesise("toolagent", seed=3, duration_s=30, rate_per_s=6)
POOL = SimulationSettings(num_gpus=16, composition=Composition.parse("8x2"), is_fixed=True, blocks_per_rank=300)


def cell(**changes):
    given = {"columns": {"who": "me"}, "trace": TRACE, "profile": load_profile(), "settings": POOL}
    return Cell(**{**given, "make_policy": policy_maker("vertumnus"), **changes})


def test_one_router_gives_the_simulators_figures():
    row = measured(cell())
    result = simulate(TRACE, load_profile(), "vertumnus", replace(POOL, warmup_s=0.1 * TRACE.duration_s))
    assert row["who"] == "me"
    assert row["mean_ttft_s"] == result.latency.mean_ttft_s
    assert row["slo_attainment_ratio"] == result.latency.slo_attainment_ratio


@pytest.mark.parametrize("num_routers", [2, 4])
def test_routers_serve_every_request_once(num_routers):
    row = measured(cell(num_routers=num_routers, routed=Composition.of({2: 8 // num_routers}), series_s=5.0))
    assert sum(window["num_requests"] for window in row["series"]) == TRACE.num_requests
    assert row["num_rejected"] == 0


def test_series_is_the_mean_by_window_of_arrival():
    records = RequestRecords(arrival_s=[0.0, 1.0, 11.0], ttft_s=[1.0, 3.0, 5.0])
    assert series(records, 5.0) == [
        {"start_s": 0.0, "num_requests": 2, "mean_ttft_s": 2.0},
        {"start_s": 10.0, "num_requests": 1, "mean_ttft_s": 5.0},
    ]


def test_halves_share_no_request_and_keep_their_order():
    traffic = halves("any", TRACE, 50, 60)
    assert (traffic.tuning.num_requests, traffic.held_out.num_requests) == (50, 60)
    middle = TRACE.num_requests // 2
    assert np.array_equal(traffic.tuning.input_tokens, TRACE.input_tokens[middle - 50 : middle])
    assert np.array_equal(traffic.held_out.input_tokens, TRACE.input_tokens[middle : middle + 60])


def test_an_excerpt_has_the_beginning_of_every_window_at_its_rate():
    windows = 3
    traffic = Workload(name="any", tuning=TRACE, held_out=TRACE, num_windows=windows)
    excerpt = traffic.excerpt(TRACE.num_requests // 2)
    excerpt.check_invariants()
    window_s = TRACE.duration_s / windows
    is_first_half = TRACE.arrival_s % window_s <= window_s / 2
    is_first_half[-1] = False  # the last arrival ends the last window, and begins none
    assert np.array_equal(excerpt.input_tokens, TRACE.input_tokens[is_first_half])
    assert excerpt.mean_rate_per_s == pytest.approx(TRACE.mean_rate_per_s, rel=0.15)
    assert traffic.excerpt(10 * TRACE.num_requests).num_requests == TRACE.num_requests


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_coarser_blocks_still_name_prefixes(factor):
    trace = coarser(TRACE, factor)
    trace.check_invariants()
    assert trace.block_tokens == factor * TRACE.block_tokens
    assert np.array_equal(trace.input_tokens, TRACE.input_tokens)


@pytest.mark.parametrize("term", TERMS)
def test_a_term_that_is_off_changes_only_the_cost(term):
    row = measured(cell(make_policy=policy_maker("vertumnus")))
    without = simulate(TRACE, load_profile(), WithoutTerm(term=term), POOL)
    assert without.num_completed == row["num_requests"]


def test_a_wrong_belief_changes_decisions_but_not_what_steps_take():
    """One request in an idle pool takes what the hardware takes, whatever the control plane believes."""
    lone = TRACE.limited(1)
    true = simulate(lone, load_profile(), "min-ttft", POOL)
    for factors in wrong_costs(load_profile()).values():
        wrong = simulate(lone, load_profile(), "min-ttft", replace(POOL, cost_factors=factors))
        assert wrong.latency.mean_ttft_s == true.latency.mean_ttft_s


@pytest.mark.parametrize("term", TERMS)
def test_the_cost_without_a_term_is_the_cost_less_that_term(term):
    seen = view(degrees=[1, 4], reusable_tokens=[512.0, 0.0], outstanding_s=[3.0, 1.0], num_outstanding=[5, 5])
    whole = VertumnusPolicy().place(seen)
    without = WithoutTerm(term=term).place(seen)
    assert without.cost == pytest.approx(whole.cost - whole.terms[term])
    assert without.preferred_degree == whole.preferred_degree
