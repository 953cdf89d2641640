import pytest
from hypothesis import given
from hypothesis import strategies as st

from vertumnus.engine.geometry import GroupKey, all_groups, check_geometry, groups_with
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
