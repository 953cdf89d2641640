"""A replay against an endpoint in a thread: what goes out, when, and what is made of the answers."""

import time
from collections import Counter

import numpy as np
import pytest
from tests.workload.trace_strategies import trace_of

from vertumnus.errors import ConfigError
from vertumnus.replay.run import ReplaySettings, as_played, replay

EIGHT = [[0, 0, 0, 0, n, n, n, n, n] for n in range(8)]


def played(endpoint, prompts=EIGHT, *, arrival_s=None, **settings):
    """The report of a replay in which all requests are due at once, unless told otherwise."""
    trace = trace_of(prompts, arrival_s=arrival_s or [0.0] * len(prompts))
    settings = {"output_tokens": 3, "timeout_s": 20.0, **settings}
    report = replay(trace, ReplaySettings(url=endpoint.url, **settings))
    assert_every_request_is_accounted_for(report)
    return report


def assert_every_request_is_accounted_for(report):
    entry = report.to_json()
    ended = [entry[f"num_{end}"] for end in ("completed", "failed", "unfinished", "unsent")]
    assert sum(ended) == entry["num_requests"] == report.trace.num_requests
    assert sum(entry["errors"].values()) == entry["num_failed"]
    assert entry["errors"].keys() == entry["error_messages"].keys()
    assert len({outcome.index for outcome in report.outcomes}) == len(report.outcomes)
    for outcome in report.outcomes:
        assert outcome.sent_s >= outcome.ready_s >= outcome.scheduled_s, "never early"
        if outcome.is_completed:
            assert 0 < outcome.ttft_s <= outcome.last_token_s <= outcome.e2e_s


def test_bodies_are_what_the_trace_asks_for(endpoint):
    double = endpoint()
    report = played(double, output_tokens=None)
    assert report.to_json()["num_completed"] == 8
    assert Counter(len(body["prompt"]) for body in double.bodies) == {9: 8}
    assert sorted(body["max_tokens"] for body in double.bodies) == [1, 1, 2, 3, 4, 5, 6, 7], "at least one token"
    assert len({tuple(body["prompt"][:4]) for body in double.bodies}) == 1
    assert len({body["prompt"][4] for body in double.bodies}) == 8
    for body in double.bodies:
        assert body["model"] == "tiny"
        assert body["stream"] is body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert body["temperature"] == 0
    assert len({headers["X-Request-Id"] for headers in double.headers}) == 8
    assert len(double.probes) == 1


def test_the_loop_is_open(endpoint):
    """No answer begins before all have come: a client that waits for answers would never end."""
    double = endpoint(gather=8)
    assert played(double).to_json()["num_completed"] == 8
    assert double.max_open == 8


def test_a_concurrency_limit_closes_it_and_says_so(endpoint):
    double = endpoint(gather=2)
    entry = played(double, concurrency_limit=2).to_json()
    assert entry["num_completed"] == 8
    assert double.max_open <= entry["max_in_flight"] == 2
    assert 1 <= entry["num_held_back"] <= 6


def test_hits_are_those_that_an_unlimited_cache_finds_in_the_trace(endpoint):
    prompts = [[0] * 9, [0] * 13, [1] * 5, [0] * 9 + [1] * 8, [1] * 4 + [0] * 6]
    report = played(endpoint(cache_block_tokens=4), prompts, concurrency_limit=1)
    entry = report.to_json()
    assert [outcome.cached_tokens for outcome in report.outcomes] == [0, 8, 0, 8, 4]
    assert entry["token_hit_ratio"] == entry["ideal_token_hit_ratio"] == pytest.approx(20 / 54)


@pytest.mark.parametrize("tokens_per_event", [1, 4, 100])
def test_tokens_are_counted_by_usage_however_many_come_at_once(endpoint, tokens_per_event):
    report = played(endpoint(tokens_per_event=tokens_per_event), output_tokens=10)
    for outcome in report.outcomes:
        assert outcome.output_tokens == 10
        assert outcome.tpot_s == pytest.approx((outcome.last_token_s - outcome.ttft_s) / 9)
    assert report.to_json()["output_tokens_per_s"] > 0


def test_a_stream_with_carriage_returns_is_read(endpoint):
    assert played(endpoint(newline="\r\n")).to_json()["num_completed"] == 8


FAILURES = {
    "status": ({"statuses": {0: 503, 1: 429}}, {"http_429": 1, "http_503": 1}),
    "cut": ({"break_after_events": {0: 0, 3: 2}}, {"broken_stream": 2}),
    "no [DONE]": ({"has_done": False}, {"broken_stream": 8}),
    "error event": ({"error_after_events": {2: 0, 4: 1}}, {"server_error": 2}),
    "no events": ({"raw_stream": {0: b"data: {nonsense\n\n", 1: b"", 2: b"data: [DONE]\n\n"}}, None),
    "cut event": ({"raw_stream": {5: b'data: {"choices": [{"text": "a"}]}\n\ndata: {"cho'}}, {"broken_stream": 1}),
}


