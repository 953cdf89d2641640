"""The decode side: takes finished prompts over from the prefill ranks and generates, batching continuously.

    offer -> waiting (no room) -> handoff (blocks are copied) -> decoding -> ended
                    ^------------- decode rank lost ---|             |
             restart (KV lost, or no room to grow) <------------------

Each decode rank is a group of one with a loop of its own: whoever has arrived by the start of an iteration takes part
in it, and has one more token at its end. KV lies in slots that belong to one sequence each.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from vertumnus.engine.errors import PoolError, RankError, RankLost, WireError
from vertumnus.engine.messages import Refusal
from vertumnus.engine.step import Address, Step, StepOutput
from vertumnus.errors import InvariantError
from vertumnus.serve.generation import FinishReason
from vertumnus.serve.live_request import LiveRequest, Stage, token_of
from vertumnus.serve.live_settings import LiveSettings
from vertumnus.serve.rank_driver import RankDriver
from vertumnus.serve.ranks import Ranks
from vertumnus.serve.telemetry import Telemetry


class DecodeOwner(Protocol):
    """What happens to a request beyond the decode ranks."""

    def release(self, request: LiveRequest) -> None:
        """The request's KV at the prefill ranks is not needed any more."""
        ...

    def restart(self, request: LiveRequest, reason: str) -> None:
        """The request's KV is gone: compute it again, from the prompt and what was generated."""
        ...

    def first_token(self, request: LiveRequest) -> FinishReason | None:
        """The request's KV is at a decode rank: its first token can go out."""
        ...

    def end(self, request: LiveRequest, outcome: FinishReason | Exception) -> None:
        """The request needs nothing any more."""
        ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs beside everything else; an error in it is fatal for the pool."""
        ...


@dataclass(slots=True)
class _Sequence:
    request: LiveRequest
    blocks: list[Address]


@dataclass(slots=True)
class _Rank:
    rank: int
    free: list[int]
    epoch: int = 0
    is_up: bool = False
    life: int = 0
    """Grows whenever the rank is lost: slots of an earlier life mean nothing."""
    sequences: dict[int, _Sequence] = field(default_factory=dict)
    num_arriving: int = 0
    """Sequences whose blocks are being copied here."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Offer:
    request: LiveRequest
    source: list[Address]
    is_source_gone: bool = False
    """The worker that had the source's ranks is no more."""


