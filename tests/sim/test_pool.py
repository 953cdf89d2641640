"""The simulated pool with the real control plane: laws of any run, then its physics on cases computed by hand.

With the builders' profile a step takes 1 s, plus 10 ms a new token shared by the ranks, plus 1 ms a cached token; T_ext
is 3 s, blocks have 10 tokens.
"""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from tests.builders import (
    BLOCK_TOKENS,
    COST_MODEL,
    DEGREES,
    T_EXT_S,
    control_plane,
    play,
    profile,
    request,
    simulated_pool,
    ttft_by_request,
)
from tests.strategies import RandomTargets, Scenario, request_lists, scenarios

from vertumnus.core.composition import Topology
from vertumnus.core.cost import Coefficients
from vertumnus.core.events import Action, CopyBlocks, CopyEnded, CopyReason, Event, ReclaimBlocks, StepStarted
from vertumnus.core.index.reports import Removed, Stored
from vertumnus.core.queueing import Discipline
from vertumnus.core.requests import PrefillRequest
from vertumnus.errors import ConfigError
from vertumnus.sim.pool import Failure, SimulatedPool

QUICK = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


@settings(max_examples=200, phases=QUICK)
@given(scenarios())
def test_every_request_ends_exactly_once_and_nothing_is_left(scenario: Scenario):
    """Whatever fails, splits, merges, is late or is copied. The control plane watches its own laws on the way."""
    pool = scenario.run()
    plane = pool.control_plane
    ended = [*pool.records.request_id, *(request_id for _, request_id, _ in pool.rejected)]
    assert sorted(ended) == [each.request_id for each in scenario.requests]
    plane.check_invariants()
    assert plane.num_waiting == 0
    for worker in plane.workers.all():
        assert worker.num_outstanding == worker.queue.service_s == worker.queued_tokens == worker.running_tokens == 0


@settings(max_examples=100, phases=QUICK)
@given(scenarios())
def test_once_all_reports_have_arrived_the_index_knows_exactly_what_the_stores_hold(scenario: Scenario):
    pool = scenario.run()
    index = pool.control_plane.index
    assert {worker.worker_id for worker in pool.control_plane.workers.all()} == set(pool.stores)
    for worker_id, store in pool.stores.items():
        held = set(store.blocks())
        assert index.resident_blocks(worker_id) == len(held)
        assert all(index.holds(worker_id, block) for block in held)
        assert not any(store.in_use(block) for block in held)


@settings(max_examples=40, phases=QUICK)
@given(scenarios())
def test_the_same_run_twice_gives_the_same_records_and_decisions(scenario: Scenario):
    first, second = scenario.run(seed=5), scenario.run(seed=5)
    assert first.records == second.records
    assert first.control_plane.steps == second.control_plane.steps
    assert first.control_plane.transitions == second.control_plane.transitions


@settings(max_examples=40, phases=QUICK)
@given(scenarios())
def test_renaming_requests_changes_nothing(scenario: Scenario):
    renamed = [replace(each, request_id=7 * each.request_id + 1) for each in scenario.requests]
    first, second = scenario.run(), replace(scenario, requests=renamed).run()
    assert [7 * request_id + 1 for request_id in first.records.request_id] == second.records.request_id
    assert first.records.ttft_s == second.records.ttft_s


@settings(max_examples=40, phases=QUICK)
@given(scenarios())
def test_no_request_starts_before_it_arrives_or_reuses_its_last_token(scenario: Scenario):
    records = scenario.run().records
    rows = zip(records.arrival_s, records.start_s, records.ttft_s, strict=True)
    assert all(arrival_s <= start_s < arrival_s + ttft_s - T_EXT_S for arrival_s, start_s, ttft_s in rows)
    for input_tokens, reused_tokens in zip(records.input_tokens, records.reused_tokens, strict=True):
        assert reused_tokens % BLOCK_TOKENS == 0
        assert 0 <= reused_tokens < input_tokens


