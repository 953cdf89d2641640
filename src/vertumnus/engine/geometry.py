"""The groups that ranks can form: aligned blocks of a power of two of consecutive ranks inside one node."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vertumnus.errors import ConfigError

NODE_RANKS = 8


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """The group of the ranks [first_rank, first_rank + degree)."""

    first_rank: int
    degree: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.degree)

    @property
    def is_aligned(self) -> bool:
        """Whether such a group exists: a power of two, a multiple of it, within one node."""
        degree = self.degree
        return 1 <= degree <= NODE_RANKS and degree & (degree - 1) == 0 and self.first_rank % degree == 0

    def __str__(self) -> str:
        return f"{self.first_rank}x{self.degree}"


def all_groups(num_ranks: int) -> list[GroupKey]:
    """Every group of two ranks or more, small ones first: the order in which all ranks form them."""
    return list(_groups(num_ranks))


def groups_with(ranks: Iterable[int], num_ranks: int) -> list[GroupKey]:
    """Those of `all_groups` that have one of `ranks` as a member."""
    wanted = set(ranks)
    return [key for key in _groups(num_ranks) if not wanted.isdisjoint(key.ranks)]


def check_geometry(geometry: dict[int, int], num_ranks: int) -> list[GroupKey]:
    """The groups of {first_rank: degree}, in order. It may leave ranks out. Raises ConfigError if one is not aligned,
    reaches beyond the pool or overlaps another."""
    keys = [GroupKey(first_rank, degree) for first_rank, degree in sorted(geometry.items())]
    end = 0
    for key in keys:
        if not key.is_aligned or key.first_rank < end or key.ranks.stop > num_ranks:
            raise ConfigError(
                f"geometry has a group of {key.degree} ranks from rank {key.first_rank} on; accepted: disjoint groups "
                f"of 1, 2, 4 or {NODE_RANKS} ranks, each at a multiple of its degree, within {num_ranks} ranks"
            )
        end = key.ranks.stop
    return keys


def _groups(num_ranks: int) -> Iterator[GroupKey]:
    degree = 2
    while degree <= min(num_ranks, NODE_RANKS):
        for first_rank in range(0, num_ranks - degree + 1, degree):
            yield GroupKey(first_rank, degree)
        degree *= 2
