"""The compositions worth looking at when one is to be chosen: all of a small pool, a coarser grid of a large one."""

from collections.abc import Mapping
from dataclasses import dataclass

from vertumnus.core.composition import Composition, Topology, compositions, lay_out
from vertumnus.errors import ConfigError

MAX_ENUMERATED_NODES = 5
"""Pools up to this size are searched in full, larger ones among the scaled compositions of this many nodes."""


def searchable_compositions(topology: Topology, degrees: tuple[int, ...]) -> tuple[Composition, ...]:
    """All compositions of a small pool; of a large one those of five of its nodes, scaled up.

    64 nodes have some hundred thousand compositions, but the best of them is near the best blend of a few nodes.
    """
    return tuple(search_space(topology, degrees).candidates.values())


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What a pool could become, and the pool in which that is judged: itself, or of a large one five of its nodes under
    their share of the traffic, so that judging takes no longer than for those."""

    share: float
    """GPUs of the pool that is judged over those of the real one, 1 for a small one."""
    candidates: Mapping[Composition, Composition]
    """From compositions of the pool that is judged to those of the real one."""

    def judged(self, composition: Composition) -> Composition:
        """What stands for a composition of the real pool: itself, or that of the nearest shares of GPUs by degree."""
        if self.share == 1:
            return composition
        for judged, real in self.candidates.items():
            if real == composition:
                return judged
        shares = _gpu_shares(composition)

        def distance(candidate: Composition) -> float:
            others = _gpu_shares(candidate)
            return sum(abs(shares.get(degree, 0.0) - others.get(degree, 0.0)) for degree in shares.keys() | others)

        return min(self.candidates, key=distance)


def search_space(topology: Topology, degrees: tuple[int, ...]) -> SearchSpace:
    """The compositions of `searchable_compositions` with what they are judged as; of those of five nodes that come out
    the same in the real pool, the first."""
    node_gpus = topology.node_gpus
    base_gpus = MAX_ENUMERATED_NODES * node_gpus
    if topology.num_gpus <= base_gpus:
        return SearchSpace(1.0, {each: each for each in compositions(topology, degrees)})
    num_live = len(topology.live_ranks)
    found: dict[Composition, Composition] = {}
    for base in compositions(Topology(base_gpus, node_gpus), degrees):
        found.setdefault(_scaled(base, num_live, base_gpus), base)
    candidates = {base: real for real, base in found.items() if _can_be_laid_out(real, topology)}
    return SearchSpace(base_gpus / num_live, candidates)


def _gpu_shares(composition: Composition) -> dict[int, float]:
    return {degree: degree * count / composition.num_gpus for degree, count in composition}


def _scaled(base: Composition, num_gpus: int, base_gpus: int) -> Composition:
    """About the same shares of GPUs in another pool; what rounding leaves goes to the smallest degree."""
    smallest = base.degrees[0]
    counts = {degree: count * num_gpus // base_gpus for degree, count in base}
    counts[smallest] += (num_gpus - sum(degree * count for degree, count in counts.items())) // smallest
    return Composition.of(counts)


def _can_be_laid_out(composition: Composition, topology: Topology) -> bool:
    node_gpus = topology.node_gpus
    if not topology.lost_ranks and topology.num_gpus % node_gpus == 0 and node_gpus & (node_gpus - 1) == 0:
        return composition.num_gpus == topology.num_gpus  # blocks of whole nodes: largest first, nothing is left over
    try:
        lay_out(composition, topology)
    except ConfigError:
        return False
    return True
