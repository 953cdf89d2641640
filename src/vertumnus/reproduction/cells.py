"""Cells of an experiment: one simulated pool each, spread over the cores, each giving one row."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context

import numpy as np

from vertumnus.core.composition import Composition
from vertumnus.core.control_plane import Transition
from vertumnus.core.profile import Profile
from vertumnus.reproduction.rows import Label, Row
from vertumnus.reproduction.sharding import Shard, by_first_block
from vertumnus.sim.compare import PolicyMaker
from vertumnus.sim.metrics import RequestRecords, summarise
from vertumnus.sim.simulate import SimulationSettings, simulate
from vertumnus.workload.trace import Trace

SHORT_TOKENS = 4096
"""Prompts up to this length are short, for the P99 that long ones must not spoil."""

WARMUP_RATIO = 0.1
"""First share of a cell that fills the caches and is not measured."""

Measure = Callable[[Sequence["Cell"]], list[Row]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pool under one traffic."""

    columns: Row
    """What identifies it in its row."""
    trace: Trace
    profile: Profile
    make_policy: PolicyMaker
    settings: SimulationSettings
    rate_per_s: float | None = None
    num_routers: int = 1
    """Control planes, each with its share of the GPUs and of the requests."""
    shard: Shard = by_first_block
    """Which router a request goes to."""
    series_s: float | None = None
    """Windows of a time series, in the row's `series` and `transitions`; None: none."""
    routed: Composition | None = field(default=None)
    """The composition of one share where there are several routers."""


@contextmanager
def cores(jobs: int, on_done: Callable[[int, int], None] | None = None) -> Iterator[Measure]:
    """A function that simulates cells in this many processes; `on_done` is told (cells done, cells of the call)."""
    if jobs == 1:
        yield lambda cells: _each(map(measured, cells), len(cells), on_done)
        return
    # Fresh processes: a fork of one with threads (a progress bar's, BLAS') may deadlock.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as executor:
        try:
            yield lambda cells: _each(executor.map(measured, cells), len(cells), on_done)
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _each(rows: Iterator[Row], total: int, on_done: Callable[[int, int], None] | None) -> list[Row]:
    done = []
    for row in rows:
        done.append(row)
        if on_done is not None:
            on_done(len(done), total)
    return done


def measured(cell: Cell) -> Row:
    """Simulates one cell: its columns and its figures."""
    trace = cell.trace if cell.rate_per_s is None else cell.trace.rescaled(cell.rate_per_s)
    settings = replace(cell.settings, warmup_s=WARMUP_RATIO * trace.duration_s)
    results = [
        simulate(share, cell.profile, cell.make_policy(), each) for share, each in _shares(trace, settings, cell)
    ]
    records = _together([result.records for result in results])
    tokens = int(trace.input_tokens.sum()) - sum(records.input_tokens)
    figures = asdict(summarise(records, tokens, settings.slo, settings.warmup_s))
    row = {
        **cell.columns,
        "composition": results[0].composition,
        "final_composition": results[0].final_composition,
        "rate_per_s": round(trace.mean_rate_per_s, 3),
        "num_requests": trace.num_requests,
        **figures,
        "p99_short_ttft_s": _p99_short_s(records, settings.warmup_s),
        "num_transitions": sum(result.num_splits + result.num_merges for result in results),
        "num_replications": sum(result.num_replications for result in results),
        "num_pulls": sum(result.num_pulls for result in results),
        "num_rejected": sum(result.num_rejected for result in results),
        "wall_s": sum(result.wall_s for result in results),
        "label": Label.SIMULATED.value,
        "traffic": Label.SYNTHESISED.value if trace.synthesised else "recorded",
        "costs": Label.ESTIMATED.value,
    }
    if cell.series_s is not None:
        row["series"] = series(records, cell.series_s)
        row["transitions"] = [_transition(each) for each in results[0].transitions]
    return row


def _shares(trace: Trace, settings: SimulationSettings, cell: Cell) -> Iterator[tuple[Trace, SimulationSettings]]:
    """The traffic and the pool of each router: a request goes as the cell says, a worker by its node."""
    if cell.num_routers == 1:
        yield trace, settings
        return
    share = cell.shard(trace, cell.num_routers)
    for router in range(cell.num_routers):
        rows = np.flatnonzero(share == router)
        if rows.size:
            yield (
                trace.selected(rows),
                replace(settings, num_gpus=settings.num_gpus // cell.num_routers, composition=cell.routed),
            )


def _together(each: Sequence[RequestRecords]) -> RequestRecords:
    merged = RequestRecords()
    for records in each:
        for name in RequestRecords.__slots__:
            getattr(merged, name).extend(getattr(records, name))
    return merged


def _p99_short_s(records: RequestRecords, warmup_s: float) -> float | None:
    is_short = (np.array(records.input_tokens) <= SHORT_TOKENS) & (np.array(records.arrival_s) >= warmup_s)
    return float(np.percentile(np.array(records.ttft_s)[is_short], 99)) if is_short.any() else None


def series(records: RequestRecords, window_s: float) -> list[Row]:
    """Mean TTFT and number of requests by window of arrival."""
    window = (np.array(records.arrival_s) // window_s).astype(np.int64)
    counts = np.bincount(window)
    sums_s = np.bincount(window, np.array(records.ttft_s))
    return [
        {"start_s": index * window_s, "num_requests": int(count), "mean_ttft_s": float(total_s / count)}
        for index, (count, total_s) in enumerate(zip(counts, sums_s, strict=True))
        if count
    ]


def _transition(transition: Transition) -> Row:
    return {
        "committed_s": transition.committed_s,
        "kind": transition.operation.kind.name.lower(),
        "degree": len(transition.operation.sources[0].ranks),
        "drain_s": transition.drain_s,
        "switch_s": transition.switch_s,
    }
