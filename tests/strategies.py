"""Hypothesis strategies that several tests share: requests with common prefixes, and whole runs of a pool."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from tests.builders import BLOCK_TOKENS, play, request, simulated_pool

from vertumnus.core.awaited import WaitSettings
from vertumnus.core.composition import compositions
from vertumnus.core.controller import PoolState, Proposal, Reason, Window
from vertumnus.core.index import ReplicationSettings
from vertumnus.core.moves import MoveSettings
from vertumnus.core.policies import POLICIES
from vertumnus.core.pulls import PullSettings
from vertumnus.core.queueing import Discipline
from vertumnus.core.reconfiguration import ReconfigurationSettings
from vertumnus.core.requests import PrefillRequest
from vertumnus.sim.pool import Failure, SimulatedPool


@st.composite
def request_lists(draw: st.DrawFn, max_size: int = 14) -> list[PrefillRequest]:
    """Requests in order of arrival, often at one instant, of few prompts cut anywhere, many of which go their own ways
    from some block on: many common prefixes."""
    drawn = draw(
        st.lists(
            st.tuples(
                st.sampled_from([0.0, 0.0, 0.3, 1.7]),
                st.integers(0, 2),
                st.integers(1, 12 * BLOCK_TOKENS),
                st.one_of(st.none(), st.integers(0, 12)),
            ),
            min_size=1,
            max_size=max_size,
        )
    )
    requests, now_s = [], 0.0
    for request_id, (gap_s, prompt, input_tokens, num_shared) in enumerate(drawn):
        now_s += gap_s
        requests.append(
            request(request_id, arrival_s=now_s, input_tokens=input_tokens, prompt=prompt, num_shared=num_shared)
        )
    return requests


class RandomTargets:
    """A controller that wants another composition after every window, whatever it sees."""

    def __init__(self, draws: tuple[int, ...]) -> None:
        self._draws = list(draws)

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        if not self._draws:
            return None
        found = compositions(state.topology, state.degrees)
        return Proposal(found[self._draws.pop() % len(found)], (), Reason.BETTER_COMPOSITION, {})


# Copies and reclaims for the slightest reason, so that small runs have many.
EAGER_REPLICATION = ReplicationSettings(
    theta_inter_s=0.0, theta_intra=0.5, theta_reclaim=0.4, grace_s=0.0, pressure_ratio=0.1, max_intake_ratio=1.0
)
PULLS = tuple(PullSettings(s_per_token=0.001, latency_s=0.1, from_any_worker=is_any) for is_any in (False, True))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that a run of a pool is made of."""

    requests: list[PrefillRequest] = field(repr=False)
    composition: str
    policy: str
    discipline: Discipline
    step_tokens: int | None
    blocks_per_rank: int
    report_delay_s: float
    noise_ratio: float
    failures: tuple[Failure, ...]
    targets: tuple[int, ...]
    drain_timeout_s: float
    is_replicating: bool
    pull: PullSettings | None
    moves: MoveSettings | None
    waits: WaitSettings | None

    def pool(self, seed: int = 0) -> SimulatedPool:
        """A fresh pool for this scenario."""
        return simulated_pool(
            self.composition,
            policy=self.policy,
            discipline=self.discipline,
            step_tokens=self.step_tokens,
            blocks_per_rank=self.blocks_per_rank,
            report_delay_s=self.report_delay_s,
            noise_ratio=self.noise_ratio,
            failures=self.failures,
            controller=RandomTargets(self.targets) if self.targets else None,
            window_s=1.3,
            reconfiguration=ReconfigurationSettings(drain_timeout_s=self.drain_timeout_s),
            replication=EAGER_REPLICATION if self.is_replicating else None,
            scan_interval_s=0.7,
            pull=self.pull,
            moves=self.moves,
            waits=self.waits,
            seed=seed,
        )

    def run(self, seed: int = 0) -> SimulatedPool:
        """The pool after all requests have ended and everything under way has settled."""
        return play(self.pool(seed), self.requests)


_COMPOSITIONS = {"1x1": 1, "2x1": 2, "1x1,1x2": 3, "1x4": 4, "2x1,1x2": 4, "4x1,2x2": 8, "1x8": 8, "2x1,1x2,1x4": 8}


@st.composite
def failures_of(draw: st.DrawFn, num_gpus: int) -> tuple[Failure, ...]:
    """Losses and recoveries of any rank but the first, which keeps the pool alive."""
    if num_gpus == 1:
        return ()
    drawn = draw(
        st.lists(
            st.tuples(
                st.integers(1, num_gpus - 1),
                st.floats(0, 15, width=16),
                st.one_of(st.none(), st.floats(0, 6, width=16)),
            ),
            max_size=4,
        )
    )
    return tuple(Failure(rank, at_s, None if down_s is None else at_s + down_s) for rank, at_s, down_s in drawn)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small runs with everything on: any policy, queues, chunks, delays, noise, failures, reconfigurations."""
    composition = draw(st.sampled_from(sorted(_COMPOSITIONS)))
    return Scenario(
        requests=draw(request_lists()),
        composition=composition,
        policy=draw(st.one_of(st.just("vertumnus"), st.just("paper"), st.sampled_from(sorted(POLICIES)))),
        discipline=draw(st.sampled_from(Discipline)),
        step_tokens=draw(st.sampled_from([None, BLOCK_TOKENS, 25, 60])),
        blocks_per_rank=draw(st.sampled_from([1, 4, 9, 50])),
        report_delay_s=draw(st.sampled_from([0.0, 0.0, 0.25, 2.5])),
        noise_ratio=draw(st.sampled_from([0.0, 0.3])),
        failures=draw(failures_of(_COMPOSITIONS[composition])),
        targets=draw(st.lists(st.integers(0, 1000), max_size=8).map(tuple)),
        drain_timeout_s=draw(st.sampled_from([0.4, 60.0])),
        is_replicating=draw(st.booleans()),
        pull=draw(st.sampled_from([None, *PULLS])),
        moves=draw(st.sampled_from([None, MoveSettings(min_gain_s=0.0), MoveSettings(gpu_price=0.0)])),
        waits=draw(st.sampled_from([None, WaitSettings()])),
    )
