"""The threshold controller: what moves it, what stops it, and that it comes to rest under any constant traffic."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.layout_strategies import DEGREES, layouts

from vertumnus.core.capacity import LengthClass, LengthMix
from vertumnus.core.composition import (
    Composition,
    OperationKind,
    RankGroup,
    Topology,
    apply,
    compositions,
    lay_out,
)
from vertumnus.core.controller import PoolState, Reason, Window
from vertumnus.core.cost import Coefficients, CostModel
from vertumnus.core.threshold_controller import ThresholdController, ThresholdSettings
from vertumnus.errors import ConfigError

KAPPA = {1: 0.9, 2: 0.9, 4: 0.9, 8: 0.9}
H20 = CostModel.uniform(Coefficients(d=0.028, a=3.46e-5, b=2.6e-7, c=1.31e-5, alpha=5.6e-9), DEGREES)
FORTY = Topology(40)


def window(load, *, num_long=15, num_requests=300, backlog_s=0.0, input_tokens=3_000_000):
    return Window(
        start_s=0.0,
        end_s=20.0,
        demand_s_per_s=load,
        backlog_s=backlog_s,
        num_requests=num_requests,
        num_long=num_long,
        input_tokens=input_tokens,
    )


def state(text="10x4", topology=FORTY, **others):
    layout = tuple(sorted(lay_out(Composition.parse(text), topology)))
    return PoolState(layout=layout, topology=topology, degrees=DEGREES, **others)


def run(controller, layout, topology, observed, num_windows):
    """Plays windows and carries out each proposal at once; returns (window index, proposal) of each, and the layout."""
    proposals = []
    for index in range(num_windows):
        current = PoolState(layout=layout, topology=topology, degrees=DEGREES)
        proposal = controller.observe(observed(current.composition), current)
        if proposal is not None:
            assert proposal.target == current.composition.after(*proposal.operations)
            proposals.append((index, proposal))
            layout = apply(layout, proposal.operations)
    return proposals, layout


SMALL = st.sampled_from([Topology(8), Topology(4), Topology(12, 6)])


@given(st.data())
@settings(max_examples=60)
def test_any_constant_traffic_brings_finitely_many_transitions(data):
    """Whatever each composition shows as its demand and backlog, and whatever happened before."""
    topology = data.draw(SMALL)
    kappa = {degree: data.draw(st.floats(0.05, 2.0)) for degree in DEGREES}
    spread, seed = data.draw(st.floats(0.1, 30.0)), data.draw(st.integers(0, 2**32))
    num_requests = data.draw(st.integers(0, 500))
    num_long = data.draw(st.integers(0, num_requests))
    controller = ThresholdController(kappa)

    def observed(composition):
        stream = random.Random(f"{seed} {composition}")
        backlog_s = stream.choice([0.0, stream.uniform(0.0, 40.0)])
        return window(stream.uniform(0.0, spread), num_long=num_long, num_requests=num_requests, backlog_s=backlog_s)

    history = st.builds(
        window, st.floats(0.0, 30.0), num_long=st.integers(0, 100), input_tokens=st.integers(0, 10_000_000)
    )
    layout = data.draw(layouts(topology))
    for before in data.draw(st.lists(history, max_size=20)):
        proposals, layout = run(controller, layout, topology, lambda _, before=before: before, 1)

    most = controller.settings.max_exits * len(compositions(topology, DEGREES)) + 1
    wait = (controller.settings.persistence_windows << controller.settings.max_doublings) + 8
    proposals, layout = run(controller, layout, topology, observed, wait * (most + 1))
    assert len(proposals) <= most
    later, _ = run(controller, layout, topology, observed, 3 * wait)
    assert later == []


@given(st.data())
@settings(max_examples=40)
def test_under_the_cost_model_it_splits_then_merges_then_rests(data):
    topology = data.draw(st.sampled_from([Topology(8), Topology(16), Topology(24), FORTY]))
    kappa = {degree: data.draw(st.floats(0.5, 0.95)) for degree in DEGREES}
    lengths = st.builds(
        lambda tokens, cached, rate: LengthClass(tokens, tokens * (1 - cached), rate),
        st.floats(100, 100_000),
        st.floats(0.0, 0.9),
        st.floats(0.0, 10.0),
    )
    mix = LengthMix(tuple(data.draw(st.lists(lengths, min_size=1, max_size=4))))
    controller = ThresholdController(kappa)
    proposals, layout = run(
        controller,
        data.draw(layouts(topology)),
        topology,
        lambda composition: window(mix.demand_s_per_s(composition, H20)),
        8 * topology.num_gpus,
    )
    kinds = [proposal.operations[0].kind for _, proposal in proposals]
    assert kinds == sorted(kinds, key=lambda kind: kind is OperationKind.MERGE)
    assert len(kinds) < topology.num_gpus
    later, _ = run(controller, layout, topology, lambda composition: window(mix.demand_s_per_s(composition, H20)), 60)
    assert later == []


@pytest.mark.parametrize("start", ["20x2", "10x4", "40x1"])
@pytest.mark.parametrize("rate_per_s", [4.0, 10.0, 14.0, 18.0])
def test_poisson_arrivals_at_a_constant_rate_move_it_at_most_twice_an_hour_once_settled(start, rate_per_s):
    stream = np.random.default_rng(7)
    lengths, shares = np.array([2_000, 8_000, 20_000, 48_000, 90_000]), [0.3, 0.4, 0.2, 0.07, 0.03]

    def observed(composition):
        drawn = stream.choice(lengths, size=stream.poisson(rate_per_s * 20.0), p=shares)
        service_s = H20.for_degrees([composition.degrees[-1]]).prefill_s(0.6 * drawn, 0.4 * drawn)
        return window(
            service_s.sum() / 20.0,
            num_long=int((drawn > 32_768).sum()),
            num_requests=len(drawn),
            input_tokens=int(drawn.sum()),
        )

    controller = ThresholdController(KAPPA)
    _, layout = run(controller, lay_out(Composition.parse(start), FORTY), FORTY, observed, 300)
    later, _ = run(controller, layout, FORTY, observed, 3 * 180)
    assert len(later) <= 6


def test_each_reversal_under_the_same_traffic_asks_for_twice_the_patience():
    controller = ThresholdController(KAPPA, ThresholdSettings(cooldown_windows=0))

    def alternate(composition):
        return window(20.0 if composition.num_workers == 10 else 0.1)

    proposals, _ = run(controller, lay_out(Composition.parse("10x4"), FORTY), FORTY, alternate, 60)
    gaps = np.diff([index for index, _ in proposals])
    assert list(gaps) == sorted(gaps)
    assert gaps[-1] >= 2 * gaps[0]


def observe_all(controller, windows, pool):
    return [controller.observe(each, pool) for each in windows]


def test_a_high_load_must_persist_and_then_splits_the_shortest_drain():
    costs = {RankGroup(8, 4): (1.0, 9.0), RankGroup(16, 4): (1.0, 2.0)}
    pool = state(cost=lambda operation: costs.get(operation.block, (3.0, 0.0)))
    controller = ThresholdController(KAPPA)
    high, fine = window(8.5), window(7.0)
    first, second, third, proposal = observe_all(controller, [high, fine, high, high], pool)
    assert (first, second, third) == (None, None, None)
    assert proposal.reason is Reason.LOAD_HIGH
    assert proposal.operations[0].sources == (RankGroup(16, 4),)
    assert str(proposal.target) == "2x2,9x4"
    assert proposal.figures["load_s_per_s"] == 8.5
    assert proposal.figures["target_capacity_s_per_s"] == pytest.approx(9.9)


def test_backlog_counts_as_load():
    proposals = observe_all(ThresholdController(KAPPA), [window(6.0, backlog_s=60.0)] * 2, state())
    assert proposals[1].reason is Reason.LOAD_HIGH


def test_a_low_load_merges_only_where_enough_capacity_is_left():
    low = window(4.9)
    assert observe_all(ThresholdController(KAPPA), [low] * 2, state())[1].reason is Reason.LOAD_LOW
    tight = ThresholdController({**KAPPA, 8: 1e-3}, ThresholdSettings(lower_ratio=0.59, retain_ratio=0.65))
    assert observe_all(tight, [low] * 5, state()) == [None] * 5


def test_nothing_is_decided_while_an_operation_runs_nor_in_the_cool_down_after_it():
    controller = ThresholdController(KAPPA)
    moving, after = state("2x2,9x4", in_transition=True), state("2x2,9x4")
    assert observe_all(controller, [window(20.0)] * 2, state())[1] is not None
    assert observe_all(controller, [window(20.0)] * 5, moving) == [None] * 5
    found = observe_all(controller, [window(20.0)] * 4, after)
    assert found[:3] == [None] * 3
    assert found[3] is not None


def test_a_change_by_hand_is_taken_as_it_is_and_starts_a_cool_down():
    controller = ThresholdController(KAPPA)
    observe_all(controller, [window(20.0)], state())
    found = observe_all(controller, [window(20.0)] * 5, state("20x2"))
    assert found[:4] == [None] * 4
    assert str(found[4].target) == "2x1,19x2"


SETTLE = [window(6.0)] * 8


def test_more_long_requests_merge_and_fewer_split():
    rose = observe_all(ThresholdController(KAPPA), [*SETTLE, *[window(6.0, num_long=60)] * 2], state())
    assert rose[-1].reason is Reason.LONG_ROSE
    assert rose[-1].operations[0].kind is OperationKind.MERGE
    fell = observe_all(ThresholdController(KAPPA), [*SETTLE, *[window(6.0, num_long=0)] * 2], state())
    assert fell[-1].reason is Reason.LONG_FELL
    assert fell[-1].operations[0].kind is OperationKind.SPLIT


def test_chance_does_not_count_as_a_change_of_the_long_share():
    found = observe_all(ThresholdController(KAPPA), [*SETTLE, *[window(6.0, num_long=22)] * 20], state())
    assert found == [None] * 28


def test_load_wins_over_the_long_share():
    found = observe_all(ThresholdController(KAPPA), [*SETTLE, *[window(8.5, num_long=60)] * 2], state())
    assert found[-1].reason is Reason.LOAD_HIGH


def test_what_the_pool_does_not_admit_or_holds_is_never_proposed():
    pool = state(admits=lambda composition: composition.count(4) >= 10)
    assert observe_all(ThresholdController(KAPPA), [window(20.0)] * 5, pool) == [None] * 5
    layout = state().layout
    proposal = observe_all(ThresholdController(KAPPA), [window(20.0)] * 2, state(held=layout[:4]))[1]
    assert proposal.operations[0].sources == (layout[4],)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lower_ratio", 0.8),
        ("upper_ratio", 0.7),
        ("retain_ratio", float("nan")),
        ("long_rise_factor", 1.0),
        ("long_change_ratio", -0.1),
        ("persistence_windows", 0),
        ("cooldown_windows", -1),
        ("window_s", 0.0),
        ("max_exits", 0),
    ],
)
def test_settings_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        ThresholdSettings(**{field: value})
    with pytest.raises(ConfigError, match="kappa of degree 2"):
        ThresholdController({1: 1.0, 2: 0.0})
