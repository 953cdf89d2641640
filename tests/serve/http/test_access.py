"""Keys and tokens: who is let in, and whose cache is whose."""

import json

import openai
import pytest
from tests.serve.http.servers import MODEL, serving

TOKEN = "control-secret"
KEYS = {"key-of-anna": "anna", "key-of-ben": "ben"}
BODY = {"model": MODEL, "prompt": [1, 2]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "index.html").write_text("<h1>pool</h1>")
    (folder / "pool.js").write_text("1")
    (folder / "secret.txt").write_text("no")
    with serving(api_keys=KEYS, control_token=TOKEN, has_public_metrics=False, dashboard_folder=folder) as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(server):
    server.backend.__init__()


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


def code_of(answer):
    return json.loads(answer)["error"]["code"]


def test_each_key_has_a_salt_of_its_own_that_lasts(server):
    for key in (*KEYS, *KEYS):
        with openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
            client.completions.create(model=MODEL, prompt=[1])
    anna, ben, *again = [request.tenant for request in server.backend.requests]
    assert anna != ben
    assert again == [anna, ben]
    assert b"" not in (anna, ben)
    with serving(api_keys=KEYS) as restarted:
        restarted.request("POST", "/v1/completions", BODY, bearer("key-of-anna"))
        assert restarted.backend.requests[0].tenant == anna


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": "Bearer"}, "missing_api_key"),
        ({"authorization": "Basic a2V5"}, "missing_api_key"),
        (bearer("key-of-carl"), "invalid_api_key"),
        (bearer("key-of-ann"), "invalid_api_key"),
        (bearer(TOKEN), "invalid_api_key"),
        (bearer("\xe9\xff"), "invalid_api_key"),
    ],
)
def test_no_model_without_a_key(server, path, headers, code):
    status, found, answer = server.request("POST", path, BODY, headers)
    assert (status, code_of(answer)) == (401, code)
    assert found["www-authenticate"] == "Bearer"
    assert server.backend.requests == []


def test_models_are_listed_with_a_key_only(server):
    assert server.request("GET", "/v1/models")[0] == 401
    assert server.request("GET", "/v1/models", headers=bearer("key-of-ben"))[0] == 200


ADMIN = [
    ("GET", "/admin/state", None),
    ("GET", "/admin/decisions", None),
    ("GET", "/admin/events", None),
    ("POST", "/admin/composition", {"composition": "1x2"}),
    ("POST", "/admin/drain", {}),
    ("POST", "/admin/pause-controller", {"paused": True}),
    ("GET", "/metrics", None),
]


@pytest.mark.parametrize(("method", "path", "body"), ADMIN)
def test_operator_s_endpoints_are_closed(server, method, path, body):
    status, headers, answer = server.request(method, path, body)
    assert (status, code_of(answer)) == (401, "missing_control_token")
    assert headers["www-authenticate"] == "Bearer"
    for wrong in ("control-secre", "control-secret2", "key-of-anna", ""):
        status, _, answer = server.request(method, path, body, {"authorization": f"Bearer {wrong}x"})
        assert (status, code_of(answer)) == (403, "invalid_control_token")
    cookie = {"cookie": "vertumnus_dashboard=guess"}
    assert server.request(method, path, body, cookie)[0] == 401
    assert server.backend.calls == []


@pytest.mark.parametrize(("method", "path", "body"), ADMIN)
def test_without_a_token_nobody_is_an_operator(method, path, body):
    with serving() as server:
        if path != "/metrics":
            assert server.request(method, path, body)[0] == 401
            assert server.request(method, path, body, bearer("None"))[0] == 403
            assert server.request(method, "/dashboard?token=None")[0] == (403 if method == "GET" else 405)


@pytest.mark.parametrize(
    "path", ["/%61dmin/state", "/admin%2fstate", "/admin/../admin/state", "//admin/state", "/ADMIN/state"]
)
def test_other_spellings_lead_nowhere_else(server, path):
    assert server.request("GET", path)[0] in (401, 404)


def test_probes_are_open(server):
    assert server.request("GET", "/health")[0] == 200
    assert server.request("GET", "/ready")[0] == 200
    server.backend.is_ready = False
    assert server.request("GET", "/ready")[0] == 503
    assert server.request("GET", "/health")[0] == 200


def test_dashboard_hands_a_cookie_for_the_token_and_the_cookie_only_reads(server):
    assert server.request("GET", "/dashboard?token=wrong")[0] == 403
    status, headers, _ = server.request("GET", f"/dashboard?token={TOKEN}")
    assert (status, headers["location"]) == (303, "/dashboard")
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict"} <= set(attributes)
    assert TOKEN not in cookie
    assert server.request("GET", "/admin/state", headers={"cookie": cookie})[0] == 200
    assert server.request("POST", "/admin/drain", {}, {"cookie": cookie})[0] == 401
    assert server.backend.calls == []


def test_dashboard_s_files(server):
    status, headers, page = server.request("GET", "/dashboard")
    assert (status, page) == (200, b"<h1>pool</h1>")
    assert headers["content-type"].startswith("text/html")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert server.request("GET", "/dashboard/pool.js")[0] == 200
    for name in ("secret.txt", "none.js", "..", ".js", "%00.js", "a%2f..%2fpool.js"):
        assert server.request("GET", f"/dashboard/{name}")[0] == 404, name


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/health", {}, 200),
        ("/ready", {}, 200),
        ("/v1/models", bearer("key-of-anna"), 200),
        ("/v1/models", {}, 401),
        ("/metrics", bearer(TOKEN), 200),
        ("/metrics", {}, 401),
        ("/admin/events", bearer(TOKEN), 405),
    ],
)
def test_monitors_may_ask_by_head(server, path, headers, status):
    found, told, body = server.request("HEAD", path, headers=headers)
    assert (found, body) == (status, b"")
    assert int(told["content-length"]) > 0