@given(request_lists())
def test_one_fifo_worker_follows_the_textbook_recursion(requests: list[PrefillRequest]):
    pool = play(simulated_pool("1x2"), requests)
    free_s, held = 0.0, set()
    expected = {}
    for each in requests:
        limit = (each.input_tokens - 1) // BLOCK_TOKENS
        num_reused = next((n for n, block in enumerate(each.blocks[:limit]) if block not in held), limit)
        prefix = min(num_reused, len(each.blocks)) * BLOCK_TOKENS
        free_s = max(free_s, each.arrival_s) + COST_MODEL.prefill_s(each.input_tokens - prefix, prefix, 2)
        held.update(each.blocks)
        expected[each.request_id] = free_s - each.arrival_s + T_EXT_S
    assert ttft_by_request(pool) == pytest.approx(expected)


@pytest.mark.parametrize("degree", DEGREES)
def test_ttft_is_wait_plus_service_plus_transfer(degree):
    pool = play(
        simulated_pool(f"1x{degree}"), [request(0, input_tokens=800), request(1, arrival_s=0.5, input_tokens=80)]
    )
    first_s, second_s = 1 + 8 / degree, 1 + 0.8 / degree
    expected = {0: first_s + T_EXT_S, 1: first_s - 0.5 + second_s + T_EXT_S}
    assert ttft_by_request(pool) == pytest.approx(expected)


def test_the_kv_transfer_grows_with_the_prompt():
    pool = simulated_pool("1x1", profile_changes={"kv_bytes_per_token": 5, "decode_bytes_per_s": 100.0})
    assert ttft_by_request(play(pool, [request(0, input_tokens=100)])) == pytest.approx({0: 1 + 1 + T_EXT_S + 5})


def test_the_same_prompt_again_reuses_whole_blocks_but_computes_at_least_one_token():
    requests = [request(number, arrival_s=10.0 * number, input_tokens=100, prompt="same") for number in range(2)]
    pool = play(simulated_pool("1x1"), requests)
    assert pool.records.reused_tokens == [0, 90]
    assert ttft_by_request(pool)[1] == pytest.approx(1 + 0.1 + 0.09 + T_EXT_S)


def test_a_longer_prompt_reuses_the_full_blocks_of_a_shorter_one_only():
    requests = [
        request(0, input_tokens=55, prompt="same"),
        request(1, arrival_s=10.0, input_tokens=205, prompt="same"),
    ]
    assert play(simulated_pool("1x1"), requests).records.reused_tokens == [0, 50]


def test_a_request_reuses_what_is_there_when_it_starts_not_when_it_is_placed():
    # Both arrive at once: the second was placed as a miss and finds the first one's blocks.
    requests = [request(number, input_tokens=100, prompt="same") for number in range(2)]
    assert play(simulated_pool("1x1"), requests).records.reused_tokens == [0, 90]


def test_a_chunk_that_is_in_the_cache_by_now_takes_no_time():
    # Steps: 40, 40, 20+20, 40, 40 tokens. The second prompt is cut as a miss, but finds 80 tokens when it starts: only
    # its last 20 are left to compute.
    requests = [request(number, input_tokens=100, prompt="same") for number in range(2)]
    pool = play(simulated_pool("1x1", step_tokens=40), requests)
    first_s = 3 + 1.0 + 0.04 + 0.08
    assert ttft_by_request(pool) == pytest.approx({0: first_s + T_EXT_S, 1: first_s + (1 + 0.2 + 0.08) + T_EXT_S})


def test_packed_requests_share_the_fixed_cost_of_their_step():
    # The first runs alone as the worker is idle, the other two share one step of 1 + 0.3 + 0.4 s.
    requests = [request(0, input_tokens=100), request(1, input_tokens=30), request(2, input_tokens=40)]
    pool = play(simulated_pool("1x1", step_tokens=100), requests)
    assert ttft_by_request(pool) == pytest.approx({0: 2 + T_EXT_S, 1: 3.7 + T_EXT_S, 2: 3.7 + T_EXT_S})


def test_every_chunk_pays_the_fixed_cost_and_gathers_what_is_before_it():
    # Chunks of 40, 40 and 20 tokens on one rank, behind 0, 40 and 80 tokens.
    pool = play(simulated_pool("1x1", step_tokens=40), [request(0, input_tokens=100)])
    assert ttft_by_request(pool) == pytest.approx({0: 3 + 1.0 + 0.04 + 0.08 + T_EXT_S})


