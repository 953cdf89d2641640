"""The workloads of the evaluation: one half to tune on, another to report on, and rates by what GPUs can do."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from vertumnus.core.composition import Composition
from vertumnus.core.profile import Profile
from vertumnus.reproduction.bench import Bench
from vertumnus.sim.auto import history
from vertumnus.sim.plan import Planner
from vertumnus.sim.simulate import SimulationSettings
from vertumnus.workload.synthesis import DAY_S, synthesise
from vertumnus.workload.trace import Trace

WORKLOADS = ("conversation", "toolagent", "production")
NODE_GPUS = 8
PLANNED_LOAD = 0.75
"""Load for which `plan` chooses the one composition of the whole workload, on the tuning half."""
TUNING_LOAD = 0.8

NUM_WINDOWS = 6
WINDOW_S = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One traffic in two parts that share no request; nothing is chosen by looking at the second."""

    name: str
    tuning: Trace
    held_out: Trace
    num_windows: int = 1
    """Equally long windows, hours apart, that both parts are joined from."""

    def excerpt(self, num_requests: int) -> Trace:
        """About so many requests of the second part: the beginning of each of its windows, joined."""
        trace = self.held_out
        if num_requests >= trace.num_requests:
            return trace
        window_s = trace.duration_s / self.num_windows
        kept_s = window_s * num_requests / trace.num_requests
        window = np.minimum(trace.arrival_s // window_s, self.num_windows - 1)
        since_s = trace.arrival_s - window * window_s
        rows = np.flatnonzero(since_s <= kept_s)
        return replace(trace.selected(rows), arrival_s=(window * kept_s + since_s)[rows])

    def capacity_per_s(self, profile: Profile, num_gpus: int) -> float:
        """Mean rate at which the smallest degree would be busy all the time in the busiest sixth of the traffic.

        With the prefixes that one node's cache finds and no waiting: what the rates of all experiments are shares of.
        """
        trace = self.tuning
        blocks = profile.kv_capacity_blocks(trace.block_tokens)
        arrivals = history(trace, blocks, NODE_GPUS)
        degree = profile.degrees[0]
        costs = profile.cost_model().for_degrees((degree,))
        suffix = arrivals.input_tokens - arrivals.prefix_tokens
        service_s = float(np.mean(costs.prefill_s(suffix, arrivals.prefix_tokens)))
        return num_gpus / degree / service_s / peak_ratio(trace)


def peak_ratio(trace: Trace) -> float:
    """Arrivals in the busiest sixth of the time over the mean of all sixths."""
    counts, _ = np.histogram(trace.arrival_s, bins=NUM_WINDOWS)
    return float(counts.max() / counts.mean())


def workload(bench: Bench, name: str) -> Workload:
    """A workload by name, at the size of the run."""
    size, tuning = bench.scale.cell_requests, bench.scale.tuning_requests
    if name == "production":
        return _production(bench, 2 * size, bench.scale.production_rate_per_s)
    return halves(name, whole(bench, name), tuning, size)


def long_day(bench: Bench) -> Workload:
    """Production with so many requests that its windows last some ten minutes each at the rates that are played."""
    num_requests = bench.scale.day_requests
    return _production(bench, num_requests, num_requests / (NUM_WINDOWS * WINDOW_S))


def _production(bench: Bench, num_requests: int, rate_per_s: float) -> Workload:
    """Windows of a day synthesised at a mean rate, to be played faster; 20 minutes each at most."""
    day = _synthesised("production", bench.seed, rate_per_s)
    length_s = min(WINDOW_S, num_requests / (NUM_WINDOWS * rate_per_s))
    tuning_s = min(WINDOW_S, 2 * bench.scale.tuning_requests / (NUM_WINDOWS * rate_per_s))
    return Workload(
        name="production",
        tuning=_windows(day, 0.0, tuning_s),
        held_out=_windows(day, 7200.0, length_s),
        num_windows=NUM_WINDOWS,
    )


def whole(bench: Bench, name: str) -> Trace:
    """All of a traffic: recorded where it was given, else synthesised."""
    if name == "conversation" and bench.conversation is not None:
        return bench.conversation
    return _synthesised(name, bench.seed, bench.scale.production_rate_per_s if name == "production" else None)


@lru_cache(maxsize=4)
def _synthesised(name: str, seed: int, rate_per_s: float | None = None) -> Trace:
    return synthesise(name, seed=seed, rate_per_s=rate_per_s)


def halves(name: str, trace: Trace, tuning_requests: int, held_out_requests: int) -> Workload:
    """The end of the first half of a trace to tune on, the beginning of the second to report on."""
    middle = trace.num_requests // 2
    tuning = np.arange(max(0, middle - tuning_requests), middle)
    held_out = np.arange(middle, min(trace.num_requests, middle + held_out_requests))
    return Workload(name=name, tuning=trace.selected(tuning), held_out=trace.selected(held_out))


def _windows(day: Trace, offset_s: float, length_s: float) -> Trace:
    """Six windows, four hours apart, joined without the gaps between them."""
    rows, arrival_s = [], []
    for index in range(NUM_WINDOWS):
        start_s = offset_s + index * DAY_S / NUM_WINDOWS
        first, last = np.searchsorted(day.arrival_s, (start_s, start_s + length_s))
        rows.append(np.arange(first, last))
        arrival_s.append(day.arrival_s[first:last] - start_s + index * length_s)
    joined = np.concatenate(arrival_s)
    return replace(day.selected(np.concatenate(rows)), arrival_s=joined - joined[0])


def settings(bench: Bench) -> SimulationSettings:
    """The pool of the evaluation, before anything is chosen."""
    return SimulationSettings(num_gpus=bench.scale.num_gpus, node_gpus=NODE_GPUS, seed=bench.seed)


def planned(bench: Bench, traffic: Workload, profile: Profile) -> Composition:
    """The one composition that `plan` recommends, from the tuning half."""
    rate_per_s = PLANNED_LOAD * traffic.capacity_per_s(profile, bench.scale.num_gpus)
    planner = Planner(trace=traffic.tuning.rescaled(rate_per_s), profile=profile, settings=settings(bench))
    return planner.best_composition(bench.scale.num_gpus, dict(profile.kappa or {}))
