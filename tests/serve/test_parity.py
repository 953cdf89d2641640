"""One trace through the simulator and through the live pool with ranks of the same speed: the same decisions."""

import asyncio
from array import array

import numpy as np
import pytest
from tests.builders import BLOCK_TOKENS, ObservedControlPlane, profile
from tests.serve.live_builders import HASH_KEY, asked, check_idle

from vertumnus.core.awaited import WaitSettings
from vertumnus.core.composition import Composition, Topology, lay_out
from vertumnus.core.controller import PoolState, Proposal, Reason, Window
from vertumnus.core.cost import Coefficients
from vertumnus.core.events import (
    Action,
    ActivateGroups,
    CopyBlocks,
    Event,
    OpenWorker,
    ReclaimBlocks,
    RequestPlaced,
    StartStep,
)
from vertumnus.core.hashing import BlockHasher
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.moves import MoveSettings
from vertumnus.core.policies import make_policy
from vertumnus.core.pulls import PullSettings
from vertumnus.core.queueing import Discipline
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.settings import ControlPlaneSettings
from vertumnus.serve.live_pool import LivePool
from vertumnus.serve.live_settings import LiveSettings
from vertumnus.serve.stub_ranks import StubRanks, StubSpeed
from vertumnus.serve.virtual_time import run_virtually
from vertumnus.sim.pool import SimulatedPool

COMPOSITION = Composition.parse("4x1,2x2")
# No round numbers: where two things end at the same instant, their order is left to chance.
SWITCH_S = 0.49371
UNEVEN = Coefficients(d=1.00713, a=0.0, b=0.0010037, c=0.0100171, alpha=1.3e-7)
HARDWARE = profile(
    coefficients=dict.fromkeys((1, 2, 4, 8), UNEVEN),
    copy_latency_s=0.0,
    intra_node_bytes_per_s=1e30,
    inter_node_bytes_per_s=1e30,
    switch_s=SWITCH_S,
)


class Changing:
    """A controller that wants something else every other window."""

    def __init__(self) -> None:
        self._targets = [Composition.parse(each) for each in ("2x4", "8x1", "1x4,1x2,2x1", "1x8", "4x2")] * 4

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        target = self._targets.pop()
        return Proposal(target, (), Reason.BETTER_COMPOSITION, {}) if len(self._targets) % 2 else None


class RecordingControlPlane(ObservedControlPlane):
    """Remembers every decision and when it was taken."""

    is_thorough = False

    def __init__(self, **parts) -> None:
        super().__init__(**parts)
        self.decisions: list[tuple] = []

    def handle(self, event: Event, now_s: float) -> list[Action]:
        actions = super().handle(event, now_s)
        for action in actions:
            match action:
                case RequestPlaced(request_id, worker_id, _, is_redirected):
                    decision = ("place", request_id, worker_id, is_redirected)
                case StartStep(worker_id, _, items):
                    chunks = [(item.request.request_id, item.start_tokens, item.end_tokens) for item in items]
                    decision = ("step", worker_id, *chunks)
                case CopyBlocks():
                    ends = action.source_worker_id, action.destination_worker_id
                    decision = ("copy", action.reason, *ends, *action.blocks)
                case ReclaimBlocks(worker_id, blocks):
                    decision = ("reclaim", worker_id, *blocks)
                case ActivateGroups(_, groups):
                    decision = ("activate", *groups)
                case OpenWorker(worker_id, group, _):
                    decision = ("open", worker_id, group)
                case _:
                    continue
            self.decisions.append((now_s, *decision))
        return actions


def recording(epoch: int, discipline: Discipline, step_tokens: int | None, has_copies: bool) -> RecordingControlPlane:
    topology = Topology(COMPOSITION.num_gpus)
    return RecordingControlPlane(
        layout=lay_out(COMPOSITION, topology),
        topology=topology,
        cost_model=HARDWARE.cost_model(),
        policy=make_policy("vertumnus"),
        controller=Changing(),
        settings=ControlPlaneSettings(
            block_tokens=BLOCK_TOKENS,
            blocks_per_rank=600 if has_copies else 60,
            discipline=discipline,
            step_tokens=step_tokens,
            replication=ReplicationSettings() if has_copies else None,
            pull=PullSettings(s_per_token=1e-4, latency_s=0.0, from_any_worker=True) if has_copies else None,
            moves=None if has_copies else MoveSettings(),
            waits=WaitSettings(),
        ),
        epoch=epoch,
    )


