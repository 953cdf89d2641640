"""What happens to blocks that are read or written while their workers go."""

import pytest
from tests.builders import BLOCK_TOKENS, chain

from vertumnus.core.composition import RankGroup
from vertumnus.core.events import CopyBlocks, CopyReason, StartStep, StepItem
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.slices import finish
from vertumnus.core.worker_caches import WorkerCaches

PATH = chain(1, 2, 3)


def real_caches(*groups: RankGroup) -> WorkerCaches:
    """Worker n has the nth group."""
    caches = WorkerCaches(10, BLOCK_TOKENS, is_real=True)
    for worker_id, group in enumerate(groups):
        caches.open(worker_id, group, 1)
    return caches


def prefill(caches: WorkerCaches, worker_id: int, request_id: int = 1) -> None:
    """A prompt of PATH and half a block, whose KV is held afterwards."""
    num_tokens = len(PATH) * BLOCK_TOKENS + BLOCK_TOKENS // 2
    request = PrefillRequest(request_id, 0.0, num_tokens, PATH)
    caches.begin_step(StartStep(worker_id, 1, (StepItem(request, 0, num_tokens, True),)))
    assert caches.finish_step(worker_id, holds=True) is not None


def copy_from_0_to_1() -> CopyBlocks:
    return CopyBlocks(
        copy_id=7,
        reason=CopyReason.INTRA_DEGREE,
        source_worker_id=0,
        destination_worker_id=1,
        parent=None,
        blocks=PATH,
    )


def test_a_worker_that_goes_gives_up_what_it_held():
    caches = real_caches(RankGroup(0, 1), RankGroup(1, 1))
    prefill(caches, 0)
    caches.park([0])
    assert caches.close(0) == (1,)
    caches.release(0, 1)  # whoever read it is late
    assert caches.num_in_use == 0
    caches.close(1)
    caches.open(2, RankGroup(0, 2), 2)  # which nothing in use stands in the way of
    assert caches.stores[2].num_allocated == 0
    caches.check_invariants()


@pytest.mark.parametrize("end", ["lost", "closed"])
def test_a_copy_whose_source_is_gone_keeps_its_slots_until_it_has_ended(end):
    """Somebody may still be writing to them."""
    caches = real_caches(RankGroup(0, 1), RankGroup(1, 1))
    prefill(caches, 0)
    caches.release(0, 1)
    assert caches.begin_copy(copy_from_0_to_1()) is not None
    if end == "lost":
        assert caches.fail_rank(0) == ((7,), ())
    caches.close(0)
    assert caches.stores[1].num_allocated == len(PATH)
    assert caches.end_copy(7, len(PATH)) is None
    assert caches.stores[1].num_allocated == caches.stores[1].num_resident == caches.num_in_use == 0
    caches.check_invariants()


def test_a_copy_whose_destination_is_gone_keeps_nothing():
    caches = real_caches(RankGroup(0, 1), RankGroup(1, 1))
    prefill(caches, 0)
    caches.release(0, 1)
    caches.begin_copy(copy_from_0_to_1())
    caches.park([1])
    caches.close(1)
    assert caches.end_copy(7, len(PATH)) is None
    assert caches.num_in_use == 0
    caches.open(2, RankGroup(0, 1), 2)
    caches.check_invariants()


def two_that_merge() -> WorkerCaches:
    """Both have PATH, the second a block more."""
    caches = real_caches(RankGroup(0, 1), RankGroup(1, 1))
    for worker_id in (0, 1):
        prefill(caches, worker_id, worker_id)
        caches.release(worker_id, worker_id)
    longer = PrefillRequest(9, 0.0, 4 * BLOCK_TOKENS, [*PATH, *chain(4, below=PATH[-1])])
    caches.begin_step(StartStep(1, 1, (StepItem(longer, 0, longer.input_tokens, True),)))
    assert caches.finish_step(1) is not None
    caches.park([0, 1])
    return caches


def test_a_merge_that_was_prepared_in_slices_is_the_merge_at_once(monkeypatch):
    monkeypatch.setattr("vertumnus.core.block_store.SLICE_BLOCKS", 1)
    at_once, prepared = two_that_merge(), two_that_merge()
    assert len(list(prepared.prepare((0, 1)))) > 3
    assert prepared.open(2, RankGroup(0, 2), 2) == at_once.open(2, RankGroup(0, 2), 2)
    assert [*prepared.stores[2].blocks()] == [*at_once.stores[2].blocks()]
    assert prepared.stores[2].num_free == at_once.stores[2].num_free == 16
    for worker_id in (0, 1):
        prepared.close(worker_id)
    prepared.check_invariants()


@pytest.mark.parametrize("change", ["lost", "serves again"])
def test_what_was_prepared_is_not_taken_once_a_rank_has_changed(change):
    caches = two_that_merge()
    finish(caches.prepare((0, 1)))
    caches.close(1)
    if change == "lost":
        caches.fail_rank(1)
        caches.recover_rank(1)
        expected = 3
    else:
        caches.open(2, RankGroup(1, 1), 2)
        more = PrefillRequest(10, 0.0, BLOCK_TOKENS, chain("else"))
        caches.begin_step(StartStep(2, 2, (StepItem(more, 0, more.input_tokens, True),)))
        caches.finish_step(2)
        caches.park([1])
        expected = 5
    snapshot = caches.open(3, RankGroup(0, 2), 3)
    assert sum(len(blocks) for _, blocks in snapshot.chains) == caches.stores[3].num_resident == expected
    caches.stores[3].check_invariants()


@pytest.mark.parametrize(("spares_last_copies", "lost"), [(False, "alone"), (True, "shared")])
def test_blocks_that_another_worker_holds_go_before_older_ones_if_last_copies_are_spared(spares_last_copies, lost):
    caches = WorkerCaches(2, BLOCK_TOKENS, spares_last_copies=spares_last_copies)
    for worker_id in (0, 1):
        caches.open(worker_id, RankGroup(worker_id, 1), 1)
    paths = {name: chain(name) for name in ("alone", "shared", "new")}
    for worker_id, name in ((0, "alone"), (0, "shared"), (1, "shared"), (0, "new")):
        request = PrefillRequest(1, 0.0, BLOCK_TOKENS, paths[name])
        caches.begin_step(StartStep(worker_id, 1, (StepItem(request, 0, BLOCK_TOKENS, True),)))
        assert caches.finish_step(worker_id) is not None
    kept = {name for name, path in paths.items() if path[0] in caches.stores[0]}
    assert kept == set(paths) - {lost}
