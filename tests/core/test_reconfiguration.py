"""Splits, merges, failures and epochs: the state machine under any order of events."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.core.layout_strategies import DEGREES, layouts

from vertumnus.core.composition import Operation, RankGroup, Topology, operations
from vertumnus.core.reconfiguration import (
    Activate,
    GroupLost,
    GroupReady,
    OperationAborted,
    OperationCommitted,
    OperationRefused,
    OperationStarted,
    Reason,
    Reconfiguration,
    ReconfigurationSettings,
)
from vertumnus.errors import ConfigError

TIMEOUTS = ReconfigurationSettings(drain_timeout_s=30.0, switch_timeout_s=5.0)
NODE = Topology(8)


def pool(*groups, topology=NODE, degrees=DEGREES):
    return Reconfiguration(groups, topology, degrees=degrees, settings=TIMEOUTS)


def confirm(machine, activate, now_s):
    return [effect for rank in activate.ranks for effect in machine.rank_confirmed(rank, activate.epoch, now_s)]


def of_kind(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def test_a_merge_drains_activates_and_commits():
    left, right, parent = RankGroup(0, 2), RankGroup(2, 2), RankGroup(0, 4)
    machine = pool(left, right, RankGroup(4, 4))
    merge = Operation.merge(parent)
    assert machine.start([merge], 10.0, busy={left, right}) == (OperationStarted(merge, 40.0),)
    assert machine.layout == (RankGroup(4, 4),)
    assert machine.planned_layout == (parent, RankGroup(4, 4))
    assert machine.held == {parent}
    assert machine.next_deadline_s == 40.0
    assert machine.source_drained(right, 11.0) == ()
    (activate,) = machine.source_drained(left, 13.0)
    assert activate == Activate(1, (parent,), (0, 1, 2, 3))
    assert machine.next_deadline_s == 18.0
    assert [machine.rank_confirmed(rank, 1, 13.2) for rank in (3, 1, 0)] == [(), (), ()]
    assert machine.layout == (RankGroup(4, 4),)
    assert machine.rank_confirmed(2, 1, 13.5) == (
        GroupReady(parent, 1, merge),
        OperationCommitted(merge, 1, drain_s=3.0, switch_s=0.5),
    )
    assert dict(machine.ready) == {parent: 1, RankGroup(4, 4): 0}
    assert not machine.in_transition
    assert machine.next_deadline_s is None


def test_each_child_of_a_split_is_ready_on_its_own_and_can_be_split_again():
    machine = pool(RankGroup(0, 8))
    split = Operation.split(RankGroup(0, 8))
    _, activate = machine.start([split], 0.0)
    ready = [effect for rank in (4, 5, 6, 7) for effect in machine.rank_confirmed(rank, activate.epoch, 0.1)]
    assert ready == [GroupReady(RankGroup(4, 4), 1, split)]
    started, _ = machine.start([Operation.split(RankGroup(4, 4))], 0.2)
    assert isinstance(started, OperationStarted)
    assert of_kind(confirm(machine, activate, 0.3), OperationCommitted) == [OperationCommitted(split, 1, 0.0, 0.3)]
    machine.check_invariants()


def test_a_bundle_runs_side_by_side_and_refuses_what_cannot_start():
    machine = pool(RankGroup(0, 4), RankGroup(4, 2), RankGroup(6, 2))
    split, merge, late = (
        Operation.split(RankGroup(0, 4)),
        Operation.merge(RankGroup(4, 4)),
        Operation.split(RankGroup(4, 2)),
    )
    effects = machine.start([split, merge, late], 0.0)
    assert of_kind(effects, OperationRefused) == [OperationRefused(late, Reason.SOURCE_NOT_READY)]
    first, second = of_kind(effects, Activate)
    assert (first.epoch, second.epoch) == (1, 2)
    assert of_kind(confirm(machine, second, 1.0), OperationCommitted) == [OperationCommitted(merge, 2, 0.0, 1.0)]
    assert of_kind(confirm(machine, first, 2.0), OperationCommitted) == [OperationCommitted(split, 1, 0.0, 2.0)]


def test_a_drain_that_takes_too_long_gives_the_sources_back_under_their_old_epoch():
    left, right = RankGroup(0, 4), RankGroup(4, 4)
    machine = pool(left, right)
    merge = Operation.merge(RankGroup(0, 8))
    machine.start([merge], 0.0, busy={left})
    assert machine.tick(29.9) == ()
    assert machine.tick(30.0) == (OperationAborted(merge, (left, right), Reason.DRAIN_TIMEOUT),)
    assert dict(machine.ready) == {left: 0, right: 0}
    assert machine.source_drained(left, 31.0) == ()


def test_a_failure_while_draining_gives_back_the_source_that_is_whole():
    left, right = RankGroup(0, 4), RankGroup(4, 4)
    machine = pool(left, right)
    merge = Operation.merge(RankGroup(0, 8))
    machine.start([merge], 0.0, busy={left})
    assert machine.rank_failed(5, 1.0) == (
        OperationAborted(merge, (left,), Reason.RANK_FAILED),
        GroupLost(right, (5,), Reason.RANK_FAILED),
        Activate(1, (RankGroup(4, 1), RankGroup(6, 2)), (4, 6, 7)),
    )


def test_a_failure_while_switching_never_mixes_geometries():
    machine = pool(RankGroup(0, 4), RankGroup(4, 4))
    merge = Operation.merge(RankGroup(0, 8))
    _, activate = machine.start([merge], 0.0)
    for rank in range(7):
        machine.rank_confirmed(rank, activate.epoch, 0.1)
    aborted, lost, anew = machine.rank_failed(7, 0.2)
    assert aborted == OperationAborted(merge, (), Reason.RANK_FAILED)
    assert lost == GroupLost(RankGroup(0, 8), (7,), Reason.RANK_FAILED)
    assert anew.groups == (RankGroup(0, 4), RankGroup(4, 2), RankGroup(6, 1))
    assert machine.rank_confirmed(0, activate.epoch, 0.3) == ()
    assert of_kind(confirm(machine, anew, 0.4), GroupReady) == [GroupReady(group, 2, None) for group in anew.groups]


def test_a_rank_that_does_not_confirm_in_time_is_lost_and_its_siblings_child_is_not():
    machine = pool(RankGroup(0, 4))
    split = Operation.split(RankGroup(0, 4))
    _, activate = machine.start([split], 0.0)
    for rank in (0, 1, 2):
        machine.rank_confirmed(rank, activate.epoch, 0.1)
    assert machine.tick(5.0) == (
        OperationAborted(split, (), Reason.SWITCH_TIMEOUT),
        GroupLost(RankGroup(2, 2), (3,), Reason.SWITCH_TIMEOUT),
        Activate(2, (RankGroup(2, 1),), (2,)),
    )
    assert dict(machine.ready) == {RankGroup(0, 2): 1}
    assert machine.lost_ranks == {3}
    assert 3 not in machine.live_topology.live_ranks


def test_a_recovered_rank_comes_back_under_a_new_epoch():
    machine = pool(RankGroup(0, 4))
    machine.rank_failed(3, 0.0)
    (activate,) = machine.rank_recovered(3, 9.0)
    assert activate == Activate(2, (RankGroup(3, 1),), (3,))
    assert machine.rank_recovered(3, 9.0) == ()
    assert confirm(machine, activate, 9.1) == [GroupReady(RankGroup(3, 1), 2, None)]


def test_ranks_that_no_supported_degree_can_use_wait_for_their_buddy():
    machine = pool(RankGroup(0, 4), degrees=(2, 4))
    _, anew = machine.rank_failed(3, 0.0)
    assert anew.groups == (RankGroup(0, 2),)
    machine.check_invariants()
    (activate,) = machine.rank_recovered(3, 1.0)
    assert activate.groups == (RankGroup(2, 2),)


def test_bad_input_is_refused():
    with pytest.raises(ConfigError, match="layout has group 0-3"):
        pool(RankGroup(0, 2), RankGroup(0, 4))
    with pytest.raises(ConfigError, match="rank is 8; accepted: 0 to 7"):
        pool(RankGroup(0, 8)).rank_failed(8, 0.0)
    with pytest.raises(ConfigError, match="switch_timeout_s is 0"):
        ReconfigurationSettings(switch_timeout_s=0)


class AnyOrder(RuleBasedStateMachine):
    """Ranks, network and clock as an adversary; the shadow below knows only what the effects have said."""

    @initialize(data=st.data(), topology=st.sampled_from([Topology(8), Topology(16), Topology(11), Topology(12, 6)]))
    def start_pool(self, data, topology):
        layout = data.draw(layouts(topology))
        self.machine = Reconfiguration(layout, topology, settings=TIMEOUTS)
        self.now_s = 0.0
        self.schedulable = set(layout)
        self.draining = {}
        self.sent = {}  # rank -> (epoch, group) of the last Activate
        self.messages = []  # (rank, epoch) of every Activate ever sent: confirmations may come late or twice
        self.confirmed = set()
        self.open = set()  # operations that have started and not ended
        self.epoch = 0

    def apply(self, effects):
        for effect in effects:
            match effect:
                case OperationStarted(operation, _):
                    self.schedulable -= set(operation.sources)
                    self.open.add(operation)
                    self.draining[operation] = set(operation.sources)
                case Activate(epoch, groups, ranks):
                    assert epoch > self.epoch
                    assert self.schedulable.isdisjoint(groups)
                    self.epoch = epoch
                    for group in groups:
                        for rank in group.ranks:
                            assert not any(rank in other.ranks for other in self.schedulable)
                            self.sent[rank] = epoch, group
                            self.messages.append((rank, epoch))
                    assert sorted(ranks) == sorted(rank for group in groups for rank in group.ranks)
                case GroupReady(group, epoch, _):
                    assert all(self.sent[rank] == (epoch, group) for rank in group.ranks)
                    assert all((rank, epoch) in self.confirmed for rank in group.ranks)
                    self.schedulable.add(group)
                case OperationCommitted(operation, _, drain_s, switch_s):
                    assert min(drain_s, switch_s) >= 0
                    self.open.remove(operation)
                case OperationAborted(operation, restored, _):
                    self.open.remove(operation)
                    assert set(restored) <= set(operation.sources)
                    self.schedulable |= set(restored)
                    self.draining.pop(operation, None)
                case GroupLost(group, lost_ranks, _):
                    self.schedulable.discard(group)
                    assert lost_ranks

    @rule(data=st.data())
    def start_operations(self, data):
        found = operations(self.machine.planned_layout, self.machine.topology, DEGREES)
        if found:
            bundle = data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=3, unique=True))
            sources = sorted({group for operation in bundle for group in operation.sources})
            busy = data.draw(st.sets(st.sampled_from(sources)))
            effects = self.machine.start(bundle, self.now_s, busy)
            self.apply(effects)
            for refused in of_kind(effects, OperationRefused):
                assert refused.operation in bundle

    @rule(data=st.data())
    def drain(self, data):
        sources = sorted({group for groups in self.draining.values() for group in groups})
        if sources:
            self.apply(self.machine.source_drained(data.draw(st.sampled_from(sources)), self.now_s))

    @rule(data=st.data(), num=st.integers(1, 8))
    def confirm_any(self, data, num):
        for _ in range(num if self.messages else 0):
            rank, epoch = data.draw(st.sampled_from(self.messages))
            self.confirmed.add((rank, epoch))
            self.apply(self.machine.rank_confirmed(rank, epoch, self.now_s))

    @rule()
    def confirm_all_sent(self):
        for rank, (epoch, _) in sorted(self.sent.items()):
            self.confirmed.add((rank, epoch))
            self.apply(self.machine.rank_confirmed(rank, epoch, self.now_s))

    @rule(data=st.data())
    def fail(self, data):
        rank = data.draw(st.integers(0, self.machine.topology.num_gpus - 1))
        self.apply(self.machine.rank_failed(rank, self.now_s))

    @rule(data=st.data())
    def recover(self, data):
        if self.machine.lost_ranks:
            rank = data.draw(st.sampled_from(sorted(self.machine.lost_ranks)))
            self.apply(self.machine.rank_recovered(rank, self.now_s))

    @rule(step_s=st.sampled_from([0.0, 1.0, 5.0, 30.0]))
    def pass_time(self, step_s):
        self.now_s += step_s
        self.apply(self.machine.tick(self.now_s))
        deadline_s = self.machine.next_deadline_s
        assert deadline_s is None or deadline_s > self.now_s

    @invariant()
    def everything_is_consistent(self):
        if hasattr(self, "machine"):
            self.machine.check_invariants()
            assert self.schedulable == set(self.machine.layout)
            assert self.machine.in_transition or not self.open
            assert self.machine.epoch == self.epoch

    def teardown(self):
        if not hasattr(self, "machine"):
            return
        while self.machine.next_deadline_s is not None:
            self.now_s = self.machine.next_deadline_s
            self.apply(self.machine.tick(self.now_s))
            for rank, (epoch, _) in sorted(self.sent.items()):
                self.confirmed.add((rank, epoch))
                self.apply(self.machine.rank_confirmed(rank, epoch, self.now_s))
        self.machine.check_invariants()
        assert not self.open
        served = [rank for group in self.machine.layout for rank in group.ranks]
        assert sorted(served) == list(self.machine.live_topology.live_ranks)


AnyOrder.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
