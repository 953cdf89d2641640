"""What a live pool adds: how the simulator takes it, and that measuring it finds what is there."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.validation.builders import PROFILE, TRACE, spec

from vertumnus.core.slo import Slo
from vertumnus.errors import ConfigError
from vertumnus.replay.endpoint import Endpoint
from vertumnus.replay.load import Played
from vertumnus.replay.outcome import Outcome
from vertumnus.replay.report import Report
from vertumnus.sim.overheads import LiveOverheads
from vertumnus.sim.simulate import simulate
from vertumnus.validation.live import LiveRun
from vertumnus.validation.overheads import (
    calibration_trace,
    idle_step_ratio,
    line_through_medians,
    measured_overheads,
    transfer_s,
)
from vertumnus.validation.recorder import Record, Seen, SeenStep
from vertumnus.validation.side import simulated_side

overheads = st.builds(
    LiveOverheads,
    request_s=st.floats(0, 0.02),
    request_s_per_token=st.floats(0, 1e-6),
    step_s=st.floats(0, 0.002),
    handover_s=st.floats(0, 0.02),
)


@given(overheads, st.sampled_from([None, 1024]))
def test_at_idle_a_request_takes_longer_by_exactly_what_is_added(added, step_tokens):
    pool = spec("4x1", step_tokens=step_tokens)
    alone = calibration_trace(TRACE, PROFILE, step_tokens)
    without, with_them = (simulated_side(alone, pool, each, 0.0) for each in (None, added))
    num_steps = 1 if step_tokens is None else -(-alone.input_tokens // step_tokens)
    expected_s = (
        added.request_s + added.request_s_per_token * alone.input_tokens + num_steps * added.step_s + added.handover_s
    )
    assert with_them.ttft_s - without.ttft_s == pytest.approx(expected_s, abs=1e-9)


def test_overheads_of_nothing_change_nothing():
    pool = spec("2x2", controller="lookahead")
    plain = simulated_side(TRACE, pool, None, 0.0)
    zero = simulated_side(TRACE, pool, LiveOverheads(), 0.0)
    assert (plain.ttft_s == zero.ttft_s).all()
    assert plain.groups == zero.groups


@pytest.mark.parametrize("name", ["request_s", "request_s_per_token", "step_s", "handover_s"])
@pytest.mark.parametrize("value", [-0.001, float("nan"), float("inf")])
def test_an_overhead_that_is_none_is_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        LiveOverheads(**{name: value})


def test_a_pool_that_has_stood_idle_begins_its_windows_earlier():
    settings = spec("16x1", controller="lookahead").simulation(None, 0.0)
    at_once, later = (simulate(TRACE, PROFILE, settings=replace(settings, lead_s=lead_s)) for lead_s in (0.0, 1.0))
    assert at_once.num_completed == later.num_completed == TRACE.num_requests
    # Splits and merges start at the ends of windows, which lie a second earlier.
    begun_s = [
        [each.committed_s - each.drain_s - each.switch_s for each in run.transitions] for run in (at_once, later)
    ]
    assert begun_s[0][0] % settings.window_s == pytest.approx(0.0, abs=1e-6)
    assert begun_s[1][0] % settings.window_s == pytest.approx(settings.window_s - 1.0, abs=1e-6)


def calibration(added, noise_s):
    """A calibration as a pool with these overheads would have told it; every other row is held up by noise."""
    alone = calibration_trace(TRACE, PROFILE, None)
    costs = PROFILE.cost_model()
    requests, steps, outcomes = {}, [], []
    for row, (at_s, tokens) in enumerate(zip(alone.arrival_s.tolist(), alone.input_tokens.tolist(), strict=True)):
        late_s = noise_s if row % 3 == 0 else 0.0
        accepted_s = 50.0 + at_s + added.placed_after_s(tokens) + late_s
        predicted_s = costs.prefill_s(tokens, 0, 1)
        prefilled_s = accepted_s + predicted_s + added.step_s + late_s
        first_s = prefilled_s + transfer_s(PROFILE, tokens) + added.handover_s + late_s
        requests[f"replay-0a-{row}"] = Seen(accepted_s=accepted_s, first_rank=0, degree=1, prefilled_s=prefilled_s)
        steps.append(SeenStep(ended_s=prefilled_s - 1e-6, seconds=predicted_s + added.step_s, predicted_s=predicted_s))
        outcomes.append(
            Outcome(
                index=row,
                scheduled_s=at_s,
                ready_s=at_s,
                sent_s=at_s,
                input_tokens=tokens,
                max_tokens=2,
                ttft_s=first_s - 50.0 - at_s,
            )
        )
    report = Report(
        trace=alone,
        endpoint=Endpoint(base_url="http://127.0.0.1:1", model="stub"),
        played=Played(outcomes=outcomes, started_s=50.0),
        slo=Slo(),
        warmup_s=0.0,
        wall_s=1.0,
    )
    return LiveRun(report=report, record=Record(requests=requests, steps=steps))


@given(overheads, st.sampled_from([0.0, 0.3]))
def test_measuring_finds_what_is_there_and_is_deaf_to_what_happens_now_and_then(added, noise_s):
    found = measured_overheads(calibration(added, noise_s), PROFILE)
    for name in ("request_s", "step_s", "handover_s"):
        assert getattr(found, name) == pytest.approx(getattr(added, name), abs=1e-6)
    assert found.request_s_per_token == pytest.approx(added.request_s_per_token, abs=1e-9)


@given(overheads)
def test_how_true_the_profile_is_at_idle_is_told_and_changes_nothing(added):
    run = calibration(added, 0.0)
    slow = [replace(step, seconds=2 * step.predicted_s) for step in run.record.steps]
    assert idle_step_ratio(LiveRun(report=run.report, record=replace(run.record, steps=slow))) == pytest.approx(2.0)
    assert idle_step_ratio(LiveRun(report=run.report, record=Record())) is None


def test_a_calibration_without_answers_adds_nothing():
    run = calibration(LiveOverheads(step_s=0.1), 0.0)
    run.report.played.outcomes.clear()
    assert measured_overheads(run, PROFILE) == LiveOverheads()


@given(st.floats(0, 1), st.floats(0, 1e-3))
def test_a_line_is_found_through_medians(intercept, slope):
    x = np.repeat([10.0, 500.0, 2000.0], 3)
    y = intercept + slope * x
    y[::3] += 5.0
    assert line_through_medians(x, y) == pytest.approx((intercept, slope), abs=1e-6)


def test_a_falling_line_has_no_slope():
    intercept, slope = line_through_medians(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0]))
    assert (intercept, slope) == (2.0, 0.0)


def test_calibration_requests_share_nothing_and_never_meet():
    alone = calibration_trace(TRACE, PROFILE, None)
    gaps_s = np.diff(alone.arrival_s)
    slowest_s = [PROFILE.cost_model().prefill_s(int(each), 0, 1) for each in alone.input_tokens[:-1]]
    assert (gaps_s > slowest_s).all()
    assert not alone.has_block_ids