def traffic(seed: int) -> list[tuple[float, list[int]]]:
    """(arrival, prompt): short ones, then long ones, many with a beginning in common; whole blocks."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(0.5, 300))
    prompts = []
    for at_s in arrival_s:
        is_long = rng.random() < (0.05 if at_s < 70 else 0.4)
        num_blocks = int(rng.integers(30, 55) if is_long else rng.integers(1, 12))
        family = int(rng.integers(8))
        shared = [family * 50 + place % 50 for place in range(BLOCK_TOKENS * int(rng.integers(1, 25)))]
        own = rng.integers(0, 900, num_blocks * BLOCK_TOKENS).tolist()
        prompts.append((float(at_s), (shared + own)[: num_blocks * BLOCK_TOKENS]))
    return prompts


def simulated_decisions(plane: RecordingControlPlane, seed: int) -> list[tuple]:
    hasher = BlockHasher(HASH_KEY, BLOCK_TOKENS)
    pool = SimulatedPool(
        control_plane=plane,
        topology=Topology(COMPOSITION.num_gpus),
        profile=HARDWARE,
        blocks_per_rank=plane.settings.blocks_per_rank,
        block_tokens=BLOCK_TOKENS,
    )
    requests = [
        PrefillRequest(number, at_s, len(tokens), hasher.chain(array("I", tokens)))
        for number, (at_s, tokens) in enumerate(traffic(seed), 1)
    ]
    pool.run(iter(requests))
    return plane.decisions


async def live_decisions(plane: RecordingControlPlane, seed: int) -> list[tuple]:
    num_ranks = COMPOSITION.num_gpus
    ranks = StubRanks(num_ranks + 1)
    pool = LivePool(
        ranks=ranks,
        control_plane=plane,
        settings=LiveSettings(
            num_prefill_ranks=num_ranks,
            num_decode_ranks=1,
            block_tokens=BLOCK_TOKENS,
            blocks_per_rank=plane.settings.blocks_per_rank,
            max_sequence_tokens=100_000,
            vocab_size=32000,
        ),
        hash_key=HASH_KEY,
    )
    await pool.start()
    ranks.speed = StubSpeed(prefill=HARDWARE.cost_model(), switch_s=SWITCH_S)
    loop = asyncio.get_running_loop()

    async def ask(at_s: float, tokens: list[int]) -> None:
        arrival = loop.create_future()
        loop.call_at(at_s, arrival.set_result, None)
        await arrival
        async for _ in pool.submit(asked(tokens, max_tokens=1)):
            pass

    await asyncio.gather(*(ask(*each) for each in traffic(seed)))
    check_idle(pool)
    await pool.close()
    return plane.decisions


# Copies take no time here, since the two pools know different links. Beside chunks, of which one would end at the very
# instant at which a copy does, that would leave their order to chance. Nor is room scarce beside them: the live pool
# holds what it hands over a moment longer, and evicts something else then.
@pytest.mark.parametrize(("step_tokens", "has_copies"), [(None, True), (100, False)])
@pytest.mark.parametrize("discipline", Discipline)
@pytest.mark.parametrize("seed", range(6))
def test_the_same_decisions_at_the_same_instants(seed, discipline, step_tokens, has_copies):
    simulated = simulated_decisions(recording(0, discipline, step_tokens, has_copies), seed)
    live = run_virtually(live_decisions(recording(1, discipline, step_tokens, has_copies), seed))
    kinds = {decision[1] for decision in simulated}
    assert {"place", "step", "activate", "open"} <= kinds, "the trace has something of everything"
    assert ("copy" in kinds) is has_copies
    for number, (of_sim, of_live) in enumerate(zip(simulated, live, strict=False)):
        assert of_sim[1:] == of_live[1:], f"decision {number}"
        assert of_sim[0] == pytest.approx(of_live[0])
    assert abs(len(simulated) - len(live)) <= 20, "only what comes after the last request may differ"
