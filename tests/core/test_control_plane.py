"""The control plane by itself: single events in, actions out. Its laws over whole runs are in tests/sim/test_pool.py.

`Driver` answers for the hardware: snapshots are reported as soon as a worker opens unless a test holds them back.
"""

from typing import TypeVar

import pytest
from tests.builders import BLOCK_TOKENS, control_plane, request

from vertumnus.core.composition import Composition
from vertumnus.core.controller import PoolState, Proposal, Reason, Window
from vertumnus.core.events import (
    Action,
    ActivateGroups,
    CloseWorker,
    CompositionRequested,
    ControllerPaused,
    CopyBlocks,
    CopyEnded,
    DropRequest,
    Event,
    OpenWorker,
    RankConfirmed,
    RankFailed,
    RankRecovered,
    RequestArrived,
    RequestCancelled,
    RequestPlaced,
    RequestRejected,
    SendSnapshot,
    StartStep,
    StepFinished,
    StepStarted,
    TimerFired,
)
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.index.reports import Removed, Snapshot, Stored
from vertumnus.core.moves import MoveSettings
from vertumnus.core.pulls import PullSettings
from vertumnus.core.queueing import Discipline
from vertumnus.core.reconfiguration import ReconfigurationSettings
from vertumnus.core.settings import ControlPlaneSettings
from vertumnus.core.slices import Slices, finish
from vertumnus.core.workers import WorkerStatus
from vertumnus.errors import ConfigError

A = TypeVar("A")


class Towards:
    """A controller that asks once for one composition."""

    def __init__(self, composition: str) -> None:
        self._targets = [Composition.parse(composition)]

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        return Proposal(self._targets.pop(), (), Reason.BETTER_COMPOSITION, {}) if self._targets else None


class Thinking:
    """A controller that takes two slices more for each answer, and then says the same every time."""

    def __init__(self, composition: str) -> None:
        self.target = Composition.parse(composition)
        self.answered: list[float] = []
        """The ends of the windows that it is through with."""

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        return finish(self.observing(window, state))

    def observing(self, window: Window, state: PoolState) -> Slices[Proposal | None]:
        yield
        yield
        self.answered.append(window.end_s)
        return Proposal(self.target, (), Reason.BETTER_COMPOSITION, {})


class Driver:
    """A control plane and the hardware's part of the conversation."""

    def __init__(self, composition: str = "2x1", *, holds_snapshots: bool = False, **parts) -> None:
        self.plane = control_plane(composition, **({"policy": "least-loaded"} | parts))
        self.holds_snapshots = holds_snapshots
        self.now_s = 0.0
        self.epochs: dict[int, int] = {}
        self.sequences: dict[int, int] = {}
        self.log: list[Action] = []
        self.answer(self.plane.start(0.0))

    def tell(self, event: Event, at_s: float | None = None) -> list[Action]:
        """Hands an event over; returns all actions that follow, snapshots of opened workers included."""
        self.now_s = self.now_s if at_s is None else at_s
        return self.answer(self.plane.handle(event, self.now_s))

    def answer(self, actions: list[Action]) -> list[Action]:
        following = list(actions)
        self.log += actions
        for action in actions:
            if isinstance(action, OpenWorker):
                self.epochs[action.worker_id] = action.epoch
                if not self.holds_snapshots:
                    following += self.snapshot(action.worker_id)
        return following

    def report(self, make, worker_id: int, **content) -> list[Action]:
        sequence = self.sequences.get(worker_id, 0)
        self.sequences[worker_id] = sequence + 1
        return self.tell(make(worker_id=worker_id, epoch=self.epochs[worker_id], sequence=sequence, **content))

    def snapshot(self, worker_id: int, *chains) -> list[Action]:
        return self.report(Snapshot, worker_id, chains=chains)

    def arrive(self, request_id: int, **changes) -> list[Action]:
        return self.tell(RequestArrived(request(request_id, arrival_s=self.now_s, **changes)))

    def finish(self, worker_id: int) -> list[Action]:
        return self.tell(StepFinished(worker_id))


def only(kind: type[A], actions: list[Action]) -> list[A]:
    """The actions of one kind, in order."""
    return [action for action in actions if isinstance(action, kind)]


def placed_at(actions: list[Action]) -> list[tuple[int, int, bool]]:
    """(request, worker, whether redirected) of every placement."""
    return [(each.request_id, each.worker_id, each.is_redirected) for each in only(RequestPlaced, actions)]


def started(actions: list[Action]) -> list[tuple[int, list[int]]]:
    """(worker, its requests) of every step."""
    return [(step.worker_id, [item.request.request_id for item in step.items]) for step in only(StartStep, actions)]


# Placement and reservation


def test_an_idle_worker_starts_what_it_is_given_at_once():
    actions = Driver().arrive(0)
    assert [type(action) for action in actions] == [RequestPlaced, StartStep]
    assert started(actions) == [(0, [0])]