def test_shortest_first_lets_a_short_request_pass_a_long_one():
    requests = [request(0, input_tokens=100), request(1, input_tokens=1000), request(2, arrival_s=0.5, input_tokens=10)]
    pool = play(simulated_pool("1x1", discipline=Discipline.SHORTEST, ageing=10.0), requests)
    assert pool.records.request_id == [0, 2, 1]


def test_noise_moves_service_times_but_not_the_number_of_requests():
    requests = [request(number, arrival_s=float(number)) for number in range(5)]
    quiet, noisy = play(simulated_pool(), requests), play(simulated_pool(noise_ratio=0.5), requests)
    assert sorted(quiet.records.request_id) == sorted(noisy.records.request_id)
    assert ttft_by_request(quiet) != ttft_by_request(noisy)


def test_a_failed_rank_costs_its_step_and_its_blocks_only():
    # Two workers with one request each; the step of the first is lost after 1 s and starts again at the other.
    requests = [request(0, input_tokens=100), request(1, input_tokens=100)]
    pool = play(simulated_pool("2x1", failures=[Failure(0, 1.0)]), requests)
    assert ttft_by_request(pool) == pytest.approx({1: 2 + T_EXT_S, 0: 4 + T_EXT_S})
    assert len(pool.stores) == 1


def test_what_the_surviving_ranks_of_a_failed_worker_hold_can_be_reused():
    requests = [
        request(0, input_tokens=45, prompt="same"),
        request(1, arrival_s=20.0, input_tokens=45, prompt="same"),
    ]
    # Four blocks lie on ranks 0 and 1, two each; rank 1 is lost, the first two blocks remain.
    pool = play(simulated_pool("1x2", failures=[Failure(1, 10.0)]), requests)
    assert pool.records.reused_tokens == [0, 20]
    assert pool.records.degree == [2, 1]


def test_a_recovered_rank_comes_back_empty_after_a_switch():
    # The only rank fails before the request comes; it is placed at 5 + 0.5 s.
    requests = [request(0, arrival_s=2.0, input_tokens=100)]
    pool = play(simulated_pool("1x1", failures=[Failure(0, 1.0, recovers_s=5.0)]), requests)
    assert ttft_by_request(pool) == pytest.approx({0: 3.5 + 2 + T_EXT_S})


class Scripted:
    """Stands where the control plane stands, adds actions to its answer when a worker's step starts, and listens."""

    def __init__(self, plane, script: list[Action]) -> None:
        self._plane, self._script = plane, script
        self.heard: list[tuple[float, Event]] = []

    def __getattr__(self, name):
        return getattr(self._plane, name)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        self.heard.append((now_s, event))
        actions = self._plane.handle(event, now_s)
        if isinstance(event, StepStarted) and event.worker_id == 1:
            actions, self._script = [*actions, *self._script], []
        return actions


def scripted_pool(composition: str, script: list[Action], node_gpus: int = 8) -> tuple[SimulatedPool, Scripted]:
    """A pool in which these actions are carried out as soon as worker 1 starts its first step."""
    hardware = profile()
    plane = Scripted(control_plane(composition, node_gpus=node_gpus, policy="round-robin"), script)
    pool = SimulatedPool(
        control_plane=plane,
        topology=Topology(2, node_gpus),
        profile=hardware,
        blocks_per_rank=100,
        block_tokens=BLOCK_TOKENS,
    )
    return pool, plane


def copy_of(each: PrefillRequest, copy_id: int, start: int, end: int) -> CopyBlocks:
    """Copies blocks [start, end) of a prompt from worker 0 to worker 1."""
    return CopyBlocks(
        copy_id=copy_id,
        reason=CopyReason.INTRA_DEGREE,
        source_worker_id=0,
        destination_worker_id=1,
        parent=each.blocks[start - 1] if start else None,
        blocks=each.blocks[start:end],
    )


# Request 0 fills worker 0 with ten blocks by 2 s; request 1 starts on worker 1 at 10 s, when the script is carried out.
FILLED = request(0, input_tokens=100)
LATER = request(1, arrival_s=10.0, input_tokens=100)


