r"""Where CP workers can sit: nodes as runs of consecutive ranks, and the aligned rank groups inside them.

A node's groups form a binary tree of blocks whose leaves are the workers. Ranks 0..7 as 1x4,1x2,2x1:

            0-7               inner blocks: 0-7, 4-7, 6-7
          /     \             leaves:       0-3, 4-5, 6, 7
       0-3       4-7          a split turns a leaf into an inner block, a merge an inner block into a leaf,
                /   \         so the operations between two layouts are exactly the blocks that are inner
             4-5     6-7      in one of them only
                     / \
                    6   7
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from vertumnus.errors import ConfigError


def is_degree(degree: int) -> bool:
    """Whether a CP degree is a power of two (1, 2, 4, ...)."""
    return degree >= 1 and degree & (degree - 1) == 0


def check_degrees(degrees: Collection[int]) -> tuple[int, ...]:
    """The supported degrees in ascending order; ConfigError unless they are powers of two without a gap."""
    ascending = tuple(sorted(set(degrees)))
    if not ascending or not all(map(is_degree, ascending)) or any(b != 2 * a for a, b in pairwise(ascending)):
        raise ConfigError(f"degrees are {list(degrees)}; accepted: powers of two without a gap, such as 1, 2, 4, 8")
    return ascending


@dataclass(frozen=True, slots=True, order=True)
class RankGroup:
    """Ranks first_rank .. first_rank + degree - 1, aligned inside their node. Ordered by first rank, then degree."""

    first_rank: int
    degree: int

    def __post_init__(self) -> None:
        if self.first_rank < 0 or not is_degree(self.degree):
            raise ConfigError(
                f"rank group is ({self.first_rank}, {self.degree}); "
                "accepted: a first rank of 0 or more, a power of two as degree"
            )

    def __str__(self) -> str:
        return f"{self.first_rank}-{self.first_rank + self.degree - 1}" if self.degree > 1 else f"{self.first_rank}"

    @property
    def ranks(self) -> range:
        """The ranks of the group, ascending."""
        return range(self.first_rank, self.first_rank + self.degree)

    @property
    def children(self) -> tuple["RankGroup", "RankGroup"] | None:
        """The two halves, or None for a single rank. Parent and buddy depend on the node: see Topology."""
        if self.degree == 1:
            return None
        half = self.degree // 2
        return RankGroup(self.first_rank, half), RankGroup(self.first_rank + half, half)

    def overlaps(self, other: "RankGroup") -> bool:
        """Whether the two groups share a rank."""
        return self.first_rank < other.ranks.stop and other.first_rank < self.ranks.stop


Layout = tuple[RankGroup, ...]


@dataclass(frozen=True)
class Topology:
    """Ranks 0 .. num_gpus - 1 in nodes of `node_gpus` consecutive ranks; the last node may be smaller.

    A group of degree C is aligned when it starts a multiple of C after its node's first rank and ends inside the
    node, so a node of 6 holds 4 + 2 and never 2 + 4. `lost_ranks` are out of service: no layout uses them.
    """

    num_gpus: int
    node_gpus: int = 8
    lost_ranks: frozenset[int] = field(default=frozenset())

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ConfigError(f"num_gpus is {self.num_gpus}; accepted: 1 or more")
        if self.node_gpus < 1:
            raise ConfigError(f"node_gpus is {self.node_gpus}; accepted: 1 or more")
        strangers = sorted(rank for rank in self.lost_ranks if not 0 <= rank < self.num_gpus)
        if strangers:
            raise ConfigError(f"lost_ranks contain {strangers[0]}; accepted: 0 to {self.num_gpus - 1}")

    @cached_property
    def nodes(self) -> tuple[range, ...]:
        """The ranks of each node."""
        starts = range(0, self.num_gpus, self.node_gpus)
        return tuple(range(start, min(start + self.node_gpus, self.num_gpus)) for start in starts)

    @property
    def max_degree(self) -> int:
        """The largest degree that a node can hold."""
        return 1 << (min(self.node_gpus, self.num_gpus).bit_length() - 1)

    @cached_property
    def live_ranks(self) -> tuple[int, ...]:
        """The ranks in service, ascending."""
        return tuple(rank for rank in range(self.num_gpus) if rank not in self.lost_ranks)

    def without(self, ranks: Iterable[int]) -> "Topology":
        """The same nodes with exactly these ranks out of service."""
        return Topology(self.num_gpus, self.node_gpus, frozenset(ranks))

    def node_of(self, rank: int) -> int:
        """The index of the node that holds a rank."""
        return rank // self.node_gpus

    def contains(self, group: RankGroup) -> bool:
        """Whether the group is aligned, lies inside one node and has no lost rank."""
        if group.first_rank >= self.num_gpus:
            return False
        node = self.nodes[self.node_of(group.first_rank)]
        return (
            (group.first_rank - node.start) % group.degree == 0
            and group.ranks.stop <= node.stop
            and self.lost_ranks.isdisjoint(group.ranks)
        )

    def parent(self, group: RankGroup) -> RankGroup | None:
        """The aligned group of twice the degree around this one, or None where it would leave the node."""
        node = self.nodes[self.node_of(group.first_rank)]
        degree = 2 * group.degree
        first_rank = node.start + (group.first_rank - node.start) // degree * degree
        return RankGroup(first_rank, degree) if first_rank + degree <= node.stop else None

    def buddy(self, group: RankGroup) -> RankGroup | None:
        """The other half of the parent: the only group this one can merge with. None where there is no parent."""
        parent = self.parent(group)
        if parent is None:
            return None
        first_rank = 2 * parent.first_rank + group.degree - group.first_rank
        return RankGroup(first_rank, group.degree)

    def coalesce(self, groups: Iterable[RankGroup], max_degree: int | None = None) -> Layout:
        """The largest aligned groups that cover the same ranks: buddies joined until none is left, in rank order."""
        remaining = set(groups)
        pending = sorted(remaining, key=lambda group: group.degree)
        for group in pending:  # grows while it is walked: every join appends the parent
            parent, buddy = self.parent(group), self.buddy(group)
            if parent is None or buddy is None or (max_degree is not None and parent.degree > max_degree):
                continue
            if group in remaining and buddy in remaining:
                remaining -= {group, buddy}
                remaining.add(parent)
                pending.append(parent)
        return tuple(sorted(remaining))

    def blocks(self, ranks: Iterable[int], max_degree: int | None = None) -> Layout:
        """The largest aligned groups that these ranks form, in rank order."""
        return self.coalesce((RankGroup(rank, 1) for rank in ranks), max_degree)
