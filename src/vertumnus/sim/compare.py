"""The same traffic through many pools: one cell per policy, composition and rate, run over the cores."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

from vertumnus.core.composition import Composition
from vertumnus.core.placement import PlacementPolicy, names_preferred_degrees
from vertumnus.core.policies import make_policy
from vertumnus.core.profile import Profile
from vertumnus.errors import ConfigError
from vertumnus.sim.metrics import RequestRecords
from vertumnus.sim.simulate import SimulationResult, SimulationSettings, chosen_composition, simulate
from vertumnus.workload.trace import Trace

PolicyMaker = Callable[[], PlacementPolicy]
"""Makes a fresh policy (they may keep state); a policy's class will do. Picklable where several processes run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pool to try: how it places, how it is set up, and how fast the traffic comes (None: as recorded)."""

    make_policy: PolicyMaker
    settings: SimulationSettings
    rate_per_s: float | None = None
    label: str = ""
    """What tables and plots call it; empty: the policy's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What a cell gave: one result per trace (per seed), without the records of single requests."""

    cell: Cell
    results: tuple[SimulationResult, ...] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The mean over the traces of every figure; with several traces the single runs as `runs` too."""
        entries = [result.to_json() for result in self.results]
        merged = {key: _mean([entry[key] for entry in entries]) for key in entries[0]}
        if self.cell.label:
            merged["label"] = self.cell.label
        if len(entries) > 1:
            merged["runs"] = entries
        return merged


def _mean(values: list[Any]) -> Any:
    """Mean of numbers, whole where all are equal; None if any is; for texts the one that they share."""
    if all(value == values[0] for value in values):
        return values[0]
    if any(value is None for value in values):
        return None
    return "varies" if isinstance(values[0], str) else statistics.fmean(values)


def policy_maker(
    name: str, *, beta: float | None = None, lambda_: float | None = None, **options: float
) -> PolicyMaker:
    """A maker of the named policy; `beta` and `lambda_` are the weights of J, None for the policy's own.

    `options` are the other parameters of the policy's class, such as the `overlap_weight` of `dynamo`. Raises
    ConfigError for an unknown name or option, listing the known, and for weights out of range.
    """
    if names_preferred_degrees(make_policy(name)):
        weights = (("beta", beta), ("lambda_", lambda_))
        options |= {weight: value for weight, value in weights if value is not None}
    maker = partial(make_policy, name, **options)
    maker()  # what is out of range is found now rather than in the middle of a comparison
    return maker


def compare(
    traces: Trace | Sequence[Trace],
    profile: Profile,
    policies: Sequence[str | PolicyMaker],
    settings: SimulationSettings | Sequence[SimulationSettings] | None = None,
    *,
    rates_per_s: Sequence[float | None] = (None,),
    jobs: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> list[CellResult]:
    """Every policy under every setting and rate on the same traffic, in that order (rates outermost).

    Several traces count as several samples of one traffic; figures are then means. With `jobs` above 1 the cells run
    in that many processes; `on_progress` is told how many runs have ended. Raises ConfigError as `simulate` does.
    """
    makers = [policy_maker(policy) if isinstance(policy, str) else policy for policy in policies]
    each_settings = list(settings) if isinstance(settings, Sequence) else [settings or SimulationSettings()]
    cells = [
        Cell(make_policy=maker, settings=each, rate_per_s=rate_per_s)
        for rate_per_s, each, maker in product(rates_per_s, each_settings, makers)
    ]
    samples = [traces] if isinstance(traces, Trace) else list(traces)
    return run_cells(cells, samples, profile, jobs=jobs, on_progress=on_progress)


def run_cells(
    cells: Sequence[Cell],
    traces: Sequence[Trace],
    profile: Profile,
    *,
    jobs: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> list[CellResult]:
    """Runs every cell on every trace; see `compare`. Trace number k of a cell runs under the cell's seed plus k."""
    for name, values in (("cells", cells), ("traces", traces)):
        if not values:
            raise ConfigError(f"{name} is empty; accepted: at least one")
    tasks = [
        replace(cell, settings=replace(cell.settings, seed=cell.settings.seed + index))
        for cell in cells
        for index in range(len(traces))
    ]
    indices = [index for _ in cells for index in range(len(traces))]
    tasks = _with_compositions(tasks, indices, traces, profile)
    results: list[SimulationResult | None] = [None] * len(tasks)
    runs = _in_processes if min(jobs, len(tasks)) > 1 else _in_this_process
    for num_done, (position, result) in enumerate(runs(tasks, indices, traces, profile, jobs), 1):
        results[position] = result
        if on_progress is not None:
            on_progress(num_done)
    done = [result for result in results if result is not None]
    size = len(traces)
    return [CellResult(cell=cell, results=tuple(done[row * size : (row + 1) * size])) for row, cell in enumerate(cells)]


def _with_compositions(
    tasks: Sequence[Cell], indices: Sequence[int], traces: Sequence[Trace], profile: Profile
) -> list[Cell]:
    """The tasks with `auto` resolved, once for all policies that share traffic and pool."""
    known: dict[tuple[object, ...], Composition] = {}
    resolved = []
    for task, index in zip(tasks, indices, strict=True):
        settings = task.settings
        if settings.composition is None:
            key = (
                index,
                task.rate_per_s,
                settings.num_gpus,
                settings.node_gpus,
                settings.blocks_per_rank,
                settings.slo,
            )
            if key not in known:
                known[key] = chosen_composition(_traffic(task, traces[index]), profile, settings)
            task = replace(task, settings=replace(settings, composition=known[key]))
        resolved.append(task)
    return resolved


def _traffic(task: Cell, trace: Trace) -> Trace:
    return trace if task.rate_per_s is None else trace.rescaled(task.rate_per_s)


def _run(task: Cell, trace: Trace, profile: Profile) -> SimulationResult:
    result = simulate(_traffic(task, trace), profile, task.make_policy(), task.settings)
    return replace(result, records=RequestRecords())


def _in_this_process(
    tasks: Sequence[Cell], indices: Sequence[int], traces: Sequence[Trace], profile: Profile, jobs: int
) -> Iterator[tuple[int, SimulationResult]]:
    for position, (task, index) in enumerate(zip(tasks, indices, strict=True)):
        yield position, _run(task, traces[index], profile)


# What a process of the pool works on, sent to it once when it starts instead of with every task.
_shared: tuple[Sequence[Trace], Profile] | None = None


def _share(traces: Sequence[Trace], profile: Profile) -> None:
    global _shared
    _shared = traces, profile


def _run_shared(task: Cell, index: int) -> SimulationResult:
    assert _shared is not None
    traces, profile = _shared
    return _run(task, traces[index], profile)


def _in_processes(
    tasks: Sequence[Cell], indices: Sequence[int], traces: Sequence[Trace], profile: Profile, jobs: int
) -> Iterator[tuple[int, SimulationResult]]:
    """As the runs end. Fresh processes: a fork of one with threads (a progress bar's, BLAS') may deadlock."""
    workers = min(jobs, len(tasks))
    with ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_share, initargs=(traces, profile)
    ) as executor:
        position_of: dict[Future[SimulationResult], int] = {
            executor.submit(_run_shared, task, index): position
            for position, (task, index) in enumerate(zip(tasks, indices, strict=True))
        }
        pending = set(position_of)
        try:
            while pending:
                ended, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in sorted(ended, key=position_of.__getitem__):
                    yield position_of[future], future.result()
        finally:
            for future in pending:
                future.cancel()
