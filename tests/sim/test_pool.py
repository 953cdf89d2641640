"""The simulated pool with the real control plane: laws of any run, then its physics on cases computed by hand."""

from hypothesis import Phase, given, settings

from tests.strategies import Scenario, scenarios

@settings(max_examples=1500, report_multiple_bugs=False, phases=(Phase.generate, Phase.shrink))
@given(scenarios())
def test_every_request_ends_exactly_once_and_nothing_is_left(scenario: Scenario):
    pool = scenario.run()
    plane = pool.control_plane
    ended = [*pool.records.request_id, *(request_id for _, request_id, _ in pool.rejected)]
    assert sorted(ended) == [request.request_id for request in scenario.requests]
    plane.check_invariants()
    assert plane.num_waiting == 0
    assert all(worker.num_outstanding == 0 for worker in plane.workers.all())
    serving = {w.worker_id for w in plane.workers.all()}
    assert serving == set(pool.stores), "a worker was not closed, or closed too soon"
    for worker_id, store in pool.stores.items():
        held = set(store.blocks())
        assert plane.index.resident_blocks(worker_id) == len(held)
        assert all(plane.index.holds(worker_id, block) for block in held)
        assert not any(store.in_use(block) for block in held)
