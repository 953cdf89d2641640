"""Waiting for a prefix that another request is computing: who waits, until when, and what becomes of it otherwise.

That nobody starts too early or waits for one that is gone is watched in every run (`ObservedControlPlane`). With the
builders' profile a step takes 1 s, plus 10 ms a new token shared by the ranks, plus 1 ms a cached token.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders import BLOCK_TOKENS, chain, play, request, simulated_pool
from tests.core.test_control_plane import Driver, only, placed_at, started
from tests.strategies import request_lists

from vertumnus.core.awaited import WaitSettings, _num_shared
from vertumnus.core.events import (
    CopyBlocks,
    CopyEnded,
    RankFailed,
    RequestCancelled,
    RequestPlaced,
    StartStep,
)
from vertumnus.core.index.reports import Stored
from vertumnus.core.moves import MoveSettings
from vertumnus.core.pulls import PullSettings
from vertumnus.core.queueing import Discipline
from vertumnus.errors import ConfigError

PULL = PullSettings(s_per_token=0.0001, latency_s=0.01, from_any_worker=True)
FAMILY = {"input_tokens": 200, "prompt": "shared", "num_shared": 18}
"""Of 20 blocks, the first 18 in common: 3 s alone, 1.38 s once these are there."""


def driver(composition: str = "1x1", **parts) -> Driver:
    return Driver(composition, **({"policy": "min-ttft", "waits": WaitSettings(), "pull": PULL} | parts))


def finish(driver: Driver, worker_id: int, request_id: int, end_tokens: int = 200, start_tokens: int = 0, **changes):
    """A worker reports what a step computed of a request, and that it is done."""
    blocks = request(request_id, **(FAMILY | changes)).blocks
    start, end = start_tokens // BLOCK_TOKENS, end_tokens // BLOCK_TOKENS
    driver.report(Stored, worker_id, parent=blocks[start - 1] if start else None, blocks=tuple(blocks[start:end]))
    actions = driver.finish(worker_id)
    driver.plane.check_invariants()
    return actions


def held(driver: Driver) -> list[int]:
    workers = driver.plane.workers.all()
    return [item.request.request_id for worker in workers for item in worker.queue.items() if item.is_held]


def first_tokens(actions) -> list[tuple[int, int]]:
    """(request, its first token to compute) of every step."""
    return [(item.request.request_id, item.start_tokens) for step in only(StartStep, actions) for item in step.items]


# Laws


@given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 40), st.data())
def test_common_beginnings_are_as_long_as_comparing_one_by_one_says(num_shared, more, others, data):
    one = chain(*range(num_shared), *(("one", each) for each in range(more)))
    other = chain(*range(num_shared), *(("other", each) for each in range(others)))
    limit = data.draw(st.integers(1, min(len(one), len(other))))
    num_known = data.draw(st.integers(0, min(num_shared, limit) - 1))
    assert _num_shared(one, other, num_known, limit) == min(num_shared, limit)


@settings(max_examples=60)
@given(request_lists(), st.sampled_from([None, 25, 60, 200]))
def test_one_fifo_worker_never_computes_more_than_without(requests, step_tokens):
    """With room for everything: then a wait spares what would be computed twice, and costs nothing."""

    def num_computed(waits: WaitSettings | None) -> int:
        pool = play(simulated_pool("1x1", step_tokens=step_tokens, waits=waits, blocks_per_rank=1000), requests)
        assert len(pool.records) == len(requests)
        return pool.control_plane.num_computed_tokens

    assert num_computed(WaitSettings()) <= num_computed(None)


# Placement


def test_waiting_is_one_more_choice_at_every_candidate():
    pool = driver("2x1")
    pool.arrive(0, **FAMILY)
    placement = only(RequestPlaced, pool.arrive(1, **FAMILY))[0].placement
    assert placement.worker_ids.tolist() == [0, 1, 0, 1]
    assert placement.service_s.tolist() == pytest.approx([3.0, 3.0, 1.38, 1.38])
    # At the other worker, 180 tokens have to be copied after it.
    assert placement.terms["wait"].tolist() == pytest.approx([3.0, 0.0, 3.0, 3.028])
    assert placement.awaited_tokens is not None
    assert placement.awaited_tokens.tolist() == [0, 0, 180, 180]
    assert (placement.worker_id, placement.awaited_request_id) == (1, None)  # computing it too ends sooner


def test_without_copies_one_can_wait_only_where_the_prefix_is_computed():
    pool = driver("2x1", pull=None)
    pool.arrive(0, **FAMILY)
    placement = only(RequestPlaced, pool.arrive(1, **FAMILY))[0].placement
    assert placement.awaited_tokens is not None
    assert placement.awaited_tokens.tolist() == [0, 0, 180, 0]


def test_where_nothing_is_under_way_there_is_one_choice_a_candidate():
    pool = driver("2x1")
    pool.arrive(0, **FAMILY)
    placement = only(RequestPlaced, pool.arrive(1, input_tokens=200))[0].placement
    assert placement.awaited_tokens is None
    assert placement.worker_ids.tolist() == [0, 1]


def test_it_computes_the_rest_once_the_prefix_is_there():
    pool = driver()
    pool.arrive(0, **FAMILY)
    assert only(RequestPlaced, pool.arrive(1, **FAMILY))[0].placement.awaited_request_id == 0
    assert held(pool) == [1]
    assert first_tokens(finish(pool, 0, 0)) == [(1, 180)]


def test_nobody_waits_for_a_less_urgent_request_that_may_be_overtaken_for_ever():
    pool = driver()
    pool.arrive(9, input_tokens=200)
    pool.arrive(0, **FAMILY, priority=1)
    pool.arrive(1, **FAMILY)
    assert held(pool) == []
    pool.arrive(2, **FAMILY, priority=1)
    assert held(pool) == [2]


def test_requests_with_the_same_prefix_are_not_packed_into_one_step():
    pool = driver(step_tokens=500)
    pool.arrive(9, input_tokens=200)
    for number in range(3):
        pool.arrive(number, **FAMILY)
    assert started(finish(pool, 0, 9, prompt=None)) == [(0, [0])]
    assert first_tokens(finish(pool, 0, 0)) == [(1, 180), (2, 180)]


def test_the_chunk_that_completes_the_prefix_is_enough():
    pool = driver(step_tokens=100)
    pool.arrive(0, **(FAMILY | {"input_tokens": 500}))
    pool.arrive(1, **FAMILY)
    assert first_tokens(finish(pool, 0, 0, 100)) == [(0, 100)]
    assert held(pool) == [1]
    finish(pool, 0, 0, 200, 100)
    assert held(pool) == []


# At another worker


def waiting_elsewhere(**parts) -> Driver:
    """Request 0 runs at worker 0, request 8 at worker 1; 9 follows at worker 0, and 1 at worker 1, where it waits for
    the prefix that request 0 computes."""
    pool = driver("2x1", **parts)
    pool.arrive(0, **FAMILY)
    pool.arrive(8, input_tokens=1000)
    pool.arrive(9, input_tokens=1000)
    assert placed_at(pool.arrive(1, **FAMILY)) == [(1, 1, False)]
    assert held(pool) == [1]
    return pool


def test_the_prefix_is_copied_once_it_is_there():
    pool = waiting_elsewhere()
    copies = only(CopyBlocks, finish(pool, 0, 0))
    assert [(each.source_worker_id, each.destination_worker_id, len(each.blocks)) for each in copies] == [(0, 1, 18)]
    pool.report(Stored, 1, parent=None, blocks=copies[0].blocks)
    pool.tell(CopyEnded(copies[0].copy_id, True))
    assert first_tokens(pool.finish(1)) == [(1, 180)]


def test_others_pass_who_waits():
    pool = waiting_elsewhere()
    pool.arrive(10, input_tokens=1000)
    assert [item.request.request_id for item in pool.plane.workers[1].queue.items()] == [1, 10]
    assert started(pool.finish(1)) == [(1, [10])]


def test_a_worker_where_all_wait_takes_over_what_does_not():
    pool = waiting_elsewhere(moves=MoveSettings())
    assert placed_at(pool.finish(1)) == [(9, 1, True)]
    assert held(pool) == [1]


# Whoever is waited for goes another way


def test_when_it_is_cancelled_in_the_queue_the_waiting_are_placed_anew():
    pool = driver()
    pool.arrive(9, input_tokens=200)
    for number in range(3):
        pool.arrive(number, **FAMILY)
    assert held(pool) == [1, 2]
    assert placed_at(pool.tell(RequestCancelled(0))) == [(1, 0, True), (2, 0, True)]
    assert held(pool) == [2]  # now for request 1
    assert started(finish(pool, 0, 9, prompt=None)) == [(0, [1])]


def test_when_it_is_cancelled_between_two_chunks_what_it_has_computed_counts():
    pool = driver(step_tokens=100)
    pool.arrive(0, **FAMILY)
    pool.arrive(1, **FAMILY)
    pool.tell(RequestCancelled(0))
    assert held(pool) == [1]
    actions = finish(pool, 0, 0, 100)
    assert placed_at(actions) == [(1, 0, True)]
    assert first_tokens(actions) == [(1, 100)]


def test_when_its_rank_fails_both_are_placed_anew():
    pool = waiting_elsewhere()
    actions = pool.tell(RankFailed(0))
    assert placed_at(actions) == [(0, 1, True), (9, 1, True), (1, 1, True)]
    assert held(pool) == [1]
    assert first_tokens(pool.finish(1)) == [(0, 0)]


def test_when_it_moves_the_waiting_are_placed_anew():
    pool = driver("2x1", moves=MoveSettings(), pull=None)
    pool.arrive(8, input_tokens=700)
    pool.arrive(9, input_tokens=1000)
    pool.arrive(0, **FAMILY)
    assert placed_at(pool.arrive(1, **FAMILY)) == [(1, 0, False)]
    assert held(pool) == [1]
    assert placed_at(pool.finish(1)) == [(0, 1, True), (1, 1, True)]
    assert held(pool) == [1]
    assert first_tokens(finish(pool, 1, 0)) == [(1, 180)]


def test_who_waits_may_go_away_too():
    pool = waiting_elsewhere()
    pool.tell(RequestCancelled(1))
    assert only(CopyBlocks, finish(pool, 0, 0)) == []


def test_waits_form_chains_under_shortest_first_too():
    pool = driver(discipline=Discipline.SHORTEST)
    pool.arrive(9, input_tokens=200)
    pool.arrive(0, **FAMILY)
    pool.arrive(1, **(FAMILY | {"input_tokens": 400, "num_shared": None}))
    pool.arrive(2, **(FAMILY | {"input_tokens": 500, "num_shared": 40}))
    assert sorted(held(pool)) == [1, 2]
    assert started(finish(pool, 0, 9, prompt=None)) == [(0, [0])]
    assert first_tokens(finish(pool, 0, 0)) == [(1, 180)]
    assert first_tokens(finish(pool, 0, 1, 400, 180, num_shared=None, input_tokens=400)) == [(2, 400)]


def test_a_search_of_nobody_is_refused():
    with pytest.raises(ConfigError, match="max_tried is 0; accepted: 1 or more"):
        WaitSettings(max_tried=0)
