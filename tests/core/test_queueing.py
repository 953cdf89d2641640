"""Laws of a worker's queue: order of service, the ageing bound, and its sums against naive recomputation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import queued

from vertumnus.core.queueing import Discipline, ServiceOrder, WorkerQueue

AGEING = 10.0
ARRIVALS = st.lists(st.tuples(st.integers(0, 50).map(float), st.integers(0, 8).map(float)), max_size=12)
DISCIPLINES = st.sampled_from(Discipline)


def queue_of(discipline: Discipline, arrivals: list[tuple[float, float]], ageing: float = AGEING) -> WorkerQueue:
    """A queue of these (arrival, service) requests, pushed in order of arrival, with their positions as ids."""
    queue = WorkerQueue(ServiceOrder(discipline, ageing))
    for request_id, (arrival_s, service_s) in enumerate(sorted(arrivals)):
        queue.push(queued(request_id, arrival_s=arrival_s, service_s=service_s))
    return queue


def drain(queue: WorkerQueue) -> list[int]:
    """The ids in order of service."""
    served = []
    while (item := queue.pop_ready()) is not None:
        served.append(item.request.request_id)
    return served


@given(ARRIVALS)
def test_fifo_serves_in_order_of_arrival(arrivals):
    assert drain(queue_of(Discipline.FIFO, arrivals)) == list(range(len(arrivals)))


@given(ARRIVALS)
def test_nobody_is_overtaken_by_a_request_that_arrives_later_than_the_ageing_bound(arrivals):
    by_id = sorted(arrivals)
    served = drain(queue_of(Discipline.SHORTEST, arrivals))
    assert sorted(served) == list(range(len(arrivals)))
    for position, later in enumerate(served):
        for earlier in served[:position]:
            (arrival_s, service_s), (other_s, _) = by_id[later], by_id[earlier]
            assert other_s <= arrival_s + AGEING * service_s


@given(st.lists(st.integers(0, 8).map(float), max_size=12))
def test_shortest_goes_first_among_requests_of_one_instant(services_s):
    queue = queue_of(Discipline.SHORTEST, [(0.0, service_s) for service_s in services_s])
    ordered = sorted(services_s)
    assert [ordered[request_id] for request_id in drain(queue)] == ordered


def test_without_ageing_weight_shortest_is_fifo():
    assert drain(queue_of(Discipline.SHORTEST, [(0.0, 9.0), (1.0, 1.0)], ageing=0.0)) == [0, 1]


@given(DISCIPLINES, st.lists(st.tuples(st.sampled_from(["push", "pop", "remove", "back", "clear"]), st.integers(0, 9))))
def test_the_queued_seconds_are_the_sum_of_its_items_after_any_operations(discipline, operations):
    queue = WorkerQueue(ServiceOrder(discipline, AGEING))
    for request_id, (operation, number) in enumerate(operations):
        before = [item.request.request_id for item in queue.items()]
        if operation == "push":
            queue.push(queued(request_id, arrival_s=float(request_id), service_s=0.1 * number))
        elif operation == "pop":
            item = queue.pop_ready()
            assert (item.request.request_id if item else None) == (before[0] if before else None)
        elif operation == "remove":
            item = queue.remove(number)
            assert (item is not None) == (number in before)
        elif operation == "back":
            queue.push_back(queued(request_id, arrival_s=0.0, service_s=0.1 * number, started=True))
        else:
            taken = queue.remove_not_started()
            assert not any(item.started for item in taken)
            assert all(item.started for item in queue.items())
        services_s = [item.service_s for item in queue.items()]
        assert queue.service_s == pytest.approx(sum(services_s))
        assert len(queue) == len(services_s)
    drain(queue)
    assert queue.service_s == 0.0, "an empty queue holds exactly nothing"


def test_a_request_whose_chunk_has_run_goes_on_before_all_others_under_fifo():
    queue = queue_of(Discipline.FIFO, [(0.0, 1.0), (1.0, 1.0)])
    queue.push_back(queued(7, arrival_s=5.0, service_s=3.0, started=True))
    assert drain(queue) == [7, 0, 1]


def test_a_request_whose_chunk_has_run_lets_those_of_a_smaller_priority_pass():
    queue = WorkerQueue(ServiceOrder(Discipline.FIFO, AGEING))
    queue.push(queued(0))
    queue.push(queued(1, priority=-1))
    queue.push_back(queued(2, started=True))
    assert drain(queue) == [1, 2, 0]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=10))
def test_where_there_is_no_room_only_what_has_begun_goes_on(waiting):
    """And one that finds no room is not passed by others that would."""
    queue = WorkerQueue(ServiceOrder(Discipline.SHORTEST, AGEING))
    for number, (started, _) in enumerate(waiting):
        queue.push(queued(number, arrival_s=float(number), started=started))
    served = []
    while (item := queue.pop_ready(lambda request: waiting[request.request_id][1])) is not None:
        served.append(item.request.request_id)
    blocked = next((number for number, (started, fits) in enumerate(waiting) if not (started or fits)), len(waiting))
    assert served == [number for number, (started, _) in enumerate(waiting) if started or number < blocked]


def test_a_request_that_awaits_a_copy_lets_others_pass_and_keeps_its_place():
    queue = WorkerQueue(ServiceOrder(Discipline.FIFO, AGEING))
    waiting = queued(0, num_copies_awaited=1)
    queue.push(waiting)
    queue.push(queued(1))
    assert queue.pop_ready().request.request_id == 1
    assert queue.pop_ready() is None
    waiting.num_copies_awaited = 0
    assert queue.pop_ready() is waiting
