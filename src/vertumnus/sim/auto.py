"""The composition to begin with, chosen from the traffic itself (`auto`).

Two rules. `by_rollout`, the default, replays the traffic through every composition at once (`core.rollout`) and takes
the one of least mean TTFT. `by_capacity` is the paper's: the most large-degree workers whose capacity still covers the
demand; it needs kappa. Both look only at compositions that fit the length mix, and both take history to be given: the
trace's requests, with the prefixes that a node's cache would have found.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vertumnus.core.capacity import LengthMix
from vertumnus.core.composition import Composition, Topology, initial_composition
from vertumnus.core.controller import Arrivals
from vertumnus.core.profile import Profile
from vertumnus.core.rollout import Shadows
from vertumnus.core.search_space import searchable_compositions
from vertumnus.core.slices import finish
from vertumnus.core.slo import Slo
from vertumnus.errors import ConfigError
from vertumnus.workload.reuse import block_reuse
from vertumnus.workload.trace import IntArray, Trace

ROLLOUT_REQUESTS = 12_000
"""Longest stretch of a trace that is replayed, the busiest of that length: some seconds."""

SHORTLIST_REQUESTS, SHORTLIST_COMPOSITIONS = 2_000, 40
"""Arrivals that choose a shortlist, and its length."""


def history(trace: Trace, blocks_per_rank: int, node_gpus: int) -> Arrivals:
    """The busiest stretch of a trace, with the block-aligned prefixes that one node's cache would have found."""
    start, end = _busiest(trace, ROLLOUT_REQUESTS)
    return arrivals_between(trace, start, end, blocks_per_rank, node_gpus)


def arrivals_between(trace: Trace, start: int, end: int, blocks_per_rank: int, node_gpus: int) -> Arrivals:
    """Requests [start, end) of a trace as a controller would have seen them, had a node's cache served them all."""
    stretch = trace if (start, end) == (0, trace.num_requests) else trace.selected(np.arange(start, end))
    tokens = stretch.input_tokens
    prefix: IntArray = np.zeros_like(tokens)
    if stretch.has_block_ids:
        found = block_reuse(stretch).found_tokens(blocks_per_rank * node_gpus, stretch.num_requests)
        prefix = np.minimum(found, tokens - 1) // stretch.block_tokens * stretch.block_tokens
    return Arrivals(
        arrival_s=stretch.arrival_s,
        input_tokens=tokens.astype(np.float64),
        prefix_tokens=prefix.astype(np.float64),
    )


def _busiest(trace: Trace, num_requests: int) -> tuple[int, int]:
    """[start, end) of the shortest stretch with so many requests; the earliest of equals."""
    if trace.num_requests <= num_requests:
        return 0, trace.num_requests
    spans_s = trace.arrival_s[num_requests - 1 :] - trace.arrival_s[: 1 - num_requests]
    start = int(spans_s.argmin())
    return start, start + num_requests


def candidates(topology: Topology, profile: Profile, arrivals: Arrivals, slo: Slo) -> tuple[Composition, ...]:
    """Compositions to choose from: those that fit the length mix, or all where none does."""
    found = searchable_compositions(topology, profile.degrees)
    if not found:
        raise ConfigError(
            f"num_gpus is {topology.num_gpus}, {topology.node_gpus} a node; accepted: nodes that hold a worker of "
            f"profile {profile.name}, degrees {', '.join(map(str, profile.degrees))}"
        )
    mix = length_mix(arrivals)
    costs = profile.cost_model()
    fits_degrees: dict[tuple[int, ...], bool] = {}
    for composition in found:
        if composition.degrees not in fits_degrees:
            fits_degrees[composition.degrees] = mix.fits(composition, costs, slo_function(slo), profile.degrees)
    return tuple(each for each in found if fits_degrees[each.degrees]) or found


def by_rollout(
    choices: Sequence[Composition], arrivals: Arrivals, profile: Profile, *, num_best: int = 1
) -> list[tuple[Composition, float]]:
    """The compositions of least predicted mean TTFT (seconds), best first.

    The first arrivals choose a shortlist, on which all of them then decide.
    """
    shortlist = [choices[row] for row in _ranked(choices, arrivals.part(0, SHORTLIST_REQUESTS), profile)[0]]
    shortlist = shortlist[: max(SHORTLIST_COMPOSITIONS, num_best)]
    order, mean_s = _ranked(shortlist, arrivals, profile)
    return [(shortlist[row], mean_s[row]) for row in order[:num_best]]


def _ranked(choices: Sequence[Composition], arrivals: Arrivals, profile: Profile) -> tuple[list[int], list[float]]:
    """(rows of the compositions, best first; predicted mean TTFT by row)."""
    mean_s = finish(Shadows(choices, profile.cost_model()).replay(arrivals)).ttft_s.mean(axis=0)
    return np.argsort(mean_s, kind="stable").tolist(), mean_s.tolist()


def by_capacity(
    choices: Sequence[Composition], mix: LengthMix, profile: Profile, kappa: Mapping[int, float]
) -> Composition:
    """The paper's choice: most large-degree workers whose capacity covers the demand, else most capacity."""
    return initial_composition(
        choices, demand_s_per_s=demand_of(mix, profile), kappa=kappa, fits=lambda composition: True
    )


def demand_of(mix: LengthMix, profile: Profile) -> Callable[[Composition], float]:
    """Predicted service seconds per second by composition; each set of degrees is computed once."""
    known: dict[tuple[int, ...], float] = {}

    def demand_s_per_s(composition: Composition) -> float:
        if composition.degrees not in known:
            known[composition.degrees] = mix.demand_s_per_s(composition, profile.cost_model())
        return known[composition.degrees]

    return demand_s_per_s


def length_mix(arrivals: Arrivals, duration_s: float | None = None) -> LengthMix:
    """The arrivals by length class, over this time, else over their own; those of one instant over a second."""
    if duration_s is None:
        duration_s = float(arrivals.arrival_s[-1] - arrivals.arrival_s[0]) or 1.0
    return LengthMix.of_requests(arrivals.input_tokens, arrivals.input_tokens - arrivals.prefix_tokens, duration_s)


def slo_function(slo: Slo) -> Callable[[float], float]:
    """tau in seconds by input tokens, for one request."""
    return lambda input_tokens: slo.base_s + slo.per_token_s * input_tokens


def auto_composition(
    trace: Trace, profile: Profile, topology: Topology, *, slo: Slo, blocks_per_rank: int
) -> Composition:
    """The composition that `auto` stands for: least predicted mean TTFT for the busiest stretch of the trace."""
    arrivals = history(trace, blocks_per_rank, topology.node_gpus)
    ((composition, _),) = by_rollout(candidates(topology, profile, arrivals, slo), arrivals, profile)
    return composition
