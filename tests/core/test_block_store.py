"""Laws of the block store: conservation, order of eviction against a naive model, regrouping, and reports."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.builders import chain

from vertumnus.core.block_store import Allocation, BlockStore
from vertumnus.errors import InvariantError

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda labels: chain(*labels))


def fill(store: BlockStore, path: Sequence[bytes]) -> list[bytes]:
    """Serves one request of this path alone; returns what was evicted for it."""
    allocation = store.allocate(path, store.num_reusable(path, len(path)))
    store.finish(allocation, len(path))
    return allocation.evicted


class NaiveStore:
    """The same promises in the plainest form: a list of blocks, next to be evicted first, and a list of pins."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.order: list[bytes] = []

    def fill(self, path: Sequence[bytes]) -> list[bytes]:
        num_reused = next((n for n, block in enumerate(path) if block not in self.order), len(path))
        wanted = len(path) - num_reused
        evictable = [block for block in self.order if block not in path[:num_reused]]
        evicted = evictable[: max(0, wanted - (self.capacity_blocks - len(self.order)))]
        self.order = [block for block in self.order if block not in evicted]
        room = self.capacity_blocks - len(self.order)
        held = path[: num_reused + min(wanted, room)]
        self.order = [block for block in self.order if block not in held] + list(reversed(held))
        return evicted


@given(st.integers(1, 3), st.integers(1, 6), st.lists(PATHS, max_size=20))
def test_blocks_go_in_the_order_of_a_naive_lru(num_ranks: int, blocks_per_rank: int, paths: list[list[bytes]]):
    store, naive = BlockStore(range(num_ranks), blocks_per_rank), NaiveStore(num_ranks * blocks_per_rank)
    for path in paths:
        assert fill(store, path) == naive.fill(path)
        assert list(store.blocks()) == naive.order
        store.check_invariants()


@given(st.integers(1, 3), st.integers(1, 6), st.lists(PATHS, max_size=20))
def test_no_block_goes_before_one_that_extends_it(num_ranks: int, blocks_per_rank: int, paths: list[list[bytes]]):
    store = BlockStore(range(num_ranks), blocks_per_rank)
    for path in paths:
        fill(store, path)
        order = {block: position for position, block in enumerate(store.blocks())}
        for parent, blocks in store.chains():
            assert parent is None or parent in order
            run = [*([parent] if parent else []), *blocks]
            assert all(order[above] > order[below] for above, below in pairwise(run))


def extended(store: BlockStore) -> set[bytes | None]:
    """Blocks that others hang below."""
    parents: set[bytes | None] = {parent for parent, _ in store.chains()}
    return parents | {above for _, blocks in store.chains() for above in blocks[:-1]}


@given(st.integers(1, 3), st.integers(1, 6), st.lists(st.tuples(PATHS, st.sets(st.integers(0, 9))), max_size=20))
def test_what_others_hold_goes_first_and_never_before_what_extends_it(num_ranks, blocks_per_rank, requests):
    store = BlockStore(range(num_ranks), blocks_per_rank)
    for path, numbers in requests:
        elsewhere = {block for number, block in enumerate(store.blocks()) if number in numbers}
        num_reused = store.num_reusable(path, len(path))
        num_short = len(path) - num_reused - store.num_free
        num_evictable = store.num_resident - num_reused
        extended_before = extended(store)
        allocation = store.allocate(path, num_reused, is_elsewhere=elsewhere.__contains__)
        assert len(allocation.evicted) == min(max(num_short, 0), num_evictable), "as many as the oldest would be"
        assert extended(store).isdisjoint(allocation.evicted), "what is left still hangs together"
        if not elsewhere.issuperset(allocation.evicted):
            spared = (elsewhere & set(store.blocks())) - set(path[:num_reused])
            assert spared <= extended_before, "a last copy went though a leaf that others hold could have"
        store.finish(allocation, len(path))
        store.check_invariants()


def test_last_copies_are_spared_only_where_that_is_asked_for():
    path, other, new = chain("a"), chain("b"), chain("c")
    for is_elsewhere, evicted in ((None, path), (other.__contains__, other)):
        store = BlockStore((0,), 2)
        fill(store, path)
        fill(store, other)
        assert store.allocate(new, 0, is_elsewhere=is_elsewhere).evicted == list(evicted)


