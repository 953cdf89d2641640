"""Several routers over the same workers: what each sees, and what its ignorance costs.

With the builders' profile a step takes 1 s, plus 10 ms a new token shared by the ranks.
"""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders import play, request, simulated_pool
from tests.strategies import Scenario, scenarios

from vertumnus.core.composition import Composition
from vertumnus.core.placement import Placement, PlacementPolicy, PlacementView
from vertumnus.core.profile import load_profile
from vertumnus.core.queueing import Discipline, ServiceOrder
from vertumnus.core.requests import PrefillRequest
from vertumnus.errors import ConfigError
from vertumnus.sim.pool import SimulatedPool
from vertumnus.sim.several_routers import RouterSettings, SeveralRouters
from vertumnus.sim.simulate import SimulationSettings, simulate
from vertumnus.workload.synthesis import synthesise

LATE = RouterSettings(num_routers=2, delay_s=1.0, has_own_order=False)


@dataclass
class Watched:
    """A policy that keeps what it was shown; its copies keep it in the same place."""

    policy: PlacementPolicy
    views: list[PlacementView] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.policy.name

    def place(self, view: PlacementView) -> Placement:
        self.views.append(view)
        return self.policy.place(view)

    def __deepcopy__(self, memo: Any) -> "Watched":
        return Watched(deepcopy(self.policy, memo), self.views)


def behind_routers(pool: SimulatedPool, requests: list[PrefillRequest], routers: RouterSettings) -> Watched:
    """Puts the pool's policy behind several routers."""
    plane = pool.control_plane
    watched = Watched(plane.policy)
    plane.policy = SeveralRouters(
        watched,
        routers,
        workers=plane.workers,
        order=ServiceOrder(plane.settings.discipline, plane.settings.ageing),
        arrival_s=np.array([each.arrival_s for each in requests]),
    )
    return watched


def seen(requests: list[PrefillRequest], routers: RouterSettings = LATE, **pool: Any) -> list[PlacementView]:
    simulated = simulated_pool("2x1", policy="least-loaded", **pool)
    watched = behind_routers(simulated, requests, routers)
    play(simulated, requests)
    return watched.views


def test_a_router_knows_what_it_placed_itself_at_once_and_what_others_did_after_the_delay():
    # All take 2 s. Request 2 comes to the router of request 0, request 3 to that of request 1.
    requests = [request(number, arrival_s=at_s) for number, at_s in enumerate((0.0, 0.25, 0.5, 1.125))]
    views = seen(requests)
    assert [view.wait_s.tolist() for view in views] == [
        [0.0, 0.0],
        [0.0, 0.0],  # request 0 is not known: this one goes to worker 0 too, and queues there
        [1.5, 0.0],  # request 0 is its own; request 1 is not known
        [2.875, 0.0],  # request 0 is known by now, and request 1 its own; request 2 at worker 1 is not known
    ]
    assert [view.num_outstanding.tolist() for view in views] == [[0, 0], [0, 0], [1, 0], [2, 0]]
    assert [view.outstanding_tokens.tolist() for view in views] == [[0, 0], [0, 0], [100, 0], [200, 0]]


def test_a_longer_request_that_is_not_known_would_not_be_delayed_either():
    requests = [
        request(0, input_tokens=400),
        request(1, input_tokens=400),
        request(2, input_tokens=200),  # at worker 0, behind request 0; known to the next one's router a second later
        request(3, arrival_s=0.5, input_tokens=50),
        request(4, arrival_s=0.625, input_tokens=50),
        request(6, arrival_s=1.0, input_tokens=50),
    ]
    simulated = simulated_pool("1x1", discipline=Discipline.SHORTEST)
    by_id = [replace(requests[0], request_id=number) for number in range(7)]
    for each in requests:
        by_id[each.request_id] = each
    watched = behind_routers(simulated, by_id, LATE)
    play(simulated, requests)
    views = {view.request_id: view for view in watched.views}
    # Request 0 runs for 5 s; what is longer would wait 1.5 s for a request of 50 tokens.
    assert views[3].wait_s.tolist() == [0.0], "request 0 runs, but router 1 does not know"
    assert views[3].delay_s.tolist() == [1.5], "request 1 is its own, request 2 is not known"
    assert views[4].wait_s.tolist() == [4.375]
    assert views[4].delay_s.tolist() == [1.5], "request 2 is its own"
    assert views[6].wait_s.tolist() == [4.0 + 1.5], "request 4, which goes before it, is its own"
    assert views[6].delay_s.tolist() == [3.0], "requests 1 and 2 are longer, and have been known for an instant"


