"""What can be seen of a live pool, and what its operator can do."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.builders import COST_MODEL
from tests.serve.live_builders import asked, prompt, stub_pool
from tests.serve.test_live_pool import COMPOSITIONS, arrivals, play, read, until_idle, upsets

from vertumnus.core.composition import Composition
from vertumnus.core.drift import RefitSettings, scaled
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.pulls import PullSettings
from vertumnus.core.slo import Slo
from vertumnus.core.threshold_controller import ThresholdController
from vertumnus.errors import ConfigError
from vertumnus.serve import metric_families as families
from vertumnus.serve.errors import Overloaded, ShuttingDown
from vertumnus.serve.live_backend import LiveBackend, Watch
from vertumnus.serve.metrics import Metrics, slo_verdict
from vertumnus.serve.stub_ranks import StubSpeed
from vertumnus.serve.virtual_time import run_virtually

DOCS = Path(__file__).resolve().parents[2] / "docs"


def with_backend(body, composition="2x1", *, slo=None, kappa=None, **parts):
    """Runs `body(pool, backend)` on a started pool."""

    async def main():
        watch = Watch(slo or Slo())
        pool = stub_pool(composition, telemetry=watch.telemetry, **parts)
        backend = LiveBackend(pool, watch, kappa=kappa)
        await pool.start()
        await body(pool, backend)
        await until_idle(pool)
        await pool.close()

    run_virtually(main())


def samples(backend):
    """{(name, labels as sorted pairs): value}."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(backend.metrics_text().decode())
        for sample in family.samples
    }


def total(found, name, **labels):
    """Over all samples of the name that have these labels."""
    wanted = set(labels.items())
    return sum(value for (each, has), value in found.items() if each == name and wanted <= set(has))


# Any run


@settings(max_examples=50, deadline=None)
@given(arrivals(), upsets(), st.sampled_from(COMPOSITIONS), st.sampled_from([None, 20]), st.booleans())
def test_the_figures_add_up_after_any_run(arrivals, upsets, composition, step_tokens, has_copies):
    async def main():
        watch = Watch(Slo(3.0, 0.0))
        pool = stub_pool(
            composition,
            num_decode_ranks=2,
            blocks_per_rank=24,
            telemetry=watch.telemetry,
            step_tokens=step_tokens,
            replication=ReplicationSettings() if has_copies else None,
            pull=PullSettings(s_per_token=0.0001, latency_s=0.001, from_any_worker=True) if has_copies else None,
        )
        backend = LiveBackend(pool, watch)
        answers = await play(pool, arrivals, upsets)
        found = samples(backend)
        num_accepted = total(found, "vertumnus_requests_accepted_total")
        assert num_accepted == len(arrivals)
        assert num_accepted == total(found, "vertumnus_requests_ended_total")
        assert total(found, "vertumnus_requests_open") == total(found, "vertumnus_requests_unanswered") == 0
        num_answered = total(found, "vertumnus_ttft_seconds_count")
        for name in ("queue", "service", "t_ext"):
            assert total(found, f"vertumnus_{name}_seconds_count") == num_answered
        parts = [total(found, f"vertumnus_{name}_seconds_sum") for name in ("queue", "service", "t_ext")]
        assert sum(parts) == pytest.approx(total(found, "vertumnus_ttft_seconds_sum"))
        assert num_answered >= sum(answer is not None for answer in answers)
        assert num_answered >= total(found, "vertumnus_requests_ended_total", outcome="length")
        given_out = total(found, "vertumnus_generated_tokens_total")
        assert given_out >= sum(len(answer) for answer in answers if answer is not None)
        assert total(found, "vertumnus_reused_tokens_total") <= total(found, "vertumnus_prompt_tokens_total")
        assert total(found, "vertumnus_slo_met_tokens_total") <= total(found, "vertumnus_slo_tokens_total")
        first = total(found, "vertumnus_placements_total", redirected="false")
        restarted = total(found, "vertumnus_requests_restarted_total")
        cancelled = total(found, "vertumnus_requests_ended_total", outcome="cancelled")
        assert num_accepted - cancelled <= first <= num_accepted + restarted
        assert total(found, "vertumnus_worker_outstanding_seconds") == 0.0
        assert total(found, "vertumnus_decode_sequences") == 0
        num_lost = total(found, "vertumnus_ranks", state="lost")
        assert total(found, "vertumnus_ranks") == pool.settings.num_prefill_ranks
        workers = {int(dict(has)["degree"]): value for (name, has), value in found.items() if "composition_w" in name}
        num_spare = total(found, "vertumnus_ranks", state="spare")
        planned = sum(degree * count for degree, count in workers.items())
        assert planned == pool.settings.num_prefill_ranks - num_lost - num_spare
        num_workers = len(backend.describe()["workers"])
        assert total(found, "vertumnus_worker_index_state") == num_workers
        assert total(found, "vertumnus_workers") == num_workers
        transitions = pool.control_plane.transitions
        assert total(found, "vertumnus_transitions_total") == len(transitions)
        drains = sum(each.drain_s for each in transitions)
        assert total(found, "vertumnus_transition_drain_seconds_sum") == pytest.approx(drains)
        decisions = backend.decisions(10_000)
        assert [each["sequence"] for each in decisions] == sorted(
            (each["sequence"] for each in decisions), reverse=True
        )
        json.dumps([backend.describe(), decisions])

    run_virtually(main())


