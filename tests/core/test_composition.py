"""Compositions, layouts and the way between them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.layout_strategies import DEGREES, compositions_of, layouts, topologies

from vertumnus.core.composition import (
    Composition,
    Layout,
    Operation,
    OperationKind,
    RankGroup,
    Topology,
    apply,
    compositions,
    initial_composition,
    lay_out,
    num_operations_between,
    operations,
    plan_towards,
)
from vertumnus.errors import ConfigError

FORTY = Topology(40)


def no_cost(operation: Operation) -> tuple[float, float]:
    return 0.0, 0.0


def assert_valid(layout: Layout, topology: Topology) -> None:
    ranks = [rank for group in layout for rank in group.ranks]
    assert len(ranks) == len(set(ranks))
    assert all(topology.contains(group) for group in layout)


@given(st.dictionaries(st.sampled_from(DEGREES), st.integers(1, 99), min_size=1))
def test_text_and_composition_are_the_same_thing(counts: dict[int, int]) -> None:
    composition = Composition.of(counts)
    assert Composition.parse(str(composition)) == composition
    assert composition.num_workers == sum(counts.values())
    assert composition.num_gpus == sum(degree * count for degree, count in counts.items())
    assert composition.capacity({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}) == composition.num_workers


def test_text_is_count_by_degree_in_ascending_order() -> None:
    composition = Composition.parse(" 1x8, 8x2,4x4")
    assert str(composition) == "8x2,4x4,1x8"
    assert composition.count(2) == 8
    assert composition.count(1) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "COUNTxDEGREE"),
        ("8", "COUNTxDEGREE"),
        ("8x2,", "COUNTxDEGREE"),
        ("-1x2", "COUNTxDEGREE"),
        ("1.5x2", "COUNTxDEGREE"),
        ("8X2", "COUNTxDEGREE"),
        ("0x2", "counts of 1 or more"),
        ("1x3", "power of two"),
        ("1x0", "power of two"),
        ("1x2,2x2", "each degree once"),
    ],
)
def test_garbage_is_refused_with_what_is_accepted(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Composition.parse(text)


@pytest.mark.parametrize(
    ("text", "topology", "said"),
    [
        ("6x8", FORTY, "takes 48 GPUs; accepted: 40 GPUs"),
        ("4x8", FORTY, "leaves room for more workers of degree 8; accepted: all 40 GPUs"),
        ("1x16,3x8", FORTY, "degrees up to 8"),
        ("3x4", Topology(12, 6), "room for 2 workers of degree 4"),
        ("2x4", Topology(8, 8, frozenset({5})), "accepted: 7 GPUs"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(text: str, topology: Topology, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        lay_out(Composition.parse(text), topology)


def test_a_node_of_six_holds_four_and_two() -> None:
    topology = Topology(12, 6)
    layout = lay_out(Composition.parse("2x2,2x4"), topology)
    assert layout == (RankGroup(0, 4), RankGroup(6, 4), RankGroup(4, 2), RankGroup(10, 2))
    assert topology.parent(RankGroup(0, 4)) is None
    assert topology.buddy(RankGroup(8, 2)) == RankGroup(6, 2)
    assert not topology.contains(RankGroup(8, 4))
    assert not topology.contains(RankGroup(5, 2))


def test_gpus_too_few_for_any_supported_degree_stay_idle() -> None:
    topology = Topology(8, 8, frozenset({7}))
    assert compositions(topology, (2, 4)) == (Composition.parse("1x2,1x4"), Composition.parse("3x2"))
    assert lay_out(Composition.parse("1x2,1x4"), topology) == (RankGroup(0, 4), RankGroup(4, 2))


def test_five_nodes_have_a_few_hundred_compositions_most_large_workers_first() -> None:
    found = compositions(FORTY, DEGREES)
    assert len(found) == 286
    assert str(found[0]) == "5x8"
    assert str(found[-1]) == "40x1"


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_listed_composition_is_laid_out_and_every_layout_is_listed(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    listed = compositions(topology, DEGREES)
    assert len(set(listed)) == len(listed)
    for composition in listed[:20]:
        layout = lay_out(composition, topology)
        assert_valid(layout, topology)
        assert Composition.of_layout(layout) == composition
        assert [group.degree for group in layout] == sorted((group.degree for group in layout), reverse=True)
    assert Composition.of_layout(data.draw(layouts(topology))) in listed


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_operations_undo_each_other_and_keep_the_gpus(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    layout = data.draw(layouts(topology))
    for operation in operations(layout, topology, DEGREES):
        after = apply(layout, [operation])
        assert_valid(after, topology)
        assert Composition.of_layout(after) == Composition.of_layout(layout).after(operation)
        assert Composition.of_layout(after).num_gpus == Composition.of_layout(layout).num_gpus
        inverse = Operation.merge if operation.kind is OperationKind.SPLIT else Operation.split
        assert inverse(operation.block) in operations(after, topology, DEGREES)
        assert apply(after, [inverse(operation.block)]) == layout


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_planning_again_and_again_reaches_any_target_on_a_shortest_way(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    layout = data.draw(layouts(topology))
    target = data.draw(compositions_of(topology))
    max_operations = data.draw(st.integers(1, 5))
    seed = data.draw(st.integers(0, 3))

    def cost(operation: Operation) -> tuple[float, float]:
        return float(operation.block.first_rank * (seed + 3) % 5), float(operation.block.degree)

    left = num_operations_between(layout, target, topology)
    assert left is not None
    while left:
        round_ = plan_towards(layout, target, topology, cost=cost, max_operations=max_operations)
        assert 1 <= len(round_) <= max_operations
        assert list(round_) == sorted(round_, key=lambda each: (*cost(each), *each.order))
        layout = apply(layout, round_)
        assert_valid(layout, topology)
        assert num_operations_between(layout, target, topology) == left - len(round_)
        left -= len(round_)
    assert Composition.of_layout(layout) == target
    assert plan_towards(layout, target, topology, cost=cost, max_operations=max_operations) == ()


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_no_way_is_shorter_than_the_planned_one(data: st.DataObject) -> None:
    topology = data.draw(topologies(max_nodes=2))
    layout = data.draw(layouts(topology))
    target = data.draw(compositions_of(topology))
    reached, front, num_steps = {layout}, {layout}, 0
    while all(Composition.of_layout(each) != target for each in front):
        front = {apply(each, [step]) for each in front for step in operations(each, topology, DEGREES)} - reached
        reached |= front
        num_steps += 1
    assert num_operations_between(layout, target, topology) == num_steps


def test_pieces_in_different_nodes_are_rearranged() -> None:
    topology = Topology(16)
    layout = (RankGroup(0, 4), *(RankGroup(rank, 1) for rank in range(4, 8)), RankGroup(8, 4))
    layout += tuple(RankGroup(rank, 1) for rank in range(12, 16))
    target = Composition.parse("8x1,1x8")
    rounds = []
    while Composition.of_layout(layout) != target:
        rounds.append(plan_towards(layout, target, topology, cost=no_cost, max_operations=9))
        layout = apply(layout, rounds[-1])
    assert [len(each) for each in rounds] == [3, 3, 1]


def test_the_cheapest_drain_is_taken_then_the_least_traffic() -> None:
    layout = lay_out(Composition.parse("10x4"), FORTY)
    costs = {RankGroup(16, 4): (0.5, 9.0), RankGroup(8, 4): (0.5, 7.0), RankGroup(24, 4): (1.0, 0.0)}
    found = plan_towards(
        layout,
        Composition.parse("4x2,8x4"),
        FORTY,
        cost=lambda operation: costs.get(operation.block, (2.0, 0.0)),
        max_operations=5,
    )
    assert [operation.block.first_rank for operation in found] == [8, 16]


def test_groups_under_way_are_left_alone_and_others_do_the_work() -> None:
    layout = lay_out(Composition.parse("10x4"), FORTY)
    target = Composition.parse("2x2,9x4")
    found = plan_towards(layout, target, FORTY, cost=no_cost, max_operations=5, held=layout[:3])
    assert found == (Operation.split(layout[3]),)
    assert plan_towards(layout, target, FORTY, cost=no_cost, max_operations=5, held=layout) == ()


def test_a_target_that_the_ranks_in_use_cannot_form_plans_nothing() -> None:
    layout = lay_out(Composition.parse("9x4,1x2,1x1"), Topology(40, 8, frozenset({39})))
    assert plan_towards(layout, Composition.parse("5x8"), FORTY, cost=no_cost, max_operations=5) == ()
    assert num_operations_between(layout, Composition.parse("5x8"), FORTY) is None


def test_degrees_with_a_gap_are_refused() -> None:
    with pytest.raises(ConfigError, match="powers of two without a gap"):
        compositions(FORTY, (1, 4))


KAPPA = {1: 0.9, 2: 0.9, 4: 0.8, 8: 0.7}


def test_start_is_the_largest_degrees_that_carry_the_demand() -> None:
    candidates = compositions(FORTY, DEGREES)
    chosen = initial_composition(candidates, demand_s_per_s=9.0, kappa=KAPPA, fits=lambda _: True)
    assert chosen.capacity(KAPPA) >= 9.0
    for other in candidates:
        if other.large_first > chosen.large_first:
            assert other.capacity(KAPPA) < 9.0


def test_start_keeps_to_compositions_that_fit_the_lengths() -> None:
    chosen = initial_composition(
        compositions(FORTY, DEGREES), demand_s_per_s=0.0, kappa=KAPPA, fits=lambda each: each.count(1) > 0
    )
    assert str(chosen) == "2x1,1x2,1x4,4x8"


def test_start_with_too_much_demand_is_the_fitting_one_with_most_capacity() -> None:
    candidates = compositions(FORTY, DEGREES)
    chosen = initial_composition(candidates, demand_s_per_s=1e9, kappa=KAPPA, fits=lambda each: each.count(8) > 0)
    assert str(chosen) == "32x1,1x8"
    nothing_fits = initial_composition(candidates, demand_s_per_s=1e9, kappa=KAPPA, fits=lambda _: False)
    assert str(nothing_fits) == "40x1"


def test_kappa_without_a_degree_is_refused() -> None:
    with pytest.raises(ConfigError, match="kappa has no value for degree 8; accepted: 1, 2"):
        Composition.parse("1x8").capacity({1: 1.0, 2: 1.0})
