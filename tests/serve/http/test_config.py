"""Settings that make no sense are refused by name, and secrets are not shown."""

import pytest
from tests.serve.http.servers import http_config

from vertumnus.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_name", ""),
        ("max_context_tokens", 0),
        ("vocab_size", -1),
        ("max_body_bytes", 0),
        ("max_connections", 0),
        ("max_top_logprobs", -1),
        ("header_timeout_s", 0.0),
        ("unread_timeout_s", float("inf")),
        ("heartbeat_s", float("nan")),
        ("drain_timeout_s", -1.0),
        ("control_token", ""),
        ("api_keys", {"": "anna"}),
    ],
)
def test_value_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name}.*accepted"):
        http_config(**{name: value})


def test_body_limit_follows_the_context():
    assert http_config().body_limit_bytes == 1 << 20
    assert http_config(max_context_tokens=1 << 20).body_limit_bytes == 1 << 24
    assert http_config(max_body_bytes=5).body_limit_bytes == 5


def test_secrets_are_not_shown():
    assert "zanzibar" not in repr(http_config(control_token="zanzibar", api_keys={"zanzibar": "anna"}))
