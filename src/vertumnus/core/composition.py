"""Compositions of CP workers, and the way from one layout to another.

Composition   how many workers of each degree, written COUNTxDEGREE: 8x2,4x4,1x8
layout        a tuple of disjoint rank groups (see topology.py): a composition with places
Operation     one split (a group into its two halves) or one merge (two buddies into their parent)
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from itertools import pairwise, product

import numpy as np

from vertumnus.core.topology import Layout, RankGroup, Topology, check_degrees, is_degree
from vertumnus.errors import ConfigError

__all__ = [
    "Composition",
    "Layout",
    "Operation",
    "OperationCost",
    "OperationKind",
    "RankGroup",
    "Topology",
    "apply",
    "compositions",
    "initial_composition",
    "lay_out",
    "num_operations_between",
    "operations",
    "plan_towards",
]

_PART = re.compile(r"\s*(\d{1,9})\s*x\s*(\d{1,9})\s*")
_UNREACHED = 1 << 60


class OperationKind(Enum):
    """The two ways to change a layout."""

    SPLIT = "split"
    MERGE = "merge"


@dataclass(frozen=True, slots=True)
class Operation:
    """One degree-2C group <-> its two degree-C halves. Built by `split` and `merge`."""

    kind: OperationKind
    sources: Layout
    results: Layout

    @classmethod
    def split(cls, group: RankGroup) -> "Operation":
        """A group becomes its two halves; ConfigError for a single rank."""
        if group.children is None:
            raise ConfigError(f"split of group {group}; accepted: a group of degree 2 or more")
        return cls(OperationKind.SPLIT, (group,), group.children)

    @classmethod
    def merge(cls, parent: RankGroup) -> "Operation":
        """The two halves of `parent` become one group; ConfigError for a single rank."""
        if parent.children is None:
            raise ConfigError(f"merge into group {parent}; accepted: a group of degree 2 or more")
        return cls(OperationKind.MERGE, parent.children, (parent,))

    def __str__(self) -> str:
        return f"{self.kind.value} {'+'.join(map(str, self.sources))} into {'+'.join(map(str, self.results))}"

    @property
    def block(self) -> RankGroup:
        """The group of degree 2C: source of a split, result of a merge. Its ranks are those that take part."""
        return self.sources[0] if self.kind is OperationKind.SPLIT else self.results[0]

    @property
    def ranks(self) -> range:
        """The ranks that take part, ascending."""
        return self.block.ranks

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort key that breaks ties between operations: first rank, degree, kind."""
        return self.block.first_rank, self.block.degree, self.kind.value


OperationCost = Callable[[Operation], tuple[float, float]]
"""Predicted drain in seconds, then expected reconciliation traffic in bytes."""


