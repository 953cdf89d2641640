"""A pool of ranks, for whoever decides what they do: activate groups, run steps, copy blocks, and be told of losses.

    pool = await RankPool.start(PoolConfig(source=..., num_ranks=8, num_slots=1024))
    await pool.activate(1, {0: 4, 4: 4})
    outputs = await pool.step(Step(step_id=1, first_rank=0, degree=4, epoch=1, requests=[...]))
    await pool.close()

Ranks outlive the process that has the pool where it was given a socket that somebody else keeps open
(`PoolConfig.listen_fd`): the next process then finds them, with all that they hold, by `RankPool.attach`.

Nothing here knows the model, and no torch is imported. A rank that dies is started again, and the groups that lost it
are formed anew under the next generation; whoever uses the pool then activates them under a new epoch.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vertumnus.engine.errors import (
    CopyFailed,
    GroupUnready,
    PoolError,
    RankError,
    RankFailed,
    RankLost,
    RankTimeout,
    WireError,
)
from vertumnus.engine.geometry import GroupKey, all_groups, check_geometry, groups_with
from vertumnus.engine.messages import (
    Abort,
    Activate,
    Activated,
    AskLabels,
    AskStatus,
    Done,
    Failure,
    FailureKind,
    FormGroups,
    Labels,
    Lease,
    Leased,
    Message,
    Pull,
    Pulled,
    RankStatus,
    Refusal,
    ReleaseLease,
    RunStep,
    Settle,
    Stepped,
    TakeLease,
)
from vertumnus.engine.peer import Peer, PeerGone
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.engine.roster import Roster
from vertumnus.engine.step import LABEL_BYTES, Step, StepOutput
from vertumnus.errors import ConfigError

_Answer = TypeVar("_Answer")
MAX_RECOVERIES = 5
"""Attempts in a row that may fail before the pool gives up."""


@dataclass(frozen=True, slots=True)
class RankGone:
    """The rank's process is gone, and its KV with it: what it held is nowhere else unless it was copied."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankBack:
    """The rank is there again, its groups whole under `generation`; take it to hold nothing, or ask for its labels."""

    rank: int
    generation: int