# Metrics


def test_every_family_is_shown_from_the_start_under_prometheus_conventions():
    shown = {family.name: family for family in text_string_to_metric_families(Metrics().text().decode())}
    for family in families.ALL:
        name = family.name.removesuffix("_total")
        assert shown[name].type == family.kind.value
        assert shown[name].documentation == family.text
        assert re.fullmatch(r"vertumnus_[a-z_]+[a-z]", family.name)
        assert (family.kind is families.Kind.COUNTER) == family.name.endswith("_total")
        assert list(family.bounds) == sorted(set(family.bounds))
    assert len(shown) == len(families.ALL)


def test_the_handbook_defines_every_metric():
    rows = [line for line in (DOCS / "watching.md").read_text().splitlines() if line.startswith("| `vertumnus_")]
    expected = []
    for family in families.ALL:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        expected.append(f"| `{family.name}` | {family.kind.value} | {labels} | {family.text} |")
    assert rows == expected


def test_a_request_is_counted_where_it_spent_its_time():
    async def body(pool, backend):
        for number in (1, 1):
            await read(pool.submit(asked(prompt(number, 100), max_tokens=3)))
        found = samples(backend)
        # d = 1 s, 10 ms a token and 1 ms a cached one; then 10 blocks at 1 ms each; then two decode steps of 50 ms.
        assert total(found, "vertumnus_service_seconds_sum", degree="1") == pytest.approx(2.0 + 1.1 + 0.09)
        assert total(found, "vertumnus_t_ext_seconds_sum") == pytest.approx(2 * 0.01)
        assert total(found, "vertumnus_queue_seconds_sum") == 0
        assert total(found, "vertumnus_time_per_output_token_seconds_sum") == pytest.approx(2 * 0.05)
        assert total(found, "vertumnus_inter_token_seconds_count") == 4
        assert total(found, "vertumnus_inter_token_seconds_sum") == pytest.approx(4 * 0.05)
        assert total(found, "vertumnus_decode_batch_sequences_sum") == 4
        assert total(found, "vertumnus_prompt_tokens_total") == 200
        assert total(found, "vertumnus_reused_tokens_total") == 90
        assert total(found, "vertumnus_reachable_tokens_total") == 90
        assert total(found, "vertumnus_prefill_computed_tokens_total") == 110
        assert total(found, "vertumnus_prefill_step_predicted_seconds_total") == pytest.approx(3.19)
        assert total(found, "vertumnus_prefill_step_prediction_ratio_sum") == pytest.approx(2.0)
        assert total(found, "vertumnus_generated_tokens_total") == 6
        # 2.01 s and 1.2 s, within 1 s and 0.2 ms a token: neither.
        assert total(found, "vertumnus_slo_tokens_total") == 200
        assert total(found, "vertumnus_slo_met_tokens_total") == 0

    with_backend(body, "1x1")