def test_the_work_is_reserved_before_the_next_request_is_placed():
    driver = Driver("4x1")
    assert [placed_at(driver.arrive(number))[0][1] for number in range(4)] == [0, 1, 2, 3]


def test_what_is_left_of_a_running_step_counts_and_time_wears_it_down():
    driver = Driver("2x1", policy="vertumnus")
    driver.arrive(0, input_tokens=1000)
    driver.now_s = 4.0
    terms = only(RequestPlaced, driver.arrive(1))[0].placement.terms
    assert terms["wait"].tolist() == pytest.approx([11.0 - 4.0, 0.0])


def test_a_finished_step_leaves_no_reservation_and_starts_the_next_request():
    driver = Driver("1x1")
    driver.arrive(0)
    driver.arrive(1)
    assert started(driver.finish(0)) == [(0, [1])]
    assert driver.finish(0) == []
    worker = driver.plane.workers[0]
    assert (worker.num_outstanding, worker.outstanding_s(driver.now_s)) == (0, 0.0)


def test_a_report_of_stored_blocks_makes_the_next_placement_count_on_them():
    driver = Driver("2x1", policy="vertumnus")
    prompt = request(0, prompt="same")
    driver.report(Stored, 1, parent=None, blocks=tuple(prompt.blocks))
    placement = only(RequestPlaced, driver.arrive(7, prompt="same"))[0].placement
    assert placement.worker_id == 1
    step = only(StartStep, driver.log)[-1]
    assert step.items[0].start_tokens == 90, "whole blocks, and at least one token is computed"


def test_removed_blocks_are_no_longer_counted_on():
    driver = Driver("1x1")
    blocks = tuple(request(0, prompt="same").blocks)
    driver.report(Stored, 0, parent=None, blocks=blocks)
    driver.report(Removed, 0, blocks=blocks[4:])
    assert only(StartStep, driver.arrive(7, prompt="same"))[0].items[0].start_tokens == 4 * BLOCK_TOKENS


def test_a_gap_in_the_reports_asks_for_a_snapshot():
    driver = Driver("1x1")
    driver.sequences[0] += 1
    assert driver.report(Stored, 0, parent=None, blocks=tuple(request(0).blocks)) == [SendSnapshot(0)]


def test_the_predicted_end_of_a_step_follows_what_the_cache_really_held():
    driver = Driver("1x1")
    driver.arrive(0)
    assert driver.plane.workers[0].outstanding_s(0.0) == pytest.approx(2.0)
    driver.tell(StepStarted(0, (90,)))
    assert driver.plane.workers[0].outstanding_s(0.0) == pytest.approx(1 + 0.1 + 0.09)


def test_a_prompt_longer_than_the_model_takes_is_rejected_with_the_reason():
    driver = Driver("1x1", max_sequence_tokens=100)
    assert driver.arrive(0, input_tokens=100) != []
    (rejected,) = driver.arrive(1, input_tokens=101)
    assert isinstance(rejected, RequestRejected)
    assert "101" in rejected.reason
    assert "100" in rejected.reason


def test_a_cancelled_request_that_has_not_started_is_never_served():
    driver = Driver("1x1")
    for number in range(3):
        driver.arrive(number)
    assert driver.tell(RequestCancelled(1)) == []
    assert started(driver.finish(0)) == [(0, [2])]


def test_cancelling_an_unknown_or_ended_request_changes_nothing():
    driver = Driver("1x1")
    driver.arrive(0)
    driver.finish(0)
    assert driver.tell(RequestCancelled(0)) == driver.tell(RequestCancelled(99)) == []


def test_a_cancelled_request_that_waits_for_the_pool_is_never_placed():
    driver = Driver("1x1", holds_snapshots=True)
    driver.arrive(0)
    driver.arrive(1)
    driver.tell(RequestCancelled(0))
    assert placed_at(driver.snapshot(0)) == [(1, 0, False)]


def test_a_cancelled_request_between_two_chunks_is_dropped_and_the_pool_is_told():
    driver = Driver("1x1", step_tokens=100)
    driver.arrive(0, input_tokens=250)
    driver.arrive(1, input_tokens=50)
    assert driver.tell(RequestCancelled(0)) == []  # a step that runs is not interrupted
    actions = driver.finish(0)
    assert only(DropRequest, actions) == [DropRequest(0, 0)]
    assert started(actions) == [(0, [1])]
    driver.finish(0)
    driver.plane.check_invariants()
    assert driver.plane.workers[0].num_outstanding == 0


def test_a_worker_that_cannot_hold_a_request_is_no_candidate_for_it():
    driver = Driver("2x1,1x2", blocks_per_rank=10)
    tokens = 15 * BLOCK_TOKENS
    assert placed_at(driver.arrive(0, input_tokens=tokens)) == [(0, 0, False)]
    assert driver.plane.workers[0].degree == 2
    (placed,) = only(RequestPlaced, driver.arrive(1, input_tokens=tokens))
    assert placed.placement.worker_ids.tolist() == [0]


