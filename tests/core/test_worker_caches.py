"""What happens to blocks that are read or written while their workers go."""

import pytest
from tests.builders import BLOCK_TOKENS, chain

from vertumnus.core.composition import RankGroup
from vertumnus.core.events import CopyBlocks, CopyReason, StartStep, StepItem
from vertumnus.core.requests import PrefillRequest
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