@pytest.mark.parametrize(
    ("waited_s", "outcome", "verdict"),
    [
        (1.0, None, True),
        (2.0, None, False),
        (1.0, "failed", False),
        (1.0, "deadline", False),
        (1.0, "cancelled", None),
        (2.0, "cancelled", False),
        (0.0, "refused", None),
    ],
)
def test_who_counts_for_slo_attainment(waited_s, outcome, verdict):
    assert slo_verdict(Slo(1.0, 0.001), 500, waited_s, outcome) is verdict


def test_refusals_are_counted_by_kind_and_miss_their_target_where_the_pool_is_at_fault():
    async def body(pool, backend):
        first = pool.submit(asked(prompt(1, 50)))
        with pytest.raises(Overloaded):
            pool.submit(asked(prompt(2, 60)))
        with pytest.raises(Exception, match="more than"):
            pool.submit(asked(prompt(2, 5000)))
        await read(first)
        found = samples(backend)
        assert total(found, "vertumnus_requests_refused_total", kind="Overloaded") == 1
        assert total(found, "vertumnus_requests_refused_total", kind="RequestTooLarge") == 1
        assert total(found, "vertumnus_slo_tokens_total") == 110
        assert backend.describe()["recent"]["slo_attainment_ratio"] == pytest.approx(50 / 110)

    with_backend(body, slo=Slo(10.0, 0.0), settings={"max_queued_requests": 1})


# The state


def test_ranks_are_shown_through_a_merge_and_a_loss():
    async def body(pool, backend):
        def states():
            return [rank["state"] for rank in backend.describe()["ranks"]]

        assert states() == ["serving"] * 4
        busy = [pool.submit(asked(prompt(number, 100), max_tokens=1)) for number in range(4)]
        outcome = await backend.set_composition("2x1,1x2")
        assert outcome == {"composition": "2x1,1x2", "target": "2x1,1x2", "controller_paused": True}
        assert sorted(states()) == ["draining"] * 2 + ["serving"] * 2
        for generation in busy:
            await read(generation)
        await asyncio.sleep(0.1)
        assert sorted(states()) == ["serving"] * 2 + ["switching"] * 2
        groups = [rank["group"] for rank in backend.describe()["ranks"] if rank["state"] == "switching"]
        assert groups[0] == groups[1]
        await asyncio.sleep(0.2)
        state = backend.describe()
        assert sorted(worker["degree"] for worker in state["workers"]) == [1, 1, 2]
        assert {worker["index_state"] for worker in state["workers"]} == {"exact"}
        pool.ranks.kill(0)
        await asyncio.sleep(0.1)
        assert states()[0] == "lost"
        assert "refused" in await backend.set_composition("4x1")
        await asyncio.sleep(3.0)
        assert "lost" not in states()
        kinds = [each["kind"] for each in backend.decisions(100)]
        assert {"merge", "rank_lost", "rank_back", "activation", "worker_opened", "worker_closed"} <= set(kinds)

    with_backend(body, "4x1")


def test_everything_is_shown_while_all_ranks_are_lost():
    async def body(pool, backend):
        pool.ranks.kill(0)
        waiting = pool.submit(asked(prompt(1, 50)))
        await asyncio.sleep(0.1)
        state = backend.describe()
        assert (state["composition"], state["num_unanswered"], state["workers"]) == ("", 1, [])
        assert backend.pause_controller(True)["controller_paused"]
        assert total(samples(backend), "vertumnus_ranks", state="lost") == 1
        await read(waiting)

    with_backend(body, "1x1")