def test_a_request_that_no_worker_could_hold_is_rejected_with_what_is_missing():
    driver = Driver("2x1,1x2", blocks_per_rank=10)
    (rejected,) = driver.arrive(0, input_tokens=21 * BLOCK_TOKENS)
    assert "21 KV blocks" in rejected.reason
    assert "20" in rejected.reason


class Asks:
    """A controller that only remembers which compositions were open to it."""

    def __init__(self, *compositions: str) -> None:
        self.compositions = [Composition.parse(text) for text in compositions]
        self.admitted: list[bool] = []

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        self.admitted = [state.admits(each) for each in self.compositions]
        return None


def test_a_pool_that_holds_a_request_stays_able_to_and_a_rejected_one_asks_for_nothing():
    asks = Asks("4x1", "2x2", "1x4")
    driver = Driver("2x2", blocks_per_rank=10, controller=asks)
    assert only(RequestRejected, driver.arrive(0, input_tokens=500 * BLOCK_TOKENS))
    driver.arrive(1, input_tokens=5 * BLOCK_TOKENS)
    window_ends(driver)
    assert asks.admitted == [False, True, True]


# Steps


def test_a_step_packs_requests_up_to_its_budget_and_cuts_the_last_one():
    driver = Driver("1x1", step_tokens=100)
    driver.arrive(0, input_tokens=50)
    driver.arrive(1, input_tokens=70)
    driver.arrive(2, input_tokens=130)
    (step,) = only(StartStep, driver.finish(0))
    assert [(item.request.request_id, item.start_tokens, item.end_tokens) for item in step.items] == [
        (1, 0, 70),
        (2, 0, 30),
    ]
    (step,) = only(StartStep, driver.finish(0))
    assert [(item.start_tokens, item.end_tokens, item.is_first) for item in step.items] == [(30, 130, False)]


def test_what_cannot_run_yet_is_spared_no_step():
    """2 would make 1 wait for 1.5 s and spare itself 1 s; those behind it await copies, and have their own step."""
    driver = Driver("1x1", step_tokens=1000)
    driver.arrive(0, input_tokens=50)
    driver.arrive(1, input_tokens=50)
    driver.arrive(2, input_tokens=150)
    driver.arrive(3, input_tokens=900)
    driver.arrive(4, input_tokens=900)
    for item in driver.plane.workers.get(0).queue.items()[2:]:
        item.num_copies_awaited = 1
    assert started(driver.finish(0)) == [(0, [1])]


def test_requests_are_packed_as_long_as_the_steps_spared_outweigh_the_waiting_for_each_other():
    driver = Driver("1x1", step_tokens=1000)  # a step costs 1 s, a token 0.01 s
    for number, tokens in enumerate((50, 60, 60, 60, 60, 200)):
        driver.arrive(number, input_tokens=tokens)
    # Waiting of 0.6, 1.2 and 1.8 s spares 4, 3 and 2 s; that of 4 * 2 s for the last would spare one.
    assert started(driver.finish(0)) == [(0, [1, 2, 3, 4])]
    assert started(driver.finish(0)) == [(0, [5])]


@pytest.mark.parametrize(
    ("short", "long"),
    [
        pytest.param(20, 300, id="1.8 s of waiting would spare 1 s"),
        pytest.param(150, 390, id="the rest takes two steps with the first 50 tokens as without"),
    ],
)
def test_a_long_prompt_does_not_fill_up_the_step_of_a_short_one(short, long):
    driver = Driver("1x1", step_tokens=200)
    driver.arrive(0, input_tokens=50)
    driver.arrive(1, input_tokens=short)
    driver.arrive(2, input_tokens=long)
    assert started(driver.finish(0)) == [(0, [1])]
    assert started(driver.finish(0)) == [(0, [2])]


def test_under_shortest_first_a_short_request_goes_before_a_long_one_that_came_earlier():
    driver = Driver("1x1", discipline=Discipline.SHORTEST)
    driver.arrive(0)
    driver.arrive(1, input_tokens=1000)
    driver.arrive(2, input_tokens=10)
    assert started(driver.finish(0)) == [(0, [2])]


def test_the_delay_put_on_longer_queued_work_is_part_of_the_cost():
    driver = Driver("2x1", policy="paper", discipline=Discipline.SHORTEST)
    for number in range(3):
        driver.arrive(number, input_tokens=1000)
    placement = only(RequestPlaced, driver.arrive(3, input_tokens=10))[0].placement
    # It would overtake request 2, which waits at worker 0: nothing to wait for there but the step, one to delay.
    assert placement.terms["delay"].tolist() == pytest.approx([1.1, 0.0])
    assert placement.terms["wait"].tolist() == pytest.approx([11.0, 11.0])


# Moving


def worker_runs_dry(**parts):
    """Worker 1 has a running and a waiting request when worker 0 is done, earlier than predicted."""
    driver = Driver("2x1", **parts)
    driver.arrive(0, input_tokens=1000)
    driver.arrive(1, input_tokens=500)
    driver.arrive(2, input_tokens=100)
    assert {w.worker_id: w.num_outstanding for w in driver.plane.workers.all()} == {0: 1, 1: 2}
    actions = driver.finish(0)
    driver.plane.check_invariants()
    return driver, actions


