"""Which groups there are; and how a rank's ends of them are formed, used and given up, over real sockets."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from vertumnus.engine.collectives import GroupBroken
from vertumnus.engine.geometry import GroupKey, all_groups, check_geometry, groups_with
from vertumnus.engine.groups import Groups
from vertumnus.errors import ConfigError


@given(st.integers(1, 40))
def test_groups_are_aligned_and_within_one_node(num_ranks):
    keys = all_groups(num_ranks)
    assert len(set(keys)) == len(keys)
    for key in keys:
        assert key.is_aligned
        assert key.ranks.stop <= num_ranks
        assert key.ranks[0] // 8 == key.ranks[-1] // 8


@given(st.integers(1, 40), st.data())
def test_two_groups_are_nested_or_disjoint(num_ranks, data):
    keys = all_groups(num_ranks)
    if keys:
        one, other = data.draw(st.sampled_from(keys)), data.draw(st.sampled_from(keys))
        common = set(one.ranks) & set(other.ranks)
        assert not common or len(common) == min(one.degree, other.degree)


def test_a_rank_of_a_node_of_eight_is_in_three_groups():
    assert groups_with([5], 8) == [GroupKey(4, 2), GroupKey(4, 4), GroupKey(0, 8)]


@pytest.mark.parametrize("geometry", [{1: 2}, {0: 3}, {0: 16}, {0: 4, 2: 2}, {4: 8}, {8: 1}, {-2: 2}])
def test_a_geometry_that_ranks_cannot_form_is_refused(geometry):
    with pytest.raises(ConfigError, match="geometry"):
        check_geometry(geometry, 8)


class Members:
    """The groups of some ranks, each rank with a thread of its own, over one store."""

    def __init__(self, num_ranks: int, connect_timeout_s: float = 20.0) -> None:
        store = HashStore()
        self.all = [
            Groups(rank, store, "127.0.0.1", connect_timeout_s=connect_timeout_s, exchange_timeout_s=20.0)
            for rank in range(num_ranks)
        ]
        self._threads = ThreadPoolExecutor(num_ranks)

    def __enter__(self) -> "Members":
        return self

    def __exit__(self, *_: object) -> None:
        for groups in self.all:
            groups.abort_all()
        self._threads.shutdown()

    def form(self, generation: int, keys: Sequence[GroupKey]) -> None:
        """At every member, and waits for all."""
        forming = [groups.prepare(generation, keys) for groups in self.all]
        for done in [self.start(groups.form, each) for groups, each in zip(self.all, forming, strict=True)]:
            done.result()

    def start(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._threads.submit(call, *arguments)

    def exchange(self, rank: int, key: GroupKey) -> list[int]:
        with self.all[rank].using(key) as link:
            return [int(value) for value in link.all_gather(torch.tensor([rank])).wait().flatten()]


PAIR, ALL = GroupKey(0, 2), GroupKey(0, 4)


def test_all_groups_of_four_ranks_form_and_step_side_by_side():
    with Members(4) as members:
        members.form(1, all_groups(4))
        assert [groups.usable for groups in members.all] == [tuple(sorted(groups_with([r], 4))) for r in range(4)]
        for keys in ([ALL], [PAIR, GroupKey(2, 2)]):
            found = [(key, members.start(members.exchange, rank, key)) for key in keys for rank in key.ranks]
            assert all(each.result() == list(key.ranks) for key, each in found)


def test_giving_a_group_up_ends_a_wait_at_every_member_and_the_other_groups_go_on():
    with Members(4) as members:
        members.form(1, all_groups(4))
        waiting = [members.start(members.exchange, rank, ALL) for rank in (0, 1, 2)]
        members.all[3].abort([ALL])
        for each in waiting:
            with pytest.raises(GroupBroken):
                each.result()
        with pytest.raises(GroupBroken, match="given up"):
            members.exchange(0, ALL)
        assert [each.result() for each in [members.start(members.exchange, rank, PAIR) for rank in PAIR.ranks]] == [
            [0, 1],
            [0, 1],
        ]
        members.form(2, [ALL])
        again = [members.start(members.exchange, rank, ALL) for rank in range(4)]
        assert all(each.result() == [0, 1, 2, 3] for each in again)


def test_what_fails_while_a_group_is_used_gives_it_up_there():
    with Members(2) as members:
        members.form(1, [PAIR])
        with pytest.raises(ValueError, match="as told"), members.all[0].using(PAIR):
            raise ValueError("as told")
        assert members.all[0].usable == ()
        with pytest.raises(GroupBroken):
            members.exchange(1, PAIR)


def test_a_group_that_was_formed_anew_outlives_a_failure_of_the_one_before():
    with Members(2) as members:
        members.form(1, [PAIR])

        def fail_late() -> None:
            with members.all[0].using(PAIR):
                members.form(2, [PAIR])
                raise ValueError("late")

        with pytest.raises(ValueError, match="late"):
            fail_late()
        found = [members.start(members.exchange, rank, PAIR) for rank in PAIR.ranks]
        assert [each.result() for each in found] == [[0, 1], [0, 1]]


def test_forming_that_is_given_up_fails_at_once_however_long_it_may_take():
    with Members(2, connect_timeout_s=1000.0) as members:
        alone = members.all[0]
        forming = alone.prepare(1, [PAIR])
        waiting = members.start(alone.form, forming)
        alone.abort([PAIR])
        with pytest.raises(GroupBroken, match="while it formed"):
            waiting.result(20.0)
        # Given up even before it has begun, or because another generation is wanted.
        early, late = alone.prepare(2, [PAIR]), alone.prepare(3, [PAIR])
        with pytest.raises(GroupBroken, match="while it formed"):
            alone.form(early)
        other = members.all[1].prepare(3, [PAIR])
        for each in [members.start(alone.form, late), members.start(members.all[1].form, other)]:
            each.result(20.0)
        assert alone.generation == 3
        assert alone.usable == (PAIR,)


def test_members_that_form_under_different_generations_do_not_meet():
    with Members(2, connect_timeout_s=0.2) as members:
        forming = [groups.prepare(generation, [PAIR]) for generation, groups in enumerate(members.all, start=1)]
        for each in [members.start(groups.form, of) for groups, of in zip(members.all, forming, strict=True)]:
            with pytest.raises(GroupBroken, match="did not form"):
                each.result()


def test_a_group_of_one_needs_nobody():
    with Members(1) as members:
        assert members.exchange(0, GroupKey(0, 1)) == [0]
