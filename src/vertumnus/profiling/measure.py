"""Queue-free prefill, copies and switches of real ranks, interleaved and repeated against noise."""

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vertumnus.core.composition import RankGroup
from vertumnus.core.fit import PrefillSample
from vertumnus.engine.messages import Refusal
from vertumnus.engine.pool import RankPool
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.errors import ConfigError
from vertumnus.profiling.samples import append_sample
from vertumnus.serve.calibration import CalibrationFailed, time_copies, time_step

BLOCK_TOKENS = 64
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
NUM_SWITCHES = 40
NUM_COPIED_BLOCKS = 64

Cell = tuple[int, int, int]
"""(C, R, P)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """What is measured: `num_ranks` prefill ranks and one to hand over to. max_tokens: the longest prompt.

    num_rounds: samples of every cell; fewer once `budget_s` seconds have passed, but one.
    """

    folder: Path
    dtype: str | None = None
    num_ranks: int = 2
    threads_per_rank: int = 1
    max_tokens: int = 4096
    num_rounds: int = 5
    budget_s: float = 480.0
    seed: int = 0

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(degree for degree in (1, 2, 4, 8) if degree <= self.num_ranks)


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Several equal cold prompts in one step: do they share d, as the cost model says?"""

    degree: int
    num_requests: int
    suffix_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that ranks were asked. Copies are of one KV block of BLOCK_TOKENS tokens, from rank to rank."""

    samples: tuple[PrefillSample, ...]
    packed: tuple[PackedStep, ...]
    copy_latency_s: float
    copy_s_per_block: float
    switch_s: float


def cells_of(degrees: Iterable[int], max_tokens: int) -> list[Cell]:
    """Cold prompts of doubling length, and suffixes up to a quarter of `max_tokens` behind prefixes of one to three
    quarters of it."""
    cold = [(length, 0) for length in LENGTHS if length <= max_tokens]
    quarter = max_tokens // 4 // BLOCK_TOKENS * BLOCK_TOKENS
    suffixes = [length for length in LENGTHS if length <= quarter][::2]
    warm = [(suffix, share * quarter) for suffix in suffixes for share in (1, 2, 3) if quarter]
    return [(degree, suffix, prefix) for degree in degrees for suffix, prefix in cold + warm]


async def measure(
    settings: MeasureSettings,
    *,
    known: Sequence[PrefillSample] = (),
    samples_path: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """Starts ranks, measures, ends them. `known` samples count as taken already; new ones are appended to
    `samples_path` as they come. `on_progress` is told (done, planned).

    Raises ConfigError for settings that the model does not allow, CalibrationFailed or PoolError if ranks fail.
    """
    if settings.max_tokens < 4 * BLOCK_TOKENS:
        raise ConfigError(f"max_tokens is {settings.max_tokens}; accepted: {4 * BLOCK_TOKENS} or more")
    if settings.num_ranks not in (1, 2, 4, 8):
        raise ConfigError(f"ranks is {settings.num_ranks}; accepted: 1, 2, 4 or 8")
    ranks = await RankPool.start(
        PoolConfig(
            source="vertumnus.engine.model_source:load",
            num_ranks=settings.num_ranks + 1,
            num_slots=max(-(-settings.max_tokens // BLOCK_TOKENS), NUM_COPIED_BLOCKS) + 8,
            options={"folder": str(settings.folder), "dtype": settings.dtype, "block_tokens": BLOCK_TOKENS},
            threads_per_rank=settings.threads_per_rank,
            step_timeout_s=600,
        )
    )
    try:
        bench = _Bench(ranks, settings.num_ranks)
        latency_s, per_block_s = await time_copies(ranks, NUM_COPIED_BLOCKS, destination=settings.num_ranks)
        switch_s = await bench.switches(settings.degrees)
        samples = await _prefill(bench, settings, known, samples_path, on_progress)
        packed = [
            PackedStep(degree, count, suffix, await bench.step(degree, [(suffix, 0)] * count))
            for degree in settings.degrees
            for count, suffix in ((2, 128), (4, 64), (4, 256), (8, 128))
            if count * suffix <= settings.max_tokens
        ]
    finally:
        await ranks.close()
    return Measured(
        samples=tuple(samples),
        packed=tuple(packed),
        copy_latency_s=latency_s,
        copy_s_per_block=per_block_s,
        switch_s=switch_s,
    )


async def _prefill(
    bench: "_Bench",
    settings: MeasureSettings,
    known: Sequence[PrefillSample],
    samples_path: Path | None,
    on_progress: Callable[[int, int], None] | None,
) -> list[PrefillSample]:
    cells = cells_of(settings.degrees, settings.max_tokens)
    taken = Counter((sample.degree, sample.suffix_tokens, sample.prefix_tokens) for sample in known)
    samples = list(known)
    rng = random.Random(settings.seed)
    num_planned = len(cells) * settings.num_rounds
    num_done = sum(min(taken[cell], settings.num_rounds) for cell in cells)
    for degree in settings.degrees:
        await bench.step(degree, [(256, 0)])  # warms caches and allocators
    deadline_s = time.monotonic() + settings.budget_s
    for number in range(settings.num_rounds):
        rng.shuffle(cells)
        for cell in cells:
            if taken[cell] > number or (number and time.monotonic() > deadline_s):
                continue
            degree, suffix_tokens, prefix_tokens = cell
            seconds = await bench.step(degree, [(suffix_tokens, prefix_tokens)])
            sample = PrefillSample(degree, suffix_tokens, prefix_tokens, seconds)
            samples.append(sample)
            if samples_path is not None:
                append_sample(samples_path, sample)
            num_done += 1
            if on_progress is not None:
                on_progress(num_done, num_planned)
    return samples


class _Bench:
    """Activates whatever degree is asked for on the prefill ranks, and times steps."""

    def __init__(self, ranks: RankPool, num_ranks: int) -> None:
        self._ranks = ranks
        self._num_ranks = num_ranks
        self._epoch = ranks.highest_epoch
        self._degree: int | None = None

    async def step(self, degree: int, work: Sequence[tuple[int, int]]) -> float:
        if degree != self._degree:
            await self._activate(degree)
        return await time_step(self._ranks, RankGroup(0, degree), self._epoch, BLOCK_TOKENS, work)

    async def switches(self, degrees: Sequence[int]) -> float:
        """Median seconds of taking up another degree on all ranks, or the same again where there is but one."""
        seconds = []
        for number in range(NUM_SWITCHES):
            started_s = time.perf_counter()
            await self._activate(degrees[number % len(degrees)])
            seconds.append(time.perf_counter() - started_s)
        return statistics.median(seconds[len(degrees) :])

    async def _activate(self, degree: int) -> None:
        self._epoch += 1
        answer = await self._ranks.activate(self._epoch, dict.fromkeys(range(0, self._num_ranks, degree), degree))
        if isinstance(answer, Refusal):
            raise CalibrationFailed(f"degree {degree} cannot be measured: {answer.detail}")
        self._degree = degree
