"""The server against its own description of itself: nothing breaks, and every answer is one that is described."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks
from tests.serve.http.fake_backend import FakeBackend
from tests.serve.http.servers import WAIT_S, http_config, serving, tokeniser

from vertumnus.serve.http import create_app

TOKEN = {"authorization": "Bearer control-secret"}

NO_FAILURE = checks.not_a_server_error
PROMISES = [
    NO_FAILURE,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
POSTS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def server():
    with serving(control_token="control-secret") as server:
        yield server


def operations():
    """All but the stream of events, which never ends."""
    app = create_app(FakeBackend(), tokeniser(), http_config())
    found = (operation.ok() for operation in schemathesis.openapi.from_dict(app.api.openapi()).get_all_operations())
    return [operation for operation in found if operation.path != "/admin/events"]


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.label)
def test_every_operation_keeps_its_promises(server, operation, mode):
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    def check(case):
        headers = TOKEN if operation.path.startswith("/admin") else {}
        response = case.call(base_url=server.url, headers=headers, timeout=WAIT_S)
        # A deadline of a millisecond may well pass: that status is meant.
        promises = [promise for promise in PROMISES if response.status_code != 504 or promise is not NO_FAILURE]
        if operation.path in POSTS:  # elsewhere unknown query parameters are ignored, and the token is given regardless
            promises.append(checks.negative_data_rejection)
        case.validate_response(response, checks=promises)

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # nothing can be wrong with a request that takes nothing


def test_document_names_every_endpoint_and_its_guards(server):
    _, _, answer = server.request("GET", "/openapi.json")
    document = json.loads(answer)
    assert set(document["paths"]) == {
        *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}"),
        *("/health", "/ready", "/metrics"),
        *("/admin/state", "/admin/decisions", "/admin/events", "/admin/resume"),
        *("/admin/composition", "/admin/drain", "/admin/pause-controller"),
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert operation.get("security", []) == ([{"control_token": []}] if path.startswith("/admin") else [])
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert reference in document["components"]["schemas"]