@pytest.mark.parametrize(("behaviour", "errors"), FAILURES.values(), ids=FAILURES.keys())
def test_failures_are_counted_by_kind_and_miss_the_slo(endpoint, behaviour, errors):
    entry = played(endpoint(**behaviour)).to_json()
    assert entry["errors"] == (errors or {"bad_answer": 1, "broken_stream": 2})
    assert entry["slo_attainment_ratio"] == pytest.approx(1 - entry["num_failed"] / 8)


def test_the_words_of_the_endpoint_are_kept(endpoint):
    entry = played(endpoint(statuses={0: 503}, error_after_events={2: 1})).to_json()
    assert entry["error_messages"] == {"http_503": "as told", "server_error": "a rank was lost"}


def test_a_request_without_an_answer_times_out_alone(endpoint):
    entry = played(endpoint(silent_from=6), timeout_s=0.5).to_json()
    assert entry["errors"] == {"timeout": 2}
    assert entry["num_completed"] == 6


def test_answers_without_usage_are_complete_but_counted(endpoint):
    entry = played(endpoint(has_usage=False)).to_json()
    assert entry["num_completed"] == entry["num_missing_usage"] == 8
    assert entry["mean_ttft_s"] > 0
    assert entry["mean_tpot_s"] is entry["token_hit_ratio"] is entry["output_tokens_per_s"] is None


def test_an_endpoint_that_does_not_tell_cached_tokens_has_no_hit_ratio(endpoint):
    entry = played(endpoint(has_details=False)).to_json()
    assert entry["token_hit_ratio"] is entry["ideal_token_hit_ratio"] is None
    assert entry["output_tokens_per_s"] > 0


def test_requests_before_the_warm_up_is_over_are_sent_but_not_measured(endpoint):
    double = endpoint(statuses={0: 500})
    entry = played(double, arrival_s=[0.0, 0.0, *np.linspace(0.3, 0.4, 6)], warmup_s=0.2).to_json()
    assert (entry["num_completed"], entry["num_measured"], entry["num_failed"]) == (7, 6, 1)
    assert entry["slo_attainment_ratio"] == 1.0


def test_a_busy_generator_says_so(endpoint):
    """Whatever keeps this program from sending in time must not look like a slow endpoint."""
    trace = trace_of(EIGHT * 4, arrival_s=np.linspace(0, 0.7, 32).tolist())
    settings = ReplaySettings(url=endpoint().url, output_tokens=1)
    report = replay(trace, settings, on_progress=lambda progress: time.sleep(0.2))
    entry = report.to_json()
    assert entry["generator_was_slow"]
    assert entry["max_lag_s"] > 0.01


def test_progress_counts_up_to_all(endpoint):
    seen = []
    trace = trace_of(EIGHT, arrival_s=[0.0] * 8)
    replay(trace, ReplaySettings(url=endpoint(statuses={1: 500}).url, output_tokens=2), on_progress=seen.append)
    assert (seen[-1].num_sent, seen[-1].num_ended, seen[-1].num_failed) == (8, 8, 1)
    assert [progress.num_ended for progress in seen] == sorted(progress.num_ended for progress in seen)


def test_ignore_eos_is_left_out_where_it_is_refused(endpoint):
    double = endpoint(takes_ignore_eos=False)
    assert played(double).to_json()["num_completed"] == 8
    assert all("ignore_eos" not in body for body in double.bodies)


def test_an_overloaded_endpoint_is_played_against(endpoint):
    assert played(endpoint(probe_status=429)).to_json()["num_completed"] == 8


def test_a_named_model_needs_no_list(endpoint):
    report = played(endpoint(models_status=404), model="mine")
    assert report.endpoint.model == "mine"
    assert report.to_json()["num_completed"] == 8


def test_a_key_is_sent_and_never_shown(endpoint):
    double = endpoint(key="sesame")
    settings = ReplaySettings(url=double.url, api_key="sesame", output_tokens=1)
    assert replay(trace_of(EIGHT[:1]), settings).to_json()["num_completed"] == 1
    assert double.headers[0]["Authorization"] == "Bearer sesame"
    assert "sesame" not in repr(settings) + repr(settings.to_json())


def test_a_long_prompt_arrives_whole(endpoint):
    double = endpoint()
    trace = trace_of([[n % 2 for n in range(9)]], block_tokens=4)
    report = replay(trace, ReplaySettings(url=double.url, length_scale=40_000, output_tokens=1))
    assert report.to_json()["num_completed"] == 1
    assert len(double.bodies[0]["prompt"]) == report.trace.input_tokens[0] == 360_000


def test_rate_scale_and_outputs_make_the_trace_that_is_played():
    trace = trace_of(EIGHT, arrival_s=np.arange(8.0).tolist())
    settings = ReplaySettings(url="http://localhost", rate_per_s=4, length_scale=0.5, output_tokens=5)
    scaled = as_played(trace, settings)
    assert scaled.mean_rate_per_s == pytest.approx(4)
    assert set(scaled.input_tokens) == {5}
    assert set(scaled.output_tokens) == {5}
    with pytest.raises(ConfigError, match="at most a week"):
        as_played(trace, ReplaySettings(url="http://localhost", rate_per_s=1e-6))
