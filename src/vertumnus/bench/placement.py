"""What one placement takes, from the prompt's tokens to the reserved worker.

Timed is everything the control plane does for an arriving request: hashing the prompt's tokens block by block as far
as the trie knows them, the match, P, R, s and J for every worker, the reservation, Algorithm 1's `missed`, and, when
the request's step starts, Algorithm 1's `access`. Prompts are fresh: each is hashed for the first time. The hashes
beyond the first miss, which the pool needs only to report what it stored, are computed outside the timed part.

Two pools are timed: one with nothing queued, as the paper's placement sees it, and one under load, in which requests
wait at every worker and may move, be waited for or pull blocks from any worker, and in which one step finishes for
every request that arrives. What a finished step takes until the next has started is timed by itself.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.awaited import WaitSettings
from vertumnus.core.composition import Composition, Topology, lay_out
from vertumnus.core.control_plane import ControlPlane
from vertumnus.core.events import (
    Action,
    CopyBlocks,
    CopyEnded,
    Event,
    OpenWorker,
    RequestArrived,
    StartStep,
    StepFinished,
    StepStarted,
)
from vertumnus.core.hashing import KEY_BYTES, BlockHasher
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.index.reports import Snapshot, Stored
from vertumnus.core.moves import MoveSettings
from vertumnus.core.placement import VertumnusPolicy
from vertumnus.core.profile import load_profile
from vertumnus.core.pulls import PullSettings
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.settings import ControlPlaneSettings

BLOCK_TOKENS = 64
NUM_WORKERS = (64, 512)
PROMPT_TOKENS = (8 * 1024, 32 * 1024, 128 * 1024)
CACHED_RATIOS = (0.5, 0.95)
NUM_QUEUED = 2
"""Requests that wait per worker in the loaded pool, on average."""
BLOCKS_PER_RANK = 12_288
_PER_64_WORKERS = {1: 32, 2: 16, 4: 12, 8: 4}
_NUM_WARMUP = 20
_IDLE_INTERVAL_S = 0.05


def run(
    *,
    seed: int = 0,
    num_samples: int = 300,
    num_workers: Sequence[int] = NUM_WORKERS,
    prompt_tokens: Sequence[int] = PROMPT_TOKENS,
    cached_ratios: Sequence[float] = CACHED_RATIOS,
) -> list[dict[str, Any]]:
    """One entry per number of workers (a multiple of 64), prompt length and cached ratio, with nothing queued; then,
    for the shortest prompts, with NUM_QUEUED requests waiting per worker."""
    return [
        _measured(workers, tokens, ratio, num_samples, num_queued, np.random.default_rng((seed, workers, tokens)))
        for num_queued, lengths in ((0, prompt_tokens), (NUM_QUEUED, [min(prompt_tokens)]))
        for workers in num_workers
        for tokens in lengths
        for ratio in cached_ratios
    ]


class _Pool:
    """The least that a control plane needs to be answered: snapshots, stored prefixes, copies, steps that start and
    finish."""

    def __init__(self, num_workers: int, *, is_loaded: bool) -> None:
        counts = {degree: count * num_workers // 64 for degree, count in _PER_64_WORKERS.items()}
        composition = Composition.of(counts)
        topology = Topology(composition.num_gpus)
        profile = load_profile()
        self.costs = profile.cost_model().for_degrees(composition.degrees)
        settings = ControlPlaneSettings(
            block_tokens=BLOCK_TOKENS, blocks_per_rank=BLOCKS_PER_RANK, replication=ReplicationSettings()
        )
        if is_loaded:
            pull = PullSettings.of_profile(profile, from_any_worker=True)
            settings = replace(settings, moves=MoveSettings(), waits=WaitSettings(), pull=pull)
        self.control_plane = ControlPlane(
            layout=lay_out(composition, topology),
            topology=topology,
            cost_model=profile.cost_model(),
            policy=VertumnusPolicy(),
            settings=settings,
        )
        self.now_s = 0.0
        self.running: deque[int] = deque()
        """The workers whose steps run, longest first."""
        self._sequence: dict[int, int] = {}
        self._access_s = 0.0
        for action in self.control_plane.start(0.0):
            assert isinstance(action, OpenWorker)
            self._sequence[action.worker_id] = 1
            self.tell(Snapshot(worker_id=action.worker_id, epoch=action.epoch, sequence=0, chains=()))
            self._epoch = action.epoch

    @property
    def worker_ids(self) -> list[int]:
        return sorted(self._sequence)

    def store(self, worker_id: int, blocks: tuple[bytes, ...]) -> None:
        """A worker reports that it now holds this prefix."""
        sequence = self._sequence[worker_id]
        self._sequence[worker_id] += 1
        self.tell(Stored(worker_id=worker_id, epoch=self._epoch, sequence=sequence, parent=None, blocks=blocks))

    def tell(self, event: Event) -> tuple[float, float]:
        """Seconds that the control plane took to handle an event, and to hear that the steps it asked for started."""
        self._access_s = 0.0
        handled_s = self._handled_s(event)
        return handled_s, self._access_s

    def _handled_s(self, event: Event) -> float:
        begin_s = time.perf_counter()
        actions = self.control_plane.handle(event, self.now_s)
        handled_s = time.perf_counter() - begin_s
        for action in actions:
            self._execute(action)
        return handled_s

    def _execute(self, action: Action) -> None:
        if isinstance(action, StartStep):
            self.running.append(action.worker_id)
            started = StepStarted(action.worker_id, tuple(item.start_tokens for item in action.items))
            self._access_s += self._handled_s(started)
        elif isinstance(action, CopyBlocks):
            self._handled_s(CopyEnded(action.copy_id, True))


def _measured(
    num_workers: int,
    prompt_tokens: int,
    cached_ratio: float,
    num_samples: int,
    num_queued: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    pool = _Pool(num_workers, is_loaded=num_queued > 0)
    hasher = BlockHasher(rng.bytes(KEY_BYTES), BLOCK_TOKENS)
    num_cached = int(cached_ratio * prompt_tokens) // BLOCK_TOKENS
    cached_tokens = num_cached * BLOCK_TOKENS
    num_tokens = prompt_tokens + BLOCK_TOKENS // 2  # a last block that is not full, as prompts have
    systems = rng.integers(2**32, size=(16, cached_tokens // 4), dtype=np.uint32)

    def prompt(number: int) -> NDArray[np.uint32]:
        tokens = rng.integers(2**32, size=num_tokens, dtype=np.uint32)
        tokens[: systems.shape[1]] = systems[number % len(systems)]
        return tokens

    # Under load requests come as fast as all workers together serve them, so that queues neither grow nor drain.
    per_s = np.sum(
        1 / pool.costs.prefill_s(np.array(float(num_tokens - cached_tokens)), np.array(float(cached_tokens)))
    )
    interval_s = 1 / float(per_s) if num_queued else _IDLE_INTERVAL_S
    num_filled = num_workers * (1 + num_queued) if num_queued else 0
    max_running = num_workers // 2
    decision_s: list[float] = []
    access_s: list[float] = []
    finish_s: list[float] = []
    for number in range(num_filled + _NUM_WARMUP + num_samples):
        tokens = prompt(number)
        is_timed = number >= num_filled + _NUM_WARMUP
        if number >= num_filled or number < len(systems):
            prefix = tuple(hasher.chain(tokens[:cached_tokens].data).finish())
            for worker_id in rng.choice(pool.worker_ids, size=1 + number % 3, replace=False).tolist():
                pool.store(worker_id, prefix)
        chain = hasher.chain(tokens.data)
        pool.now_s += interval_s if number >= num_filled else 0.0
        placed_s, started_s = pool.tell(RequestArrived(PrefillRequest(number, pool.now_s, num_tokens, chain)))
        if number < num_filled:
            continue
        finished_s = 0.0
        if num_queued or len(pool.running) > max_running:
            finished_s, next_started_s = pool.tell(StepFinished(pool.running.popleft()))
            started_s += next_started_s
        if is_timed:
            decision_s.append(placed_s)
            access_s.append(started_s)
            finish_s.append(finished_s)
    whole_s = np.add(decision_s, access_s)
    return {
        "num_workers": num_workers,
        "num_queued": num_queued,
        "block_tokens": BLOCK_TOKENS,
        "prompt_tokens": prompt_tokens,
        "cached_ratio": cached_ratio,
        "p50_s": float(np.quantile(whole_s, 0.5)),
        "p99_s": float(np.quantile(whole_s, 0.99)),
        "decision_p50_s": float(np.quantile(decision_s, 0.5)),
        "access_p50_s": float(np.quantile(access_s, 0.5)),
        "finish_p50_s": float(np.quantile(finish_s, 0.5)) if num_queued else None,
        "finish_p99_s": float(np.quantile(finish_s, 0.99)) if num_queued else None,
        "num_samples": num_samples,
        "num_blocks": pool.control_plane.index.num_blocks,
    }