def test_a_worker_that_runs_dry_takes_over_what_waits_elsewhere():
    driver, actions = worker_runs_dry(moves=MoveSettings())
    assert placed_at(actions) == [(2, 0, True)]
    assert started(actions) == [(0, [2])]
    driver.finish(1)
    driver.finish(0)
    driver.plane.check_invariants()
    assert all(worker.num_outstanding == worker.queued_tokens == 0 for worker in driver.plane.workers.all())


def test_what_was_placed_stays_where_moving_is_not_wanted_or_saves_too_little():
    assert worker_runs_dry()[1] == []
    assert worker_runs_dry(moves=MoveSettings(min_gain_s=60.0))[1] == []


def test_a_worker_without_room_for_a_request_does_not_take_it_over():
    driver = Driver("1x1,1x2", moves=MoveSettings(), blocks_per_rank=10)
    driver.arrive(0, input_tokens=15 * BLOCK_TOKENS)
    driver.arrive(1, input_tokens=15 * BLOCK_TOKENS)
    driver.arrive(2)
    assert placed_at(driver.finish(1)) == []


# Waiting for a worker


def test_the_further_chunks_of_a_running_request_are_waited_for_or_delayed():
    driver = Driver("2x1", discipline=Discipline.SHORTEST, step_tokens=100, policy="min-ttft")
    driver.arrive(0, input_tokens=500)
    running = driver.plane.workers[0]
    assert running.later_s > 0
    step_s = running.running_end_s
    (longer,) = only(RequestPlaced, driver.arrive(1, input_tokens=900))
    assert longer.placement.terms["wait"][0] == pytest.approx(running.outstanding_s(0.0))
    assert longer.placement.terms["delay"][0] == 0.0
    (shorter,) = only(RequestPlaced, driver.arrive(2, input_tokens=20))
    assert shorter.placement.terms["wait"][0] == pytest.approx(step_s)
    assert shorter.placement.terms["delay"][0] == pytest.approx(shorter.placement.terms["service"][0])


def test_a_worker_takes_requests_only_once_its_cache_is_known():
    driver = Driver("2x1", holds_snapshots=True)
    assert driver.arrive(0) == []
    assert driver.plane.num_waiting == 1
    assert placed_at(driver.snapshot(1)) == [(0, 1, False)]
    assert driver.plane.num_waiting == 0


# Splits and merges


def window_ends(driver: Driver) -> list[Action]:
    """Fires the timer that ends the current window."""
    return driver.tell(TimerFired(), driver.plane.next_timer_s())


def test_a_controller_that_takes_its_time_is_asked_to_go_on_at_once_and_answers_in_the_end():
    thinking = Thinking("1x2")
    driver = Driver("2x1", controller=thinking)
    assert only(ActivateGroups, window_ends(driver)) == []
    window_end_s = driver.now_s
    assert (driver.plane.next_timer_s(), driver.plane.last_window) == (window_end_s, None)
    driver.arrive(0)  # other turns
    driver.finish(0)
    assert only(ActivateGroups, driver.tell(TimerFired())) == []
    assert driver.plane.target is None
    assert only(ActivateGroups, driver.tell(TimerFired()))
    assert thinking.answered == [window_end_s]
    assert driver.plane.last_window.end_s == window_end_s
    assert driver.plane.next_timer_s() > window_end_s
    driver.plane.check_invariants()


def test_what_a_controller_thinks_of_counts_for_nothing_once_an_operator_has_spoken():
    driver = Driver("2x1", controller=Thinking("1x2"))
    window_ends(driver)
    driver.tell(ControllerPaused(True))
    for _ in range(2):
        assert only(ActivateGroups, driver.tell(TimerFired())) == []
    assert (driver.plane.target, driver.plane.last_proposal) == (None, None)
    assert driver.plane.last_window is not None


@pytest.mark.parametrize(
    "events",
    [
        (ControllerPaused(True), ControllerPaused(False)),
        (CompositionRequested(Composition.parse("2x1")), ControllerPaused(False)),
        (RankFailed(3),),
    ],
    ids=["paused and resumed", "an order and resumed", "a rank lost"],
)
def test_an_answer_that_was_thought_over_across_a_change_of_the_pool_counts_for_nothing(events):
    driver = Driver("4x1" if isinstance(events[0], RankFailed) else "2x1", controller=Thinking("1x2"))
    window_ends(driver)
    for event in events:
        driver.tell(event)
    for _ in range(3):
        driver.tell(TimerFired())
    assert (driver.plane.target, driver.plane.last_proposal) == (None, None)
    assert driver.plane.last_window is not None, "it is asked again with the next window alone"