class Interleaved(RuleBasedStateMachine):
    """Requests that overlap in time, copies, reclamation and pins: what is in use is never evicted, no slot is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.store = BlockStore((0, 1, 2), 4)
        self.open: list[Allocation] = []
        self.pinned: list[bytes] = []

    @rule(path=PATHS, limit=st.integers(0, 8))
    def begin(self, path, limit):
        before = set(self.store.blocks())
        allocation = self.store.allocate(path, self.store.num_reusable(path, limit))
        assert before - set(self.store.blocks()) == set(allocation.evicted)
        wanted = len(path) - allocation.num_reused
        assert len(allocation.slots) <= wanted
        if len(allocation.slots) < wanted:
            assert all(self.store.in_use(block) for block in self.store.blocks()), "room was refused"
        self.open.append(allocation)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), num_blocks=st.integers(0, 8))
    def produce(self, which, num_blocks):
        allocation = self.open[which % len(self.open)]
        before = allocation.num_resident
        self.store.produce(allocation, num_blocks)
        most = allocation.num_reused + len(allocation.slots)
        assert allocation.num_resident == max(before, min(num_blocks, most))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), num_blocks=st.integers(0, 8))
    def finish(self, which, num_blocks):
        allocation = self.open.pop(which % len(self.open))
        self.store.finish(allocation, num_blocks)
        held = allocation.path[: allocation.num_resident]
        recent = [block for block in self.store.blocks() if block in held]
        assert recent == list(reversed(held)), "a path becomes recent with its root last"

    @rule(path=PATHS)
    def pin_for_a_copy(self, path):
        blocks = path[: self.store.num_reusable(path, len(path))]
        self.store.pin(blocks)
        self.pinned += blocks

    @rule()
    def unpin_all(self):
        self.store.unpin(self.pinned)
        self.pinned = []

    @rule(path=PATHS)
    def reclaim(self, path):
        expected = [block for block in path if block in self.store and not self.store.in_use(block)]
        assert self.store.reclaim(path) == expected
        assert not any(block in self.store for block in expected)

    @invariant()
    def conserves_slots(self):
        self.store.check_invariants()

    @invariant()
    def keeps_what_is_in_use(self):
        for allocation in self.open:
            assert all(block in self.store for block in allocation.path[: allocation.num_resident])
        assert all(block in self.store and self.store.in_use(block) for block in self.pinned)

    @invariant()
    def addresses_are_distinct(self):
        addresses = [self.store.address(block) for block in self.store.blocks()]
        assert len(set(addresses)) == len(addresses)
        assert all(rank in (0, 1, 2) and 0 <= slot < 4 for rank, slot in addresses)

    def teardown(self):
        for allocation in self.open:
            self.store.finish(allocation)
        self.store.unpin(self.pinned)
        self.store.check_invariants()
        assert not any(self.store.in_use(block) for block in self.store.blocks())


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=40, stateful_step_count=25)


@given(st.integers(1, 4), st.integers(1, 12))
def test_new_blocks_lie_evenly_and_in_runs_over_empty_ranks(num_ranks: int, num_blocks: int):
    store = BlockStore(range(num_ranks), 12)
    path = chain(*range(num_blocks))
    fill(store, path)
    ranks = [store.address(block)[0] for block in path]
    counts = [ranks.count(rank) for rank in range(num_ranks)]
    assert max(counts) - min(counts) <= 1
    assert ranks == sorted(ranks), "one contiguous run per rank"


def test_what_a_full_rank_cannot_take_is_shared_by_the_others():
    left = BlockStore((0,), 4)
    fill(left, chain("a", "b", "c"))
    store = BlockStore.merged([left, BlockStore((1,), 4), BlockStore((2,), 4)])
    path = chain("x", *range(6))
    fill(store, path)
    ranks = [store.address(block)[0] for block in path]
    assert [ranks.count(rank) for rank in range(3)] == [1, 3, 3]


@given(st.lists(PATHS, max_size=12))
def test_splitting_and_merging_again_keeps_every_block_where_it_lies(paths: list[list[bytes]]):
    store = BlockStore(range(4), 4)
    for path in paths:
        fill(store, path)
    before = {block: store.address(block) for block in store.blocks()}
    halves = store.regroup([(0, 1), (2, 3)])
    order = list(before)
    for half in halves:
        half.check_invariants()
        assert list(half.blocks()) == [block for block in order if block in half], "order of use is kept"
        assert all(half.address(block) == before[block] for block in half.blocks())
    union = BlockStore.merged(halves)
    union.check_invariants()
    assert {block: union.address(block) for block in union.blocks()} == before
    assert union.capacity_blocks == store.capacity_blocks


@given(st.lists(PATHS, max_size=8), st.lists(PATHS, max_size=8))
def test_merging_frees_one_of_two_copies_of_a_block(left_paths, right_paths):
    left, right = BlockStore((0,), 8), BlockStore((1,), 8)
    for store, paths in ((left, left_paths), (right, right_paths)):
        for path in paths:
            fill(store, path)
    expected = set(left.blocks()) | set(right.blocks())
    union = BlockStore.merged([left, right])
    union.check_invariants()
    assert set(union.blocks()) == expected
    assert union.num_resident == len(expected)


def test_after_a_merge_a_block_is_never_older_than_one_that_extends_it():
    path = [number.to_bytes(16, "big") for number in range(1, 7)]
    store = BlockStore((0, 1), 6)
    store.finish(store.allocate(path, 0), len(path))
    head, tail = store.regroup(((0,), (1,)))
    for number in range(20, 23):  # the tail's store is used on, so that its blocks look young beside the head's
        other = [number.to_bytes(16, "big")]
        head.finish(head.allocate(other, 0), 1)
    order = list(BlockStore.merged([head, tail]).blocks())
    places = [order.index(block) for block in path]
    assert places == sorted(places, reverse=True)


def test_a_store_in_use_is_neither_split_nor_merged():
    store = BlockStore((0, 1), 4)
    store.allocate(chain("a"), 0)
    with pytest.raises(InvariantError):
        store.regroup([(0,), (1,)])
    with pytest.raises(InvariantError):
        BlockStore.merged([store])


@given(st.lists(PATHS, max_size=12), st.booleans())
def test_a_snapshot_tells_every_block_once_below_its_true_parent(paths: list[list[bytes]], is_split: bool):
    parent_of: dict[bytes, bytes | None] = {}
    store = BlockStore((0, 1), 6)
    for path in paths:
        fill(store, path)
        parent_of.update(zip(path, [None, *path], strict=False))
    stores = store.regroup([(0,), (1,)]) if is_split else [store]
    for part in stores:
        told = []
        for parent, blocks in part.chains():
            for block in blocks:
                assert parent_of[block] == parent
                told.append(block)
                parent = block
        assert sorted(told) == sorted(part.blocks())


@given(st.integers(1, 8), st.lists(st.integers(0, 8), max_size=6), st.integers(1, 6))
def test_producing_in_chunks_leaves_what_producing_at_once_leaves(length, chunks, capacity_blocks):
    path = chain(*range(length))
    at_once, in_chunks = BlockStore((0,), capacity_blocks), BlockStore((0,), capacity_blocks)
    fill(at_once, path)
    allocation = in_chunks.allocate(path, 0)
    for num_blocks in sorted(chunks):
        in_chunks.produce(allocation, num_blocks)
        in_chunks.check_invariants()
    in_chunks.finish(allocation, length)
    assert list(in_chunks.blocks()) == list(at_once.blocks())
    assert [in_chunks.address(block) for block in path] == [at_once.address(block) for block in path]


def test_a_block_that_arrived_meanwhile_keeps_its_place_and_the_slot_goes_back():
    store = BlockStore((0,), 4)
    path = chain("a", "b")
    slow = store.allocate(path, 0)
    fill(store, path)
    first = [store.address(block) for block in path]
    store.finish(slow, 2)
    store.check_invariants()
    assert [store.address(block) for block in path] == first
    assert store.num_resident == 2


def test_an_allocation_is_addressed_where_its_blocks_lie_also_when_one_has_arrived_meanwhile():
    store = BlockStore((0, 1), 4)
    path = chain("a", "b", "c")
    slow = store.allocate(path, 0, num_extra=1)
    before = store.addresses(slow)
    assert [rank * 4 + slot for rank, slot in before] == slow.slots
    fill(store, path[:1])
    store.produce(slow, 3)
    after = store.addresses(slow)
    assert after[:3] == [store.address(block) for block in path]
    assert after[1:] == before[1:]
    assert after[0] != before[0]


def test_copied_blocks_are_never_more_recent_than_the_prefix_they_extend():
    store = BlockStore((0,), 6)
    prefix = chain("a", "b")
    fill(store, prefix)
    fill(store, chain("other"))
    copied = chain("c", "d", below=prefix[-1])
    store.finish(store.allocate(copied, 0, prefix[-1]), 2)
    order = list(store.blocks())
    assert [order.index(block) for block in [*prefix, *copied]] == sorted(
        (order.index(block) for block in [*prefix, *copied]), reverse=True
    )


def test_a_copy_does_not_evict_the_prefix_that_it_extends():
    store = BlockStore((0,), 3)
    prefix = chain("a")
    fill(store, prefix)
    fill(store, chain("x", "y"))
    copied = chain("b", below=prefix[-1])
    allocation = store.allocate(copied, 0, prefix[-1])
    store.finish(allocation, 1)
    assert store.num_reusable([*prefix, *copied], 2) == 2