@pytest.mark.parametrize(("node_gpus", "bytes_per_s"), [(8, 100.0), (1, 10.0)])
def test_a_copy_takes_latency_plus_bytes_over_the_link_it_occupies(node_gpus, bytes_per_s):
    script = [copy_of(FILLED, 0, 0, 4), copy_of(FILLED, 1, 4, 6)]
    pool, plane = scripted_pool("2x1", script, node_gpus)
    play(pool, [FILLED, LATER])
    ended = {event.copy_id: (now_s, event.ok) for now_s, event in plane.heard if isinstance(event, CopyEnded)}
    first_s = 10 + 0.5 + 4 * BLOCK_TOKENS / bytes_per_s
    second_s = first_s + 0.5 + 2 * BLOCK_TOKENS / bytes_per_s
    assert ended[0] == (pytest.approx(first_s), True)
    assert ended[1] == (pytest.approx(second_s), True), "the second waits for the link"
    assert pool.stores[1].num_reusable(FILLED.blocks, 99) == 6
    stored = [event for _, event in plane.heard if isinstance(event, Stored) and event.worker_id == 1]
    assert (FILLED.blocks[3], tuple(FILLED.blocks[4:6])) in [(event.parent, event.blocks) for event in stored]


def test_a_copy_of_what_the_source_does_not_hold_fails_at_once():
    pool, plane = scripted_pool("2x1", [copy_of(request(77, input_tokens=50), 3, 0, 5)])
    play(pool, [FILLED, LATER])
    assert [(now_s, event) for now_s, event in plane.heard if isinstance(event, CopyEnded)] == [
        (10.0, CopyEnded(3, False))
    ]


def test_a_copy_between_workers_that_are_gone_fails_and_does_no_harm():
    action = copy_of(FILLED, 3, 0, 5)
    strangers = [replace(action, source_worker_id=9), replace(action, copy_id=4, destination_worker_id=9)]
    pool, plane = scripted_pool("2x1", strangers)
    play(pool, [FILLED, LATER])
    assert [event.ok for _, event in plane.heard if isinstance(event, CopyEnded)] == [False, False]


def test_reclaiming_frees_and_reports_all_but_what_is_in_use():
    blocks = [*FILLED.blocks, *request(5, input_tokens=30).blocks]
    pool, plane = scripted_pool(
        "2x1", [ReclaimBlocks(0, blocks), ReclaimBlocks(1, LATER.blocks), ReclaimBlocks(9, blocks)]
    )
    play(pool, [FILLED, LATER])
    removed = [event for _, event in plane.heard if isinstance(event, Removed)]
    assert [(event.worker_id, event.blocks) for event in removed] == [(0, tuple(FILLED.blocks))]
    assert pool.stores[1].num_reusable(LATER.blocks, 99) == 10


@pytest.mark.parametrize("controller", [None, RandomTargets(())])
def test_a_pool_that_is_gone_for_good_says_so_instead_of_waiting_for_ever(controller):
    pool = simulated_pool("1x1", failures=[Failure(0, 1.0)], controller=controller)
    with pytest.raises(ConfigError, match=r"failures leave no GPU at .*1 requests open; accepted"):
        pool.run(iter([request(0, input_tokens=1000)]))


def test_a_degree_with_its_own_coefficients_is_simulated_with_them():
    coefficients = {degree: Coefficients(d=float(degree), a=0, b=0, c=0, alpha=0) for degree in DEGREES}
    provenance = {k: v for k, v in profile().provenance.items() if not k.startswith("coefficients")}
    source = next(iter(provenance.values()))
    for degree in DEGREES:
        for name in ("d_s", "a_s_per_token", "b_s_per_token", "c_s_per_token", "alpha_s_per_pair"):
            provenance[f"coefficients.{degree}.{name}"] = source
    pool = simulated_pool("1x4", profile_changes={"coefficients": coefficients, "provenance": provenance})
    assert ttft_by_request(play(pool, [request(0)])) == pytest.approx({0: 4 + T_EXT_S})
