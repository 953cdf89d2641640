"""Endpoints that end with the test."""

from contextlib import ExitStack

import pytest
from tests.replay.endpoint_double import EndpointDouble, serving


@pytest.fixture
def endpoint():
    """Makes endpoints that behave as told."""
    with ExitStack() as stack:
        yield lambda **behaviour: stack.enter_context(serving(EndpointDouble(**behaviour)))