def test_an_answer_that_was_thought_over_while_a_rank_came_back_counts_for_nothing():
    driver = Driver("4x1", controller=Thinking("1x2"), window_s=9.0)
    driver.tell(RankFailed(3))
    driver.tell(TimerFired(), 9.0)
    driver.tell(RankRecovered(3))
    for _ in range(3):
        driver.tell(TimerFired())
    assert driver.plane.last_window is not None
    assert (driver.plane.target, driver.plane.last_proposal) == (None, None)


def test_an_answer_that_was_thought_over_while_an_operation_was_given_up_counts_for_nothing():
    driver = Driver("4x1", controller=Thinking("2x2"), window_s=9.0)
    window_ends(driver)
    for _ in range(2):
        driver.tell(TimerFired())
    assert only(ActivateGroups, driver.log)
    driver.tell(TimerFired(), 18.0)
    assert driver.plane.next_timer_s() == 18.0, "it thinks"
    driver.tell(RankFailed(0))
    assert driver.plane.last_proposal is None
    driver.tell(TimerFired())
    assert driver.plane.target is None


class Faulty(Thinking):
    """A controller that raises after a slice, at the first of its windows."""

    def observing(self, window: Window, state: PoolState) -> Slices[Proposal | None]:
        yield
        if not self.answered:
            self.answered.append(window.end_s)
            raise ZeroDivisionError("no worker")
        return (yield from super().observing(window, state))


def through(driver: Driver) -> None:
    """Ends the current window, and lets the controller think it over."""
    window_ends(driver)
    for _ in range(4):
        driver.tell(TimerFired())


def test_a_controllers_fault_is_raised_where_nobody_outlives_it():
    driver = Driver("2x1", controller=Faulty("1x2"))
    with pytest.raises(ZeroDivisionError):
        through(driver)


def test_a_controllers_fault_costs_its_window_and_it_is_asked_again_with_the_next():
    driver = Driver("2x1", controller=Faulty("1x2"), outlives_controller_faults=True)
    through(driver)
    assert driver.plane.last_window.end_s == driver.now_s
    assert (driver.plane.target, driver.plane.last_proposal) == (None, None)
    assert isinstance(driver.plane.last_controller_fault, ZeroDivisionError)
    assert only(StartStep, driver.arrive(0)), "requests are served"
    driver.finish(0)
    through(driver)
    assert str(driver.plane.composition) == "1x2"


def test_a_target_whose_way_cannot_be_planned_is_given_up(monkeypatch):
    def broken(*parts, **named):
        raise KeyError("a group")

    driver = Driver("2x1", controller=Towards("1x2"), outlives_controller_faults=True)
    with monkeypatch.context() as patched:
        patched.setattr("vertumnus.core.steering.plan_towards", broken)
        window_ends(driver)
    assert isinstance(driver.plane.last_controller_fault, KeyError)
    assert driver.plane.target is None
    driver.tell(CompositionRequested(Composition.parse("1x2")))
    assert only(ActivateGroups, driver.log), "an operator's order is carried out"


def test_a_controller_that_takes_longer_than_a_window_is_through_before_the_next():
    thinking = Thinking("2x1")
    driver = Driver("2x1", controller=thinking)
    window_ends(driver)
    first_s, window_s = driver.now_s, driver.plane.settings.window_s
    driver.tell(TimerFired(), first_s + window_s)
    assert thinking.answered == [first_s]
    driver.tell(TimerFired())
    driver.tell(TimerFired())
    assert thinking.answered == [first_s, first_s + window_s]


def confirm(driver: Driver, activated: ActivateGroups) -> list[Action]:
    """Every rank confirms, in order; returns what follows."""
    ranks = sorted(rank for group in activated.groups for rank in group.ranks)
    return [action for rank in ranks for action in driver.tell(RankConfirmed(rank, activated.epoch))]


def test_a_draining_worker_gets_no_new_request_and_its_queue_goes_elsewhere():
    driver = Driver("1x1,1x2", controller=Towards("3x1"))
    driver.arrive(0)
    driver.arrive(1)
    driver.arrive(2)
    driver.arrive(3)
    assert {w.worker_id: w.num_outstanding for w in driver.plane.workers.all()} == {0: 2, 1: 2}
    pair = driver.plane.workers[0]
    assert pair.degree == 2
    actions = window_ends(driver)
    assert pair.status is WorkerStatus.DRAINING
    assert placed_at(actions) == [(2, 1, True)]
    assert placed_at(driver.arrive(4)) == [(4, 1, False)]
    (activated,) = only(ActivateGroups, driver.finish(0))
    assert [group.degree for group in activated.groups] == [1, 1]


def test_an_idle_worker_switches_at_once_and_each_child_serves_as_soon_as_its_own_rank_confirms():
    driver = Driver("1x2", controller=Towards("2x1"))
    (activated,) = only(ActivateGroups, window_ends(driver))
    assert driver.arrive(0) == [], "everything switches: the request waits for the pool"
    actions = driver.tell(RankConfirmed(1, activated.epoch))
    assert [action.group.ranks for action in only(OpenWorker, actions)] == [range(1, 2)]
    assert placed_at(actions) == [(0, 1, False)]
    assert driver.plane.transitions == []
    actions = driver.tell(RankConfirmed(0, activated.epoch))
    assert only(CloseWorker, actions) == [CloseWorker(0)]
    assert len(driver.plane.transitions) == 1
    assert str(driver.plane.composition) == "2x1"


