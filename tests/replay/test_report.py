"""Every figure of a replay, computed by hand on a few outcomes."""

from dataclasses import replace

import numpy as np
import pytest
from tests.workload.trace_strategies import trace_of

from vertumnus.core.slo import Slo
from vertumnus.replay.endpoint import Endpoint
from vertumnus.replay.load import Played
from vertumnus.replay.outcome import GENERATOR, TIMEOUT, Outcome
from vertumnus.replay.report import Report, warnings_of

# tau: 1.4, 1.8 and 2.2 s
TRACE = trace_of([[0] * 4, [0] * 8, [1] * 12, [2] * 4], arrival_s=[0.0, 1.0, 2.0, 3.0])
SLO = Slo(1.0, 0.1)


def outcome(index, ttft_s, *, lag_s=0.001, output_tokens=11, cached_tokens=0, **changes):
    return Outcome(
        index=index,
        scheduled_s=float(index),
        ready_s=float(index),
        sent_s=index + lag_s,
        input_tokens=int(TRACE.input_tokens[index]),
        max_tokens=11,
        ttft_s=ttft_s,
        last_token_s=ttft_s + 1.0,
        e2e_s=ttft_s + 1.1,
        output_tokens=output_tokens,
        prompt_tokens=int(TRACE.input_tokens[index]),
        cached_tokens=cached_tokens,
        **changes,
    )


THREE = [outcome(0, 1.4), outcome(1, 2.0, cached_tokens=4), outcome(2, 0.5)]


def report_of(outcomes, *, warmup_s=0.0, stalls_s=(), **played):
    return Report(
        trace=TRACE,
        endpoint=Endpoint(base_url="http://localhost", model="tiny"),
        played=Played(outcomes=list(outcomes), stalls_s=np.array(stalls_s), **played),
        slo=SLO,
        warmup_s=warmup_s,
        wall_s=4.0,
    )


def test_the_figures_of_three_answers_and_one_unsent():
    entry = report_of(THREE).to_json()
    assert (entry["num_completed"], entry["num_unsent"], entry["num_measured"]) == (3, 1, 3)
    assert entry["mean_ttft_s"] == pytest.approx(1.3)
    assert entry["p50_ttft_s"] == pytest.approx(1.4)
    assert entry["mean_tpot_s"] == pytest.approx(0.1), "a second for the ten tokens after the first"
    assert entry["p99_e2e_s"] == pytest.approx(np.percentile([2.5, 3.1, 1.6], 99))
    assert entry["slo_attainment_ratio"] == pytest.approx((4 + 12) / 24), "by tokens; tau itself counts"
    assert entry["token_hit_ratio"] == pytest.approx(4 / 24)
    assert entry["ideal_token_hit_ratio"] == pytest.approx(4 / 24)
    assert entry["output_tokens_per_s"] == pytest.approx(33 / 4.1), "from 0.001 s to 1.001 + 3.1 s"
    assert entry["achieved_rate_per_s"] == pytest.approx(1.0)
    assert entry["max_lag_s"] == pytest.approx(0.001)
    assert not entry["generator_was_slow"]
    assert warnings_of(entry) == []


def test_a_failed_request_missed_its_slo_even_if_its_first_token_came_in_time():
    entry = report_of([*THREE[:2], outcome(2, 0.5, error=TIMEOUT)], messages={TIMEOUT: "late"}).to_json()
    assert entry["slo_attainment_ratio"] == pytest.approx(4 / 24)
    assert entry["mean_ttft_s"] == pytest.approx(1.7), "of answers that came in full"
    assert entry["errors"] == {TIMEOUT: 1}
    assert warnings_of(entry) == ["1 failed with timeout: late"]


def test_unfinished_requests_are_neither_met_nor_missed():
    cut = replace(THREE[2], is_unfinished=True)
    entry = report_of([*THREE[:2], cut], is_interrupted=True).to_json()
    assert (entry["num_completed"], entry["num_unfinished"], entry["num_failed"]) == (2, 1, 0)
    assert entry["slo_attainment_ratio"] == pytest.approx(4 / 12)
    assert warnings_of(entry) == ["interrupted: 1 requests were under way and 1 not yet sent"]


def test_order_of_ending_does_not_matter():
    one, other = report_of(THREE).to_json(), report_of(THREE[::-1]).to_json()
    assert one == other


def test_an_answer_of_one_token_has_no_tpot():
    entry = report_of([outcome(0, 1.0, output_tokens=1)]).to_json()
    assert entry["mean_tpot_s"] is None


def test_nothing_measured_gives_nothing_but_counts():
    entry = report_of([]).to_json()
    assert entry["mean_ttft_s"] is entry["slo_attainment_ratio"] is entry["p99_lag_s"] is None
    assert entry["achieved_rate_per_s"] is entry["output_tokens_per_s"] is None
    assert entry["num_unsent"] == 4


@pytest.mark.parametrize(
    ("outcomes", "stalls_s", "is_slow"),
    [
        (THREE, [0.001] * 100, False),
        ([outcome(0, 1.0, lag_s=0.02)], [], True),
        (THREE, [0.02] * 100, True),
        ([*THREE[:2], outcome(2, 0.5, error=GENERATOR)], [], True),
    ],
    ids=["in time", "late", "stalled", "out of sockets"],
)
def test_a_slow_generator_cannot_pass_for_a_slow_server(outcomes, stalls_s, is_slow):
    report = report_of(outcomes, stalls_s=stalls_s, messages={GENERATOR: "too many open files"})
    entry = report.to_json()
    assert entry["generator_was_slow"] is is_slow
    assert any("slow" in warning for warning in warnings_of(entry)) is is_slow


def test_a_rate_that_was_not_reached_is_warned_of():
    slow = [replace(each, sent_s=2 * each.sent_s, ready_s=2 * each.ready_s) for each in THREE]
    entry = report_of(slow).to_json()
    assert entry["num_held_back"] == 2
    assert warnings_of(entry) == [
        "the concurrency limit held back 2 requests: no open loop",
        "0.5 requests/s went out instead of 1",
    ]


def test_answers_about_other_prompts_are_warned_of():
    entry = report_of([replace(THREE[0], prompt_tokens=5)]).to_json()
    assert warnings_of(entry) == ["1 answers count other prompt tokens than were sent"]
