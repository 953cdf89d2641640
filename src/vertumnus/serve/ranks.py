"""What the live pool asks of ranks, whatever they are: the engine's processes, or stand-ins of known speed."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vertumnus.engine.messages import Activated, Pulled, Refusal
from vertumnus.engine.pool import PoolEvent
from vertumnus.engine.step import Step, StepOutput


class Ranks(Protocol):
    """See `vertumnus.engine.pool.RankPool`, which is one. Errors are those of `engine.errors`."""

    @property
    def events(self) -> asyncio.Queue[PoolEvent]: ...

    async def activate(self, epoch: int, geometry: Mapping[int, int]) -> list[Activated] | Refusal:
        """Takes up the groups of {first_rank: degree}; all members have confirmed when it returns."""
        ...

    async def step(self, step: Step) -> list[StepOutput] | Refusal:
        """The outputs of all members; a refusal means that nothing was done."""
        ...

    async def copy_blocks(
        self, source: int, source_slots: Sequence[int], destination: int, destination_slots: Sequence[int]
    ) -> Pulled | Refusal:
        """Copies slots of one rank into slots of another."""
        ...

    def kill(self, rank: int) -> None:
        """Ends a rank that misbehaves; `RankGone` and `RankBack` follow."""
        ...

    def describe(self) -> dict[str, Any]:
        """What they are, for people to look at."""
        ...

    async def close(self) -> None:
        """Ends all ranks."""
        ...