def test_a_merged_worker_serves_once_all_its_ranks_have_confirmed():
    driver = Driver("2x1", controller=Towards("1x2"))
    (activated,) = only(ActivateGroups, window_ends(driver))
    driver.arrive(0)
    assert driver.tell(RankConfirmed(0, activated.epoch)) == []
    assert driver.tell(RankConfirmed(0, activated.epoch)) == [], "a confirmation counts once"
    assert driver.tell(RankConfirmed(1, activated.epoch - 1)) == [], "one of an older epoch never"
    actions = driver.tell(RankConfirmed(1, activated.epoch))
    assert placed_at(actions) == [(0, 2, False)]
    assert only(CloseWorker, actions) == [CloseWorker(0), CloseWorker(1)]


def test_a_request_that_waited_after_a_drain_is_marked_as_redirected_when_it_is_placed():
    driver = Driver("1x2", controller=Towards("2x1"))
    driver.arrive(0)
    driver.arrive(1)
    window_ends(driver)
    (activated,) = only(ActivateGroups, driver.finish(0))
    assert placed_at(confirm(driver, activated)) == [(1, 1, True)]


def test_a_started_request_finishes_its_chunks_before_its_worker_parks():
    driver = Driver("1x2", controller=Towards("2x1"), step_tokens=40)
    driver.arrive(0, input_tokens=100)
    driver.arrive(1)
    window_ends(driver)
    assert started(driver.finish(0)) == [(0, [0])]
    assert started(driver.finish(0)) == [(0, [0])]
    assert len(only(ActivateGroups, driver.finish(0))) == 1


def merge_between_two_chunks(**parts):
    """Two workers that merge while each is at the first of three chunks of a request, and a third that serves."""
    driver = Driver("4x1", controller=Towards("1x2,2x1"), step_tokens=40, **parts)
    driver.arrive(0, input_tokens=100)
    driver.arrive(1, input_tokens=100)
    driver.arrive(2, input_tokens=1000)
    driver.arrive(3, input_tokens=1000)
    actions = window_ends(driver)
    return driver, actions


def test_a_request_between_two_chunks_goes_on_at_the_merged_worker():
    driver, _ = merge_between_two_chunks()
    prompt = request(0, input_tokens=100)
    driver.report(Stored, 0, parent=None, blocks=tuple(prompt.blocks[:4]))
    assert only(DropRequest, driver.finish(0)) == [DropRequest(0, 0)]
    actions = driver.finish(1)
    assert only(DropRequest, actions) == [DropRequest(1, 1)]
    (activated,) = only(ActivateGroups, actions)
    assert driver.plane.num_waiting == 2
    driver.plane.check_invariants()
    driver.holds_snapshots = True
    opened = only(OpenWorker, confirm(driver, activated))[0].worker_id
    actions = driver.snapshot(opened, (None, tuple(prompt.blocks[:4])))
    assert placed_at(actions) == [(0, opened, True), (1, opened, True)]
    (step,) = only(StartStep, actions)
    assert [(item.start_tokens, item.is_first) for item in step.items] == [(40, True)]
    assert driver.plane.num_waiting == 0
    driver.plane.check_invariants()


def test_a_request_between_two_chunks_that_is_cancelled_does_not_come_back():
    driver, _ = merge_between_two_chunks()
    driver.finish(0)
    assert driver.tell(RequestCancelled(0)) == []
    (activated,) = only(ActivateGroups, driver.finish(1))
    assert [request_id for request_id, *_ in placed_at(confirm(driver, activated))] == [1]


def test_a_request_between_two_chunks_is_placed_anew_when_its_merge_is_given_up():
    driver, _ = merge_between_two_chunks()
    driver.finish(0)
    actions = driver.tell(RankFailed(1))
    assert {request_id for request_id, *_ in placed_at(actions)} == {0, 1}
    driver.plane.check_invariants()


def test_a_drain_that_takes_too_long_gives_the_worker_back():
    driver = Driver(
        "1x1,1x2", controller=Towards("3x1"), reconfiguration=ReconfigurationSettings(drain_timeout_s=5.0), window_s=20
    )
    driver.arrive(0)
    driver.arrive(1)
    window_ends(driver)
    assert [w.status for w in driver.plane.workers.all()].count(WorkerStatus.DRAINING) == 1
    driver.tell(TimerFired(), driver.plane.next_timer_s())
    assert driver.now_s == 25.0
    assert driver.plane.transitions == []


