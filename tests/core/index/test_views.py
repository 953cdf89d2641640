"""What becomes of reports that are lost, late, repeated, contradictory or without a parent: one example each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.index.naive_index import block_at, chain, chains_of

from vertumnus.core.index import Cleared, PrefixIndex, Removed, ReportOutcome, Snapshot, Stored, ViewState
from vertumnus.errors import ConfigError

PATH = (0, 1, 2, 3)


def index_of(num_workers: int = 1, **options: int) -> PrefixIndex:
    index = PrefixIndex(degrees=(1, 2), block_tokens=16, **options)
    for worker_id in range(num_workers):
        index.add_worker(worker_id, 1)
    return index


def stored(sequence: int, path: tuple[int, ...], start: int = 0, *, worker_id: int = 0, epoch: int = 0) -> Stored:
    parent = block_at(path[:start]) if start else None
    return Stored(worker_id=worker_id, epoch=epoch, sequence=sequence, parent=parent, blocks=chain(path, start))


def snapshot(sequence: int, *paths: tuple[int, ...]) -> Snapshot:
    return Snapshot(worker_id=0, epoch=0, sequence=sequence, chains=chains_of(paths))


def cleared(sequence: int, epoch: int = 0) -> Cleared:
    return Cleared(worker_id=0, epoch=epoch, sequence=sequence)


def test_a_gap_keeps_what_was_known_and_applies_nothing_more_until_a_snapshot() -> None:
    index = index_of()
    assert index.apply(stored(0, (0,)), 0.0) is ReportOutcome.APPLIED
    assert index.apply(stored(2, (1,)), 0.0) is ReportOutcome.GAP
    assert index.apply(stored(1, (2,)), 0.0) is ReportOutcome.GAP
    assert index.apply(stored(3, (3,)), 0.0) is ReportOutcome.GAP
    assert index.degraded_workers() == (0,)
    assert index.num_blocks == 1
    assert index.holds(0, block_at((0,)))
    assert index.apply(snapshot(4, (1,), (2,)), 0.0) is ReportOutcome.APPLIED
    assert index.view_state(0) is ViewState.EXACT
    assert not index.holds(0, block_at((0,)))
    assert index.resident_blocks(0) == 2
    assert index.counts["gap"] == 3


@pytest.mark.parametrize("whole", [snapshot(5, (1,)), cleared(5)])
def test_a_whole_view_older_than_reports_seen_is_taken_but_leaves_the_view_degraded(whole: Snapshot | Cleared) -> None:
    index = index_of()
    index.apply(stored(0, (0,)), 0.0)
    index.apply(stored(7, (2,)), 0.0)
    assert index.apply(whole, 0.0) is ReportOutcome.GAP
    assert index.view_state(0) is ViewState.DEGRADED
    assert not index.holds(0, block_at((0,)))
    assert index.apply(snapshot(3, (0,)), 0.0) is ReportOutcome.DUPLICATE
    assert index.apply(snapshot(8, (2,)), 0.0) is ReportOutcome.APPLIED
    assert index.apply(stored(9, (3,)), 0.0) is ReportOutcome.APPLIED


def test_recovery_takes_one_snapshot_however_much_was_lost() -> None:
    index = index_of()
    sequence = 0
    for lost in range(1, 20):
        sequence += lost
        assert index.apply(stored(sequence, (0,)), 0.0) is ReportOutcome.GAP
        assert index.apply(snapshot(sequence + 1, (1,)), 0.0) is ReportOutcome.APPLIED
        sequence += 2
        assert index.apply(stored(sequence, (2,)), 0.0) is ReportOutcome.APPLIED


def test_a_restart_drops_all_entries_and_refuses_what_the_old_epoch_still_sends() -> None:
    index = index_of()
    index.apply(stored(0, PATH), 0.0)
    assert index.apply(stored(0, (5,), epoch=1), 0.0) is ReportOutcome.APPLIED
    assert index.num_blocks == 1
    assert index.apply(stored(1, PATH), 0.0) is ReportOutcome.STALE_EPOCH
    assert index.apply(stored(4, PATH, epoch=2), 0.0) is ReportOutcome.GAP
    assert index.num_blocks == 0
    assert index.apply(cleared(9, epoch=3), 0.0) is ReportOutcome.APPLIED
    assert index.view_state(0) is ViewState.EXACT


@given(st.permutations(range(4)))
def test_the_order_in_which_parents_and_children_are_reported_does_not_matter(order: list[int]) -> None:
    index = index_of()
    for sequence, depth in enumerate(order):
        index.apply(stored(sequence, PATH[: depth + 1], depth), 0.0)
        index.check_invariants()
        assert index.resident_blocks(0) == sequence + 1
    assert index.num_parked_blocks == 0
    assert index.match(chain(PATH)).reusable_blocks.tolist() == [4]


def test_a_subscriber_that_joins_late_attaches_children_once_another_worker_reports_the_roots() -> None:
    index = index_of(num_workers=2)
    index.apply(stored(0, PATH, 2), 0.0)
    assert index.num_parked_blocks == 2
    assert index.holders(block_at(PATH)) == (0,)
    index.apply(stored(0, PATH[:2], worker_id=1), 0.0)
    assert index.num_parked_blocks == 0
    assert index.match(chain(PATH)).num_blocks == 4
    assert index.match(chain(PATH)).reusable_blocks.tolist() == [0, 2]
    assert index.replica_holders(block_at(PATH)) == ()
    assert index.holders(block_at(PATH)) == (0,)


def test_parked_blocks_are_bounded_and_whoever_loses_some_is_asked_for_a_snapshot() -> None:
    index = index_of(num_workers=2, max_parked_blocks=3)
    index.apply(stored(0, (0, 0, 0), 1), 0.0)
    index.apply(stored(0, (1, 0, 0), 1, worker_id=1), 0.0)
    index.check_invariants()
    assert index.num_parked_blocks == 2
    assert index.counts["parked_dropped"] == 2
    assert index.degraded_workers() == (0,)
    assert index.resident_blocks(0) == 0
    assert index.apply(stored(1, (3,)), 0.0) is ReportOutcome.GAP


def test_a_snapshot_of_more_orphans_than_can_be_parked_does_not_ask_for_ever() -> None:
    index = index_of(max_parked_blocks=2)
    index.apply(stored(3, (9,)), 0.0)
    orphans = [(k, 0) for k in range(6)]
    assert index.apply(snapshot(4, *orphans, (7,)), 0.0) is ReportOutcome.APPLIED
    index.check_invariants()
    assert index.num_parked_blocks == 2
    assert index.holds(0, block_at((7,)))


def test_blocks_that_cannot_be_represented_are_refused_with_what_follows_in_their_chain() -> None:
    a, b, c, d = (block_at((k,)) for k in range(4))
    index = index_of()

    def report(sequence: int, parent: bytes | None, *blocks: bytes) -> None:
        index.apply(Stored(worker_id=0, epoch=0, sequence=sequence, parent=parent, blocks=blocks), 0.0)
        index.check_invariants()

    report(0, None, a, b)
    report(1, a, c, b, d)  # b is known below a
    assert index.counts["rejected"] == 2
    assert index.num_blocks == 3
    report(2, None, bytes(16), d)
    report(3, None, b"short", d)
    report(4, d, bytes(16))
    assert index.counts["rejected"] == 7
    report(5, c, d, d)  # twice in one chain
    report(6, None)  # nothing at all
    assert index.counts["rejected"] == 8
    assert index.num_blocks == 4
    index.apply(Removed(worker_id=0, epoch=0, sequence=7, blocks=(d, d, b"short", block_at((9,)))), 0.0)
    index.check_invariants()
    assert index.counts["unheld"] == 3
    assert index.resident_blocks(0) == index.num_blocks == 3


def test_parked_blocks_that_contradict_each_other_are_refused() -> None:
    a, b, c, d = (block_at((k,)) for k in range(4))
    index = index_of(num_workers=2)

    def report(sequence: int, parent: bytes | None, *blocks: bytes) -> None:
        index.apply(Stored(worker_id=0, epoch=0, sequence=sequence, parent=parent, blocks=blocks), 0.0)
        index.check_invariants()

    report(0, a, b)
    report(1, b, a)  # a cycle
    report(2, c, b)  # another parent
    report(3, d, d)  # its own parent
    assert index.counts["rejected"] == 3
    report(4, None, c, b)  # in the trie b would have another parent than the parked one
    assert index.counts["rejected"] == 4
    report(5, None, a)
    assert index.num_parked_blocks == 0
    assert index.match([a, b]).num_blocks == 2
    index.remove_worker(0)
    index.check_invariants()
    assert index.num_blocks == 0


def test_a_long_parked_chain_attaches() -> None:
    path = tuple(k % 256 for k in range(3000))
    index = index_of()
    index.apply(stored(0, path, 1), 0.0)
    index.apply(stored(1, path[:1]), 0.0)
    assert index.num_parked_blocks == 0
    assert index.match(chain(path)).reusable_blocks.tolist() == [3000]


def test_a_match_reads_its_hashes_lazily() -> None:
    path = tuple(k % 256 for k in range(2000))
    index = index_of()
    index.apply(stored(0, path[:1000]), 0.0)
    hashed = 0

    def hashes() -> object:
        nonlocal hashed
        for block in chain(path):
            hashed += 1
            yield block

    assert index.match(hashes()).num_blocks == 1000
    assert hashed <= 1064


def test_slots_are_reused_and_start_empty() -> None:
    index = index_of(num_workers=3)
    index.apply(stored(0, PATH, worker_id=1), 0.0)
    index.remove_worker(1)
    assert index.add_worker(7, degree=2, epoch=4) == 1
    assert index.num_slots == 3
    assert index.num_blocks == 0
    assert index.apply(stored(1, PATH, worker_id=1), 0.0) is ReportOutcome.UNKNOWN_WORKER
    assert index.apply(stored(0, PATH, worker_id=7, epoch=4), 0.0) is ReportOutcome.APPLIED
    assert (index.replica_count(block_at(PATH), 1), index.replica_count(block_at(PATH), 2)) == (0, 1)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigError, match="degrees is"):
        PrefixIndex(degrees=(), block_tokens=16)
    with pytest.raises(ConfigError, match="block_tokens is 0"):
        PrefixIndex(degrees=(1,), block_tokens=0)
    index = index_of()
    with pytest.raises(ConfigError, match="degree is 3; accepted: 1, 2"):
        index.add_worker(1, degree=3)
    with pytest.raises(ConfigError, match="worker_id 0 is in use"):
        index.add_worker(0, degree=1)
    with pytest.raises(ConfigError, match="worker_id is 5"):
        index.slot_of(5)
