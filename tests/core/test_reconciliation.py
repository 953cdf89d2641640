"""Pending blocks after a split, and copies that requests wait for."""

from hypothesis import given
from hypothesis import strategies as st

from vertumnus.core.copies import CopyLedger
from vertumnus.core.events import CopyBlocks, CopyReason
from vertumnus.core.queueing import QueuedRequest
from vertumnus.core.reconciliation import PendingBlocks, assign_prefixes
from vertumnus.core.requests import PrefillRequest


def block(number):
    return number.to_bytes(16, "big")


@st.composite
def split_stores(draw):
    """A random trie, every block of it on child 0 or 1 (as after a split), and random demand."""
    size = draw(st.integers(1, 40))
    parents = {block(1): None}
    for number in range(2, size + 1):
        parents[block(number)] = draw(st.sampled_from([None, *parents]))
    owner = {each: draw(st.integers(0, 1)) for each in parents}
    missing = draw(st.sets(st.sampled_from(sorted(parents)), max_size=3))
    demand = {each: draw(st.sampled_from([0.0, 1.0, 5.0])) for each in parents}
    held = [[(parents[each], (each,)) for each in parents if owner[each] == k and each not in missing] for k in (0, 1)]
    return held, {each: above for each, above in parents.items() if each not in missing}, demand


def path_of(leaf, parents):
    path = [leaf]
    while parents[path[-1]] is not None:
        if parents[path[-1]] not in parents:
            return None
        path.append(parents[path[-1]])
    return path


@given(split_stores())
def test_every_complete_prefix_is_whole_at_one_child_once_its_pending_blocks_have_come(stores):
    held, parents, demand = stores
    own = [{each for _, blocks in chains for each in blocks} for chains in held]
    pending = assign_prefixes(held, lambda each: demand[each])
    for leaf in parents.keys() - set(parents.values()):
        path = path_of(leaf, parents)
        if path is not None:
            assert any(set(path) <= own[k] | pending[k] for k in (0, 1))


@given(split_stores())
def test_only_blocks_that_the_other_child_holds_are_pending(stores):
    held, _, demand = stores
    own = [{each for _, blocks in chains for each in blocks} for chains in held]
    pending = assign_prefixes(held, lambda each: demand[each])
    assert pending[0] <= own[1]
    assert pending[1] <= own[0]
    assert not pending[0] & own[0]


def test_demand_is_shared_between_the_children():
    held = [[(None, (block(1), block(2)))], [(None, (block(3), block(4)))]]
    held[0].append((block(3), (block(5),)))
    pending = assign_prefixes(held, lambda each: {block(5): 9.0, block(4): 8.0}.get(each, 0.0))
    assert pending[0] == {block(3)}  # the hottest prefix goes to the child that holds its leaf
    assert pending[1] == set()


def test_settled_blocks_are_no_longer_pending_and_a_worker_that_left_has_none():
    pending = PendingBlocks()
    pending.add(7, [block(1), block(2)])
    pending.settle(7, [block(1)])
    assert pending.of(7) == {block(2)}
    pending.settle(7, [block(2)])
    assert list(pending.workers()) == []
    pending.add(7, [block(1)])
    pending.forget_worker(7)
    assert pending.of(7) == frozenset()


def test_a_block_on_its_way_is_known_and_its_waiters_are_released_once():
    ledger = CopyLedger()
    item = QueuedRequest(request=PrefillRequest(0, 0.0, 1024, [block(1)]), prefix_tokens=512, service_s=1.0)
    action = CopyBlocks(
        copy_id=ledger.next_id(),
        reason=CopyReason.PULL,
        source_worker_id=1,
        destination_worker_id=2,
        parent=None,
        blocks=(block(1),),
    )
    ledger.begin(action, source_node=0)
    ledger.await_copy(0, item)
    ledger.await_copy(0, item)
    assert (ledger.coming(2, block(1)), ledger.coming(1, block(1)), item.num_copies_awaited) == (0, None, 1)
    assert (ledger.num_leaving(1, node=0), ledger.num_leaving(3, node=0), ledger.num_leaving(2, node=1)) == (
        (1, 1),
        (1, 0),
        (0, 0),
    )
    assert ledger.end(0) == (action, None)
    assert ledger.end(0) is None
    assert (ledger.coming(2, block(1)), item.num_copies_awaited, len(ledger)) == (None, 0, 0)
    assert ledger.num_leaving(1, node=0) == (0, 0)
