"""The compositions worth looking at when one is to be chosen: all of a small pool, a coarser grid of a large one."""

from vertumnus.core.composition import Composition, Topology, compositions, lay_out
from vertumnus.errors import ConfigError

MAX_ENUMERATED_NODES = 5
"""Pools up to this size are searched in full, larger ones among the scaled compositions of this many nodes."""


def searchable_compositions(topology: Topology, degrees: tuple[int, ...]) -> tuple[Composition, ...]:
    """All compositions of a small pool; of a large one those of five of its nodes, scaled up.

    64 nodes have some hundred thousand compositions, but the best of them is near the best blend of a few nodes.
    """
    node_gpus = topology.node_gpus
    if topology.num_gpus <= MAX_ENUMERATED_NODES * node_gpus:
        return compositions(topology, degrees)
    base_gpus = MAX_ENUMERATED_NODES * node_gpus
    num_live = len(topology.live_ranks)
    scaled = (_scaled(base, num_live, base_gpus) for base in compositions(Topology(base_gpus, node_gpus), degrees))
    return tuple(dict.fromkeys(each for each in scaled if _can_be_laid_out(each, topology)))


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
