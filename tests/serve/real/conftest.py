"""One server for all tests that leave it as they found it: a start takes seconds."""

import pytest
from tests.serve.real.live_server import LiveServer, serving


@pytest.fixture(scope="session")
def _shared_server():
    with serving() as server:
        yield server


@pytest.fixture
def server(_shared_server: LiveServer) -> LiveServer:
    """Of 2x1,1x2, unless another test has left it in another composition; it serves, and all its ranks are there."""
    _shared_server.until(lambda state: state["held"]["ranks_down"] == 0, "all ranks are there")
    return _shared_server
