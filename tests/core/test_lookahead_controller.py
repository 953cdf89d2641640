"""The look-ahead controller: finds the right composition, from anywhere, and then stays."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vertumnus.core.composition import Composition, Topology, compositions, lay_out
from vertumnus.core.controller import Arrivals, PoolState, Window
from vertumnus.core.lookahead_controller import LookaheadController, LookaheadSettings
from vertumnus.core.profile import load_profile
from vertumnus.core.rollout import Shadows
from vertumnus.core.search_space import search_space, searchable_compositions
from vertumnus.core.slices import finish
from vertumnus.errors import ConfigError

COST = load_profile().cost_model()
TWO_NODES = Topology(16)
WINDOW_S = 20.0


def arrivals(start_s, gaps_s, input_tokens, hit_ratio=0.3):
    tokens = np.asarray(input_tokens, dtype=float)
    arrival_s = start_s + np.cumsum(np.asarray(gaps_s, dtype=float))
    return Arrivals(arrival_s=arrival_s, input_tokens=tokens, prefix_tokens=np.floor(tokens * hit_ratio / 512) * 512)


def window(index, arrived):
    return Window(
        start_s=index * WINDOW_S,
        end_s=(index + 1) * WINDOW_S,
        demand_s_per_s=1.0,
        num_requests=len(arrived),
        arrivals=arrived,
    )


def state(composition, topology=TWO_NODES):
    return PoolState(layout=lay_out(composition, topology), topology=topology, degrees=(1, 2, 4, 8))


def drive(controller, start, windows, topology=TWO_NODES):
    """Plays windows, follows every proposal at once; returns the composition after each window."""
    current = Composition.parse(start)
    path = []
    for each in windows:
        proposal = controller.observe(each, state(current, topology))
        if proposal is not None:
            assert proposal.target != current
            current = proposal.target
        path.append(current)
    return path


def equal_windows(num_windows, num_requests, input_tokens):
    gap_s = WINDOW_S / (num_requests + 1)
    lengths = [input_tokens[index % len(input_tokens)] for index in range(num_requests)]
    return [window(k, arrivals(k * WINDOW_S, [gap_s] * num_requests, lengths)) for k in range(num_windows)]


def poisson_windows(num_windows, rate_per_s, seed):
    rng = np.random.default_rng(seed)
    windows = []
    for index in range(num_windows):
        count = rng.poisson(rate_per_s * WINDOW_S)
        at_s = np.sort(rng.uniform(0, WINDOW_S, count))
        lengths = np.clip(rng.lognormal(8.6, 1.0, count), 100, 120_000)
        windows.append(window(index, arrivals(index * WINDOW_S, np.diff(at_s, prepend=0.0), lengths)))
    return windows


def transitions(path):
    return [index for index in range(1, len(path)) if path[index] != path[index - 1]]


@settings(max_examples=8)
@given(
    num_requests=st.integers(1, 150),
    input_tokens=st.lists(st.integers(100, 100_000), min_size=1, max_size=5),
    start=st.sampled_from(["16x1", "8x2", "4x4", "2x8", "4x1,2x2,2x4"]),
)
# Just overloaded: the better composition stands out from chance only after 39 windows.
@example(num_requests=60, input_tokens=[100, 100, 7_726, 80_018], start="8x2")
def test_equal_windows_give_finitely_many_transitions_then_none(num_requests, input_tokens, start):
    """Evidence weighs half after 30 windows: what it has not shown after three times that, it never will. Surges weigh
    less and less for 180 windows, which opens compositions one after the other."""
    path = drive(LookaheadController(COST), start, equal_windows(300, num_requests, input_tokens))
    assert len(transitions(path)) <= 8
    assert not [index for index in transitions(path) if index >= 270]


@pytest.mark.parametrize("rate_per_s", [2.0, 5.0, 8.0])
def test_poisson_arrivals_of_constant_rate_give_at_most_two_transitions_an_hour_once_settled(rate_per_s):
    settled, hour = 45, 180
    path = drive(LookaheadController(COST), "8x2", poisson_windows(settled + hour, rate_per_s, seed=int(rate_per_s)))
    assert len([index for index in transitions(path) if index >= settled]) <= 2


def test_light_long_traffic_goes_to_large_degrees_and_heavy_short_traffic_to_small_ones():
    light = drive(LookaheadController(COST), "16x1", equal_windows(10, 4, [60_000]))[-1]
    heavy = drive(LookaheadController(COST), "2x8", equal_windows(10, 700, [6_000]))[-1]
    assert light.degrees[-1] == 8
    assert heavy.degrees[0] == 1
    assert heavy.num_workers > light.num_workers


def test_far_from_right_one_window_is_enough_and_the_gap_is_taken_at_once():
    path = drive(LookaheadController(COST), "2x8", equal_windows(1, 300, [8_000]))
    assert path[0].num_workers >= 5  # three splits or more in one proposal


def test_changed_traffic_is_followed_within_two_windows():
    first = equal_windows(12, 4, [60_000])
    second = equal_windows(6, 500, [6_000])
    path = drive(LookaheadController(COST), "4x4", first + second)
    assert path[11] != path[13]
    assert path[13].num_workers > path[11].num_workers


def test_what_a_surge_would_cost_is_weighed_against_the_gain_until_the_traffic_has_lasted():
    """Two large workers serve this light traffic best; while it is young, more and smaller ones have to do."""
    windows = equal_windows(150, 40, [30_000, 5_000])
    bold = drive(LookaheadController(COST, LookaheadSettings(surge_windows=0.0)), "16x1", windows)
    wary = drive(LookaheadController(COST), "16x1", windows)
    assert bold[10].num_workers < wary[10].num_workers
    assert wary[-1].num_workers < wary[10].num_workers


def test_traffic_that_may_come_back_keeps_the_pool_from_what_it_could_not_stand():
    heavy, light = equal_windows(20, 500, [6_000]), equal_windows(20, 4, [60_000])
    after_heavy = drive(LookaheadController(COST), "16x1", heavy + light)
    alone = drive(LookaheadController(COST), "16x1", light)
    assert after_heavy[-1].num_workers > alone[-1].num_workers


def test_waits_of_shadows_are_believed_as_far_as_the_pool_itself_waits():
    """The same arrivals near saturation, and a pool that hardly waits: no reason to split all of its workers."""
    waiting, calm = (
        [replace(each, waited_s=each.num_requests * wait_s) for each in equal_windows(1, 500, [8_000])]
        for wait_s in (5.0, 0.01)
    )
    split = [drive(LookaheadController(COST), "2x4,4x2", windows)[-1].num_workers for windows in (waiting, calm)]
    assert split[0] > split[1] == Composition.parse("2x4,4x2").num_workers


def test_no_composition_is_entered_a_third_time_even_if_dropped_ones_are_passed_through():
    """On the way to a target the pool passes through compositions that are not followed any more."""
    controller = LookaheadController(COST, LookaheadSettings(max_shadows=1))
    entered = Counter()
    for each in equal_windows(40, 300, [8_000]):
        proposal = controller.observe(each, state(Composition.parse("2x8")))  # somebody undoes every change
        if proposal is not None:
            entered[proposal.target] += 1
        controller.observe(each, state(Composition.parse("4x1,2x2,2x4")))  # dropped long ago
    assert entered
    assert max(entered.values()) <= 2


def test_memory_is_bounded_under_the_same_traffic():
    controller = LookaheadController(COST, LookaheadSettings(half_life_windows=1.0))
    drive(controller, "4x4", equal_windows(30, 4, [60_000]))
    assert len(controller._evidence.counts) == len(controller._evidence._sums_s) <= 12


def test_a_backlog_that_stays_makes_dropped_compositions_candidates_again():
    """Followed are a few compositions only; when they leave a backlog, one that was dropped is found."""
    controller = LookaheadController(COST, LookaheadSettings(max_shadows=2))
    path = drive(controller, "2x8", equal_windows(12, 30, [20_000]))
    settled = path[-1]
    waiting = arrivals(0.0, [0.0] * 400, [4_000] * 400)
    behind = PoolState(layout=lay_out(settled, TWO_NODES), topology=TWO_NODES, degrees=(1, 2, 4, 8), queued=waiting)
    proposal = controller.observe(equal_windows(13, 30, [20_000])[12], behind)
    assert proposal is not None
    assert proposal.target.num_workers > settled.num_workers


def test_nothing_is_proposed_without_traffic_or_during_a_transition():
    controller = LookaheadController(COST)
    assert controller.observe(window(0, arrivals(0, [], [])), state(Composition.parse("2x8"))) is None
    busy = equal_windows(2, 300, [8_000])
    layout = lay_out(Composition.parse("2x8"), TWO_NODES)
    moving = PoolState(layout=layout, topology=TWO_NODES, degrees=(1, 2, 4, 8), in_transition=True)
    assert controller.observe(busy[1], moving) is None


def test_a_proposal_says_what_it_rests_on():
    proposal = LookaheadController(COST).observe(equal_windows(1, 300, [8_000])[0], state(Composition.parse("2x8")))
    assert proposal is not None
    assert proposal.figures["target_mean_ttft_s"] < 0.5 * proposal.figures["mean_ttft_s"]


def test_a_large_pool_is_searched_through_multiples_of_a_few_nodes():
    found = searchable_compositions(Topology(64 * 8), (1, 2, 4, 8))
    assert 100 < len(found) < 400
    assert {each.num_gpus for each in found} == {512}


def test_a_large_pool_that_lost_ranks_is_searched_among_what_fits():
    found = searchable_compositions(Topology(10 * 8, lost_ranks=frozenset({3, 40})), (1, 2, 4, 8))
    assert found
    assert {each.num_gpus for each in found} == {78}


def shares(composition):
    return {degree: degree * count / composition.num_gpus for degree, count in composition}


@pytest.mark.parametrize("lost_ranks", [(), (3,), (0, 8, 9, 77)])
@pytest.mark.parametrize("num_nodes", [10, 13, 32, 128])
@pytest.mark.parametrize("degrees", [(1, 2, 4, 8), (2, 4, 8), (4, 8)])
def test_every_composition_of_a_large_pool_has_about_the_shares_of_the_one_that_it_is_judged_as(
    num_nodes, lost_ranks, degrees
):
    topology = Topology(8 * num_nodes, lost_ranks=frozenset(lost_ranks))
    space = search_space(topology, degrees)
    num_bases = len(compositions(Topology(40), degrees))
    assert 0.5 * num_bases < len(space.candidates) <= num_bases
    for base, real in space.candidates.items():
        lay_out(real, topology)
        assert 8 * num_nodes - real.num_gpus <= len(lost_ranks) * degrees[0]
        if space.share < 1 and not lost_ranks:
            ours, theirs = shares(real), shares(base)
            assert all(abs(ours.get(degree, 0.0) - theirs.get(degree, 0.0)) < 0.12 for degree in degrees)
            assert space.share == 5 / num_nodes
    assert space.judged(Composition.of({degrees[0]: 8 * num_nodes // degrees[0]})).degrees == degrees[:1]


@settings(max_examples=60)
@given(st.sets(st.integers(0, 47), max_size=48), st.sampled_from([(1, 2, 4, 8), (2, 4), (4, 8)]))
def test_whatever_ranks_are_lost_what_is_searched_fits_and_leaves_nothing_idle_that_could_serve(lost, degrees):
    topology = Topology(48, lost_ranks=frozenset(lost))
    usable = degrees[0] * sum(not lost & set(range(first, first + degrees[0])) for first in range(0, 48, degrees[0]))
    found = searchable_compositions(topology, degrees)
    assert bool(found) == bool(usable)
    for each in found:
        lay_out(each, topology)
        assert each.num_gpus == usable


def test_a_controller_survives_losses_that_leave_little_to_choose():
    topology = Topology(80, lost_ranks=frozenset({0, 8}))
    controller, current = LookaheadController(COST), Composition.parse("2x4,8x8")
    for each in equal_windows(3, 40, [8_000]):
        pool = PoolState(layout=lay_out(current, topology), topology=topology, degrees=(4, 8))
        proposal = controller.observe(each, pool)
        if proposal is not None:
            current = proposal.target


def test_what_the_pool_has_been_in_but_could_not_go_to_is_never_a_target():
    """A rank idle beside seven single ones: nothing that is searched leaves one idle."""
    layout = tuple(group for group in lay_out(Composition.parse("8x1,1x8"), TWO_NODES) if group.first_rank != 15)
    assert len(layout) == 8
    controller = LookaheadController(COST)
    windows = equal_windows(8, 3, [60_000])
    odd = PoolState(layout=layout, topology=TWO_NODES, degrees=(1, 2, 4, 8))
    full = set(searchable_compositions(TWO_NODES, (1, 2, 4, 8)))
    proposals = [controller.observe(windows[0], odd)]
    proposals += [controller.observe(each, state(Composition.parse("16x1"))) for each in windows[1:]]
    assert any(proposals)
    assert all(each.target in full for each in proposals if each is not None)


def test_what_waits_when_nothing_arrives_is_there_at_the_end_of_the_window():
    """At half a window's work per worker, the next window's arrivals wait for what waited before them."""
    waits = []
    for num_queued in (0, 60):
        controller = LookaheadController(COST, LookaheadSettings(min_gain_ratio=0.99))
        queued = arrivals(900.0, [0.1] * num_queued, [30_000] * num_queued)
        pool = replace(state(Composition.parse("16x1")), queued=queued)
        controller.observe(window(50, arrivals(1000.0, [], [])), pool)
        still = replace(pool, queued=queued.part(0, num_queued // 3))
        controller.observe(window(51, arrivals(1020.0, [1.0], [500])), still)
        waits.append(controller._evidence._sums_s[-1][0, 0])
    assert waits[0] == 0
    assert waits[1] > 1


def test_a_large_pool_takes_noise_for_other_traffic_no_more_often_than_a_small_one(monkeypatch):
    begun = []
    start = LookaheadController._start_anew
    monkeypatch.setattr(
        LookaheadController, "_start_anew", lambda self, state: (begun[-1].append(1), start(self, state))
    )
    rng = np.random.default_rng(5)
    rates = 1 + 0.05 * rng.standard_normal(40)
    for num_gpus in (40, 320, 1024):
        begun.append([])
        controller = LookaheadController(COST, LookaheadSettings(min_gain_ratio=0.99))
        pool = state(Composition.of({2: num_gpus // 2}), Topology(num_gpus))
        for index, rate in enumerate(rates):
            count = int(num_gpus * rate)
            (drawn,) = equal_windows(1, count, [3_000])
            controller.observe(
                window(
                    index, arrivals(index * WINDOW_S, [WINDOW_S / (count + 1)] * count, drawn.arrivals.input_tokens)
                ),
                pool,
            )
    assert len(begun[1]) <= len(begun[0]) + 2
    assert len(begun[2]) <= len(begun[0]) + 2


def test_an_overload_is_seen_though_windows_are_cut():
    """Half as much again as one can serve: queues grow from window to window, whatever share of it is replayed."""
    waits = []
    for most in (6_000, 150):
        controller = LookaheadController(COST, LookaheadSettings(min_gain_ratio=0.99, max_requests=most))
        topology = Topology(8)
        per_s = 8 / COST.prefill_s(6_000, 1_536, 1) * 1.5
        for each in equal_windows(5, int(per_s * WINDOW_S), [6_000]):
            controller.observe(each, state(Composition.parse("8x1"), topology))
        means = controller._evidence._window_means_s(1.0)[:, 0]
        waits.append(means[-1] / means[0])
    assert waits[0] > 3
    assert waits[1] > 3


def test_thinning_takes_no_pattern_for_the_whole_and_loses_nothing_on_average():
    arrived = arrivals(0.0, [0.1] * 1_000, [60_000, 3_000] * 500)
    half = arrived.thinned(0.5, seed=3)
    assert len(half) == 500
    assert 200 < int((half.input_tokens == 60_000).sum()) < 300
    few = [len(arrivals(0.0, [0.1] * 51, [3_000] * 51).thinned(40 / 1024, seed=seed)) for seed in range(400)]
    assert 1.9 < np.mean(few) < 2.1
    assert len(arrived.thinned(1.0)) == 1_000


def test_a_composition_of_a_large_pool_that_is_no_multiple_is_judged_as_the_nearest():
    space = search_space(Topology(1024), (1, 2, 4, 8))
    assert space.judged(Composition.parse("4x1,510x2")) == Composition.parse("20x2")
    assert space.judged(Composition.parse("106x1,307x2,76x4")) == Composition.parse("4x1,12x2,3x4")


def test_a_review_may_fall_on_a_window_without_arrivals():
    controller = LookaheadController(COST, LookaheadSettings(review_windows=4))
    windows = equal_windows(5, 8, [3_000])
    windows[3] = window(3, arrivals(60.0, [], []))
    for each in windows:
        controller.observe(each, state(Composition.parse("8x2")))
    counts = controller._evidence.counts
    assert counts == [8] * 4, "the review forgot nothing but the empty window"


def test_a_small_pool_is_judged_as_it_is():
    space = search_space(TWO_NODES, (1, 2, 4, 8))
    assert space.share == 1
    assert all(base == real == space.judged(real) for base, real in space.candidates.items())


@pytest.mark.parametrize("num_nodes", [10, 40])
def test_a_large_pool_goes_where_five_of_its_nodes_with_their_share_of_the_traffic_would(num_nodes):
    factor = num_nodes // 5
    few, many = Topology(40), Topology(8 * num_nodes)
    for degree, lengths, num_requests in ((2, [60_000, 3_000], 20), (8, [6_000], 600)):
        small = equal_windows(8, num_requests, lengths)
        large = equal_windows(8, num_requests * factor, [each for each in lengths for _ in range(factor)])
        start = Composition.of({degree: 40 // degree})
        path = drive(LookaheadController(COST), str(start), small, few)
        others = drive(LookaheadController(COST), f"{40 // degree * factor}x{degree}", large, many)
        assert [[(degree, count * factor) for degree, count in each] for each in path] == [list(e) for e in others]
        assert path[-1] != start


def work_of(monkeypatch, num_gpus, num_requests, **changes):
    """Placements that shadows replay, times their workers, window by window; the composition stays."""
    replay, work = Shadows.replay, []

    def counting(shadows, arrived):
        work[-1] += len(arrived) * sum(each.num_workers for each in shadows.compositions)
        return replay(shadows, arrived)

    monkeypatch.setattr(Shadows, "replay", counting)
    controller = LookaheadController(COST, LookaheadSettings(min_gain_ratio=0.99, **changes))
    topology, composition = Topology(num_gpus), Composition.of({2: num_gpus // 2})
    for each in equal_windows(13, num_requests, [2_000]):
        work.append(0)
        controller.observe(each, state(composition, topology))
    return work


def test_what_a_window_takes_to_judge_does_not_grow_with_the_pool(monkeypatch):
    few, many = (work_of(monkeypatch, gpus, gpus) for gpus in (40, 1024))
    assert max(many) <= 1.1 * max(few)


def test_what_a_window_takes_to_judge_is_bounded_however_much_arrives(monkeypatch):
    heavy, overwhelming = (work_of(monkeypatch, 40, count, max_requests=100) for count in (100, 2_000))
    assert max(overwhelming) <= max(heavy)


def test_a_shadow_is_the_fifo_recursion_over_the_cheapest_worker():
    composition = Composition.parse("2x1,1x2")
    arrived = arrivals(0.0, [0.1] * 40, [3_000, 9_000, 30_000, 500] * 10)
    got = finish(Shadows([composition], COST, beta=2.0, lambda_=0.3).replay(arrived)).ttft_s[:, 0]
    free_s, degrees = [0.0, 0.0, 0.0], [1, 1, 2]
    for index in range(40):
        prefix = arrived.prefix_tokens[index]
        suffix = arrived.input_tokens[index] - prefix
        now_s = arrived.arrival_s[index]
        service_s = [COST.prefill_s(suffix, prefix, degree) for degree in degrees]
        begin_s = [max(each, now_s) for each in free_s]
        cost = [b + (2.0 + 0.3 * d) * s for b, d, s in zip(begin_s, degrees, service_s, strict=True)]
        best = cost.index(min(cost))
        free_s[best] = begin_s[best] + service_s[best]
        assert got[index] == pytest.approx(free_s[best] - now_s)


def test_shadows_carry_their_queues_from_one_replay_to_the_next():
    candidates = compositions(Topology(8), (1, 2, 4, 8))
    arrived = arrivals(0.0, [0.05] * 60, [5_000, 20_000] * 30)
    halves = [
        Arrivals(
            arrival_s=arrived.arrival_s[part],
            input_tokens=arrived.input_tokens[part],
            prefix_tokens=arrived.prefix_tokens[part],
        )
        for part in (slice(0, 30), slice(30, 60))
    ]
    shadows = Shadows(candidates, COST)
    in_two = np.concatenate([finish(shadows.replay(half)).ttft_s for half in halves])
    assert np.array_equal(in_two, finish(Shadows(candidates, COST).replay(arrived)).ttft_s)


@pytest.mark.parametrize(
    "bad",
    [
        {"min_gain_ratio": 0.0},
        {"urgent_gain_ratio": 1.0},
        {"min_windows": 0},
        {"gain_sigmas": 0},
        {"surge_ratio": 0.5},
        {"surge_windows": -1.0},
        {"review_windows": 0},
        {"reviewed_windows": 0},
    ],
)
def test_settings_out_of_range_are_named(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LookaheadSettings(**bad)


def test_what_the_first_window_ranked_wrongly_is_looked_at_again():
    """At first the same requests come in volleys, and only many small workers keep up. That drops the composition which
    is best once they come evenly, though rate and work have not changed."""
    even = equal_windows(60, 60, [30_000, 5_000])
    volleys = [
        replace(each, arrivals=replace(each.arrivals, arrival_s=np.full(60, each.start_s + 1.0))) for each in even[:2]
    ]
    reviews = LookaheadSettings(max_shadows=1, surge_windows=0.0)
    never = replace(reviews, review_windows=10_000)
    alone = drive(LookaheadController(COST, reviews), "16x1", even)
    reviewed = drive(LookaheadController(COST, reviews), "16x1", volleys + even[2:])
    stuck = drive(LookaheadController(COST, never), "16x1", volleys + even[2:])
    assert stuck[-1] != alone[-1]
    assert reviewed[-1] == alone[-1]
    assert reviewed[reviews.review_windows - 2] == stuck[reviews.review_windows - 2]


def test_a_proposal_shows_its_gain_with_and_without_surges():
    controller = LookaheadController(COST)
    for each in equal_windows(40, 40, [30_000, 5_000]):
        proposal = controller.observe(each, state(Composition.parse("16x1")))
        if proposal is not None:
            figures = proposal.figures
            assert figures["target_ttft_with_surges_s"] < figures["ttft_with_surges_s"]
            assert figures["target_mean_ttft_s"] < figures["mean_ttft_s"]
            return
    pytest.fail("no proposal in 40 windows")


def test_a_window_of_many_requests_is_thought_over_in_many_short_slices():
    controller = LookaheadController(COST)
    busy = equal_windows(2, 2_000, [8_000])
    for each in busy:
        num_slices = sum(1 for _ in controller.observing(each, state(Composition.parse("2x8"))))
        assert num_slices >= 2_000 * len(controller._shadows.compositions) / 6_000


def test_a_surge_lasts_as_long_as_a_window_of_few_requests_and_a_review_meets_those_of_all_windows_it_looks_at():
    controller = LookaheadController(COST)
    ours = LookaheadSettings()
    for number, each in enumerate(equal_windows(ours.review_windows, 40, [3_000]), 1):
        controller.observe(each, state(Composition.parse("16x1")))
        seen = controller._surges.counts
        assert set(seen) == {ours.surge_ratio * 40}
        assert len(seen) == (ours.reviewed_windows if number == ours.review_windows else number)


def test_a_backlog_that_neither_grows_nor_goes_does_not_make_the_controller_forget_window_after_window():
    """It begins with more than two requests a worker, then there is always some request for most of the workers."""
    controller = LookaheadController(COST)
    current = Composition.parse("8x2")
    for number, each in enumerate(equal_windows(6, 60, [8_000])):
        num_queued = 20 if number == 0 else 6
        queued = arrivals(each.start_s, [0.0] * num_queued, [8_000] * num_queued)
        controller.observe(each, replace(state(current), queued=queued))
    # All but the first are remembered: that one told who is quickest at working off a backlog.
    assert len(controller._evidence.counts) == 5


def test_what_was_given_up_half_thought_is_thought_over_with_the_next_window():
    """An operator pauses and resumes the controller while it looks at all compositions again."""
    ours = LookaheadSettings()
    controllers = LookaheadController(COST), LookaheadController(COST)
    windows = equal_windows(ours.review_windows + 1, 40, [3_000])
    seen = []
    for number, each in enumerate(windows, 1):
        for is_disturbed, controller in enumerate(controllers):
            thinking = controller.observing(each, state(Composition.parse("16x1")))
            if is_disturbed and number == ours.review_windows:
                next(thinking)
                thinking.close()
            else:
                finish(thinking)
        seen = [(len(each._evidence.counts), len(each._surges.counts)) for each in controllers]
    assert seen == [(ours.reviewed_windows + 1,) * 2, (ours.reviewed_windows,) * 2]
