"""How a pool of ranks is started."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vertumnus.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """What the ranks run, how many there are, and how long anything may take.

    source: module:function that gives every rank its stepper; it is called with `options`, which JSON can carry.
    num_slots: KV blocks per rank. threads_per_rank: of one operator of a rank, set and not inherited.
    host, port: where ranks connect to and listen on; port 0 takes any. token: None makes one up.
    listen_fd: a socket that listens already, instead of host and port, and that whoever made it keeps open: ranks
    outlive the pool's process as long as it does, and wait there for the next (`RankPool.attach`). None: they end with
    the pool.
    is_launched: False where another supervisor starts the ranks (torchrun) and starts them again.
    connect_timeout_s bounds the forming of a group, step_timeout_s a step and every exchange within it,
    control_timeout_s any other answer, recovery_timeout_s one attempt to bring lost ranks back.
    lease_s: how long a lease on a copy's source lasts unless it is released before. orphan_timeout_s: how long ranks
    whose pool is gone wait for the next before they end.
    """

    source: str
    num_ranks: int
    num_slots: int
    options: Mapping[str, Any] = field(default_factory=dict)
    threads_per_rank: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    listen_fd: int | None = None
    token: str | None = None
    is_launched: bool = True
    start_timeout_s: float = 120.0
    recovery_timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    control_timeout_s: float = 10.0
    step_timeout_s: float = 120.0
    copy_timeout_s: float = 60.0
    lease_s: float = 60.0
    orphan_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_slots", "threads_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        for name in self.__slots__:
            if name.endswith("_s") and not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: a positive number of seconds")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}; accepted: 0 to 65535")
        if self.token is not None and len(self.token) < 16:
            raise ConfigError(f"token has {len(self.token)} characters; accepted: 16 or more, or none to make one up")
        try:
            json.dumps(dict(self.options))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"options cannot be sent ({error}); accepted: what JSON can carry") from None
