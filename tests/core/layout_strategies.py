"""Hypothesis strategies for topologies, layouts and compositions."""

from hypothesis import strategies as st

from vertumnus.core.composition import Composition, Layout, RankGroup, Topology, compositions

DEGREES = (1, 2, 4, 8)


@st.composite
def topologies(draw: st.DrawFn, max_nodes: int = 4) -> Topology:
    """Some nodes, the last one often cut short, sometimes with ranks out of service."""
    node_gpus = draw(st.sampled_from([8, 8, 8, 4, 6, 5]))
    num_gpus = draw(st.integers(1, max_nodes * node_gpus))
    lost = draw(st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, num_gpus - 1), max_size=num_gpus - 1)))
    return Topology(num_gpus, node_gpus, lost)


@st.composite
def layouts(draw: st.DrawFn, topology: Topology) -> Layout:
    """Any layout that covers all ranks in service: each block is kept or cut at random."""
    pending, groups = list(topology.blocks(topology.live_ranks, DEGREES[-1])), []
    while pending:
        block: RankGroup = pending.pop()
        if block.children is not None and draw(st.booleans()):
            pending += block.children
        else:
            groups.append(block)
    return tuple(sorted(groups))


def compositions_of(topology: Topology) -> st.SearchStrategy[Composition]:
    """Any composition that the topology can hold."""
    return st.sampled_from(compositions(topology, DEGREES))
