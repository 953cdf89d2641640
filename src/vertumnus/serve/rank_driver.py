"""Steps, switches and copies on ranks that may die, be formed anew, or have a slot still in use: what to wait for, what
to try again, and what to give up."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from vertumnus.core.composition import RankGroup
from vertumnus.engine.errors import CopyFailed, GroupUnready, PoolError, RankError, RankLost, RankTimeout, WireError
from vertumnus.engine.messages import Refusal, RefusalReason
from vertumnus.engine.step import Address, Step, StepOutput, StepRequest
from vertumnus.serve.live_settings import LiveSettings
from vertumnus.serve.ranks import Ranks
from vertumnus.serve.telemetry import Telemetry

SLOT_POLL_S = 0.005
"""Between two attempts at slots that a copy still reads or writes."""

_T = TypeVar("_T")


class RankDriver:
    """Every wait is bounded by the settings. A rank that misbehaves is killed, so that it comes back as a new one."""

    def __init__(self, ranks: Ranks, settings: LiveSettings, telemetry: Telemetry) -> None:
        self._ranks = ranks
        self._settings = settings
        self._telemetry = telemetry
        self._loop = asyncio.get_running_loop()
        self._formed = asyncio.Event()
        self._num_steps = 0

    def groups_formed(self) -> None:
        """Groups that could not be used may be usable now."""
        self._formed.set()
        self._formed = asyncio.Event()

    async def activate(self, epoch: int, groups: Sequence[RankGroup]) -> None:
        """Raises PoolError if the ranks do not take the groups up."""
        answer = await self._ranks.activate(epoch, {group.first_rank: group.degree for group in groups})
        if isinstance(answer, Refusal):
            raise PoolError(f"rank {answer.rank} refuses epoch {epoch}: {answer.detail}")

    async def try_activate(self, epoch: int, groups: Sequence[RankGroup]) -> bool:
        """Whether the ranks have taken the groups up. If not, a loss has been or will be reported, or the epoch is
        out of date."""
        try:
            geometry = {group.first_rank: group.degree for group in groups}
            answer = await self._when_formed(partial(self._ranks.activate, epoch, geometry))
        except RankLost:
            return False
        except (RankError, PoolError, WireError) as error:
            self._give_up([rank for group in groups for rank in group.ranks], error)
            return False
        return not isinstance(answer, Refusal)

    async def step(
        self, group: RankGroup, epoch: int, requests: Sequence[StepRequest], is_wanted: Callable[[], bool]
    ) -> list[StepOutput] | None:
        """The outputs of all members; None if ranks are lost, which has been or will be reported, or if the step is not
        wanted any more when the ranks cannot run it."""
        deadline_s = self._loop.time() + self._settings.slot_wait_s
        while True:
            self._num_steps += 1
            step = Step(
                step_id=self._num_steps,
                first_rank=group.first_rank,
                degree=group.degree,
                epoch=epoch,
                requests=requests,
            )
            try:
                answer = await self._when_formed(partial(self._ranks.step, step))
            except RankLost:
                return None
            except (RankError, PoolError, WireError) as error:
                if is_wanted():
                    self._give_up(list(group.ranks), error)
                return None
            if not isinstance(answer, Refusal):
                return answer
            if not is_wanted():  # its worker was lost; the ranks may be others by now, and are not to blame
                return None
            if answer.reason is not RefusalReason.SLOT_IN_USE or self._loop.time() > deadline_s:
                self._give_up(list(group.ranks), PoolError(f"rank {answer.rank} refuses a step: {answer.detail}"))
                return None
            await asyncio.sleep(SLOT_POLL_S)

    async def copy(self, source: Sequence[Address], destination: Sequence[Address]) -> int:
        """Copies blocks between ranks; how many of them, from the first on, have arrived."""
        slots: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        """By source and destination rank, the slots to read and those to write."""
        for (from_rank, from_slot), (to_rank, to_slot) in zip(source, destination, strict=True):
            pair = slots.get((from_rank, to_rank))
            if pair is None:
                pair = slots[from_rank, to_rank] = [], []
            pair[0].append(from_slot)
            pair[1].append(to_slot)
        found = await asyncio.gather(*(self._copy_slots(*ranks, *pair) for ranks, pair in slots.items()))
        if all(map(all, found)):
            return len(source)
        arrived = {ranks: iter(each) for ranks, each in zip(slots, found, strict=True)}
        return next(
            number
            for number, ((from_rank, _), (to_rank, _)) in enumerate(zip(source, destination, strict=True))
            if not next(arrived[from_rank, to_rank])
        )

    async def _copy_slots(
        self, from_rank: int, to_rank: int, from_slots: list[int], to_slots: list[int]
    ) -> Sequence[bool]:
        deadline_s = self._loop.time() + self._settings.slot_wait_s
        while True:
            try:
                answer = await self._ranks.copy_blocks(from_rank, from_slots, to_rank, to_slots)
            except RankTimeout as error:
                self._give_up([error.rank], error)  # it might still write to the slots some time
                return [False] * len(from_slots)
            except (RankError, CopyFailed, PoolError, WireError):
                return [False] * len(from_slots)
            if not isinstance(answer, Refusal):
                return answer.is_installed
            if answer.reason is not RefusalReason.SLOT_IN_USE or self._loop.time() > deadline_s:
                return [False] * len(from_slots)
            await asyncio.sleep(SLOT_POLL_S)

    async def _when_formed(self, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Asks again once groups were formed, as long as this one is not. Raises what asking raises in the end."""
        deadline_s = self._loop.time() + self._settings.group_wait_s
        while True:
            formed = self._formed
            try:
                return await ask()
            except GroupUnready:
                left_s = deadline_s - self._loop.time()
                if left_s <= 0:
                    raise
                try:
                    await asyncio.wait_for(formed.wait(), left_s)
                except (asyncio.TimeoutError, TimeoutError):
                    raise PoolError(f"a group was not formed within {self._settings.group_wait_s} s") from None

    def _give_up(self, ranks: list[int], error: Exception) -> None:
        culprits = [error.rank] if isinstance(error, RankError) else ranks
        self._telemetry.step_failed(self._loop.time(), culprits, str(error))
        for rank in culprits:
            self._ranks.kill(rank)
