"""What to buy and how to set it up: composition, capacity and headroom of a pool for given traffic.

The shortlist is what rollouts of the busiest stretch like best, plus the paper's choice by capacity; each is simulated
on that stretch, and the one that serves it best is recommended. What is reported of it, of the same pool with the
controller on, and of a pool with one node fewer, is simulated on the whole trace.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from vertumnus.core.composition import Composition, Topology
from vertumnus.core.controller import Arrivals
from vertumnus.core.placement import VertumnusPolicy
from vertumnus.core.profile import Profile
from vertumnus.errors import ConfigError
from vertumnus.sim.auto import (
    arrivals_between,
    by_capacity,
    by_rollout,
    candidates,
    history,
    length_mix,
)
from vertumnus.sim.compare import Cell, CellResult, PolicyMaker, run_cells
from vertumnus.sim.headroom import load_ratio
from vertumnus.sim.kappa import RampSettings, measured_kappa
from vertumnus.sim.simulate import SimulationSettings
from vertumnus.workload.trace import Trace

STRETCH_REQUESTS = 12_000
"""Busiest stretch on which compositions are simulated against each other."""

NUM_SHORTLISTED = 3
MAX_NODES = 128
MAX_NUM_WINDOWS = 24
MIN_WINDOW_REQUESTS = 200
WINDOW_ROLLOUT_REQUESTS = 1_000
CLEAR_GAIN_RATIO = 0.05
"""Share of the predicted mean TTFT that another composition must save to be named."""

Report = Callable[[str], None]
"""Is told, in a few words, what comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWindow:
    """One stretch of the day under the recommended composition, and the composition that would suit it best."""

    start_s: float
    end_s: float
    num_requests: int
    rate_per_s: float
    demand_s_per_s: float
    """Predicted service seconds arriving per second, at the degrees that `sim.headroom` gives them."""
    headroom_ratio: float
    """Share of the capacity that this window's demand leaves; negative: the demand is beyond it."""
    best_composition: str
    """The recommended one unless another is predicted to save a clear share of the mean TTFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One pool that was simulated on the whole trace, and its capacity by kappa."""

    role: str
    num_gpus: int
    composition: Composition
    capacity_s_per_s: float
    headroom_ratios: tuple[float, ...]
    """By window. Capacities of different compositions do not compare (a smaller degree takes longer for the same
    request), headrooms do."""
    simulated: CellResult

    def to_json(self) -> dict[str, Any]:
        """The simulation's figures with the role and the capacity in front."""
        head = {
            "role": self.role,
            "num_gpus": self.num_gpus,
            "capacity_s_per_s": self.capacity_s_per_s,
            "min_headroom_ratio": min(self.headroom_ratios),
            "headroom_ratios": list(self.headroom_ratios),
        }
        return head | self.simulated.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A recommendation with its grounds; `options` holds the recommended pool first."""

    num_gpus: int
    composition: Composition
    target_ratio: float
    kappa: dict[int, float]
    kappa_source: str
    capacity_s_per_s: float
    windows: tuple[PlanWindow, ...]
    options: tuple[Option, ...]

    @property
    def min_headroom_ratio(self) -> float:
        """Headroom of the window with least."""
        return min(window.headroom_ratio for window in self.windows)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the options' figures are `results`, as everywhere."""
        return {
            "num_gpus": self.num_gpus,
            "composition": str(self.composition),
            "target_ratio": self.target_ratio,
            "capacity_s_per_s": self.capacity_s_per_s,
            "min_headroom_ratio": self.min_headroom_ratio,
            "kappa": {str(degree): value for degree, value in self.kappa.items()},
            "kappa_source": self.kappa_source,
            "windows": [asdict(window) for window in self.windows],
            "results": [option.to_json() for option in self.options],
        }


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans pools for one trace. `settings` sets up the pool; its number of GPUs and composition are what is sought."""

    trace: Trace
    profile: Profile
    settings: SimulationSettings
    make_policy: PolicyMaker = VertumnusPolicy
    target_ratio: float = 0.95
    jobs: int = 1
    report: Report = lambda text: None

    def __post_init__(self) -> None:
        if not 0 < self.target_ratio < 1:
            raise ConfigError(f"target is {self.target_ratio}; accepted: a token-weighted attainment between 0 and 1")

    def plan(self, num_gpus: int | None) -> Plan:
        """The plan for this many GPUs, or for the fewest that meet the target."""
        kappa, source = self._kappa()
        num_gpus = self.fewest_gpus() if num_gpus is None else num_gpus
        composition = self.best_composition(num_gpus, kappa)
        pools = [("recommended", num_gpus, composition, True)]
        if not self.settings.is_fixed:
            pools.append(("recommended, adaptive", num_gpus, composition, False))
        fewer = num_gpus - self.settings.node_gpus
        if fewer > 0:
            pools.append(("one node fewer", fewer, self.best_composition(fewer, kappa), True))
        self.report(f"simulating {composition} on {num_gpus} GPUs, and its neighbours, on the whole trace")
        cells = [self._cell(num, chosen, is_fixed, role) for role, num, chosen, is_fixed in pools]
        results = run_cells(cells, [self.trace], self.profile, jobs=self.jobs)
        options = tuple(
            Option(
                role=role,
                num_gpus=num,
                composition=chosen,
                capacity_s_per_s=chosen.capacity(kappa),
                headroom_ratios=self._headroom_ratios(chosen, kappa),
                simulated=result,
            )
            for (role, num, chosen, _), result in zip(pools, results, strict=True)
        )
        self.report("looking at the windows of the day")
        return Plan(
            num_gpus=num_gpus,
            composition=composition,
            target_ratio=self.target_ratio,
            kappa=kappa,
            kappa_source=source,
            capacity_s_per_s=composition.capacity(kappa),
            windows=self._windows(composition, num_gpus, kappa),
            options=options,
        )

    def best_composition(self, num_gpus: int, kappa: dict[int, float]) -> Composition:
        """The composition of the shortlist that serves the busiest stretch best."""
        self.report(f"choosing among the compositions of {num_gpus} GPUs")
        shortlist = self._shortlist(num_gpus, kappa)
        cells = [self._cell(num_gpus, composition, True) for composition in shortlist]
        results = run_cells(cells, [self._stretch()], self.profile, jobs=self.jobs)
        ranks = [self._rank(result) for result in results]
        return shortlist[ranks.index(min(ranks))]

    def fewest_gpus(self) -> int:
        """Fewest GPUs, in whole nodes and then halves, whose `auto` composition meets the target on the busiest
        stretch. The search begins where rollouts think the answer is. Raises ConfigError if no pool meets it."""
        node_gpus = self.settings.node_gpus
        num_nodes = self._nodes_by_rollout()
        met = self._meets(num_nodes * node_gpus)
        while met and num_nodes > 1 and self._meets((num_nodes - 1) * node_gpus):
            num_nodes -= 1
        while not met:
            num_nodes += max(1, num_nodes // 8)
            if num_nodes > MAX_NODES:
                raise ConfigError(
                    f"target is {self.target_ratio}, which {MAX_NODES} nodes do not meet; accepted: a lower target, "
                    "or a slower --rate"
                )
            met = self._meets(num_nodes * node_gpus)
        half = num_nodes * node_gpus - node_gpus // 2
        return half if 0 < half < num_nodes * node_gpus and self._meets(half) else num_nodes * node_gpus

    # What it is made of

    def _stretch(self) -> Trace:
        trace, size = self.trace, STRETCH_REQUESTS
        if trace.num_requests <= size:
            return trace
        start = int((trace.arrival_s[size - 1 :] - trace.arrival_s[: 1 - size]).argmin())
        return trace.selected(np.arange(start, start + size))

    def _blocks_per_rank(self) -> int:
        return self.settings.blocks_per_rank or self.profile.kv_capacity_blocks(self.trace.block_tokens)

    def _topology(self, num_gpus: int) -> Topology:
        return Topology(num_gpus, self.settings.node_gpus)

    def _kappa(self) -> tuple[dict[int, float], str]:
        """kappa and where it is from: the profile's, else a ramp on this traffic."""
        if self.profile.kappa is not None:
            sources = {self.profile.provenance[f"kappa.{degree}"].source.value for degree in self.profile.degrees}
            return dict(self.profile.kappa), f"profile ({', '.join(sorted(sources))})"
        self.report("measuring kappa by load ramps on this traffic")
        settings = self.settings
        ramp = RampSettings(
            slo=settings.slo,
            target_ratio=self.target_ratio,
            discipline=settings.discipline,
            step_tokens=settings.step_tokens,
            blocks_per_rank=settings.blocks_per_rank,
        )
        return measured_kappa(self.trace, self.profile, ramp), "load ramps on this traffic"

    def _shortlist(self, num_gpus: int, kappa: dict[int, float]) -> list[Composition]:
        topology, profile, arrivals = self._topology(num_gpus), self.profile, self._busiest
        choices = candidates(topology, profile, arrivals, self.settings.slo)
        best = [composition for composition, _ in by_rollout(choices, arrivals, profile, num_best=NUM_SHORTLISTED)]
        return list(dict.fromkeys([*best, by_capacity(choices, length_mix(arrivals), profile, kappa)]))

    def _cell(self, num_gpus: int, composition: Composition | None, is_fixed: bool, label: str = "") -> Cell:
        settings = replace(self.settings, num_gpus=num_gpus, composition=composition, is_fixed=is_fixed)
        return Cell(make_policy=self.make_policy, settings=settings, label=label)

    def _rank(self, result: CellResult) -> tuple[bool, float]:
        """Less is better: first whether the target is missed, then the mean TTFT."""
        latency = result.results[0].latency
        if latency.mean_ttft_s is None or latency.slo_attainment_ratio is None:
            return True, float("inf")
        return latency.slo_attainment_ratio < self.target_ratio, latency.mean_ttft_s

    def _meets(self, num_gpus: int) -> bool:
        self.report(f"simulating {num_gpus} GPUs")
        (result,) = run_cells([self._cell(num_gpus, None, True)], [self._stretch()], self.profile)
        return not self._rank(result)[0]

    def _nodes_by_rollout(self) -> int:
        """Fewest nodes at which a rollout predicts a mean TTFT within the mean target."""
        arrivals = self._busiest
        tau_s = float(self.settings.slo.tau_s(arrivals.input_tokens).mean())

        def suffices(num_nodes: int) -> bool:
            topology = self._topology(num_nodes * self.settings.node_gpus)
            choices = candidates(topology, self.profile, arrivals, self.settings.slo)
            return by_rollout(choices, arrivals, self.profile)[0][1] <= tau_s / 2

        high = 1
        while not suffices(high) and high < MAX_NODES:
            high *= 2
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if suffices(middle) else (middle, high)
        return high

    @cached_property
    def _busiest(self) -> Arrivals:
        return history(self.trace, self._blocks_per_rank(), self.settings.node_gpus)

    @cached_property
    def _edges_s(self) -> list[float]:
        """Where the windows of the day begin and end."""
        num_windows = max(1, min(MAX_NUM_WINDOWS, self.trace.num_requests // MIN_WINDOW_REQUESTS))
        edges_s: list[float] = np.linspace(0.0, self.trace.duration_s, num_windows + 1).tolist()
        return edges_s

    @cached_property
    def _arrivals_by_window(self) -> list[Arrivals]:
        whole = arrivals_between(
            self.trace, 0, self.trace.num_requests, self._blocks_per_rank(), self.settings.node_gpus
        )
        rows = [*np.searchsorted(whole.arrival_s, self._edges_s[:-1]).tolist(), len(whole)]
        return [whole.part(start, end) for start, end in pairwise(rows)]

    def _headroom_ratios(self, composition: Composition, kappa: dict[int, float]) -> tuple[float, ...]:
        costs = self.profile.cost_model()
        loads = []
        for arrivals, (start_s, end_s) in zip(self._arrivals_by_window, pairwise(self._edges_s), strict=True):
            mix = length_mix(arrivals, max(end_s - start_s, 1.0)) if len(arrivals) else None
            loads.append(0.0 if mix is None else load_ratio(mix, composition, costs, kappa))
        return tuple(1 - load for load in loads)

    def _windows(self, composition: Composition, num_gpus: int, kappa: dict[int, float]) -> tuple[PlanWindow, ...]:
        headroom_ratios = self._headroom_ratios(composition, kappa)
        return tuple(
            PlanWindow(
                start_s=start_s,
                end_s=end_s,
                num_requests=len(arrivals),
                rate_per_s=len(arrivals) / (end_s - start_s) if end_s > start_s else 0.0,
                demand_s_per_s=(1 - headroom_ratio) * composition.capacity(kappa),
                headroom_ratio=headroom_ratio,
                best_composition=str(self._best_in_window(composition, num_gpus, arrivals)),
            )
            for arrivals, headroom_ratio, (start_s, end_s) in zip(
                self._arrivals_by_window, headroom_ratios, pairwise(self._edges_s), strict=True
            )
        )

    def _best_in_window(self, recommended: Composition, num_gpus: int, arrivals: Arrivals) -> Composition:
        if len(arrivals) < 2:
            return recommended
        first = arrivals.part(0, WINDOW_ROLLOUT_REQUESTS)
        choices = candidates(self._topology(num_gpus), self.profile, first, self.settings.slo)
        ((best, best_s),) = by_rollout(choices, first, self.profile)
        ((_, recommended_s),) = by_rollout([recommended], first, self.profile)
        return best if best_s < (1 - CLEAR_GAIN_RATIO) * recommended_s else recommended