class DecodeRanks:
    """All decode ranks of a pool."""

    def __init__(
        self, ranks: Ranks, driver: RankDriver, settings: LiveSettings, telemetry: Telemetry, owner: DecodeOwner
    ) -> None:
        self._ranks = ranks
        self._driver = driver
        self._settings = settings
        self._telemetry = telemetry
        self._owner = owner
        self._now_s: Callable[[], float] = asyncio.get_running_loop().time
        num_slots = settings.blocks_per_rank
        self._by_rank = {rank: _Rank(rank, list(range(num_slots))[::-1]) for rank in settings.decode_ranks}
        self._waiting: deque[_Offer] = deque()
        self._copying: dict[int, tuple[_Offer, asyncio.Task[None]]] = {}
        """Handoffs under way, by request id."""
        self._num_steps = 0
        self._is_closed = False

    async def start(self, epoch: int) -> None:
        """Takes the ranks up under an epoch above any that they had."""
        for rank in self._by_rank.values():
            rank.epoch = epoch
            self._owner.spawn(self._decode(rank))
        await asyncio.gather(*map(self._activate, self._by_rank.values()))

    def close(self) -> None:
        self._is_closed = True
        for rank in self._by_rank.values():
            rank.wake.set()

    @property
    def num_decoding(self) -> int:
        return sum(len(rank.sequences) for rank in self._by_rank.values())

    @property
    def num_waiting(self) -> int:
        """Prompts that no decode rank has room for yet."""
        return len(self._waiting)

    @property
    def num_handoffs(self) -> int:
        """Prompts whose KV is being copied here."""
        return len(self._copying)

    @property
    def num_used_blocks(self) -> int:
        return sum(self._settings.blocks_per_rank - len(rank.free) for rank in self._by_rank.values())

    def describe(self) -> list[dict[str, Any]]:
        """One entry per rank, for people to look at."""
        return [
            {
                "rank": rank.rank,
                "is_up": rank.is_up,
                "num_sequences": len(rank.sequences),
                "free_blocks": len(rank.free),
                "num_blocks": self._settings.blocks_per_rank,
            }
            for rank in self._by_rank.values()
        ]

    # Requests

    def offer(self, request: LiveRequest, source: list[Address]) -> None:
        """Takes over a request whose prompt has all its KV at `source`, in order."""
        request.stage = Stage.WAITING_FOR_DECODE
        self._waiting.append(_Offer(request, source))
        self._admit()

    def cancel(self, request: LiveRequest) -> None:
        """Frees what a request holds here: at once, or when the copy or the iteration that uses it has ended."""
        for offer in self._waiting:
            if offer.request is request:
                self._waiting.remove(offer)
                self._owner.release(request)
                return
        for rank in self._by_rank.values():
            if request.request_id in rank.sequences:
                rank.wake.set()

    def give_up_waiting(self, worker_ids: Collection[int], reason: str) -> None:
        """Workers need their ranks back: what waits with its KV there is computed again, mostly from the cache."""
        given_up = [offer for offer in self._waiting if offer.request.worker_id in worker_ids]
        for offer in given_up:
            self._waiting.remove(offer)
            self._owner.release(offer.request)
            self._owner.restart(offer.request, reason)

    def source_gone(self, request_ids: Collection[int]) -> None:
        """The workers that held the KV of these requests are gone: who waits with it starts again, at once or when the
        copy that is under way has ended."""
        gone = [offer for offer in self._waiting if offer.request.request_id in request_ids]
        for offer in gone:
            self._waiting.remove(offer)
            self._owner.restart(offer.request, "its prefill worker was lost")
        for request_id in request_ids:
            if request_id in self._copying:
                self._copying[request_id][0].is_source_gone = True

    def handoffs_from(self, ranks: Collection[int]) -> list[asyncio.Task[None]]:
        """The copies under way that read from any of these ranks."""
        wanted = set(ranks)
        return [task for offer, task in self._copying.values() if any(rank in wanted for rank, _ in offer.source)]

    # Ranks

    def rank_gone(self, number: int) -> None:
        """Its sequences start again; handoffs to it find out themselves."""
        rank = self._by_rank[number]
        rank.is_up = False
        rank.life += 1
        rank.free = list(range(self._settings.blocks_per_rank))[::-1]
        sequences, rank.sequences = rank.sequences, {}
        for sequence in sequences.values():
            if not sequence.request.is_over:
                self._owner.restart(sequence.request, "its decode rank was lost")

    def rank_back(self, number: int) -> None:
        self._owner.spawn(self._activate(self._by_rank[number]))

    async def _activate(self, rank: _Rank) -> None:
        rank.epoch += 1
        life = rank.life
        with contextlib.suppress(RankError, PoolError):  # lost again: `rank_back` comes again
            answer = await self._ranks.activate(rank.epoch, {rank.rank: 1})
            if rank.life == life and not isinstance(answer, Refusal):
                rank.is_up = True
                rank.wake.set()
                self._admit()

    # Handoff

    def _admit(self) -> None:
        """Sends waiting requests to ranks with room for them, in order: nobody passes one that needs more."""
        while self._waiting:
            offer = self._waiting[0]
            # One block beyond the prompt, so that the first token has room too.
            num_blocks = offer.request.num_tokens // self._settings.block_tokens + 1
            fitting = [rank for rank in self._by_rank.values() if self._has_room(rank, num_blocks)]
            if not fitting:
                return
            rank = max(fitting, key=lambda rank: (len(rank.free), -rank.rank))
            self._waiting.popleft()
            offer.request.stage = Stage.HANDOFF
            blocks = [(rank.rank, slot) for slot in rank.free[-num_blocks:]]
            del rank.free[-num_blocks:]
            rank.num_arriving += 1
            task = self._owner.spawn(self._hand_over(offer, rank, rank.life, blocks))
            self._copying[offer.request.request_id] = (offer, task)

    def _has_room(self, rank: _Rank, num_blocks: int) -> bool:
        num_sequences = len(rank.sequences) + rank.num_arriving
        # What decodes already keeps a block each to grow into.
        is_spacious = len(rank.free) >= num_blocks + num_sequences
        return rank.is_up and num_sequences < self._settings.max_decode_sequences and is_spacious

    async def _hand_over(self, offer: _Offer, rank: _Rank, life: int, blocks: list[Address]) -> None:
        """`life`: in which the rank gave the blocks; it may have ended before this begins."""
        request = offer.request
        request_id = request.request_id
        started_s = self._now_s()
        try:
            num_copied = await self._driver.copy(offer.source, blocks[: len(offer.source)])
        finally:
            del self._copying[request_id]
            rank.num_arriving -= 1
        is_same = rank.life == life and rank.is_up
        is_ok = num_copied == len(offer.source) and is_same
        self._telemetry.handoff_ended(self._now_s(), started_s=started_s, num_blocks=len(offer.source), is_ok=is_ok)
        is_ok = is_ok and not offer.is_source_gone
        if rank.life == life and not (is_ok and not request.is_over):
            _give_back(rank, blocks)
        if request.is_over:
            self._owner.release(request)
        elif is_ok:
            self._owner.release(request)
            if self._owner.first_token(request) is None:
                request.stage = Stage.DECODE
                rank.sequences[request_id] = _Sequence(request, blocks)
                rank.wake.set()
            else:
                _give_back(rank, blocks)
        elif not is_same and not offer.is_source_gone:  # its KV is still where it was
            request.stage = Stage.WAITING_FOR_DECODE
            self._waiting.appendleft(offer)
        else:
            self._owner.release(request)
            self._owner.restart(request, "its KV could not be copied")
        self._admit()

    # Decoding

    async def _decode(self, rank: _Rank) -> None:
        while True:
            await rank.wake.wait()
            rank.wake.clear()
            while rank.is_up and not self._is_closed:
                self._drop_what_is_over(rank)
                self._grow(rank)
                if not rank.sequences:
                    break
                await self._iterate(rank)
            if self._is_closed:
                return

    async def _iterate(self, rank: _Rank) -> None:
        """One token for every sequence."""
        taking_part = list(rank.sequences.values())
        self._num_steps += 1
        step = Step(
            step_id=self._num_steps,
            first_rank=rank.rank,
            degree=1,
            epoch=rank.epoch,
            requests=[each.request.decode_share(each.blocks) for each in taking_part],
        )
        life, started_s = rank.life, self._now_s()
        outputs = await self._run(step, rank)
        if outputs is None or rank.life != life:
            return
        self._telemetry.decode_step_ended(
            self._now_s(), rank=rank.rank, started_s=started_s, num_sequences=len(taking_part)
        )
        has_left = False
        for output in outputs[0].outputs:
            sequence = rank.sequences[output.request_id]
            if sequence.request.is_over:
                continue
            reason = sequence.request.take(token_of(output))
            if reason is not None:
                self._free(rank, sequence)
                self._owner.end(sequence.request, reason)
                has_left = True
        if has_left:
            self._admit()

    async def _run(self, step: Step, rank: _Rank) -> list[StepOutput] | None:
        """The step's outputs; None where there are none, in which case the rank is on its way out."""
        try:
            outputs = await self._ranks.step(step)
        except RankLost:
            outputs = None
        except (RankError, PoolError, WireError) as error:
            outputs = None
            self._telemetry.step_failed(self._now_s(), [rank.rank], str(error))
            self._ranks.kill(rank.rank)
        if isinstance(outputs, Refusal):
            self._telemetry.step_failed(self._now_s(), [rank.rank], outputs.detail)
            self._ranks.kill(rank.rank)
            outputs = None
        if outputs is None:
            rank.is_up = False  # `rank_gone` follows
        return outputs

    def _grow(self, rank: _Rank) -> None:
        """A slot for every token to come; the youngest give way where there are none."""
        block_tokens = self._settings.block_tokens
        for sequence in sorted(rank.sequences.values(), key=lambda each: each.request.arrival_s):
            while sequence.request.request_id in rank.sequences and (
                len(sequence.blocks) * block_tokens < sequence.request.num_tokens
            ):
                if rank.free:
                    sequence.blocks.append((rank.rank, rank.free.pop()))
                    continue
                youngest = max(rank.sequences.values(), key=lambda each: each.request.arrival_s)
                self._free(rank, youngest)
                self._owner.restart(youngest.request, "no room at its decode rank")

    def _drop_what_is_over(self, rank: _Rank) -> None:
        over = [sequence for sequence in rank.sequences.values() if sequence.request.is_over]
        for sequence in over:
            self._free(rank, sequence)
        if over:
            self._admit()

    def _free(self, rank: _Rank, sequence: _Sequence) -> None:
        del rank.sequences[sequence.request.request_id]
        _give_back(rank, sequence.blocks)

    def requests(self) -> list[LiveRequest]:
        """All that wait, are copied or decode here."""
        found = [offer.request for offer in self._waiting]
        found += [offer.request for offer, _ in self._copying.values()]
        return found + [each.request for rank in self._by_rank.values() for each in rank.sequences.values()]

    def check_invariants(self) -> None:
        """Raises InvariantError where a slot is lost or has two owners. For tests."""
        for rank in self._by_rank.values():
            held = [slot for sequence in rank.sequences.values() for _, slot in sequence.blocks]
            slots = sorted([*rank.free, *held])
            if slots != list(range(self._settings.blocks_per_rank)) and not rank.num_arriving:
                raise InvariantError(f"decode rank {rank.rank} has lost or doubled a slot")


def _give_back(rank: _Rank, blocks: list[Address]) -> None:
    rank.free += [slot for _, slot in blocks]