@dataclass(frozen=True)
class Composition:
    """How many workers of each degree: immutable (degree, count) pairs, ascending by degree, every count >= 1."""

    counts: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.counts:
            raise ConfigError("composition is empty; accepted: COUNTxDEGREE parts such as 8x2,4x4,1x8")
        for degree, count in self.counts:
            if not is_degree(degree):
                raise ConfigError(f"composition has degree {degree}; accepted: a power of two (1, 2, 4, 8, ...)")
            if count < 1:
                raise ConfigError(f"composition has {count} workers of degree {degree}; accepted: 1 or more")
        if any(a >= b for (a, _), (b, _) in pairwise(self.counts)):
            raise ConfigError(f"composition is {self}; accepted: each degree once, in ascending order")

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> "Composition":
        """From degree -> count; counts of zero are left out."""
        return cls(tuple(sorted((degree, count) for degree, count in counts.items() if count)))

    @classmethod
    def of_layout(cls, layout: Iterable[RankGroup]) -> "Composition":
        """The degrees of a layout, counted."""
        return cls.of(Counter(group.degree for group in layout))

    @classmethod
    def parse(cls, text: str) -> "Composition":
        """Reads `8x2,4x4,1x8` (COUNTxDEGREE, any order of degrees); ConfigError says what is wrong."""
        counts: dict[int, int] = {}
        for part in text.split(","):
            match = _PART.fullmatch(part)
            if match is None:
                raise ConfigError(
                    f"composition is {text!r}, part {part.strip()!r}; accepted: COUNTxDEGREE parts such as 8x2,4x4,1x8"
                )
            count, degree = int(match[1]), int(match[2])
            if count == 0:
                raise ConfigError(f"composition is {text!r}, part {part.strip()!r}; accepted: counts of 1 or more")
            if degree in counts:
                raise ConfigError(f"composition is {text!r}; accepted: each degree once, but {degree} comes twice")
            counts[degree] = count
        return cls.of(counts)

    def __str__(self) -> str:
        return ",".join(f"{count}x{degree}" for degree, count in self.counts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(degree, count) pairs, ascending by degree."""
        return iter(self.counts)

    def count(self, degree: int) -> int:
        """How many workers have this degree (0 if none)."""
        return dict(self.counts).get(degree, 0)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The degrees present, ascending."""
        return tuple(degree for degree, _ in self.counts)

    @cached_property
    def num_workers(self) -> int:
        """Workers of all degrees."""
        return sum(count for _, count in self.counts)

    @cached_property
    def num_gpus(self) -> int:
        """GPUs that the workers take together."""
        return sum(degree * count for degree, count in self.counts)

    def capacity(self, kappa: Mapping[int, float]) -> float:
        """Predicted service seconds per second that all workers sustain together: the sum of their kappa."""
        missing = [degree for degree in self.degrees if degree not in kappa]
        if missing:
            known = ", ".join(map(str, sorted(kappa))) or "none"
            raise ConfigError(f"kappa has no value for degree {missing[0]}; accepted: {known}")
        return sum(count * kappa[degree] for degree, count in self.counts)

    def after(self, operation: Operation) -> "Composition":
        """The composition once an operation is done."""
        counts = Counter(dict(self.counts))
        counts.subtract(group.degree for group in operation.sources)
        counts.update(group.degree for group in operation.results)
        return Composition.of(counts)

    @property
    def large_first(self) -> tuple[tuple[int, int], ...]:
        """Sort key: (degree, count) from the largest degree down. Greater means more large-degree workers."""
        return self.counts[::-1]


def lay_out(composition: Composition, topology: Topology) -> Layout:
    """Places a composition on the nodes, largest degree first, each at the lowest free rank that is aligned.

    Largest first never fails where any placement exists, as every free block is a multiple of what is still to be
    placed. Raises ConfigError if the workers do not fit, or leave room for one more of the smallest degree.
    """
    too_large = [degree for degree in composition.degrees if degree > topology.max_degree]
    if too_large:
        raise ConfigError(
            f"composition is {composition}, degree {too_large[0]}; "
            f"accepted: degrees up to {topology.max_degree} on nodes of {topology.node_gpus} GPUs"
        )
    num_live = len(topology.live_ranks)
    if composition.num_gpus > num_live:
        raise ConfigError(
            f"composition is {composition}, which takes {composition.num_gpus} GPUs; accepted: {num_live} GPUs in all"
        )
    placed: list[RankGroup] = []
    free = list(topology.blocks(topology.live_ranks))
    for degree, count in reversed(composition.counts):
        free = [part for block in free for part in _parts(block, degree)]
        room = [block for block in free if block.degree == degree]
        if len(room) < count:
            raise ConfigError(
                f"composition is {composition}; accepted: what fits nodes of {topology.node_gpus} GPUs, "
                f"which here have room for {len(room)} workers of degree {degree} beside the larger ones"
            )
        placed += room[:count]
        free = sorted(set(free).difference(room[:count]))
    smallest = composition.degrees[0]
    if any(block.degree >= smallest for block in free):
        raise ConfigError(
            f"composition is {composition}, which takes {composition.num_gpus} GPUs and leaves room for more workers "
            f"of degree {smallest}; accepted: all {num_live} GPUs"
        )
    return tuple(placed)


def _parts(block: RankGroup, degree: int) -> list[RankGroup]:
    """A free block cut into groups of this degree; kept whole if it is smaller."""
    step = min(degree, block.degree)
    return [RankGroup(rank, step) for rank in block.ranks[::step]]


def compositions(topology: Topology, degrees: Collection[int]) -> tuple[Composition, ...]:
    """Every composition of these degrees that uses all GPUs in service, those with most large workers first.

    GPUs that no supported degree can use (a lone rank when the smallest degree is 2) stay idle. Five nodes of 8
    give a few hundred compositions, 64 nodes some hundred thousand.
    """
    ascending = check_degrees(degrees)
    reached: set[tuple[int, ...]] = {(0,) * len(ascending)}
    for block in topology.blocks(topology.live_ranks, ascending[-1]):
        patterns = _block_patterns(block.degree, ascending)
        reached = {tuple(map(sum, zip(counts, pattern, strict=True))) for counts in reached for pattern in patterns}
    found = [Composition.of(dict(zip(ascending, counts, strict=True))) for counts in reached if any(counts)]
    return tuple(sorted(found, key=lambda composition: composition.large_first, reverse=True))


@cache
def _block_patterns(degree: int, degrees: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """All ways to fill one aligned block with groups of these degrees, as counts by degree."""
    if degree < degrees[0]:
        return ((0,) * len(degrees),)
    found = {tuple(int(degree == other) for other in degrees)} if degree in degrees else set()
    if degree > degrees[0]:
        halves = _block_patterns(degree // 2, degrees)
        found |= {tuple(map(sum, zip(left, right, strict=True))) for left, right in product(halves, halves)}
    return tuple(sorted(found))


def operations(layout: Iterable[RankGroup], topology: Topology, degrees: Collection[int]) -> tuple[Operation, ...]:
    """Every split and merge that this layout allows, ordered by first rank, degree and kind."""
    present, supported = set(layout), set(degrees)
    found = []
    for group in present:
        if group.degree > 1 and group.degree // 2 in supported:
            found.append(Operation.split(group))
        parent, buddy = topology.parent(group), topology.buddy(group)
        is_left = parent is not None and group.first_rank == parent.first_rank
        if parent is not None and is_left and buddy in present and parent.degree in supported:
            found.append(Operation.merge(parent))
    return tuple(sorted(found, key=lambda operation: operation.order))


def apply(layout: Iterable[RankGroup], done: Iterable[Operation]) -> Layout:
    """The layout after some operations, in rank order."""
    groups = set(layout)
    for operation in done:
        assert groups.issuperset(operation.sources), f"{operation}: its sources are not in the layout"
        groups.difference_update(operation.sources)
        groups.update(operation.results)
    return tuple(sorted(groups))


def plan_towards(
    layout: Iterable[RankGroup],
    target: Composition,
    topology: Topology,
    *,
    cost: OperationCost,
    max_operations: int,
    held: Collection[RankGroup] = (),
) -> tuple[Operation, ...]:
    """Operations on disjoint groups that can start at once and lie on a shortest way to the target composition.

    Among all layouts of the target on the ranks in use, the one that the fewest operations reach is taken, ties by
    the order of `cost` (drain, then traffic, then rank) of those that can start now. The result is in that order too,
    at most `max_operations` long. Every operation brings the target one step nearer, so that planning again after
    each round always arrives; a way down several degrees takes several rounds. Groups in `held` (say, results of
    operations under way) count as they stand and are not touched in this round.

    Empty when the target is reached, when all that could start is held, or when the ranks in use cannot form the
    target (a rank was lost since it was chosen).
    """
    if max_operations < 1:
        raise ConfigError(f"max_operations is {max_operations}; accepted: 1 or more")
    groups = tuple(sorted(layout))
    if sum(group.degree for group in groups) != target.num_gpus or Composition.of_layout(groups) == target:
        return ()
    untouchable = set(held)
    startable = [
        operation
        for operation in operations(groups, topology, _powers_to(topology.max_degree))
        if untouchable.isdisjoint(operation.sources)
    ]
    startable.sort(key=lambda operation: (*cost(operation), *operation.order))
    place = {operation: index for index, operation in enumerate(startable)}
    goal = _NearestLayout(groups, target, topology, place).solve()
    if goal is None:
        return ()
    inner = _inner_blocks(goal, topology)
    wanted = [each for each in startable if (each.block in inner) == (each.kind is OperationKind.SPLIT)]
    return tuple(wanted[:max_operations])


def num_operations_between(layout: Iterable[RankGroup], target: Composition, topology: Topology) -> int | None:
    """Fewest splits and merges from this layout to the target; None if the ranks in use cannot form it."""
    groups = tuple(sorted(layout))
    if sum(group.degree for group in groups) != target.num_gpus:
        return None
    goal = _NearestLayout(groups, target, topology, {}).solve()
    return None if goal is None else len(_inner_blocks(groups, topology) ^ _inner_blocks(goal, topology))


def _powers_to(degree: int) -> tuple[int, ...]:
    return tuple(1 << exponent for exponent in range(degree.bit_length()))


def _inner_blocks(layout: Layout, topology: Topology) -> frozenset[RankGroup]:
    """Every block above a leaf of the layout, that is, every block that is cut into smaller groups."""
    inner: set[RankGroup] = set()
    for group in layout:
        parent = topology.parent(group)
        while parent is not None and parent not in inner:
            inner.add(parent)
            parent = topology.parent(parent)
    return frozenset(inner)


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to fill a block: its groups by target degree, the weight of getting there, and the groups."""

    weight: int
    groups: Layout


class _NearestLayout:
    """Shortest way to a composition: ways per tree block, then a knapsack over the blocks' counts.

    Weight of an operation = a large constant + its place in the order of cost (the last place if it cannot start
    now), so that fewer operations always win and cheaper ones break ties.
    """

    def __init__(self, layout: Layout, target: Composition, topology: Topology, place: Mapping[Operation, int]) -> None:
        self._leaves = frozenset(layout)
        self._target = target
        self._roots = topology.coalesce(layout)
        self._place = place
        self._base = (len(place) + 1) * (target.num_gpus + 1)

    def solve(self) -> Layout | None:
        """The nearest layout with the target's counts, or None if these blocks cannot form it.

        best[n] is the least weight at which the blocks so far give counts n of the degrees above the smallest (whose
        count follows, as every block is filled). Time is blocks x ways x product of the target's counts.
        """
        first, *others = self._target.counts
        sizes = (1, *(count + 1 for _, count in others))
        best = np.full(sizes, _UNREACHED, dtype=np.int64)
        best[(0,) * len(sizes)] = 0
        steps: list[tuple[list[tuple[tuple[int, ...], _Way]], np.ndarray]] = []
        for root in self._roots:
            ways = [((0, *counts[1:]), way) for counts, way in sorted(self._ways(root).items())]
            reached = np.full(sizes, _UNREACHED, dtype=np.int64)
            chosen = np.zeros(sizes, dtype=np.int32)
            for index, (shift, way) in enumerate(ways):
                if any(by >= size for by, size in zip(shift, sizes, strict=True)):
                    continue
                before = best[tuple(slice(0, size - by) for by, size in zip(shift, sizes, strict=True))]
                at = tuple(slice(by, None) for by in shift)
                better = before + way.weight < reached[at]
                reached[at][better] = before[better] + way.weight
                chosen[at][better] = index
            best = reached
            steps.append((ways, chosen))
        at_counts = tuple(size - 1 for size in sizes)
        if best[at_counts] >= _UNREACHED:
            return None
        groups: list[RankGroup] = []
        for ways, chosen in reversed(steps):
            shift, way = ways[int(chosen[at_counts])]
            groups += way.groups
            at_counts = tuple(count - by for count, by in zip(at_counts, shift, strict=True))
        assert sum(group.degree == first[0] for group in groups) == first[1]
        return tuple(sorted(groups))

    def _ways(self, block: RankGroup, below_leaf: bool = False) -> dict[tuple[int, ...], _Way]:
        """The lightest way to each set of counts that this block can take."""
        degrees = self._target.degrees
        is_leaf = block in self._leaves
        ways: dict[tuple[int, ...], _Way] = {}
        if block.degree in degrees:
            weight = 0 if is_leaf or below_leaf else self._merge_weight(block)
            ways[tuple(int(block.degree == degree) for degree in degrees)] = _Way(weight, (block,))
        if block.degree > degrees[0] and block.children is not None:
            left, right = (self._ways(child, below_leaf or is_leaf) for child in block.children)
            own = self._weight(Operation.split(block)) if is_leaf or below_leaf else 0
            for (counts_l, way_l), (counts_r, way_r) in product(left.items(), right.items()):
                counts = tuple(map(sum, zip(counts_l, counts_r, strict=True)))
                weight = own + way_l.weight + way_r.weight
                if counts not in ways or weight < ways[counts].weight:
                    ways[counts] = _Way(weight, way_l.groups + way_r.groups)
        return ways

    def _merge_weight(self, block: RankGroup) -> int:
        """Weight of merging everything under an inner block into one group."""
        if block in self._leaves or block.children is None:
            return 0
        return self._weight(Operation.merge(block)) + sum(map(self._merge_weight, block.children))

    def _weight(self, operation: Operation) -> int:
        return self._base + self._place.get(operation, len(self._place))


def initial_composition(
    candidates: Sequence[Composition],
    *,
    demand_s_per_s: float | Callable[[Composition], float],
    kappa: Mapping[int, float],
    fits: Callable[[Composition], bool],
) -> Composition:
    """The composition to start with, from what history says about the traffic.

    Among the candidates that fit the length mix and whose capacity covers the demand (predicted service seconds per
    second; a callable where it depends on the composition), the one with most large-degree workers, compared from the
    largest degree down. If none suffices, the fitting one (any, if none fits) with most capacity.
    """
    if not candidates:
        raise ConfigError("candidates are empty; accepted: at least one composition")
    demand = demand_s_per_s if callable(demand_s_per_s) else lambda _: demand_s_per_s
    fitting = [candidate for candidate in candidates if fits(candidate)] or list(candidates)
    enough = [candidate for candidate in fitting if candidate.capacity(kappa) >= demand(candidate)]
    if enough:
        return max(enough, key=lambda candidate: candidate.large_first)
    return max(fitting, key=lambda candidate: (candidate.capacity(kappa), candidate.large_first))