def test_demand_and_capacity_are_those_of_the_last_minutes():
    async def body(pool, backend):
        for number in range(3):
            await read(pool.submit(asked(prompt(number, 100), max_tokens=1)))
        await asyncio.sleep(20.0)
        state = backend.describe()
        history = state["history"]
        assert sum(history["demand_s_per_s"]) * 5.0 == pytest.approx(3 * 2.0)
        assert set(history["capacity_s_per_s"]) == {1.6}
        assert state["controller"]["capacity_s_per_s"] == 1.6
        assert state["controller"]["upper_ratio"] == 0.85
        assert state["recent"]["ttft_s"]["p50"] == pytest.approx(2.0)
        assert state["recent"]["num_arrivals"] == state["recent"]["num_answered"] == 3
        assert state["recent"]["long_ratio"] == 1.0
        lengths = {len(column) for column in history.values()}
        assert len(lengths) == 1
        found = samples(backend)
        assert total(found, "vertumnus_capacity_seconds_per_second") == 1.6
        assert total(found, "vertumnus_demand_seconds_per_second") == pytest.approx(3 * 2.0 / 20.0)

    kappa = {1: 0.8, 2: 0.9, 4: 1.0, 8: 1.0}
    with_backend(body, controller=ThresholdController(kappa), long_tokens=50)


# Decisions


def test_a_placement_is_kept_with_every_term_for_every_candidate():
    async def body(pool, backend):
        await read(pool.submit(asked(prompt(1, 100))))
        await read(pool.submit(asked(prompt(1, 100))))
        newest = next(each for each in backend.decisions(100) if each["kind"] == "placement")
        assert newest["request_id"] == "test"
        assert (newest["worker_id"], newest["reusable_tokens"], newest["matched_tokens"]) == (0, 90, 90)
        candidates = newest["candidates"]
        assert candidates["worker_id"] == [0, 1]
        assert candidates["reusable_tokens"] == [90, 0]
        for row in range(2):
            summed = sum(values[row] for values in candidates["terms"].values())
            assert summed == pytest.approx(candidates["cost"][row])
        assert candidates["cost"][0] == min(candidates["cost"])

    with_backend(body)


def test_the_log_is_bounded_and_busy_traffic_does_not_push_other_decisions_out():
    async def main():
        watch = Watch(num_decisions=5)
        pool = stub_pool(telemetry=watch.telemetry)
        backend = LiveBackend(pool, watch)
        await pool.start()
        pool.set_composition(Composition.parse("1x2"))
        await asyncio.sleep(1.0)
        for number in range(20):
            await read(pool.submit(asked(prompt(number, 10), max_tokens=1)))
        kinds = [each["kind"] for each in backend.decisions(100)]
        assert kinds.count("placement") == 5
        assert len(kinds) == 10
        assert "merge" in kinds
        assert len(backend.decisions(3)) == 3
        await pool.close()

    run_virtually(main())


def test_nothing_that_is_shown_contains_a_prompt():
    async def body(pool, backend):
        marks = [700 + place for place in range(40)]
        await read(pool.submit(asked(marks, max_tokens=2)))
        shown = json.dumps([backend.decisions(100), backend.describe()]) + backend.metrics_text().decode()
        assert "701, 702" not in shown
        assert not re.search(r"\b70[1-9]\b.{0,4}\b70[2-9]\b", shown)

    with_backend(body)


def test_events_tell_the_state_and_every_decision_once():
    async def body(pool, backend):
        await read(pool.submit(asked(prompt(1, 10), max_tokens=1)))
        events = backend.events()
        first, second = await anext(events), await anext(events)
        assert (first["event"], first["composition"]) == ("state", "2x1")
        told = [each["sequence"] for each in second["decisions"]]
        assert told == list(range(1, backend.watch.decisions.last + 1))
        generation = pool.submit(asked(prompt(2, 10), max_tokens=1))
        num_states = 0
        while told[-1] < backend.watch.decisions.last:
            event = await anext(events)
            if event["event"] == "decisions":
                assert event["num_skipped"] == 0
                told += [each["sequence"] for each in event["decisions"]]
        await read(generation)
        for _ in range(4):
            num_states += (await anext(events))["event"] == "state"
        assert num_states == 4
        assert told == list(range(1, backend.watch.decisions.last + 1))
        await events.aclose()

    with_backend(body)