@settings(max_examples=150)
@given(scenarios(), st.integers(2, 4), st.sampled_from([0.1, 1.0, 10.0]))
def test_a_router_sees_the_load_that_the_requests_which_it_knows_make(scenario: Scenario, num_routers, delay_s):
    """Added up anew at every placement, from who is where; whatever fails, splits, merges or moves."""
    scenario = replace(scenario, step_tokens=None)
    pool = scenario.pool()
    watched = behind_routers(pool, scenario.requests, RouterSettings(num_routers=num_routers, delay_s=delay_s))
    plane, order = pool.control_plane, ServiceOrder(scenario.discipline, pool.control_plane.settings.ageing)
    several = plane.policy
    log: list[tuple[float, int, int]] = []

    class Checked:
        name = several.name

        def place(self, view: PlacementView) -> Placement:
            placement = several.place(view)
            own = view.request_id % num_routers
            new = {
                (request_id, worker_id)
                for at_s, request_id, worker_id in log
                if request_id % num_routers != own and at_s > view.now_s - delay_s
            }
            log.append((view.now_s, view.request_id, placement.worker_id))
            shown = watched.views[-1]
            asked = scenario.requests[view.request_id]
            for row, worker_id in enumerate(view.worker_ids.tolist()):
                worker = plane.workers[worker_id]
                runs = [each for each in worker.running if (each.queued.request.request_id, worker_id) not in new]
                waits = [item for item in worker.queue.items() if (item.request.request_id, worker_id) not in new]
                left_s = max(0.0, worker.running_end_s - view.now_s) if runs else 0.0
                assert shown.num_outstanding[row] == len(runs) + len(waits)
                assert shown.outstanding_s[row] == pytest.approx(
                    left_s + sum(item.service_s for item in waits), abs=2e-6
                )
                if view.awaited_tokens is not None and view.awaited_tokens[row] > 0:
                    assert bool(shown.wait_s[row] == np.inf) is any(view.awaited_request_id == each for each, _ in new)
                    continue
                service_s = float(view.service_s[row])
                key = order.key(asked, service_s)
                first = [item for item in waits if order.key(item.request, item.service_s) <= key]
                assert shown.wait_s[row] == pytest.approx(left_s + sum(item.service_s for item in first), abs=2e-6)
                assert shown.delay_s[row] == pytest.approx((len(waits) - len(first)) * service_s, abs=1e-9)
            return placement

    plane.policy = Checked()
    play(pool, scenario.requests)


@settings(max_examples=50)
@given(scenarios(), st.integers(1, 4))
def test_routers_that_know_everything_at_once_are_as_one(scenario: Scenario, num_routers):
    scenario = replace(scenario, step_tokens=None, policy="vertumnus")
    alone = scenario.run()
    pool = scenario.pool()
    behind_routers(pool, scenario.requests, RouterSettings(num_routers=num_routers, has_own_order=False))
    play(pool, scenario.requests)
    assert pool.records == alone.records


@pytest.mark.parametrize(("num_routers", "workers"), [(1, [0, 1, 0, 1]), (2, [0, 0, 1, 1]), (4, [0, 0, 0, 0])])
def test_every_router_takes_turns_of_its_own(num_routers, workers):
    requests = [request(number) for number in range(4)]
    pool = simulated_pool("2x1", policy="round-robin")
    behind_routers(pool, requests, RouterSettings(num_routers=num_routers))
    routers, placed = pool.control_plane.policy, []

    class Watcher:
        name = routers.name

        def place(self, view: PlacementView) -> Placement:
            placement = routers.place(view)
            placed.append(placement.worker_id)
            return placement

    pool.control_plane.policy = Watcher()
    play(pool, requests)
    assert placed == workers


def test_late_knowledge_costs_and_an_order_of_ones_own_spares_some_of_it():
    trace = synthesise("toolagent", seed=1, rate_per_s=60.0, duration_s=25.0)
    one = SimulationSettings(num_gpus=40, composition=Composition.parse("24x1,4x2,2x4"), is_fixed=True)
    late = RouterSettings(num_routers=8, delay_s=0.1)

    def mean_ttft_s(routers: RouterSettings) -> float:
        result = simulate(trace, load_profile(), "vertumnus", replace(one, routers=routers))
        assert result.num_completed == trace.num_requests
        return result.latency.mean_ttft_s

    alone = mean_ttft_s(RouterSettings())
    assert alone < mean_ttft_s(late) < mean_ttft_s(replace(late, has_own_order=False))


def test_settings_that_nobody_would_notice_or_that_are_not_modelled_are_refused():
    for wrong in ({"num_routers": 0}, {"num_routers": 2, "delay_s": -1.0}, {"num_routers": 2, "delay_s": np.inf}):
        with pytest.raises(ConfigError, match="accepted"):
            RouterSettings(**wrong)
    with pytest.raises(ConfigError, match="one router"):
        RouterSettings(delay_s=0.5)
    trace = synthesise("toolagent", seed=1, rate_per_s=1.0, duration_s=5.0)
    chunked = SimulationSettings(num_gpus=8, step_tokens=8192, routers=RouterSettings(num_routers=2))
    with pytest.raises(ConfigError, match="step_tokens"):
        simulate(trace, load_profile(), "vertumnus", chunked)
