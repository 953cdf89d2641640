"""What a supervisor tells a router process on standard input, and what the router tells it: a JSON object a line."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from vertumnus.serve.config import ServeConfig, config_from


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """http_fd, pool_fd: listening sockets that outlive the router. report_fd: takes `RouterReport`s.

    hash_key, pool_token: the same for every router in turn, or the ranks' KV would mean nothing to the next. is_first:
    no ranks are there yet. calibration, orders: of an earlier router, if it measured or was given any.
    """

    config: ServeConfig
    http_fd: int
    pool_fd: int
    report_fd: int = -1
    hash_key: bytes
    pool_token: str
    control_token: str
    is_first: bool
    calibration: dict[str, Any] | None = None
    orders: dict[str, Any] | None = None

    def to_line(self) -> bytes:
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain |= {"config": self.config.model_dump(mode="json"), "hash_key": self.hash_key.hex()}
        return json.dumps(plain).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "RouterSpec":
        plain = json.loads(line)
        plain |= {"config": config_from(plain["config"]), "hash_key": bytes.fromhex(plain["hash_key"])}
        return cls(**plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """kind: `ready`, `calibrated`, `ordered` or `failed`. is_input: it failed for what somebody configured."""

    kind: str
    message: str = ""
    is_input: bool = False
    calibration: dict[str, Any] | None = None
    orders: dict[str, Any] | None = None

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "RouterReport":
        return cls(**json.loads(line))


@dataclass(slots=True)
class Orders:
    """What an operator has asked for and has not taken back: a composition, the controller at rest, nothing new."""

    composition: str | None = None
    is_paused: bool = False
    is_draining: bool = False

    def to_json(self) -> dict[str, Any]:
        """What the constructor takes."""
        return asdict(self)