@pytest.mark.parametrize(("killed", "num_restarted"), [(0, 1), (1, 0), (2, 0)])
def test_a_step_that_is_lost_with_its_worker_is_told(killed, num_restarted):
    """The request's own rank, another, and the decode rank, which has nothing yet."""

    async def body(pool, backend):
        generation = pool.submit(asked(prompt(1, 100)))
        await asyncio.sleep(0.5)
        assert [worker["step"] is not None for worker in backend.describe()["workers"]] == [True, False]
        pool.ranks.kill(killed)
        await read(generation)
        assert total(samples(backend), "vertumnus_requests_restarted_total") == num_restarted
        told = [each for each in backend.decisions(100) if each["kind"] == "restart"]
        assert len(told) == num_restarted

    with_backend(body)


# Orders


def test_orders():
    async def body(pool, backend):
        with pytest.raises(ConfigError):
            await backend.set_composition("3x1")
        with pytest.raises(ConfigError):
            await backend.set_composition("nonsense")
        assert backend.pause_controller(True)["controller_paused"]
        assert not backend.pause_controller(False)["controller_paused"]
        assert "refused" in await backend.drain(0)
        generation = pool.submit(asked(prompt(1, 10)))
        assert await backend.drain(None) == {"draining": True, "num_open": 1}
        assert not backend.is_ready
        await read(generation)
        assert await backend.drain(None) == {"draining": True, "num_open": 0}
        assert backend.describe()["is_draining"]
        assert samples(backend)["vertumnus_draining", ()] == 1
        with pytest.raises(ShuttingDown):
            pool.submit(asked(prompt(1, 10)))
        assert backend.resume() == {"draining": False, "num_open": 0}
        assert backend.is_ready
        assert samples(backend)["vertumnus_draining", ()] == 0
        told = [each["kind"] for each in backend.decisions(100) if each["kind"].startswith("pool_")]
        assert told == ["pool_resumed", "pool_drained"], "once each, newest first"
        await read(pool.submit(asked(prompt(1, 10))))

    with_backend(body)


def test_the_event_loops_lag_is_measured_between_start_and_close():
    async def body(pool, backend):
        backend.start()
        await asyncio.sleep(1.0)
        assert backend.describe()["event_loop_lag_s"] == pytest.approx(0.0, abs=1e-6)
        backend.close()
        counted = total(samples(backend), "vertumnus_event_loop_lag_seconds_count")
        assert counted in (19, 20)

    with_backend(body)


# What steps really take


def slow_at(factor):
    """Ranks whose steps take `factor` times what the control plane believes at degree 1."""
    return StubSpeed(prefill=scaled(COST_MODEL, {1: factor}), decode_ranks=range(2, 3), restart_s=2.0)


def test_the_pool_shows_how_far_off_the_profile_is_and_leaves_it_alone_unless_told():
    async def body(pool, backend):
        for number in range(40):
            await read(pool.submit(asked(prompt(number, 60), max_tokens=1)))
        found = samples(backend)
        assert found["vertumnus_step_drift_ratio", (("degree", "1"),)] == pytest.approx(1.5, rel=0.01)
        assert found["vertumnus_cost_correction_ratio", (("degree", "1"),)] == 1.0
        assert backend.describe()["drift"]["1"]["step_ratio"] == pytest.approx(1.5, rel=0.01)
        assert pool.control_plane.cost_model.prefill_s(60, 0, 1) == COST_MODEL.prefill_s(60, 0, 1)

    with_backend(body, speed=slow_at(1.5))


@pytest.mark.parametrize(("factor", "learnt"), [(1.5, 1.5), (0.7, 0.7), (3.0, 2.0)])
def test_a_pool_told_to_refit_predicts_what_steps_really_take_within_bounds_without_a_restart(factor, learnt):
    async def body(pool, backend):
        for number in range(60):
            await read(pool.submit(asked(prompt(number, 60), max_tokens=1)))
        drift = backend.describe()["drift"]["1"]
        assert drift["correction_ratio"] == pytest.approx(learnt, rel=0.02)
        assert drift["step_ratio"] == pytest.approx(factor / learnt, rel=0.02), "what the correction leaves"
        assert pool.control_plane.cost_model.prefill_s(60, 0, 1) == pytest.approx(
            learnt * COST_MODEL.prefill_s(60, 0, 1), rel=0.02
        )

    with_backend(body, speed=slow_at(factor), refit=RefitSettings(min_steps=20))
