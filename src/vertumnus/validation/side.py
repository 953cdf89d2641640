"""What became of a trace on one side: the same words for the live pool and for the simulator."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vertumnus.core.composition import Composition, Layout, apply, lay_out
from vertumnus.core.control_plane import Transition
from vertumnus.core.topology import RankGroup
from vertumnus.sim.overheads import LiveOverheads
from vertumnus.sim.simulate import simulate
from vertumnus.validation.spec import POLICY, PoolSpec
from vertumnus.workload.trace import FloatArray, Trace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """By request, in the order of the trace; NaN or None for a request that was not answered or placed.

    ttft_s: as the client sees it, T_ext included. groups: the ranks of the worker of the first placement.
    compositions: (seconds from the first arrival, what the pool became), the first one at its start.
    """

    ttft_s: FloatArray
    cached_tokens: FloatArray
    groups: tuple[RankGroup | None, ...]
    compositions: tuple[tuple[float, str], ...]


def simulated_side(trace: Trace, spec: PoolSpec, overheads: LiveOverheads | None, lead_s: float) -> Side:
    """The trace through the simulator. `lead_s`: for how long the live pool stood idle before it."""
    groups: list[RankGroup | None] = [None] * trace.num_requests
    result = simulate(
        trace,
        spec.profile,
        POLICY,
        spec.simulation(overheads, lead_s),
        on_placed=lambda action, group: _note_first(groups, action.request_id, group),
    )
    ttft_s, cached_tokens = np.full((2, trace.num_requests), np.nan)
    ttft_s[result.records.request_id] = result.records.ttft_s
    cached_tokens[result.records.request_id] = result.records.reused_tokens
    return Side(
        ttft_s=ttft_s,
        cached_tokens=cached_tokens,
        groups=tuple(groups),
        compositions=timeline(lay_out(spec.composition, spec.topology), result.transitions, start_s=0.0),
    )


def _note_first(groups: list[RankGroup | None], row: int, group: RankGroup) -> None:
    if groups[row] is None:
        groups[row] = group


def timeline(layout: Layout, transitions: Sequence[Transition], *, start_s: float) -> tuple[tuple[float, str], ...]:
    """Compositions after every instant at which a split or merge was committed, counted from `start_s`."""
    found = [(0.0, str(Composition.of_layout(layout)))]
    for each in transitions:
        layout = apply(layout, [each.operation])
        after = (each.committed_s - start_s, str(Composition.of_layout(layout)))
        if found[-1][0] == after[0]:
            found.pop()
        found.append(after)
    return tuple(found)


def mean_composition(compositions: Iterable[tuple[float, str]], end_s: float) -> dict[int, float]:
    """Mean share of the ranks by degree, from the first arrival until `end_s`."""
    shares: dict[int, float] = {}
    steps = [*compositions, (end_s, "")]
    for (start_s, text), (until_s, _) in pairwise(steps):
        held_s = max(0.0, min(until_s, end_s) - min(max(start_s, 0.0), end_s))
        for degree, count in Composition.parse(text):
            shares[degree] = shares.get(degree, 0.0) + count * degree * held_s
    total = sum(shares.values())
    return {degree: share / total for degree, share in sorted(shares.items())} if total else {}