def split_through_a_prompt():
    """A pool whose worker was split: child 1 has the first six blocks of the prompt, child 2 the others."""
    pull = PullSettings(s_per_token=0.0001, latency_s=0.0)
    driver = Driver("1x2", controller=Towards("2x1"), pull=pull, holds_snapshots=True)
    prompt = request(0, prompt="same", input_tokens=105)
    driver.snapshot(0, (None, tuple(prompt.blocks)))
    (activated,) = only(ActivateGroups, window_ends(driver))
    confirm(driver, activated)
    driver.snapshot(1, (None, tuple(prompt.blocks[:6])))
    driver.snapshot(2, (prompt.blocks[5], tuple(prompt.blocks[6:])))
    return driver, prompt


def test_what_a_split_leaves_at_the_other_child_is_fetched_on_first_use():
    driver, _ = split_through_a_prompt()
    actions = driver.arrive(7, prompt="same", input_tokens=105)
    copies = only(CopyBlocks, actions)
    (placed,) = placed_at(actions)
    assert {copy.destination_worker_id for copy in copies} == {placed[1]}
    assert started(actions) == [], "it is served once the copy has ended"
    for copy in copies:
        actions = driver.tell(CopyEnded(copy.copy_id, True))
    assert started(actions) == [(placed[1], [7])]


def test_a_pending_block_that_was_computed_meanwhile_is_pending_no_more():
    driver, prompt = split_through_a_prompt()
    lacking = {1: prompt.blocks[6:], 2: prompt.blocks[:6]}
    (heir,) = list(driver.plane._pending.workers())
    missing = lacking[heir]
    parent = prompt.blocks[5] if heir == 1 else None
    driver.report(Stored, heir, parent=parent, blocks=tuple(missing))
    assert not driver.plane._pending.of(heir)


def test_a_failed_copy_holds_nobody_up():
    pull = PullSettings(s_per_token=0.0, latency_s=0.0, from_any_worker=True)
    driver = Driver("2x1", pull=pull)
    prompt = request(0, prompt="same")
    driver.report(Stored, 0, parent=None, blocks=tuple(prompt.blocks))
    driver.arrive(1)
    actions = driver.arrive(7, prompt="same")
    (copy,) = only(CopyBlocks, actions)
    assert (copy.source_worker_id, copy.destination_worker_id) == (0, 1)
    assert started(driver.tell(CopyEnded(copy.copy_id, False))) == [(1, [7])]
    assert driver.tell(CopyEnded(copy.copy_id, False)) == [], "an end that is told twice counts once"


def test_copies_of_the_same_blocks_are_spread_over_the_nodes_that_hold_them():
    pull = PullSettings(s_per_token=0.0, latency_s=0.0, from_any_worker=True)
    driver = Driver("6x1", node_gpus=2, pull=pull)
    prompt = request(0, prompt="same")
    for holder in (0, 1, 2):
        driver.report(Stored, holder, parent=None, blocks=tuple(prompt.blocks))
    for number in range(4):
        driver.arrive(number)  # workers 0 to 3 are busy

    def copied(request_id: int) -> CopyBlocks:
        (copy,) = only(CopyBlocks, driver.arrive(request_id, prompt="same"))
        return copy

    first, second = copied(7), copied(8)
    assert (first.source_worker_id, first.destination_worker_id) == (0, 4)
    assert (second.source_worker_id, second.destination_worker_id) == (2, 5), "node 0 sends already"
    driver.tell(CopyEnded(first.copy_id, True))
    driver.tell(CopyEnded(second.copy_id, True))
    driver.tell(StepFinished(3))
    third = copied(9)
    assert (third.source_worker_id, third.destination_worker_id) == (2, 3), "the own node's links come first"


# Failures


def test_a_failed_rank_sends_running_and_queued_requests_elsewhere():
    driver = Driver("2x1")
    for number in range(4):
        driver.arrive(number)
    actions = driver.tell(RankFailed(0))
    assert only(CloseWorker, actions) == [CloseWorker(0)]
    assert [(worker_id, is_redirected) for _, worker_id, is_redirected in placed_at(actions)] == [(1, True)] * 2
    assert sorted(request_id for request_id, _, _ in placed_at(actions)) == [0, 2]


def test_the_surviving_rank_of_a_failed_worker_serves_under_a_new_epoch():
    driver = Driver("1x2")
    driver.arrive(0)
    (activated,) = only(ActivateGroups, driver.tell(RankFailed(0)))
    assert [group.ranks for group in activated.groups] == [range(1, 2)]
    assert activated.epoch > 0
    assert placed_at(confirm(driver, activated)) == [(0, 1, True)]


def test_a_recovered_rank_serves_again_and_takes_what_waited():
    driver = Driver("1x1")
    driver.arrive(0)
    driver.tell(RankFailed(0))
    assert driver.plane.num_waiting == 1
    (activated,) = only(ActivateGroups, driver.tell(RankRecovered(0)))
    assert placed_at(confirm(driver, activated)) == [(0, 1, True)]


def test_a_cancelled_request_does_not_start_again_when_its_worker_fails():
    driver = Driver("2x1")
    driver.arrive(0)
    driver.tell(RequestCancelled(0))
    assert placed_at(driver.tell(RankFailed(0))) == []
    driver.plane.check_invariants()


