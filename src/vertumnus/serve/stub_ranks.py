"""Ranks of known speed without a model, in this process: for tests, benchmarks of everything but the model, and for
setting what the pool does beside what the simulator says it does.

A step takes what the cost model says and yields tokens that follow from the sequence alone, so that a sequence that was
lost and computed again goes on as it would have.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vertumnus.core.cost import CostModel
from vertumnus.engine.errors import RankLost
from vertumnus.engine.geometry import GroupKey, check_geometry
from vertumnus.engine.messages import Activated, Pulled, Refusal, RefusalReason
from vertumnus.engine.pool import PoolEvent, RankBack, RankGone
from vertumnus.engine.step import RequestOutput, Step, StepOutput, StepTimings
from vertumnus.serve.stub_links import StubLinks

_NO_TIMINGS = StepTimings(total_s=0.0, gather_s=0.0, attention_s=0.0, mlp_s=0.0, projection_s=0.0, wait_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StubSpeed:
    """Seconds that things take.

    prefill: E_C of every prefill step; None: no time at all. decode_ranks: whose steps take `decode_step_s` instead.
    links: how long copies take; None: `copy_s_per_block` each, whatever else is being copied.
    """

    prefill: CostModel | None = None
    decode_ranks: range = range(0)
    decode_step_s: float = 0.0
    copy_s_per_block: float = 0.0
    links: StubLinks | None = None
    switch_s: float = 0.0
    restart_s: float = 0.0


@dataclass(slots=True)
class _Rank:
    epoch: int = 0
    group: GroupKey | None = None
    sleepers: set[asyncio.Future[None]] = field(default_factory=set)
    """What ends at once, with an error, when the rank is killed."""


class StubRanks:
    """See `ranks.Ranks`. It checks what it is asked as real ranks do, where that needs no KV."""

    def __init__(self, num_ranks: int, speed: StubSpeed | None = None, *, vocab_size: int = 32000) -> None:
        self.num_ranks = num_ranks
        self.speed = speed or StubSpeed()
        self.events: asyncio.Queue[PoolEvent] = asyncio.Queue()
        self.num_steps = 0
        self._vocab_size = vocab_size
        self._ranks = {rank: _Rank() for rank in range(num_ranks)}
        self._lost: set[int] = set()
        self._restarts: dict[int, asyncio.TimerHandle] = {}

    async def activate(self, epoch: int, geometry: Mapping[int, int]) -> list[Activated] | Refusal:
        keys = check_geometry(dict(geometry), self.num_ranks)
        for key in keys:
            self._require(key.ranks)
        if self.speed.switch_s:
            await self._sleep(self.speed.switch_s, [rank for key in keys for rank in key.ranks])
        answers = []
        for key in keys:
            for rank in key.ranks:
                if epoch <= self._ranks[rank].epoch:
                    return Refusal(rank=rank, reason=RefusalReason.STALE_EPOCH, detail=f"activation of epoch {epoch}")
            for rank in key.ranks:
                self._ranks[rank].epoch, self._ranks[rank].group = epoch, key
                answers.append(Activated(rank=rank, epoch=epoch, first_rank=key.first_rank, degree=key.degree))
        return answers

    async def step(self, step: Step) -> list[StepOutput] | Refusal:
        key = GroupKey(step.first_rank, step.degree)
        self._require(key.ranks)
        for rank in key.ranks:
            if self._ranks[rank].epoch != step.epoch or self._ranks[rank].group != key:
                return Refusal(rank=rank, reason=RefusalReason.STALE_EPOCH, detail=f"step of epoch {step.epoch}")
        duration_s = self._duration_s(step)
        if duration_s:
            await self._sleep(duration_s, key.ranks)
        self.num_steps += 1
        outputs = [
            RequestOutput(
                request_id=request.request_id,
                token_id=self.next_token(request.token_ids[-1], request.num_tokens),
                logprob=None if request.num_top_logprobs is None else -1.0,
            )
            for request in step.requests
            if request.sampling is not None
        ]
        return [
            StepOutput(
                step_id=step.step_id,
                rank=key.first_rank,
                epoch=step.epoch,
                outputs=outputs,
                timings=_NO_TIMINGS,
                received_bytes=0,
            )
        ]

    async def copy_blocks(
        self, source: int, source_slots: Sequence[int], destination: int, destination_slots: Sequence[int]
    ) -> Pulled | Refusal:
        self._require([source, destination])
        duration_s = self._copy_s(source, destination, len(source_slots))
        if duration_s:
            await self._sleep(duration_s, [source, destination])
        return Pulled(is_installed=(True,) * len(source_slots), is_tcp=False)

    def next_token(self, last_token: int, num_tokens: int) -> int:
        """What follows a sequence of `num_tokens` tokens of which this is the last."""
        return (last_token * 31 + num_tokens * 17 + 7) % self._vocab_size

    def kill(self, rank: int) -> None:
        if rank in self._lost:
            return
        self._lost.add(rank)
        for over in self._ranks[rank].sleepers:
            if not over.done():
                over.set_exception(RankLost(rank, "is gone"))
        self.events.put_nowait(RankGone(rank, "killed"))
        loop = asyncio.get_running_loop()
        self._restarts[rank] = loop.call_later(self.speed.restart_s, self._come_back, rank)

    def describe(self) -> dict[str, Any]:
        return {"rank_pids": {}}

    async def close(self) -> None:
        for handle in self._restarts.values():
            handle.cancel()

    def _come_back(self, rank: int) -> None:
        del self._restarts[rank]
        self._lost.discard(rank)
        self._ranks[rank] = _Rank()
        self.events.put_nowait(RankBack(rank, 0))

    def _require(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in self._lost:
                raise RankLost(rank, "is being started again")

    async def _sleep(self, duration_s: float, ranks: Sequence[int]) -> None:
        """Raises RankLost as soon as one of the ranks is killed."""
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        timer = loop.call_later(duration_s, _set, over)
        sleepers = [self._ranks[rank].sleepers for rank in ranks]
        for each in sleepers:
            each.add(over)
        try:
            await over
        finally:
            timer.cancel()
            for each in sleepers:
                each.discard(over)

    def _copy_s(self, source: int, destination: int, num_blocks: int) -> float:
        if self.speed.links is None:
            return self.speed.copy_s_per_block * num_blocks
        now_s = asyncio.get_running_loop().time()
        return self.speed.links.end_s(now_s, source, destination, num_blocks) - now_s

    def _duration_s(self, step: Step) -> float:
        if step.first_rank in self.speed.decode_ranks:
            return self.speed.decode_step_s
        costs = self.speed.prefill
        if costs is None:
            return 0.0
        work = [(request.num_new_tokens, request.num_prefix_tokens) for request in step.requests]
        return costs.step_s(work, step.degree)


def _set(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)
