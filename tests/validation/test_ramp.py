"""kappa by raising the load on one live worker, here of stub ranks on a virtual clock."""

from dataclasses import replace

import numpy as np
import pytest
from tests.validation.builders import PROFILE, TRACE, spec

from vertumnus.core.slo import Slo
from vertumnus.sim.kappa import RampSettings, largest_demand, measured_kappa
from vertumnus.validation.ramp import LiveRampSettings, demand_and_attainment, live_kappa
from vertumnus.validation.side import Side
from vertumnus.validation.virtual import virtual_side
from vertumnus.workload.synthesis import synthesise

TRAFFIC = synthesise("conversation", seed=3).limited(600)


def play(trace, composition):
    return virtual_side(trace, spec(str(composition)), seed=0)[0]


def test_a_live_ramp_finds_about_what_a_simulated_one_finds():
    said = []
    slo = Slo(4.0, 0.0006)
    settings = LiveRampSettings(slo=slo, probe_s=600.0)
    provenance = {key: known for key, known in PROFILE.provenance.items() if not key.startswith("kappa.")}
    coefficients = {1: PROFILE.coefficients[1]}
    profile = replace(PROFILE, degrees=(1,), coefficients=coefficients, kappa=None, provenance=provenance)
    found = live_kappa(TRAFFIC, profile, play, settings, said.append)
    assert len(said) == settings.num_probes
    assert {text.endswith("too much") for text in said} == {True, False}
    # Five halvings of the rate are good to a twentieth of a worker; a request more in time moves it as much again.
    assert found == pytest.approx(measured_kappa(TRAFFIC, profile, RampSettings(slo=slo, num_gpus=None)), abs=0.15)


def test_a_degree_that_serves_none_of_the_traffic_in_time_has_none():
    assert set(live_kappa(TRAFFIC, PROFILE, play, LiveRampSettings(slo=Slo(0.0, 1e-9))).values()) == {0.0}


def test_what_failed_was_not_in_time_and_not_cached():
    num_requests = TRACE.num_requests
    ttft_s, cached_tokens = np.zeros(num_requests), np.full(num_requests, 100.0)
    ttft_s[0] = cached_tokens[0] = np.nan
    ttft_s[1] = 1e6
    side = Side(ttft_s=ttft_s, cached_tokens=cached_tokens, groups=(None,) * num_requests, compositions=())
    demand, attainment = demand_and_attainment(TRACE, side, PROFILE, 1, Slo())
    tokens = TRACE.input_tokens
    assert attainment == pytest.approx(1 - (tokens[0] + tokens[1]) / tokens.sum())
    cached = np.where(np.arange(num_requests) == 0, 0, 100)
    service_s = PROFILE.cost_model().for_degrees((1,)).prefill_s(tokens - cached, cached)
    # n requests arrive in n - 1 gaps.
    assert demand == pytest.approx(service_s.mean() * (num_requests - 1) / TRACE.duration_s)


def test_the_largest_demand_is_found_by_halving():
    asked = []

    def sustained(rate_per_s):
        asked.append(rate_per_s)
        return rate_per_s / 10 if rate_per_s <= 3 else None

    assert largest_demand(sustained, 8.0, 4) == pytest.approx(0.3)
    assert asked == [4, 2, 3, 3.5]
    assert largest_demand(lambda rate_per_s: None, 8.0, 4) == 0


@pytest.mark.parametrize("probe_s", [0.001, 1.0, 10.0, 100.0])
def test_a_probe_lasts_longer_only_to_hold_some_requests(probe_s):
    probes = []

    def answer_at_once(trace, composition):
        probes.append(trace)
        nothing = np.zeros(trace.num_requests)
        return Side(ttft_s=nothing, cached_tokens=nothing, groups=(None,) * trace.num_requests, compositions=())

    live_kappa(TRAFFIC, PROFILE, answer_at_once, LiveRampSettings(slo=Slo(10.0, 0.002), probe_s=probe_s))
    assert len(probes) == 5 * len(PROFILE.degrees)
    for trace in probes:
        assert trace.num_requests >= 2
        if trace.num_requests > 2:
            assert trace.duration_s <= (probe_s if trace.num_requests > 10 else 4 * probe_s)
