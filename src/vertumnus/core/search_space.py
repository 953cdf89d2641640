"""The compositions worth looking at when one is to be chosen: all of a small pool, a coarser grid of a large one."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from vertumnus.core.composition import Composition, Topology, compositions

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
    the same in the real pool, the first. None where no worker of these degrees can be formed any more.

    Pools below twice five nodes, or of which no more than that is alive, are judged as they are: rounding moves too
    much of a smaller one.
    """
    base_gpus = MAX_ENUMERATED_NODES * topology.node_gpus
    if topology.num_gpus <= base_gpus:
        return SearchSpace(1.0, {each: each for each in compositions(topology, degrees)})
    usable = {degree: degree * _num_live_groups(topology, degree) for degree in degrees}
    num_usable = usable[degrees[0]]
    found: dict[Composition, Composition] = {}
    if num_usable:
        for base in compositions(Topology(base_gpus, topology.node_gpus), degrees):
            found.setdefault(_scaled(base, usable, base_gpus), base)
    if num_usable < 2 * base_gpus:
        return SearchSpace(1.0, {real: real for real in found})
    return SearchSpace(base_gpus / num_usable, {base: real for real, base in found.items()})


def _gpu_shares(composition: Composition) -> dict[int, float]:
    return {degree: degree * count / composition.num_gpus for degree, count in composition}


def _num_live_groups(topology: Topology, degree: int) -> int:
    """Aligned groups of a degree without a lost rank."""
    num_nodes, rest = divmod(topology.num_gpus, topology.node_gpus)
    in_all = num_nodes * (topology.node_gpus // degree) + rest // degree
    broken = set()
    for rank in topology.lost_ranks:
        node, place = divmod(rank, topology.node_gpus)
        node_gpus = topology.node_gpus if node < num_nodes else rest
        if place // degree < node_gpus // degree:
            broken.add((node, place // degree))
    return in_all - len(broken)


def _scaled(base: Composition, usable: Mapping[int, int], base_gpus: int) -> Composition:
    """About the same shares of GPUs in another pool. usable: by degree the GPUs that lie in whole groups of it.

    Groups are buddies: larger ones first, what fits degree by degree fits together. What rounding and lost ranks leave
    goes to the smallest degree of `base`, and what is less than one such worker to the smallest of all.
    """
    smallest = min(usable)
    counts: Counter[int] = Counter()
    used = 0
    for degree, count in reversed(list(base)):
        wanted = count * usable[smallest] // base_gpus
        counts[degree] = min(wanted, (usable[degree] - used) // degree)
        used += degree * counts[degree]
    for degree in (base.degrees[0], smallest):
        extra = (usable[degree] - used) // degree
        counts[degree] += extra
        used += degree * extra
    return Composition.of({degree: count for degree, count in counts.items() if count})
