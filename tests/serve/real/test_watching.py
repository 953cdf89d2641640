"""What the whole server shows of its traffic: every window on it fills, through supervisor, router and HTTP."""

import http.client
import json
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.serve.real import tiny_model
from tests.serve.real.live_server import CONTROL_TOKEN, WAIT_S, LiveServer, body, serving
from tests.serve.real.test_switches_under_load import switch

from vertumnus.serve import metric_families as families
from vertumnus.serve.metric_families import Kind

STILL = {
    families.REFUSED: "queues are not full here",
    families.OPEN: "nothing is open in the end",
    families.UNANSWERED: "as above",
    families.WAITING: "as above",
    families.DECODE_SEQUENCES: "as above",
    families.WORKER_QUEUE: "as above",
    families.DEMAND: "nothing has arrived in the last window",
    families.LONG_RATIO: "no prompt here is long",
    families.RECLAIMED: "the caches are not full here",
    families.COPIES: "only where a copy is worth it",
    families.COPIED_BLOCKS: "as above",
    families.RESTARTED: "only where the death meets a request",
    families.FAILED_STEPS: "as above",
    families.CONTROLLER_FAULTS: "it has none here",
    families.POOL_FAILED: "it has not",
    families.DRAINING: "nobody has asked for it",
}
"""What may well show nothing but zeros after the traffic below, and why."""


def samples(server: LiveServer) -> dict[str, dict[tuple[str, ...], float]]:
    """By sample name, then by the labels' values in the order of the labels' names."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=WAIT_S) as response:
        text = response.read().decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return found


def leave_a_stream(server: LiveServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    asked = json.dumps(body(tiny_model.prompt(5, 50), 400, stream=True))
    connection.request("POST", "/v1/completions", asked, {"content-type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()
    server.until(lambda state: state["held"]["requests"] == 0, "the request is freed")


@pytest.fixture(scope="module")
def watched():
    """After answers, refusals, a client that left, a merge, a split and the death of a rank."""
    with serving(controller="lookahead", window_s=1.0) as server:
        for _ in range(2):
            for number in range(4):
                server.complete(tiny_model.prompt(number, 200))
        for composition in ("1x4", "4x1"):
            switch(server, composition)
            server.complete(tiny_model.prompt(0, 200))
        server.kill_rank(2)
        server.until(lambda state: state["held"]["ranks_down"] > 0 or state["epoch"] > 8, "the loss is seen")
        server.until(lambda state: state["held"]["ranks_down"] == 0, "the rank is back")
        assert server.call("/v1/completions", {"model": "other", "prompt": [1]})[0] == 404
        assert server.call("/v1/completions", body((1,), 1, n=2))[0] == 400
        deadline = {"x-request-deadline-ms": "1"}
        assert server.call("/v1/completions", body(tiny_model.prompt(9, 400), 100), deadline)[0] == 504
        leave_a_stream(server)
        yield server


def test_every_metric_moves(watched):
    found = samples(watched)
    still = set()
    for family in families.ALL:
        name = f"{family.name}_count" if family.kind is Kind.HISTOGRAM else family.name
        if not any(found.get(name, {}).values()):
            still.add(family)
    # Where the profile has no kappa there is no capacity to show.
    assert still <= {*STILL, families.CAPACITY}, {family.name for family in still - set(STILL)}


def test_the_counters_agree_with_what_was_asked(watched):
    found = samples(watched)
    ended = found["vertumnus_requests_ended_total"]
    num_first = sum(found["vertumnus_ttft_seconds_count"].values())
    assert num_first == 2 * 4 + 2 + 1, "answers, and the stream that was left"
    assert (ended["length",], ended["cancelled",]) == (10, 1)
    for name in ("queue", "service", "t_ext"):
        assert sum(found[f"vertumnus_{name}_seconds_count"].values()) == num_first
    assert found["vertumnus_prompt_tokens_total"][()] == 10 * 200 + 50
    # All but the last block of each prompt when it is asked again, wherever it is then.
    assert found["vertumnus_reachable_tokens_total"][()] >= 4 * 192
    assert found["vertumnus_reused_tokens_total"][()] >= 4 * 192
    errors = found["vertumnus_http_errors_total"]
    assert errors == {
        ("model_not_found", "404"): 1,
        ("unsupported_field", "400"): 1,
        ("deadline_exceeded", "504"): 1,
        ("client_gone", "499"): 1,
    }
    assert found["vertumnus_ranks_lost_total"] == found["vertumnus_ranks_back_total"] == {("2",): 1}


def test_decisions_tell_what_was_done_and_why(watched):
    status, answer = watched.call("/admin/decisions?limit=1000")
    assert status == 200
    kinds = {each["kind"] for each in answer["decisions"]}
    assert kinds >= {"placement", "composition_requested", "activation", "merge", "split", "rank_lost", "rank_back"}
    placement = next(each for each in answer["decisions"] if each["kind"] == "placement")
    assert placement["candidates"]["worker_id"]
    assert set(placement["candidates"]["terms"]) >= {"wait", "service", "gpu_time"}


def test_the_dashboard_gets_figures_history_and_decisions(watched):
    state = watched.until(lambda state: bool(state["history"]["time"]), "five seconds are over")
    recent = state["recent"]
    assert recent["num_answered"] == 2 * 4 + 2 + 1
    assert recent["ttft_s"]["p99"] >= recent["ttft_s"]["p50"] > 0
    assert recent["hit_ratio"] > 0
    assert recent["slo_attainment_ratio"] > 0
    assert any(state["history"]["demand_s_per_s"])
    asked = urllib.request.Request(f"{watched.url}/admin/events", headers={"authorization": f"Bearer {CONTROL_TOKEN}"})
    seen = {}
    with urllib.request.urlopen(asked, timeout=WAIT_S) as events:
        while seen.keys() != {"state", "decisions"}:
            line = events.readline()
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                seen[event["event"]] = event
    assert seen["state"]["recent"]["num_answered"] == recent["num_answered"]
    assert seen["decisions"]["decisions"]