def test_what_a_lost_worker_still_says_of_its_step_is_ignored():
    driver = Driver("2x1")
    driver.arrive(0)
    driver.tell(RankFailed(0))
    assert driver.plane._on_step_started(StepStarted(0, (0,)), 0.0) == []
    assert driver.plane._on_step_finished(StepFinished(0), 0.0) == []
    driver.plane.check_invariants()


def test_windows_end_without_a_controller_s_word_while_every_rank_is_lost():
    driver = Driver("1x1", controller=Towards("1x1"))
    driver.tell(RankFailed(0))
    driver.arrive(0)
    for _ in range(3):
        assert window_ends(driver) == []
    (activated,) = only(ActivateGroups, driver.tell(RankRecovered(0)))
    assert placed_at(confirm(driver, activated)) == [(0, 1, False)]


def test_a_failure_that_is_reported_twice_counts_once():
    driver = Driver("2x1")
    driver.tell(RankFailed(0))
    assert driver.tell(RankFailed(0)) == []


def test_the_index_forgets_a_worker_that_is_gone_and_ignores_its_late_reports():
    driver = Driver("2x1")
    prompt = request(0, prompt="same")
    driver.report(Stored, 0, parent=None, blocks=tuple(prompt.blocks))
    driver.tell(RankFailed(0))
    assert driver.plane.index.num_blocks == 0
    assert driver.report(Stored, 0, parent=None, blocks=tuple(prompt.blocks)) == []
    assert driver.plane.index.num_blocks == 0


# Settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_tokens", 0),
        ("blocks_per_rank", 0),
        ("step_tokens", 9),
        ("ageing", -1.0),
        ("ageing", float("nan")),
        ("ageing", float("inf")),
    ],
)
def test_a_bad_setting_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"{field} is .*accepted"):
        ControlPlaneSettings(**({"block_tokens": 10, "blocks_per_rank": 5} | {field: value}))


# An operator's hand


def test_a_request_that_does_not_fit_beside_those_that_have_begun_waits_for_them():
    """Each takes 10 blocks of 15: begun both, neither could ever end."""
    driver = Driver("1x1", step_tokens=50, blocks_per_rank=15, discipline=Discipline.SHORTEST)
    assert started(driver.arrive(0)) == [(0, [0])]
    driver.arrive(1, input_tokens=40)  # shorter than what is left of the first, and room for it
    driver.arrive(2, input_tokens=100)
    steps = [[0]]
    while steps[-1]:
        steps.append([request_id for _, requests in started(driver.finish(0)) for request_id in requests])
    assert sorted({request_id for step in steps for request_id in step}) == [0, 1, 2]
    first_of_2 = next(number for number, step in enumerate(steps) if 2 in step)
    assert all(0 not in step for step in steps[first_of_2:])


def test_an_operators_composition_is_carried_out_and_pauses_the_controller():
    driver = Driver("2x1", controller=Towards("2x1"))
    actions = driver.tell(CompositionRequested(Composition.parse("1x2")))
    assert [str(group.degree) for each in only(ActivateGroups, actions) for group in each.groups] == ["2"]
    epoch = only(ActivateGroups, actions)[0].epoch
    for rank in (0, 1):
        driver.tell(RankConfirmed(rank, epoch))
    assert str(driver.plane.composition) == "1x2"
    assert driver.plane.is_controller_paused
    driver.tell(TimerFired(), 60.0)
    assert driver.plane.target is None, "the paused controller was not asked"
    driver.tell(ControllerPaused(False))
    actions = driver.tell(TimerFired(), 120.0)
    assert only(ActivateGroups, actions), "resumed, it starts from what it finds"


def test_without_a_controller_an_operator_still_decides():
    driver = Driver("2x1")
    assert driver.plane.next_timer_s() is None
    actions = driver.tell(CompositionRequested(Composition.parse("1x2")), 3.0)
    assert only(ActivateGroups, actions)
    assert str(driver.plane.composition) == "1x2"
    for rank in (0, 1):
        driver.tell(RankConfirmed(rank, only(ActivateGroups, actions)[0].epoch), 3.5)
    assert driver.tell(TimerFired(), 23.0) == []


def test_epochs_go_on_from_the_one_that_the_groups_are_active_under():
    driver = Driver("2x1", epoch=7)
    assert {worker.epoch for worker in driver.plane.workers.all()} == {7}
    assert only(ActivateGroups, driver.tell(CompositionRequested(Composition.parse("1x2"))))[0].epoch == 8


@pytest.mark.parametrize("now_s", [0.0, 1000.0])
def test_scans_and_windows_begin_with_the_pool_whatever_the_clock_says(now_s):
    plane = control_plane("2x1", replication=ReplicationSettings(), scan_interval_s=7.0, window_s=9.0)
    plane.start(now_s)
    assert plane.next_timer_s() == now_s + 7.0
    adaptive = control_plane("2x1", controller=Towards("2x1"), window_s=9.0)
    adaptive.start(now_s)
    assert adaptive.next_timer_s() == now_s + 9.0
