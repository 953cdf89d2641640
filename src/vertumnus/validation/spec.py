"""What both sides are given: one pool, as the simulator and as a live pool over stub ranks are told of it."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from vertumnus.core.composition import Composition, Topology, lay_out
from vertumnus.core.profile import Profile, format_profile, parse_profile
from vertumnus.core.queueing import Discipline
from vertumnus.core.slo import Slo
from vertumnus.errors import ConfigError
from vertumnus.sim.overheads import LiveOverheads
from vertumnus.sim.simulate import SimulationSettings

POLICY = "vertumnus"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """A pool of prefill ranks with everything on, and as many decode ranks as never make anybody wait.

    blocks_per_rank: of `block_tokens` tokens each. controller: None holds the composition. step_tokens: None runs one
    whole prompt a step. Durations in seconds.
    """

    profile: Profile
    composition: Composition
    block_tokens: int
    blocks_per_rank: int
    controller: str | None = None
    window_s: float = 20.0
    step_tokens: int | None = None
    discipline: Discipline = Discipline.SHORTEST
    num_decode_ranks: int = 4
    slo: Slo = field(default_factory=Slo)

    def __post_init__(self) -> None:
        """Raises ConfigError for a composition that cannot be laid out or that the profile has no costs for."""
        lay_out(self.composition, self.topology)
        if unknown := set(self.composition.degrees) - set(self.profile.degrees):
            known = ", ".join(map(str, self.profile.degrees))
            raise ConfigError(
                f"composition is {self.composition}, with degree {min(unknown)}; "
                f"accepted: degrees of profile {self.profile.name} ({known})"
            )
        if self.step_tokens is not None and self.step_tokens < self.block_tokens:
            raise ConfigError(
                f"step-tokens is {self.step_tokens}; accepted: at least one block ({self.block_tokens} tokens)"
            )

    def of(self, composition: Composition) -> "PoolSpec":
        """The same pool of another composition."""
        return replace(self, composition=composition)

    @property
    def topology(self) -> Topology:
        return Topology(self.composition.num_gpus)

    @property
    def max_tokens(self) -> int:
        """Prompt and answer together: what the model takes and one decode rank can hold."""
        held = self.blocks_per_rank * self.block_tokens
        return min(held, self.profile.max_sequence_tokens or held)

    def simulation(self, overheads: LiveOverheads | None, lead_s: float) -> SimulationSettings:
        """The same pool for the simulator, which knows no decode ranks: T_ext is the profile's."""
        return SimulationSettings(
            num_gpus=self.composition.num_gpus,
            composition=self.composition,
            is_fixed=self.controller is None,
            controller=self.controller or "lookahead",
            window_s=self.window_s,
            discipline=self.discipline,
            step_tokens=self.step_tokens,
            blocks_per_rank=self.blocks_per_rank,
            slo=self.slo,
            overheads=overheads,
            waits_for_handoffs=True,
            lead_s=lead_s,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; the profile by its name."""
        document = {name: getattr(self, name) for name in self.__slots__}
        return document | {
            "profile": self.profile.name,
            "composition": str(self.composition),
            "discipline": self.discipline.value,
            "slo": str(self.slo),
        }

    def to_line(self) -> str:
        """What `from_line` reads, in another process."""
        return json.dumps(self.to_json() | {"profile": format_profile(self.profile)})

    @classmethod
    def from_line(cls, line: str) -> "PoolSpec":
        plain = json.loads(line)
        return cls(
            **plain
            | {
                "profile": parse_profile(plain["profile"], origin="profile"),
                "composition": Composition.parse(plain["composition"]),
                "discipline": Discipline(plain["discipline"]),
                "slo": Slo.parse(plain["slo"]),
            }
        )
