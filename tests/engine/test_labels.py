"""What ranks say that their slots hold: never what is not there, whatever failed in between."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch.distributed import HashStore

from vertumnus.engine.bare_source import BareStepper
from vertumnus.engine.copies import Copies, CopyServer
from vertumnus.engine.errors import CopyFailed
from vertumnus.engine.groups import Groups
from vertumnus.engine.kv_memory import KvMemory
from vertumnus.engine.messages import Activate, Activated, Lease, Pull, Pulled, Refusal, RefusalReason
from vertumnus.engine.rank import Rank
from vertumnus.engine.slot_use import SlotUse
from vertumnus.engine.step import LABEL_BYTES, Step, StepOutput, StepRequest

BLOCK_BYTES = 32
BLOCK_TOKENS = 2
NUM_SLOTS = 6
ROOT = bytes(LABEL_BYTES)


def content(label: bytes) -> bytes:
    return label * (BLOCK_BYTES // LABEL_BYTES)


class WritingStepper:
    """Puts each request's first token, as a label, into the blocks that it is told to write; all but the last request
    where it is told to fail."""

    def __init__(self, rank: int, memory: KvMemory) -> None:
        self.is_failing = False
        self._bare = BareStepper(rank)
        self._rank = rank
        self._memory = memory

    def refusal(self, step: Step) -> str | None:
        return None

    def run(self, step: Step, link) -> StepOutput:
        for request in step.requests:
            first = request.num_prefix_tokens // BLOCK_TOKENS
            for index, (_, slot) in enumerate(request.blocks[first:], first):
                self._memory.block(slot)[:] = content(label_of(request.request_id, index))
            if self.is_failing:
                raise ValueError("as told")
        return self._bare.run(step, link)


def label_of(sequence: int, index: int) -> bytes:
    return random.Random(sequence * 100 + index).randbytes(LABEL_BYTES)


class End:
    def __init__(self, rank: int) -> None:
        self.now_s = 0.0
        self.memory = KvMemory(NUM_SLOTS, BLOCK_BYTES)
        self.slot_use = SlotUse(NUM_SLOTS, lambda: self.now_s)
        self.server = CopyServer(rank, self.memory, self.slot_use, "0123456789abcdef", "127.0.0.1", 10.0)
        self.copies = Copies(rank, self.memory, self.slot_use, self.server, 10.0)
        self.stepper = WritingStepper(rank, self.memory)
        groups = Groups(rank, HashStore(), "127.0.0.1", connect_timeout_s=1, exchange_timeout_s=1)
        self.rank = Rank(
            rank, 2, groups=groups, stepper=self.stepper, slot_use=self.slot_use, block_tokens=BLOCK_TOKENS
        )
        activated = self.rank.activate(Activate(epoch=1, first_rank=rank, degree=1))
        assert isinstance(activated, Activated)

    def step(self, *requests: StepRequest) -> StepOutput | Refusal:
        return self.rank.run_step(
            Step(step_id=1, first_rank=self.rank.rank, degree=1, epoch=1, requests=list(requests))
        )

    @property
    def labels(self) -> dict[int, tuple[bytes, bytes]]:
        return {slot: (tag[:LABEL_BYTES], tag[LABEL_BYTES:]) for slot, tag in self.slot_use.tags.items()}


def sequence(rank: int, number: int, slots, num_tokens: int, num_prefix: int = 0, num_labels: int | None = None):
    num_full = num_tokens // BLOCK_TOKENS
    return StepRequest(
        request_id=number,
        token_ids=[0] * (num_tokens - num_prefix),
        num_prefix_tokens=num_prefix,
        blocks=[(rank, slot) for slot in slots],
        labels=[label_of(number, index) for index in range(num_full if num_labels is None else num_labels)],
    )


ranks = st.integers(0, 1)
some_slots = st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=NUM_SLOTS, unique=True)


class LabelMachine(RuleBasedStateMachine):
    """Two ranks that step, fail, copy and overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = [End(0), End(1)]
        self.leases: list[Lease] = []

    @rule(rank=ranks, number=st.integers(0, 3), slots=some_slots, data=st.data(), is_failing=st.booleans())
    def step(self, rank, number, slots, data, is_failing):
        end = self.ends[rank]
        num_tokens = len(slots) * BLOCK_TOKENS - data.draw(st.integers(0, BLOCK_TOKENS - 1))
        num_labels = data.draw(st.integers(0, num_tokens // BLOCK_TOKENS))
        end.stepper.is_failing = is_failing
        requests = [sequence(rank, number, slots, num_tokens, num_labels=num_labels)]
        if len(slots) > 2:  # two requests, of which one is not reached where the step fails
            requests = [
                sequence(rank, number, slots[:2], 2 * BLOCK_TOKENS),
                sequence(rank, number + 4, slots[2:], num_tokens - 2 * BLOCK_TOKENS),
            ]
        before = end.labels
        try:
            output = end.step(*requests)
        except ValueError:
            assert is_failing
            assert end.labels == {slot: held for slot, held in before.items() if slot not in slots}
            return
        if isinstance(output, Refusal):
            assert output.reason is RefusalReason.SLOT_IN_USE
            assert end.labels == before
            return
        for request in requests:
            for index, label in enumerate(request.labels):
                parent = request.labels[index - 1] if index else ROOT
                assert end.labels[request.blocks[index][1]] == (label, parent)

    @rule(rank=ranks, slots=some_slots)
    def lease(self, rank, slots):
        lease = self.ends[rank].copies.lease(tuple(slots), 1.0)
        assert isinstance(lease, Lease)
        self.leases.append(lease)

    @rule(rank=ranks, data=st.data(), is_tcp=st.booleans())
    def pull(self, rank, data, is_tcp):
        """Also after the lease has expired and its slots have been written to."""
        if not self.leases:
            return
        lease = data.draw(st.sampled_from(self.leases))
        if lease.rank == rank:
            return
        slots = data.draw(st.permutations(range(NUM_SLOTS)))[: len(lease.slots)]
        try:
            pulled = self.ends[rank].copies.pull(Pull(lease=lease, slots=tuple(slots), is_tcp=is_tcp))
        except CopyFailed:
            assert is_tcp  # the server gives nothing of a lease that has expired
            return
        if isinstance(pulled, Pulled):
            for slot, tag, is_installed in zip(slots, lease.tags, pulled.is_installed, strict=True):
                held = self.ends[rank].slot_use.tags_of([slot])[0]
                assert held == (tag if is_installed else b"")

    @rule(rank=ranks)
    def leases_expire(self, rank):
        self.ends[rank].now_s += 2.0

    @rule(rank=ranks)
    def pool_is_gone(self, rank):
        self.ends[rank].slot_use.release_all()

    @invariant()
    def a_label_names_what_is_there(self):
        for end in self.ends:
            end.slot_use.check_invariants()
            for slot, (label, _) in end.labels.items():
                assert bytes(end.memory.block(slot)) == content(label)

    def teardown(self):
        for end in self.ends:
            end.server.close()


TestLabels = LabelMachine.TestCase
TestLabels.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.fixture
def end():
    made = End(0)
    yield made
    made.server.close()


def test_a_block_is_labelled_once_all_its_positions_are_written(end):
    end.step(sequence(0, 1, [3, 4], 3))
    assert end.labels == {3: (label_of(1, 0), ROOT)}
    end.step(sequence(0, 1, [3, 4], 4, num_prefix=3))
    assert end.labels == {3: (label_of(1, 0), ROOT), 4: (label_of(1, 1), label_of(1, 0))}


def test_labels_are_in_the_order_of_use_with_the_end_of_a_sequence_before_its_beginning(end):
    end.step(sequence(0, 1, [0, 1], 4))
    end.step(sequence(0, 2, [2, 3, 4], 6))
    assert list(end.labels) == [1, 0, 4, 3, 2]
    end.step(sequence(0, 1, [0, 1, 5], 6, num_prefix=4))
    assert list(end.labels) == [4, 3, 2, 5, 1, 0]
    end.copies.lease((3,), 1.0)
    assert list(end.labels) == [4, 2, 5, 1, 0, 3]


@pytest.mark.parametrize("labels", [[bytes(15)], [bytes(16)] * 3])
def test_labels_of_another_length_or_of_blocks_that_are_not_full_are_refused(end, labels):
    request = StepRequest(
        request_id=1, token_ids=[0] * 5, num_prefix_tokens=0, blocks=[(0, 0), (0, 1), (0, 2)], labels=labels
    )
    refusal = end.step(request)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.INVALID
    assert "labels" in refusal.detail
