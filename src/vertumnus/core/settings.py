"""What an operator decides once about a control plane."""

from dataclasses import dataclass, field

import numpy as np

from vertumnus.core.awaited import WaitSettings
from vertumnus.core.drift import RefitSettings
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.long_threshold import DEFAULT_LONG_TOKENS
from vertumnus.core.moves import MoveSettings
from vertumnus.core.pulls import PullSettings
from vertumnus.core.queueing import Discipline
from vertumnus.core.reconfiguration import ReconfigurationSettings
from vertumnus.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlaneSettings:
    """What an operator decides once. Durations in seconds."""

    block_tokens: int
    blocks_per_rank: int
    """KV blocks that one rank stores."""
    discipline: Discipline = Discipline.SHORTEST
    ageing: float = 10.0
    """Seconds of arrival order that one second of predicted service is worth under shortest-first."""
    step_tokens: int | None = None
    """Token budget of a step: longer prompts are chunked, shorter ones packed where that is the less waiting. None: one
    whole request a step."""
    max_sequence_tokens: int | None = None
    window_s: float = 20.0
    """Observation window of the controller."""
    outlives_controller_faults: bool = False
    """What the controller raises costs its window or its target and is kept, instead of ending whoever drives all."""
    long_tokens: int = DEFAULT_LONG_TOKENS
    """Requests above this length count as long."""
    long_quantile_ratio: float | None = None
    """Above this quantile of recent lengths instead, since in agentic traffic most requests are longer than 32K."""
    max_switching_ratio: float = 0.5
    """Largest share of the GPUs that may be draining or switching at once."""
    reconfiguration: ReconfigurationSettings = field(default_factory=ReconfigurationSettings)
    replication: ReplicationSettings | None = None
    """Algorithms 1 and 2; None: every worker's cache lives by itself."""
    scan_interval_s: float = 10.0
    """From the end of one replication scan to the start of the next."""
    pull: PullSettings | None = None
    """Whether and at what price a placement may count on blocks of other workers; None: pending ones are misses."""
    refit: RefitSettings | None = None
    """Whether the cost model follows what steps really take; None: it stays the profile's."""
    moves: MoveSettings | None = None
    """Whether queued work moves to workers that run dry; None: it stays where it was placed, as in the paper."""
    waits: WaitSettings | None = None
    """Whether a request may wait for a prefix that another is computing; None: it computes it too, as in the paper."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "blocks_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        if self.step_tokens is not None and self.step_tokens < self.block_tokens:
            raise ConfigError(f"step_tokens is {self.step_tokens}; accepted: at least one block ({self.block_tokens})")
        if not 0 <= self.ageing < np.inf:
            raise ConfigError(f"ageing is {self.ageing}; accepted: 0 or more")
