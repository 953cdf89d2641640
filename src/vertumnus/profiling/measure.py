"""Queue-free prefill, copies and switches of real ranks, interleaved and repeated against noise.

The first round goes from short steps to long ones, and leaves out what would take more than its share of the time; the
others each go in an order of their own, so that whatever else the machine does meets all cells alike.
"""

import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vertumnus.core.composition import RankGroup
from vertumnus.core.fit import PrefillSample
from vertumnus.engine.messages import Refusal
from vertumnus.engine.pool import RankPool
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.errors import ConfigError
from vertumnus.profiling.copies import COPIED_BLOCKS, CopyLine, Way, time_ways
from vertumnus.profiling.grid import BLOCK_TOKENS, StepCell, cells_of
from vertumnus.profiling.samples import PackedStep, SampleLog, append_sample
from vertumnus.serve.calibration import CalibrationFailed, time_step

NUM_SWITCHES = 40
LARGEST_SHARE_RATIO = 1 / 25
"""Of the time that one step may take."""

EMPTY_LOG = SampleLog((), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """What is measured: `num_ranks` prefill ranks and one to hand over to. max_tokens: the longest prompt.

    num_rounds: samples of every cell; fewer once `budget_s` seconds have passed. device: where one model steps in this
    process, at degree 1, instead of on ranks, as "cuda"; None: on ranks.
    """

    folder: Path
    dtype: str | None = None
    num_ranks: int = 2
    threads_per_rank: int = 1
    max_tokens: int = 4096
    num_rounds: int = 5
    budget_s: float = 480.0
    seed: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 4 * BLOCK_TOKENS:
            raise ConfigError(f"max_tokens is {self.max_tokens}; accepted: {4 * BLOCK_TOKENS} or more")
        if self.num_ranks not in (1, 2, 4, 8):
            raise ConfigError(f"ranks is {self.num_ranks}; accepted: 1, 2, 4 or 8")

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(degree for degree in (1, 2, 4, 8) if degree <= self.num_ranks and not (self.device and degree > 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that ranks were asked. copies: of KV blocks of BLOCK_TOKENS tokens; none where one device was measured alone,
    and switch_s is 0 then. num_left_out: cells without a sample, as they would have taken too long. kv_bytes: what the
    single device has for KV blocks, 0 where it does not say.
    """

    samples: tuple[PrefillSample, ...]
    packed: tuple[PackedStep, ...]
    copies: Mapping[Way, CopyLine]
    switch_s: float
    num_left_out: int = 0
    kv_bytes: int = 0


async def measure(
    settings: MeasureSettings,
    *,
    known: SampleLog = EMPTY_LOG,
    samples_path: Path | None = None,
    on_progress: Callable[[int, int], None] = lambda num_done, num_planned: None,
) -> Measured:
    """Starts ranks, measures, ends them. What is `known` counts as taken already; new samples are appended to
    `samples_path` as they come. `on_progress` is told (done, planned).

    Raises ConfigError for a model that cannot be used, CalibrationFailed or PoolError if ranks fail.
    """
    cells = cells_of(settings.degrees, settings.max_tokens)
    num_blocks = max(cell.num_requests * -(-cell.num_tokens // cell.num_requests // BLOCK_TOKENS) for cell in cells)
    if settings.device is not None:
        return await _measure_one(settings, cells, num_blocks, known, samples_path, on_progress)
    ranks = await RankPool.start(
        PoolConfig(
            source="vertumnus.engine.model_source:load",
            num_ranks=settings.num_ranks + 1,
            num_slots=max(num_blocks, *COPIED_BLOCKS) + 8,
            options={"folder": str(settings.folder), "dtype": settings.dtype, "block_tokens": BLOCK_TOKENS},
            threads_per_rank=settings.threads_per_rank,
            step_timeout_s=600,
        )
    )
    try:
        bench = _Bench(ranks, settings.num_ranks)
        copies = await time_ways(ranks, settings.num_ranks)
        switch_s = await bench.switches(settings.degrees)
        for degree in settings.degrees:
            await bench.step(StepCell(degree, 256, 0))  # warms caches and allocators
        rounds = Rounds(cells, settings, known, bench.step, samples_path, on_progress)
        await rounds.run()
    finally:
        await ranks.close()
    return Measured(
        samples=tuple(rounds.samples),
        packed=tuple(rounds.packed),
        copies=copies,
        switch_s=switch_s,
        num_left_out=rounds.num_left_out,
    )


async def _measure_one(
    settings: MeasureSettings,
    cells: Sequence[StepCell],
    num_blocks: int,
    known: SampleLog,
    samples_path: Path | None,
    on_progress: Callable[[int, int], None],
) -> Measured:
    import torch

    from vertumnus.profiling.one_device import OneDevice

    assert settings.device is not None
    single = OneDevice(settings.folder, settings.dtype, torch.device(settings.device), num_blocks)
    await single.step(StepCell(1, 256, 0))  # warms caches and allocators
    rounds = Rounds(cells, settings, known, single.step, samples_path, on_progress)
    await rounds.run()
    return Measured(
        samples=tuple(rounds.samples),
        packed=tuple(rounds.packed),
        copies={},
        switch_s=0.0,
        num_left_out=rounds.num_left_out,
        kv_bytes=single.kv_bytes,
    )


class Rounds:
    """Times every cell once a round until the rounds or the time are up. See the module's text."""

    def __init__(
        self,
        cells: Sequence[StepCell],
        settings: MeasureSettings,
        known: SampleLog,
        step_s: Callable[[StepCell], Awaitable[float]],
        samples_path: Path | None = None,
        on_progress: Callable[[int, int], None] = lambda num_done, num_planned: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """cells: least work first. step_s: runs one and says how long it took."""
        self.samples = list(known.samples)
        self.packed = list(known.packed)
        self._cells = cells
        self._settings = settings
        self._step_s = step_s
        self._path = samples_path
        self._on_progress = on_progress
        self._clock = clock
        self._taken: Counter[StepCell] = Counter()
        self._s_per_work: dict[int, float] = {}
        """By degree, of the longest step so far."""
        for sample in self.samples:
            self._note(StepCell(sample.degree, sample.suffix_tokens, sample.prefix_tokens), sample.seconds)
        for packed in self.packed:
            cell = StepCell(packed.degree, packed.suffix_tokens, packed.prefix_tokens, packed.num_requests)
            self._note(cell, packed.seconds)

    @property
    def num_left_out(self) -> int:
        """Cells without any sample."""
        return sum(not self._taken[cell] for cell in self._cells)

    async def run(self) -> None:
        """Raises what a step raises; the samples so far are in the file then."""
        budget_s = self._settings.budget_s
        deadline_s = self._clock() + budget_s
        num_rounds = self._settings.num_rounds
        for number in range(num_rounds):
            for cell in self._ordered(number):
                if self._taken[cell] > number:
                    continue
                guessed_s = self._s_per_work.get(cell.degree, 0.0) * cell.work
                if self._clock() + guessed_s > deadline_s or guessed_s > budget_s * LARGEST_SHARE_RATIO:
                    continue
                self._add(cell, await self._step_s(cell))
                num_done = sum(min(self._taken[each], num_rounds) for each in self._cells)
                self._on_progress(num_done, num_rounds * len(self._cells))

    def _ordered(self, number: int) -> list[StepCell]:
        if not number:
            return list(self._cells)
        draw = np.random.default_rng((self._settings.seed, number))
        return [self._cells[index] for index in draw.permutation(len(self._cells)).tolist()]

    def _add(self, cell: StepCell, seconds: float) -> None:
        sample: PrefillSample | PackedStep
        if cell.num_requests == 1:
            sample = PrefillSample(cell.degree, cell.suffix_tokens, cell.prefix_tokens, seconds)
            self.samples.append(sample)
        else:
            sample = PackedStep(cell.degree, cell.num_requests, cell.suffix_tokens, cell.prefix_tokens, seconds)
            self.packed.append(sample)
        if self._path is not None:
            append_sample(self._path, sample)
        self._note(cell, seconds)

    def _note(self, cell: StepCell, seconds: float) -> None:
        if all(cell.work >= each.work for each in self._taken if each.degree == cell.degree):
            self._s_per_work[cell.degree] = seconds / cell.work
        self._taken[cell] += 1


class _Bench:
    """Activates whatever degree is asked for on the prefill ranks, and times steps."""

    def __init__(self, ranks: RankPool, num_ranks: int) -> None:
        self._ranks = ranks
        self._num_ranks = num_ranks
        self._epoch = ranks.highest_epoch
        self._degree: int | None = None

    async def step(self, cell: StepCell) -> float:
        if cell.degree != self._degree:
            await self._activate(cell.degree)
        work = [(cell.suffix_tokens, cell.prefix_tokens)] * cell.num_requests
        return await time_step(self._ranks, RankGroup(0, cell.degree), self._epoch, BLOCK_TOKENS, work)

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
