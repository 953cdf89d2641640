"""Algorithm 2 in its practical form: what a plan promises, who is chosen, what is bounded, and how a scan resumes."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.index.naive_index import block_at, chain
from tests.core.index.random_tries import DEGREES, PATHS, Pool, pool_of, pools

from vertumnus.core.index import (
    CopyKind,
    CopyPlan,
    PoolLoad,
    ReplicationSettings,
    ScanResult,
    Stored,
    WorkerLoad,
)
from vertumnus.errors import ConfigError

EAGER = ReplicationSettings(
    theta_inter_s=0.5,
    theta_intra=2.0,
    theta_reclaim=1.0,
    grace_s=2.0,
    pressure_ratio=0.5,
    max_intake_ratio=1.0,
    max_inter=50,
    max_intra=50,
    max_reclaim=50,
)


def scan(pool: Pool, settings: ReplicationSettings, load: PoolLoad | None = None, now_s: float = 4.0) -> ScanResult:
    slices = pool.index.scan(settings, load or pool.load, now_s)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


def assert_copy_keeps_its_promise(pool: Pool, plan: CopyPlan, bring: dict[int, set[bytes]]) -> None:
    """`bring`: what earlier plans of the scan bring to each destination."""
    path = pool.naive.path(plan.block)
    assert path is not None
    assert tuple(path[-len(plan.blocks) :]) == plan.blocks
    assert plan.parent == (path[-len(plan.blocks) - 1] if len(path) > len(plan.blocks) else None)
    source, destination = plan.source_worker_id, plan.destination_worker_id
    assert source in pool.naive.replica_holders(plan.block)
    assert destination not in pool.naive.replica_holders(plan.block)
    assert pool.naive.workers[destination].degree == plan.degree
    assert pool.loads[destination].can_receive
    there = pool.naive.workers[destination].resident | bring.setdefault(destination, set())
    assert plan.missing_blocks == sum(1 for b in plan.blocks if b not in pool.naive.workers[destination].resident)
    assert plan.missing_blocks >= 1
    assert there.issuperset(path[: -len(plan.blocks)])
    if plan.kind is CopyKind.INTRA:
        assert pool.naive.workers[source].degree == plan.degree


@given(pools(), st.sampled_from([1, 2, 5, 100]))
def test_every_copy_keeps_its_promise(pool: Pool, max_blocks_per_copy: int) -> None:
    settings = ReplicationSettings(
        theta_inter_s=0.5,
        theta_intra=2.0,
        theta_reclaim=0.5,
        max_intake_ratio=0.75,
        max_blocks_per_copy=max_blocks_per_copy,
    )
    candidates = pool.naive.candidates(settings, DEGREES)
    result = scan(pool, settings)
    bring: dict[int, set[bytes]] = {}
    over_link: dict[tuple[int, int], int] = {}
    for plan in result.replications:
        assert_copy_keeps_its_promise(pool, plan, bring)
        new = set(plan.blocks) - bring[plan.destination_worker_id]
        assert plan.block in new
        bring[plan.destination_worker_id] |= new
        link = (plan.source_worker_id, plan.destination_worker_id)
        over_link[link] = over_link.get(link, 0) + plan.missing_blocks
    assert all(blocks <= max_blocks_per_copy for blocks in over_link.values())
    for worker_id, blocks in bring.items():
        arriving = blocks - pool.naive.workers[worker_id].resident
        assert len(arriving) <= settings.max_intake_ratio * pool.loads[worker_id].capacity_blocks
    for kind, name in ((CopyKind.INTER, "inter"), (CopyKind.INTRA, "intra")):
        for plan in (p for p in result.replications if p.kind is kind):
            # A copy that is cut may end where the degree has a replica; what it is on its way to must be a candidate.
            below = [b for b, degree in candidates[name] if degree == plan.degree and plan.block in pool.naive.path(b)]
            assert below, "neither the block nor anything below it is a candidate"
            if kind is CopyKind.INTER:
                assert any(pool.naive.replica_count(b, plan.degree) == 0 for b in below)
        planned = [(p.block, p.degree) for p in result.replications if p.kind is kind]
        if max_blocks_per_copy == 100:
            for block, degree in planned:
                above = set(pool.naive.path(block)[:-1])
                assert not any(other in above and d == degree for other, d in planned)


@given(pools(), st.data())
def test_every_reclaim_keeps_its_promise(pool: Pool, data: st.DataObject) -> None:
    used = data.draw(st.sets(st.sampled_from(sorted(pool.naive.known())), max_size=3)) if pool.naive.known() else set()
    candidates = pool.naive.candidates(EAGER, DEGREES)["reclaim"]
    full = {w for w, load in pool.loads.items() if len(pool.naive.workers[w].resident) >= 0.5 * load.capacity_blocks}
    result = scan(pool, EAGER, PoolLoad(pool.loads, in_use=lambda worker_id, block: block in used))
    left = {w: set(worker.resident) for w, worker in pool.naive.workers.items()}
    for plan in result.reclaims:
        worker = pool.naive.workers[plan.worker_id]
        assert plan.worker_id in full
        for block in plan.blocks:
            assert (block, worker.degree) in candidates
            assert block not in used
            assert plan.worker_id in pool.naive.replica_holders(block)
            below = {b for b, parent in pool.naive.parent.items() if parent == block}
            assert not below & left[plan.worker_id], "a longer prefix would be cut"
            left[plan.worker_id].remove(block)


@given(pools(), st.integers(1, 5), st.integers(1, 20))
def test_a_scan_in_small_slices_decides_the_same(pool: Pool, slice_rows: int, slice_work: int) -> None:
    def run(rows: int, work: int) -> tuple[ScanResult, int]:
        slices = pool.index.scan(EAGER, pool.load, 4.0)
        num_slices = 0
        with patch("vertumnus.core.index.scan.SLICE_ROWS", rows), patch("vertumnus.core.index.scan.SLICE_WORK", work):
            while True:
                try:
                    next(slices)
                    num_slices += 1
                except StopIteration as end:
                    return end.value, num_slices

    # An abandoned scan leaves the demand alone, so the same demand is scanned twice.
    with patch("vertumnus.core.index.trie.Trie.decay"):
        in_small, num_small = run(slice_rows, slice_work)
        at_once, num_large = run(1_000_000, 1_000_000)
    assert in_small == at_once
    assert num_small >= num_large


@given(pools(), st.lists(st.tuples(st.booleans(), st.integers(0, 5), PATHS), min_size=1, max_size=10))
def test_plans_hold_when_the_index_changes_between_slices(
    pool: Pool, changes: list[tuple[bool, int, tuple[int, ...]]]
) -> None:
    slices = pool.index.scan(EAGER, pool.load, 4.0)
    with patch("vertumnus.core.index.scan.SLICE_ROWS", 4), patch("vertumnus.core.index.scan.SLICE_WORK", 1):
        while True:
            try:
                next(slices)
            except StopIteration as end:
                result: ScanResult = end.value
                break
            if changes:
                is_store, worker, path = changes.pop()
                worker_id = sorted(pool.naive.workers)[worker % len(pool.naive.workers)]
                if len(path) == 1 and len(pool.naive.workers) > 1:  # it leaves, and another takes its slot
                    pool.index.remove_worker(worker_id)
                    pool.naive.remove_worker(worker_id)
                    pool.index.add_worker(100 + worker_id, 1)
                    pool.naive.add_worker(100 + worker_id, 1, 0)
                elif is_store:
                    pool.store(worker_id, path)
                else:
                    pool.evict(worker_id, path)
    pool.index.check_invariants()
    bring: dict[int, set[bytes]] = {}
    for plan in result.replications:
        holders = pool.naive.replica_holders(plan.block)
        assert plan.source_worker_id in holders
        assert plan.destination_worker_id not in holders
        there = pool.naive.workers[plan.destination_worker_id].resident | bring.get(plan.destination_worker_id, set())
        assert plan.parent is None or plan.parent in there
        bring.setdefault(plan.destination_worker_id, set()).update(plan.blocks)
    for reclaim in result.reclaims:
        left = pool.naive.workers[reclaim.worker_id].resident
        for block in reclaim.blocks:
            assert reclaim.worker_id in pool.naive.replica_holders(block)
            assert not {b for b in left if pool.naive.parent[b] == block} - _gone(result, reclaim.worker_id)


def _gone(result: ScanResult, worker_id: int) -> set[bytes]:
    return {block for plan in result.reclaims if plan.worker_id == worker_id for block in plan.blocks}


def hot_pool(*degrees: int) -> Pool:
    """Worker 0 holds (0, 1, 2, 3), which is used a lot at its degree."""
    pool = pool_of(*degrees)
    pool.store(0, (0, 1, 2, 3))
    pool.use((0, 1, 2, 3), degrees[0], times=20)
    return pool


def test_a_hot_path_is_copied_once_and_whole() -> None:
    pool = hot_pool(1, 1, 1)
    (plan,) = scan(pool, EAGER).replications
    assert (plan.kind, plan.source_worker_id, plan.destination_worker_id) == (CopyKind.INTRA, 0, 1)
    assert (plan.parent, plan.blocks, plan.score) == (None, chain((0, 1, 2, 3)), 20.0)


def test_the_destination_holds_most_of_the_path_then_has_room_then_a_short_queue() -> None:
    pool = hot_pool(1, 1, 1, 1, 2)
    pool.store(2, (0, 1))
    pool.loads[2] = WorkerLoad(queue_s=9.0, capacity_blocks=1000)
    (plan,) = scan(pool, EAGER).replications
    assert (plan.destination_worker_id, plan.parent, plan.missing_blocks) == (2, block_at((0, 1)), 2)
    pool = hot_pool(1, 1, 1, 1)
    pool.store(1, (5, 5, 5, 5))
    pool.loads[1] = WorkerLoad(queue_s=0.0, capacity_blocks=5)
    pool.loads[2] = WorkerLoad(queue_s=2.0, capacity_blocks=1000)
    pool.loads[3] = WorkerLoad(queue_s=1.0, capacity_blocks=1000)
    assert scan(pool, EAGER).replications[0].destination_worker_id == 3


def test_one_more_replica_is_made_only_where_it_relieves_a_queue_if_that_is_asked_for() -> None:
    looking = replace(EAGER, min_relief_s=0.5)
    pool = hot_pool(1, 1, 1)
    pool.loads[1] = WorkerLoad(queue_s=2.0, capacity_blocks=1000)
    pool.loads[2] = WorkerLoad(queue_s=0.2, capacity_blocks=1000)
    assert scan(pool, EAGER).replications, "Algorithm 2 asks for uses alone"
    pool = hot_pool(1, 1, 1)
    assert scan(pool, looking).replications == (), "the holder has nothing to be relieved of"
    pool = hot_pool(1, 1, 1)
    pool.loads[0] = WorkerLoad(queue_s=1.0, capacity_blocks=1000)
    pool.loads[1] = WorkerLoad(queue_s=2.0, capacity_blocks=1000)
    pool.loads[2] = WorkerLoad(queue_s=0.2, capacity_blocks=1000)
    pool.store(1, (0, 1))
    (plan,) = scan(pool, looking).replications
    assert plan.destination_worker_id == 2, "the shortest queue, though the other one lacks less"
    assert plan.score == pytest.approx(20 * 0.8)


def test_hot_paths_that_relieve_nothing_do_not_crowd_out_one_that_does() -> None:
    pool = pool_of(1, 1, 1)
    pool.loads[1] = WorkerLoad(queue_s=10.0, capacity_blocks=1000)
    for number in range(20):
        pool.store(0, (number,))
        pool.use((number,), 1, times=50)
    pool.store(1, (99,))
    pool.use((99,), 1, times=9)
    looking = replace(EAGER, min_relief_s=0.5, max_intra=1)
    assert [plan.block for plan in scan(pool, looking).replications] == [block_at((99,))]


def test_an_inter_degree_copy_comes_from_the_least_loaded_holder_and_is_ranked_by_benefit_per_block() -> None:
    pool = pool_of(1, 1, 2)
    for worker_id in (0, 1):
        pool.store(worker_id, (0, 1))
        pool.store(worker_id, (2, 2, 2, 2))
    pool.loads[0] = WorkerLoad(queue_s=3.0, capacity_blocks=1000)
    pool.miss((0, 1), 2, 2.0)
    pool.miss((2, 2, 2, 2), 2, 4.0)
    first, second = scan(pool, EAGER).replications
    assert [first.block, second.block] == [block_at((2, 2, 2, 2)), block_at((0, 1))]
    assert (first.score, second.score) == (4.0, 2.0)
    assert {first.source_worker_id, second.source_worker_id} == {1}


def test_a_copy_under_way_is_not_planned_again_and_counts_as_a_replica() -> None:
    pool = hot_pool(1, 1, 1)
    settings = ReplicationSettings(theta_intra=6.0, theta_reclaim=1.0, decay=0.999999)
    (first,) = scan(pool, settings).replications
    pool.index.copy_started(first)
    (second,) = scan(pool, settings).replications
    assert second.destination_worker_id == 2
    pool.index.copy_started(second)
    assert scan(pool, settings).replications == ()
    pool.index.copy_ended(first)
    pool.index.copy_ended(second)
    (again,) = scan(pool, settings).replications
    assert replace(again, score=first.score) == first
    pool.index.copy_started(first)
    pool.index.remove_worker(first.destination_worker_id)
    assert len(pool.index.copies) == 0


def cold_pool(*degrees: int) -> Pool:
    """Full workers that all hold (0, 1); worker 0 alone holds (0, 1, 2) and (3,)."""
    pool = pool_of(*degrees, capacity_blocks=2)
    for worker_id in range(len(degrees)):
        pool.store(worker_id, (0, 1))
    pool.store(0, (0, 1, 2))
    pool.store(0, (3,))
    return pool


def test_last_copies_are_reclaimed_last() -> None:
    pool = cold_pool(1, 1, 2)
    settings = ReplicationSettings(grace_s=0.0, pressure_ratio=1.0, max_reclaim=1)
    (plan,) = scan(pool, settings).reclaims
    assert (plan.worker_id, plan.blocks) == (1, (block_at((0, 1)), block_at((0,))))
    pool.evict(1, (0, 1), (0,))
    pool.evict(2, (0, 1), (0,))
    (plan,) = scan(pool, settings).reclaims
    assert plan.worker_id == 0


def test_nothing_is_reclaimed_without_pressure_within_the_grace_period_or_in_use() -> None:
    pool = cold_pool(1, 1)
    settings = ReplicationSettings(grace_s=5.0, pressure_ratio=1.0)
    assert scan(pool, settings, now_s=4.0).reclaims == ()
    assert scan(pool, settings, PoolLoad(pool.loads, in_use=lambda worker_id, block: True), now_s=6.0).reclaims == ()
    assert scan(pool, settings, now_s=6.0).reclaims != ()
    roomy = {worker_id: WorkerLoad(queue_s=0.0, capacity_blocks=100) for worker_id in pool.loads}
    assert scan(pool, settings, PoolLoad(roomy), now_s=6.0).reclaims == ()


def test_what_a_copy_relies_on_is_not_reclaimed() -> None:
    pool = cold_pool(1, 1)
    pool.loads[1] = WorkerLoad(queue_s=0.0, capacity_blocks=2)
    pool.index.copy_started(
        CopyPlan(
            kind=CopyKind.INTRA,
            degree=1,
            block=block_at((0, 1, 2)),
            source_worker_id=0,
            destination_worker_id=1,
            parent=block_at((0, 1)),
            blocks=chain((0, 1, 2), 2),
            missing_blocks=1,
            score=1.0,
        )
    )
    reclaimed = {(plan.worker_id, block) for plan in scan(pool, EAGER).reclaims for block in plan.blocks}
    assert reclaimed == {(0, block_at((3,)))}


def test_thresholds_that_would_undo_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="theta_reclaim is 3"):
        ReplicationSettings(theta_intra=3.0, theta_reclaim=3.0)
    with pytest.raises(ConfigError, match="decay is 1"):
        ReplicationSettings(decay=1.0)


def test_a_worker_that_joins_during_a_scan_does_not_disturb_it() -> None:
    pool = pool_of(*[1] * 3)
    pool.store(0, (0, 1, 2))
    pool.use((0, 1, 2), 1, times=50)
    scan = pool.index.scan(ReplicationSettings(theta_intra=1.0), pool.load, 0.0)
    next(scan)
    pool.index.add_worker(3, 1)
    pool.index.apply(Stored(worker_id=3, epoch=0, sequence=0, parent=None, blocks=chain((0, 1, 2))), 0.0)
    result = None
    while result is None:
        try:
            next(scan)
        except StopIteration as end:
            result = end.value
    assert all(plan.destination_worker_id != 3 for plan in result.replications)
