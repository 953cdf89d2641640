"""What a server has to be like once nobody asks it anything."""

from typing import Any

from tests.serve.real.live_server import LiveServer

NOTHING = (
    "requests",
    "attempts",
    "waiting",
    "at_workers",
    "reserved_s",
    "steps",
    "copies",
    "switches",
    "kv_in_use",
    "allocated_blocks",
    "waiting_for_decode",
    "handoffs",
    "decoding",
    "decode_blocks",
)


def until_idle(server: LiveServer) -> dict[str, Any]:
    """What it holds once it holds nothing for anybody, which has to come within a bound."""
    state = server.until(lambda state: all(state["held"][name] == 0 for name in NOTHING), "nothing is held")
    return dict(state["held"])


def check_nothing_is_held(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Of what is always there it is no more than before."""
    for name in ("tasks", "descriptors"):
        assert after[name] <= before[name], f"{name}: {before[name]} before, {after[name]} after"
