"""What an operator can ask and do."""

import http.client
import json

import pytest
from tests.serve.http.servers import WAIT_S, serving

TOKEN = {"authorization": "Bearer control-secret"}


@pytest.fixture(scope="module")
def server():
    with serving(control_token="control-secret") as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(server):
    server.backend.__init__()


def ask(server, method, path, body=None):
    status, _, answer = server.request(method, path, body, TOKEN)
    return status, json.loads(answer)


def test_state_and_decisions(server):
    assert ask(server, "GET", "/admin/state") == (200, {"composition": "1x1", "workers": []})
    assert ask(server, "GET", "/admin/decisions?limit=2") == (200, {"decisions": [{"decision": 0}, {"decision": 1}]})
    assert len(ask(server, "GET", "/admin/decisions")[1]["decisions"]) == 3
    assert server.request("GET", "/metrics")[2].startswith(b"# HELP")


def test_numbers_that_json_does_not_have_are_null(server):
    server.backend.describe = lambda: {"a": float("inf"), "b": [float("nan"), 1.5]}
    assert ask(server, "GET", "/admin/state") == (200, {"a": None, "b": [None, 1.5]})
    del server.backend.describe


def test_orders_reach_the_pool(server):
    assert ask(server, "POST", "/admin/composition", {"composition": "1x2,2x1"}) == (200, {"composition": "1x2,2x1"})
    assert ask(server, "POST", "/admin/drain", {})[0] == 200
    assert ask(server, "POST", "/admin/drain", {"worker_id": 3})[0] == 200
    assert ask(server, "POST", "/admin/resume", {}) == (200, {"draining": False})
    assert ask(server, "POST", "/admin/pause-controller", {"paused": True}) == (200, {"paused": True})
    orders = [("composition", "1x2,2x1"), ("drain", None), ("drain", 3), "resume", ("paused", True)]
    assert server.backend.calls == orders


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/admin/composition", {"composition": "9x9"}, 400, None),
        ("/admin/composition", {"composition": "busy"}, 409, None),
        ("/admin/composition", {"composition": ""}, 400, "composition"),
        ("/admin/composition", {}, 400, "composition"),
        ("/admin/composition", {"composition": "1x2", "force": True}, 400, "force"),
        ("/admin/composition", b"nothing", 400, None),
        ("/admin/composition", b"\xff", 400, None),
        ("/admin/drain", {"worker_id": -1}, 400, "worker_id"),
        ("/admin/drain", {"worker_id": 2**70}, 400, "worker_id"),
        ("/admin/resume", {"worker_id": 3}, 400, "worker_id"),
        ("/admin/pause-controller", {"paused": "yes"}, 400, "paused"),
        ("/admin/pause-controller", b" " * 70_000, 413, None),
    ],
)
def test_orders_that_make_no_sense(server, path, body, status, param):
    found, answer = ask(server, "POST", path, body)
    assert found == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert param is None or answer["error"]["param"] == param


@pytest.mark.parametrize("limit", ["0", "-1", "many", "1e3", "99999999999999999999"])
def test_limits_that_make_no_sense(server, limit):
    status, answer = ask(server, "GET", f"/admin/decisions?limit={limit}")
    assert (status, answer["error"]["param"]) == (400, "limit")


def test_events_come_until_the_reader_leaves(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    connection.request("GET", "/admin/events", headers=TOKEN)
    response = connection.getresponse()
    assert response.getheader("content-type").startswith("text/event-stream")
    assert response.readline() == b'data: {"event":"hello"}\n'
    response.close()
    connection.close()
    server.until(lambda: server.backend.calls == ["events", "events closed"])


def test_silent_events_are_kept_alive():
    with serving(control_token="control-secret", heartbeat_s=0.02) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        connection.request("GET", "/admin/events", headers=TOKEN)
        response = connection.getresponse()
        lines = [response.readline() for _ in range(6)]
        response.close()
        connection.close()
    assert lines == [b'data: {"event":"hello"}\n', b"\n", b": waiting\n", b"\n", b": waiting\n", b"\n"]


def test_events_do_not_hold_up_the_end():
    with serving(control_token="control-secret") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        connection.request("GET", "/admin/events", headers=TOKEN)
        assert connection.getresponse().readline().startswith(b"data:")
    connection.close()
    assert server.backend.calls == ["events", "events closed"]