@dataclass(frozen=True, slots=True)
class GroupsFormed:
    """Groups that were given up, though no rank was lost, can be used again."""

    groups: tuple[GroupKey, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class PoolGone:
    """The pool has given up: whatever is asked from now on fails with the same words."""

    reason: str


PoolEvent = RankGone | RankBack | GroupsFormed | PoolGone


@dataclass(frozen=True, slots=True)
class SlotLabel:
    """What the step that filled a slot called its block, and the block before; `parent` is zeros for the first one."""

    slot: int
    label: bytes
    parent: bytes


class RankPool:
    """Every method may be awaited while others are; each is bounded and fails with an error of `errors`."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.generation = 0
        self.highest_epoch = 0
        """Of any rank when it came to this pool; whoever uses the pool begins above it."""
        self.events: asyncio.Queue[PoolEvent] = asyncio.Queue()
        self.roster = Roster(config, self._on_lost)
        self._generations: dict[GroupKey, int] = {}
        """Under which each group was formed last."""
        self._broken: set[GroupKey] = set(all_groups(config.num_ranks))
        self._forming: set[GroupKey] = set()
        self._gone: set[int] = set(range(config.num_ranks))
        """Ranks that are not there, or whose groups are not formed yet."""
        self._is_started = False
        self._failure: PoolError | None = None
        self._is_whole = asyncio.Event()
        self._is_needed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: PoolConfig) -> "RankPool":
        """All ranks there, all groups formed. Raises ConfigError with what a rank or the launcher does not like, and
        PoolError if they end or take too long; nothing is left running then."""
        pool = await cls.listen(config)
        await pool.begin()
        return pool

    @classmethod
    async def attach(cls, config: PoolConfig) -> "RankPool":
        """Like `start`, with the launcher and the ranks of a pool whose process is gone; those that have died since
        are started again. The others keep their KV, labels and epochs. What they were asked and had not begun is
        dropped, a step of several ranks that was under way is given up, and any other has run to its end; leases are
        released. Raises PoolError where nobody is there, ConfigError where they were started for something else."""
        if config.token is None:
            raise ConfigError("token is none; accepted: the one that the ranks were started with")
        pool = await cls.listen(config)
        await pool._begin(pool.roster.find, MAX_RECOVERIES)
        return pool

    @classmethod
    async def listen(cls, config: PoolConfig) -> "RankPool":
        """Only the address, for ranks that another supervisor starts; `begin` waits for them."""
        pool = cls(config)
        await pool.roster.listen()
        return pool

    async def begin(self) -> None:
        """See `start`."""
        await self._begin(self.roster.launch, 1)

    async def _begin(self, find_launcher: Callable[[], Awaitable[None]], num_attempts: int) -> None:
        try:
            if self.config.is_launched:
                await find_launcher()
            while True:
                num_attempts -= 1
                try:
                    await self._recover(self.config.start_timeout_s)
                    break
                except (RankError, PoolError):
                    if not num_attempts or self.roster.is_launcher_gone:
                        raise
        except BaseException:
            await self.close()
            raise
        self._is_started = True
        self._keeper = asyncio.create_task(self._keep_whole())
        self._update()

    async def close(self) -> None:
        """Ends all ranks. What is being awaited fails with RankLost."""
        if self._failure is None:
            self._failure = PoolError("the pool is closed")
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._is_whole.set()
        await self.roster.close()

    async def whole(self) -> None:
        """Returns when every rank is there and every group can be used. Raises PoolError if the pool has given up."""
        await self._is_whole.wait()
        if self._failure is not None:
            raise self._failure

    def describe(self) -> dict[str, Any]:
        """Its processes, for people to look at."""
        roster = self.roster
        return {
            "launcher_pid": roster.launcher_pid,
            "rank_pids": {str(rank): pid for rank, pid in roster.pids.items()},
            "generation": self.generation,
        }

    # What groups do

    async def activate(self, epoch: int, geometry: Mapping[int, int]) -> list[Activated] | Refusal:
        """Takes up the groups of {first_rank: degree} under `epoch`, after the steps that were asked for before. When
        it returns, every member has confirmed. Other ranks are not concerned. All members of a group take it up or
        none does; of several groups, others may have where one refuses."""
        keys = check_geometry(dict(geometry), self.config.num_ranks)
        for key in keys:
            self._require(key)
        asked = [
            (key, self._ask_group(key, Activate(epoch=epoch, first_rank=key.first_rank, degree=key.degree)))
            for key in keys
        ]
        found = await asyncio.gather(
            *(self._of_group(key, answers, self.config.control_timeout_s) for key, answers in asked),
            return_exceptions=True,
        )
        for each in found:
            if isinstance(each, BaseException):
                raise each
        answers = [answer for each in found if not isinstance(each, BaseException) for answer in each]
        return _refusal_among(answers) or [_expect(answer, Activated) for answer in answers]

    async def step(self, step: Step) -> list[StepOutput] | Refusal:
        """The outputs of all members by rank; or the refusal of one, upon which none has done anything. Raises
        RankLost if a member dies in the middle of it: what the step was to write is then lost at the others too."""
        key = GroupKey(step.first_rank, step.degree)
        check_geometry({step.first_rank: step.degree}, self.config.num_ranks)
        self._require(key)
        answers = await self._of_group(
            key, self._ask_group(key, RunStep(step=step)), self.config.step_timeout_s + self.config.control_timeout_s
        )
        return _refusal_among(answers) or [_expect(answer, Stepped).output for answer in answers]

    # What single ranks do

    async def status(self, rank: int) -> RankStatus:
        """At once, whatever the rank is doing."""
        return _expect(await self._ask(rank, AskStatus(), self.config.control_timeout_s), RankStatus)

    async def labels(self, rank: int) -> list[SlotLabel]:
        """What the rank's slots hold, least recently used first; of a sequence, what comes late before what comes
        early. Only slots that were filled by a step with labels, or copied from one, and not written to since."""
        answer = _expect(await self._ask(rank, AskLabels(), self.config.control_timeout_s), Labels)
        if len(answer.tags) != 2 * LABEL_BYTES * len(answer.slots):
            raise WireError(f"rank {rank} answers {len(answer.tags)} bytes for the labels of {len(answer.slots)} slots")
        parts = [answer.tags[at : at + LABEL_BYTES] for at in range(0, len(answer.tags), LABEL_BYTES)]
        return [SlotLabel(*each) for each in zip(answer.slots, parts[::2], parts[1::2], strict=True)]

    def kill(self, rank: int) -> None:
        """Ends the rank's process; what follows is as if it had died by itself."""
        if not 0 <= rank < self.config.num_ranks:
            raise ConfigError(f"rank is {rank}; accepted: 0 to {self.config.num_ranks - 1}")
        self.roster.kill(rank)

    async def lease(self, rank: int, slots: Sequence[int]) -> Lease | Refusal:
        """Keeps the slots of a rank from being written until `release`, or until the configured time has gone."""
        taken = TakeLease(slots=tuple(slots), lease_s=self.config.lease_s)
        answer = await self._ask(rank, taken, self.config.copy_timeout_s)
        return answer if isinstance(answer, Refusal) else _expect(answer, Leased).lease

    async def pull(self, rank: int, lease: Lease, slots: Sequence[int], *, is_tcp: bool = False) -> Pulled | Refusal:
        """Copies a lease's blocks into slots of `rank`. Raises CopyFailed if the source is gone."""
        answer = await self._ask(rank, Pull(lease=lease, slots=tuple(slots), is_tcp=is_tcp), self.config.copy_timeout_s)
        return answer if isinstance(answer, Refusal) else _expect(answer, Pulled)

    async def release(self, lease: Lease) -> None:
        """Ends a lease."""
        _expect(await self._ask(lease.rank, ReleaseLease(lease_id=lease.lease_id), self.config.control_timeout_s), Done)

    async def copy_blocks(
        self,
        source: int,
        source_slots: Sequence[int],
        destination: int,
        destination_slots: Sequence[int],
        *,
        is_tcp: bool = False,
    ) -> Pulled | Refusal:
        """Lease, pull and release. Raises RankLost if a rank has died meanwhile, even where it is back already: its
        successor's slots are others."""
        ends = {rank: self.roster.peer(rank) for rank in (source, destination)}
        lease = await self.lease(source, source_slots)
        if isinstance(lease, Refusal):
            return lease
        try:
            self._check_same(ends)
            return await self.pull(destination, lease, destination_slots, is_tcp=is_tcp)
        finally:
            with contextlib.suppress(RankError):  # a lease ends with its rank, or expires
                self._check_same({source: ends[source]})
                await self.release(lease)

    # Asking

    def _require(self, key: GroupKey) -> None:
        if self._failure is not None:
            raise self._failure
        for rank in key.ranks:
            if rank in self._gone:
                raise RankLost(rank, "is being started again")
        if key in self._broken or key in self._forming:
            raise GroupUnready(f"the group {key} is being formed anew")

    def _check_same(self, peers: Mapping[int, Peer | None]) -> None:
        for rank, peer in peers.items():
            if self.roster.peer(rank) is not peer:
                raise RankLost(rank, "has died in the middle of a copy")

    async def _ask(self, rank: int, message: Message, timeout_s: float) -> Message:
        if not 0 <= rank < self.config.num_ranks:
            raise ConfigError(f"rank is {rank}; accepted: 0 to {self.config.num_ranks - 1}")
        if self._failure is not None:
            raise self._failure
        return await self._answer(rank, self._send(rank, message), timeout_s)

    def _send(self, rank: int, message: Message) -> asyncio.Future[Message]:
        peer = self.roster.peer(rank)
        if peer is None:
            raise RankLost(rank, "is being started again")
        return peer.ask(message)

    async def _answer(self, rank: int, asked: asyncio.Future[Message], timeout_s: float) -> Message:
        try:
            answer = await asyncio.wait_for(asked, timeout_s)
        except PeerGone:
            raise RankLost(rank, "is gone: its connection closed before it answered") from None
        except (asyncio.TimeoutError, TimeoutError):
            raise RankTimeout(rank, f"has not answered within {timeout_s} s") from None
        if not isinstance(answer, Failure):
            return answer
        if answer.kind is FailureKind.WIRE:
            raise WireError(f"rank {rank} says: {answer.detail}")
        if answer.kind is FailureKind.COPY:
            raise CopyFailed(answer.detail)
        raise RankFailed(rank, f"failed: {answer.detail}", is_cause=answer.kind is FailureKind.INTERNAL)

    def _ask_group(self, key: GroupKey, message: Message) -> dict[int, asyncio.Future[Message]]:
        # All in one go: every rank sees what concerns several groups in the same order.
        return {rank: self._send(rank, message) for rank in key.ranks}

    async def _of_group(
        self, key: GroupKey, asked: Mapping[int, asyncio.Future[Message]], timeout_s: float
    ) -> list[Message]:
        """The members' answers by rank. The first failure gives the group up, so that nobody waits for it in vain;
        raised is, when all have answered, the one that is the cause."""

        generation = self._generations.get(key)

        async def answer(rank: int) -> Message:
            try:
                return await self._answer(rank, asked[rank], timeout_s)
            except (RankError, WireError):
                if self._generations.get(key) == generation:  # not what has been formed in its place
                    self._give_up([key])
                raise

        found = await asyncio.gather(*map(answer, asked), return_exceptions=True)
        errors = [each for each in found if isinstance(each, BaseException)]
        if errors:
            raise min(errors, key=_distance_from_cause)
        return [each for each in found if not isinstance(each, BaseException)]

    # Losses

    def _on_lost(self, rank: int, reason: str) -> None:
        is_news = self._is_started and rank not in self._gone
        self._gone.add(rank)
        if is_news:
            self.events.put_nowait(RankGone(rank, reason))
        self._give_up(groups_with([rank], self.config.num_ranks))

    def _give_up(self, keys: Iterable[GroupKey]) -> None:
        """Marks groups as broken and tells their members that are left."""
        keys = [key for key in keys if key.degree > 1]
        self._broken.update(keys)
        for rank in sorted({rank for key in keys for rank in key.ranks}):
            peer = self.roster.peer(rank)
            if peer is not None:
                peer.ask(Abort(groups=tuple(key for key in keys if rank in key.ranks)))
        self._update()

    def _update(self) -> None:
        if not self._is_started or self._failure is not None:  # who waits then is to see the failure, also later
            return
        if self._gone or self._broken:
            self._is_whole.clear()
            self._is_needed.set()
        else:
            self._is_whole.set()

    async def _keep_whole(self) -> None:
        num_failed = 0
        while True:
            await self._is_needed.wait()
            self._is_needed.clear()
            if not self._gone and not self._broken:
                continue
            try:
                await self._recover(self.config.recovery_timeout_s)
                num_failed = 0
            except (RankError, PoolError, ConfigError, WireError) as error:
                num_failed += 1
                if num_failed == MAX_RECOVERIES or self.roster.is_launcher_gone:
                    self._failure = PoolError(f"the pool has given up after {num_failed} attempts: {error}")
                    self._is_whole.set()
                    self.events.put_nowait(PoolGone(str(self._failure)))
                    return
            self._update()

    async def _recover(self, timeout_s: float) -> None:
        """One attempt: starts the ranks that are missing and forms the broken groups under a new generation."""
        await self.roster.bring(self.roster.missing, timeout_s)
        newcomers, broken = set(self._gone), set(self._broken)
        self._gone.clear()  # whoever goes from here on is entered again
        self._broken.clear()
        self._forming = broken
        try:
            await self._settle(newcomers)
            await self._form(broken)
        except BaseException:
            self._gone |= newcomers
            self._broken |= broken
            raise
        finally:
            self._forming = set()
        if not self._is_started:
            return
        for rank in sorted(newcomers):
            self.events.put_nowait(RankBack(rank, self.generation))
        if not newcomers:
            self.events.put_nowait(GroupsFormed(tuple(sorted(broken)), self.generation))

    async def _settle(self, ranks: Iterable[int]) -> None:
        """Whatever another pool has asked of them is over then, and this one's epochs and generations are above."""
        # A rank that has stopped is not waited for as long as one that computes.
        await self._of_each({rank: self._send(rank, AskStatus()) for rank in ranks}, self.config.control_timeout_s)
        asked = {rank: self._send(rank, Settle()) for rank in ranks}
        for answer in await self._of_each(asked, self.config.step_timeout_s + self.config.control_timeout_s):
            status = _expect(answer, RankStatus)
            self.generation = max(self.generation, status.generation)
            self.highest_epoch = max(self.highest_epoch, status.epoch)

    async def _form(self, keys: set[GroupKey]) -> None:
        self.generation += 1
        self._generations.update(dict.fromkeys(keys, self.generation))
        ranks = sorted({rank for key in keys for rank in key.ranks})
        asked = {}
        for rank in ranks:
            mine = tuple(sorted(key for key in keys if rank in key.ranks))
            asked[rank] = self._send(rank, FormGroups(generation=self.generation, groups=mine))
        # A rank forms up to three groups one after the other; the last may wait for others' first.
        timeout_s = 3 * self.config.connect_timeout_s + self.config.control_timeout_s
        await self._of_each(asked, timeout_s)

    async def _of_each(self, asked: Mapping[int, asyncio.Future[Message]], timeout_s: float) -> list[Message]:
        """The answers, when all have come; who gives none in time is killed."""
        found = await asyncio.gather(
            *(self._answer(rank, answer, timeout_s) for rank, answer in asked.items()), return_exceptions=True
        )
        errors = [each for each in found if isinstance(each, BaseException)]
        for error in errors:
            if isinstance(error, RankTimeout):
                self.roster.kill(error.rank)
        if errors:
            raise min(errors, key=_distance_from_cause)
        return [each for each in found if not isinstance(each, BaseException)]


def _distance_from_cause(error: BaseException) -> int:
    """A lost rank explains why others failed; a broken group explains nothing."""
    if isinstance(error, RankLost):
        return 0
    if isinstance(error, RankFailed):
        return 1 if error.is_cause else 3
    return 2


def _refusal_among(answers: Iterable[Message]) -> Refusal | None:
    """The refusal that says most: one that is not about another member's."""
    refusals = [answer for answer in answers if isinstance(answer, Refusal)]
    return min(refusals, key=lambda refusal: (refusal.is_echo, refusal.rank), default=None)


def _expect(answer: Message, kind: type[_Answer]) -> _Answer:
    if not isinstance(answer, kind):
        raise WireError(f"a rank answers {type(answer).__name__}; accepted: {kind.__name__}")
    return answer
