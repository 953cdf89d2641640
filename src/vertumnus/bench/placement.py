"""What one placement takes, from the prompt's tokens to the reserved worker.

Timed is everything the control plane does for an arriving request: hashing the prompt's tokens block by block as far
as the trie knows them, the match, P, R, s and J for every worker, the reservation, Algorithm 1's `missed`, and, when
the request's step starts, Algorithm 1's `access`. Prompts are fresh: each is hashed for the first time. Steps finish
in between, untimed, so that queues stay short; the hashes beyond the first miss, which the pool needs only to report
what it stored, are computed outside the timed part.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from vertumnus.core.composition import Composition, Topology, lay_out
from vertumnus.core.control_plane import ControlPlane
from vertumnus.core.events import Action, Event, OpenWorker, RequestArrived, StartStep, StepFinished, StepStarted
from vertumnus.core.hashing import KEY_BYTES, BlockHasher
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.index.reports import Snapshot, Stored
from vertumnus.core.placement import VertumnusPolicy
from vertumnus.core.profile import load_profile
from vertumnus.core.requests import PrefillRequest
from vertumnus.core.settings import ControlPlaneSettings

BLOCK_TOKENS = 64
NUM_WORKERS = (64, 512)
PROMPT_TOKENS = (8 * 1024, 32 * 1024, 128 * 1024)
CACHED_RATIOS = (0.5, 0.95)
BLOCKS_PER_RANK = 12_288
_PER_64_WORKERS = {1: 32, 2: 16, 4: 12, 8: 4}
_NUM_WARMUP = 20


def run(
    *,
    seed: int = 0,
    num_samples: int = 300,
    num_workers: Sequence[int] = NUM_WORKERS,
    prompt_tokens: Sequence[int] = PROMPT_TOKENS,
    cached_ratios: Sequence[float] = CACHED_RATIOS,
) -> list[dict[str, Any]]:
    """One entry per number of workers (a multiple of 64), prompt length and cached ratio."""
    return [
        _measured(workers, tokens, ratio, num_samples, np.random.default_rng((seed, workers, tokens)))
        for workers in num_workers
        for tokens in prompt_tokens
        for ratio in cached_ratios
    ]


class _Pool:
    """The least that a control plane needs to be answered: snapshots, stored prefixes, steps that start and finish."""

    def __init__(self, num_workers: int) -> None:
        counts = {degree: count * num_workers // 64 for degree, count in _PER_64_WORKERS.items()}
        composition = Composition.of(counts)
        topology = Topology(composition.num_gpus)
        self.control_plane = ControlPlane(
            layout=lay_out(composition, topology),
            topology=topology,
            cost_model=load_profile().cost_model(),
            policy=VertumnusPolicy(),
            settings=ControlPlaneSettings(
                block_tokens=BLOCK_TOKENS, blocks_per_rank=BLOCKS_PER_RANK, replication=ReplicationSettings()
            ),
        )
        self.now_s = 0.0
        self.started_s: dict[int, float] = {}
        """Seconds that the control plane took to hear that a request's step had started, by request."""
        self._max_running = num_workers // 2
        self._running: deque[int] = deque()
        self._sequence: dict[int, int] = {}
        self._reused_tokens = 0
        for action in self.control_plane.start(0.0):
            assert isinstance(action, OpenWorker)
            self._sequence[action.worker_id] = 1
            self._tell(Snapshot(worker_id=action.worker_id, epoch=action.epoch, sequence=0, chains=()))
            self._epoch = action.epoch

    @property
    def worker_ids(self) -> list[int]:
        return sorted(self._sequence)

    def store(self, worker_id: int, blocks: tuple[bytes, ...]) -> None:
        """A worker reports that it now holds this prefix."""
        sequence = self._sequence[worker_id]
        self._sequence[worker_id] += 1
        self._tell(Stored(worker_id=worker_id, epoch=self._epoch, sequence=sequence, parent=None, blocks=blocks))

    def placed_s(self, request: PrefillRequest) -> float:
        """Seconds that the placement of this request took, its step's start not counted."""
        self.now_s = request.arrival_s
        begin_s = time.perf_counter()
        actions = self.control_plane.handle(RequestArrived(request), self.now_s)
        placed_s = time.perf_counter() - begin_s
        self._execute(actions)
        while len(self._running) > self._max_running:
            self._tell(StepFinished(self._running.popleft()))
        return placed_s

    def drain(self) -> None:
        """Finishes all steps, those that follow from them included."""
        while self._running:
            self._tell(StepFinished(self._running.popleft()))

    def _tell(self, event: Event) -> None:
        self._execute(self.control_plane.handle(event, self.now_s))

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartStep):
                self._running.append(action.worker_id)
                started = StepStarted(action.worker_id, tuple(item.start_tokens for item in action.items))
                begin_s = time.perf_counter()
                more = self.control_plane.handle(started, self.now_s)
                self.started_s[action.items[0].request.request_id] = time.perf_counter() - begin_s
                self._execute(more)


def _measured(
    num_workers: int, prompt_tokens: int, cached_ratio: float, num_samples: int, rng: np.random.Generator
) -> dict[str, Any]:
    pool = _Pool(num_workers)
    hasher = BlockHasher(rng.bytes(KEY_BYTES), BLOCK_TOKENS)
    num_cached = int(cached_ratio * prompt_tokens) // BLOCK_TOKENS
    cached_tokens = num_cached * BLOCK_TOKENS
    total = num_samples + _NUM_WARMUP
    systems = rng.integers(2**32, size=(16, cached_tokens // 4), dtype=np.uint32)
    decision_s: list[float] = []
    num_tokens = prompt_tokens + BLOCK_TOKENS // 2  # a last block that is not full, as prompts have
    for number in range(total):
        tokens = rng.integers(2**32, size=num_tokens, dtype=np.uint32)
        tokens[: systems.shape[1]] = systems[number % len(systems)]
        prefix = tuple(hasher.chain(tokens[:cached_tokens].data).finish())
        for worker_id in rng.choice(pool.worker_ids, size=1 + number % 3, replace=False).tolist():
            pool.store(worker_id, prefix)
        chain = hasher.chain(tokens.data)
        decision_s.append(pool.placed_s(PrefillRequest(number, 0.05 * (number + 1), num_tokens, chain)))
    pool.drain()
    measured = range(_NUM_WARMUP, total)
    access_s = [pool.started_s[number] for number in measured]
    whole_s = [decision_s[number] + pool.started_s[number] for number in measured]
    return {
        "num_workers": num_workers,
        "block_tokens": BLOCK_TOKENS,
        "prompt_tokens": prompt_tokens,
        "cached_ratio": cached_ratio,
        "p50_s": float(np.quantile(whole_s, 0.5)),
        "p99_s": float(np.quantile(whole_s, 0.99)),
        "decision_p50_s": float(np.quantile(decision_s[_NUM_WARMUP:], 0.5)),
        "access_p50_s": float(np.quantile(access_s, 0.5)),
        "num_samples": num_samples,
        "num_blocks": pool.control_plane.index.num_blocks,
    }
