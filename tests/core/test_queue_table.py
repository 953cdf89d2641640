"""What placements and moves read of all queues at once, against asking and serving each queue by itself."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import queued, request

from vertumnus.core.queue_table import QueueTable
from vertumnus.core.queueing import Discipline, ServiceOrder, WorkerQueue

AGEING = 10.0
SECONDS = st.integers(0, 8).map(float)
NEWCOMER = 1000

WAITING = st.tuples(st.integers(0, 50).map(float), SECONDS, st.integers(-2, 2))
"""(arrival, service, priority)."""


@dataclass
class Pool:
    """Some queues and their table; one column per queue."""

    order: ServiceOrder
    queues: list[WorkerQueue]
    table: QueueTable

    def update(self, column: int) -> None:
        self.table.update(column, self.queues[column], None, 0.0)


@st.composite
def pools(draw) -> Pool:
    order = ServiceOrder(draw(st.sampled_from(Discipline)), AGEING)
    queues = []
    for waiting in draw(st.lists(st.lists(WAITING, max_size=10), min_size=1, max_size=4)):
        queue = WorkerQueue(order)
        for number, (arrival_s, service_s, priority) in enumerate(waiting):
            queue.push(queued(number, arrival_s=arrival_s, service_s=service_s, priority=priority))
        queues.append(queue)
    pool = Pool(order, queues, QueueTable(order, len(queues)))
    for column in range(len(queues)):
        pool.update(column)
    return pool


def served(queue: WorkerQueue) -> list[int]:
    """The ids in order of service; empties the queue."""
    ids = []
    while (item := queue.pop_ready()) is not None:
        ids.append(item.request.request_id)
    return ids


@given(pools(), st.integers(0, 60).map(float), st.integers(-2, 2), st.data())
def test_the_predicted_wait_is_the_work_that_would_really_be_served_before(pool, arrival_s, priority, data):
    num_queues = len(pool.queues)
    services_s = data.draw(st.lists(SECONDS, min_size=num_queues, max_size=num_queues))
    ahead_s, delay_s = pool.table.around(
        request(NEWCOMER, arrival_s=arrival_s, priority=priority), np.array(services_s)
    )
    for column, (queue, service_s) in enumerate(zip(pool.queues, services_s, strict=True)):
        waiting = {item.request.request_id: item for item in queue.items()}
        queue.push(queued(NEWCOMER, arrival_s=arrival_s, service_s=service_s, priority=priority))
        ids = served(queue)
        position = ids.index(NEWCOMER)
        assert ahead_s[column] == pytest.approx(sum(waiting[each].service_s for each in ids[:position]))
        assert delay_s[column] == (len(ids) - position - 1) * service_s
        priorities = [priority if each == NEWCOMER else waiting[each].request.priority for each in ids]
        assert priorities == sorted(priorities), "a smaller priority goes first, whatever the discipline"


@given(pools(), st.integers(0, 60).map(float), SECONDS, st.tuples(st.integers(0, 50).map(float), SECONDS))
def test_a_chunk_to_come_is_waited_for_or_waits_as_it_will_queue(pool, arrival_s, service_s, cut):
    """Of the request that is cut, and of the newcomer, the one that goes first delays the other."""
    cut_arrival_s, later_s = cut
    newcomer, begun = request(NEWCOMER, arrival_s=arrival_s), request(NEWCOMER + 1, arrival_s=cut_arrival_s)
    without_s, delay_without_s = pool.table.around(newcomer, np.full(len(pool.queues), service_s))
    pool.table.update(0, pool.queues[0], begun, later_s)
    ahead_s, delay_s = pool.table.around(newcomer, np.full(len(pool.queues), service_s))
    goes_on_first = pool.order.key(begun, later_s) <= pool.order.key(newcomer, service_s)
    assert ahead_s[0] == pytest.approx(without_s[0] + (later_s if goes_on_first else 0.0))
    assert delay_s[0] == delay_without_s[0] + (service_s if later_s and not goes_on_first else 0.0)
    assert ahead_s[1:].tolist() == without_s[1:].tolist()
    assert delay_s[1:].tolist() == delay_without_s[1:].tolist()


@given(pools(), st.integers(0, 60).map(float))
def test_what_is_left_after_some_seconds_is_what_has_not_been_served_in_full(pool, after_s):
    num_left = pool.table.num_left(np.full(len(pool.queues), after_s))
    for queue, num in zip(pool.queues, num_left, strict=True):
        ends_s = np.cumsum([item.service_s for item in queue.items()])
        assert num == sum(end_s > after_s for end_s in ends_s)


@given(pools(), st.integers(0, 9).map(float), st.data())
def test_what_leaving_saves_is_the_sum_of_all_waits_that_end_sooner(pool, until_free_s, data):
    for column, queue in enumerate(pool.queues):
        for item in queue.items():
            item.started, item.is_held = data.draw(st.booleans()), data.draw(st.booleans())
            item.num_copies_awaited = data.draw(st.integers(0, 1))
        pool.update(column)
    saved_s = pool.table.saved_s(np.full(len(pool.queues), until_free_s))
    num_movable = 0
    for column, queue in enumerate(pool.queues):
        services_s = [item.service_s for item in queue.items()]
        for position, item in enumerate(queue.items()):
            if item.started or item.is_held or item.num_copies_awaited:
                assert saved_s[position, column] == -np.inf
                continue
            num_movable += 1
            ends_s = until_free_s + np.cumsum(services_s)
            without_s = until_free_s + np.cumsum(services_s[:position] + services_s[position + 1 :])
            assert saved_s[position, column] == pytest.approx(ends_s.sum() - without_s.sum())
        assert (saved_s[len(services_s) :, column] == -np.inf).all()
    assert pool.table.num_movable == num_movable


@given(pools(), st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["push", "pop", "clear"])), max_size=60))
def test_a_column_follows_its_queue_as_it_grows_and_shrinks(pool, operations):
    for number, (column, operation) in enumerate(operations):
        queue = pool.queues[column % len(pool.queues)]
        if operation == "push":
            queue.push(queued(NEWCOMER + number, arrival_s=float(number), service_s=number % 7 / 3))
        elif operation == "pop":
            queue.pop_ready()
        else:
            queue.remove_not_started()
        pool.update(column % len(pool.queues))
    fresh = Pool(pool.order, pool.queues, QueueTable(pool.order, len(pool.queues)))
    for column in range(len(pool.queues)):
        fresh.update(column)
    assert pool.table.equals(fresh.table)


def test_a_table_that_was_not_told_of_a_change_is_found_out():
    order = ServiceOrder(Discipline.SHORTEST, AGEING)
    queue = WorkerQueue(order)
    stale, fresh = QueueTable(order, 1), QueueTable(order, 1)
    queue.push(queued(0))
    fresh.update(0, queue, None, 0.0)
    assert not stale.equals(fresh)
    stale.update(0, queue, None, 0.0)
    assert stale.equals(fresh)
    queue[0].is_held = True
    fresh.update(0, queue, None, 0.0)
    assert not stale.equals(fresh)
