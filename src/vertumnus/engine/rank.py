"""One rank: what it does between messages and nothing about how they come.

A rank runs steps of the group that it has active, under the epoch that it was activated with, and nothing else. Before
a step or an activation the members tell each other whether they can; if one cannot, none does.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vertumnus.engine.collectives import GroupLink
from vertumnus.engine.geometry import GroupKey
from vertumnus.engine.groups import Groups
from vertumnus.engine.messages import Activate, Activated, Refusal, RefusalReason
from vertumnus.engine.slot_use import SlotUse
from vertumnus.engine.step import LABEL_BYTES, Address, Step, StepOutput

_INT64_MAX = 2**63 - 1


class Stepper(Protocol):
    """What runs a step once the members have agreed to it."""

    def refusal(self, step: Step) -> str | None:
        """Why the step cannot be run, or None."""
        ...

    def run(self, step: Step, link: GroupLink) -> StepOutput:
        """Communicates on `link` only. Raises GroupBroken if a member is gone."""
        ...


@dataclass(frozen=True, slots=True)
class _Slots:
    """This rank's slots of a step, those late in a sequence first; and what they hold when it is done."""

    read: tuple[int, ...]
    written: tuple[int, ...]
    tags: dict[int, bytes]


class Rank:
    """`run_step` and `activate` are called by one thread, in the order in which they were asked for."""

    def __init__(
        self, rank: int, num_ranks: int, *, groups: Groups, stepper: Stepper, slot_use: SlotUse, block_tokens: int
    ) -> None:
        self.rank = rank
        self.epoch = 0
        self.group: GroupKey | None = None
        """The active one; None before the first activation."""
        self.num_steps = 0
        self._num_ranks = num_ranks
        self._groups = groups
        self._stepper = stepper
        self._slot_use = slot_use
        self._block_tokens = block_tokens

    def activate(self, wanted: Activate) -> Activated | Refusal:
        """Takes up a group under a new epoch; its first exchange included. All members do, or all refuse."""
        key = GroupKey(wanted.first_rank, wanted.degree)
        if not self._is_mine(key):
            return self._not_mine(key)
        refusal = None
        if wanted.epoch <= self.epoch:
            detail = f"activation of epoch {wanted.epoch}; accepted: above {self.epoch}, the rank's own"
            refusal = self._refusal(RefusalReason.STALE_EPOCH, detail)
        with self._groups.using(key) as link:
            refusal = self._agree(link, 0, wanted.epoch, refusal)
        if refusal is not None:
            return refusal
        self.epoch, self.group = wanted.epoch, key
        return Activated(rank=self.rank, epoch=wanted.epoch, first_rank=key.first_rank, degree=key.degree)

    def run_step(self, step: Step) -> StepOutput | Refusal:
        """Raises GroupBroken if a member is gone; blocks that the step was to write then hold nothing of use."""
        key = GroupKey(step.first_rank, step.degree)
        if not self._is_mine(key):
            return self._not_mine(key)
        with self._groups.using(key) as link:
            return self._run_step(step, key, link)

    def _run_step(self, step: Step, key: GroupKey, link: GroupLink) -> StepOutput | Refusal:
        found = self._slots_of(step, key)
        if isinstance(found, _Slots):
            in_use = self._slot_use.begin(read=found.read, written=found.written)
            if in_use is not None:
                found = self._refusal(RefusalReason.SLOT_IN_USE, in_use)
        taken = found if isinstance(found, _Slots) else None
        tags: dict[int, bytes] = {}
        try:
            refusal = self._agree(link, step.step_id, step.epoch, None if isinstance(found, _Slots) else found)
            if refusal is not None:
                return refusal
            output = self._stepper.run(step, link)
            tags = taken.tags if taken is not None else {}
        finally:
            if taken is not None:
                self._slot_use.end(read=taken.read, written=taken.written, tags=tags)
        self.num_steps += 1
        return output

    def _slots_of(self, step: Step, key: GroupKey) -> _Slots | Refusal:
        """What the step does to this rank's slots, or why it must not be run."""
        if step.epoch != self.epoch:
            return self._refusal(RefusalReason.STALE_EPOCH, f"step of epoch {step.epoch}; accepted: {self.epoch}")
        if key != self.group:
            return self._refusal(RefusalReason.NOT_A_MEMBER, f"step of the group {key}; accepted: {self.group}")
        read: dict[Address, None] = {}
        written: dict[Address, None] = {}
        tags: dict[Address, bytes] = {}
        for request in step.requests:
            name = f"request {request.request_id}"
            for rank, slot in request.blocks:
                if rank not in key.ranks or not 0 <= slot < self._slot_use.num_slots:
                    return self._invalid(
                        f"{name} names slot {slot} of rank {rank}; accepted: slots 0 to "
                        f"{self._slot_use.num_slots - 1} of ranks {key.ranks.start} to {key.ranks.stop - 1}"
                    )
            first_written = max(request.num_prefix_tokens, 0) // self._block_tokens
            num_full = max(0, min(request.num_tokens // self._block_tokens, len(request.blocks)))
            if len(request.labels) > num_full or any(len(label) != LABEL_BYTES for label in request.labels):
                return self._invalid(
                    f"{name} has {len(request.labels)} labels; accepted: {LABEL_BYTES} bytes for each of at most "
                    f"{num_full} full blocks"
                )
            read.update(dict.fromkeys(reversed(request.blocks[:first_written])))
            for rank, slot in reversed(request.blocks[first_written:]):
                if (rank, slot) in written:
                    return self._invalid(f"slot {slot} of rank {rank} is written twice; accepted: one owner per slot")
                written[rank, slot] = None
            for index in range(len(request.labels) - 1, first_written - 1, -1):
                parent = request.labels[index - 1] if index else bytes(LABEL_BYTES)
                tags[request.blocks[index]] = request.labels[index] + parent
        both = sorted(read.keys() & written.keys())
        if both:
            rank, slot = both[0]
            return self._invalid(f"slot {slot} of rank {rank} is read and written; accepted: one of them in a step")
        problem = self._stepper.refusal(step)
        if problem is not None:
            return self._invalid(problem)
        return _Slots(
            tuple(slot for rank, slot in read if rank == self.rank),
            tuple(slot for rank, slot in written if rank == self.rank),
            {slot: tag for (rank, slot), tag in tags.items() if rank == self.rank},
        )

    def _agree(self, link: GroupLink, step_id: int, epoch: int, own: Refusal | None) -> Refusal | None:
        """None where every member of the group is about to do the same and none refuses; otherwise a refusal, this
        rank's own if it has one. Communicates on `link`."""
        if link.degree == 1:
            return own
        stand = torch.tensor([_bounded(step_id), _bounded(epoch), own is None], device=self._groups.device)
        stands = link.all_gather(stand).wait().tolist()
        if own is not None:
            return own
        for index, (other_step_id, other_epoch, is_willing) in enumerate(stands):
            peer = self._member(link, index)
            if not is_willing:
                return self._refusal(RefusalReason.PEER, f"rank {peer} refuses")
            if [other_step_id, other_epoch] != stands[link.index][:2]:
                return self._refusal(RefusalReason.PEER, f"rank {peer} is at step {other_step_id}, epoch {other_epoch}")
        return None

    def _member(self, link: GroupLink, index: int) -> int:
        return self.rank - link.index + index

    def _is_mine(self, key: GroupKey) -> bool:
        return key.is_aligned and self.rank in key.ranks and key.first_rank >= 0 and key.ranks.stop <= self._num_ranks

    def _not_mine(self, key: GroupKey) -> Refusal:
        detail = f"the group {key} is not one of rank {self.rank}; accepted: aligned groups that it is in"
        return self._refusal(RefusalReason.NOT_A_MEMBER, detail)

    def _invalid(self, detail: str) -> Refusal:
        return self._refusal(RefusalReason.INVALID, detail)

    def _refusal(self, reason: RefusalReason, detail: str) -> Refusal:
        return Refusal(rank=self.rank, reason=reason, detail=detail)


def _bounded(value: int) -> int:
    return min(max(value, 0), _INT64_MAX)
