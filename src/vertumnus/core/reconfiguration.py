"""Changing the workers of a running pool: the state machine of splits, merges, failures and epochs.

    DRAINING   sources take no new work; their running steps finish; each then waits at the model-input boundary
       |       all sources drained                                     time-out: sources resume under their old epoch
    SWITCHING  Activate(epoch e+1) is out; every rank confirms          time-out or lost rank: see below
       |       a group is schedulable as soon as its own ranks have
    COMMITTED  all groups are                                           ABORTED

Sans-I/O: events and `now_s` go in, effects come out, and the caller carries them out: it sends `Activate` to the
ranks, and when `GroupReady` comes it updates the scheduler's and the cache index's view of the workers before it routes
anything there, which is how these two confirm.

A rank that is lost, or does not confirm in time, takes down only the group that it belongs to. What is left of that
group becomes the largest aligned groups of live ranks, activated under a newer epoch, so that no step ever mixes two
geometries. Only the confirmation of the epoch last sent to a rank counts; older ones are ignored.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from vertumnus.core.composition import Layout, Operation, RankGroup, Topology
from vertumnus.core.topology import check_degrees
from vertumnus.errors import ConfigError, InvariantError


@dataclass(frozen=True, slots=True)
class ReconfigurationSettings:
    """Time-outs of the two stages. A drain lasts as long as the longest running step of the sources."""

    drain_timeout_s: float = 60.0
    switch_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name in ("drain_timeout_s", "switch_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: seconds above 0")


class Reason(Enum):
    """Why an operation was refused or given up, or a group was lost."""

    SOURCE_NOT_READY = "a source is not a ready group"
    DRAIN_TIMEOUT = "the drain took too long"
    SWITCH_TIMEOUT = "a rank did not confirm in time"
    RANK_FAILED = "a rank failed"


@dataclass(frozen=True, slots=True)
class OperationStarted:
    """The sources take no new work from now on; report each as drained once its running steps have finished."""

    operation: Operation
    drain_deadline_s: float


@dataclass(frozen=True, slots=True)
class OperationRefused:
    """The operation did not start and nothing has changed: the layout is no longer what it was planned on."""

    operation: Operation
    reason: Reason


@dataclass(frozen=True, slots=True)
class Activate:
    """To send to `ranks`: use these groups from the next step on, and confirm this epoch."""

    epoch: int
    groups: Layout
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupReady:
    """All ranks of the group have confirmed: it can be scheduled. `operation` is None after a failure or recovery."""

    group: RankGroup
    epoch: int
    operation: Operation | None


@dataclass(frozen=True, slots=True)
class OperationCommitted:
    """All results of the operation are ready. Seconds from start to last drain, and from there to now."""

    operation: Operation
    epoch: int
    drain_s: float
    switch_s: float


@dataclass(frozen=True, slots=True)
class OperationAborted:
    """The operation has ended without all its results. `restored` sources resume at once, under their old epoch."""

    operation: Operation
    restored: Layout
    reason: Reason


@dataclass(frozen=True, slots=True)
class GroupLost:
    """A group is gone for good, with whatever ran on it. Its surviving ranks come back in groups of their own."""

    group: RankGroup
    lost_ranks: tuple[int, ...]
    reason: Reason


Effect = OperationStarted | OperationRefused | Activate | GroupReady | OperationCommitted | OperationAborted | GroupLost


class _Stage(Enum):
    DRAINING = "draining"
    SWITCHING = "switching"


@dataclass(slots=True, eq=False)
class _Flight:
    """One operation under way."""

    operation: Operation
    started_s: float
    deadline_s: float
    source_epochs: dict[RankGroup, int]
    stage: _Stage = _Stage.DRAINING
    drained: set[RankGroup] = field(default_factory=set)
    drained_s: float = 0.0
    aborted: bool = False
    waiting: set[RankGroup] = field(default_factory=set)
    """Results that are still pending."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A group whose ranks were sent an Activate and have not all confirmed."""

    group: RankGroup
    epoch: int
    deadline_s: float
    flight: _Flight | None
    confirmed: set[int] = field(default_factory=set)


class Reconfiguration:
    """Who may serve on which ranks under which epoch: one per pool.

    Each rank is in exactly one of: a ready group, a source that drains, a pending group, the lost, the spare (live,
    but no supported degree fits around it; never with degree 1 supported).
    """

    def __init__(
        self,
        layout: Iterable[RankGroup],
        topology: Topology,
        *,
        degrees: Collection[int] = (1, 2, 4, 8),
        settings: ReconfigurationSettings | None = None,
        epoch: int = 0,
    ) -> None:
        """Starts with all groups of `layout` ready under `epoch`. Raises ConfigError if they overlap or misfit."""
        self.topology = topology.without(())
        self.degrees = check_degrees(degrees)
        self.settings = settings or ReconfigurationSettings()
        self.epoch = epoch
        self._ready: dict[RankGroup, int] = {}
        self._flights: list[_Flight] = []
        self._pending: dict[RankGroup, _Pending] = {}
        self._rank_epochs = [epoch] * topology.num_gpus
        self._lost: set[int] = set(topology.lost_ranks)
        taken: set[int] = set()
        for group in sorted(layout):
            if not topology.contains(group) or group.degree not in self.degrees or not taken.isdisjoint(group.ranks):
                raise ConfigError(
                    f"layout has group {group}; accepted: disjoint aligned groups of degree "
                    f"{', '.join(map(str, self.degrees))} inside a node"
                )
            taken.update(group.ranks)
            self._ready[group] = epoch
        self._spare: set[int] = set(topology.live_ranks) - taken

    @property
    def ready(self) -> Mapping[RankGroup, int]:
        """The groups that may serve, each with its epoch."""
        return MappingProxyType(self._ready)

    @property
    def layout(self) -> Layout:
        """The groups that may serve, in rank order."""
        return tuple(sorted(self._ready))

    @property
    def planned_layout(self) -> Layout:
        """The layout once all that is under way has ended well, in rank order. The base for planning."""
        draining = [group for flight in self._draining() for group in flight.operation.results]
        return tuple(sorted([*self._ready, *self._pending, *draining]))

    @property
    def held(self) -> frozenset[RankGroup]:
        """The groups of `planned_layout` that are not ready, so that no operation can take them yet."""
        return frozenset(self.planned_layout) - self._ready.keys()

    @property
    def lost_ranks(self) -> frozenset[int]:
        """The ranks out of service."""
        return frozenset(self._lost)

    @property
    def live_topology(self) -> Topology:
        """The nodes without the ranks out of service: what compositions have to fit."""
        return self.topology.without(self._lost)

    @property
    def in_transition(self) -> bool:
        """Whether an operation or an activation is under way."""
        return bool(self._flights or self._pending)

    @property
    def next_deadline_s(self) -> float | None:
        """When `tick` has to be called at the latest; None while nothing is under way."""
        deadlines = [flight.deadline_s for flight in self._draining()]
        deadlines += [pending.deadline_s for pending in self._pending.values()]
        return min(deadlines, default=None)

    def rank_epoch(self, rank: int) -> int:
        """The last epoch that this rank has confirmed."""
        return self._rank_epochs[rank]

    def start(
        self, operations: Iterable[Operation], now_s: float, busy: Collection[RankGroup] = ()
    ) -> tuple[Effect, ...]:
        """Starts one transition: a bundle of operations that progress independently of each other.

        Sources in `busy` still run steps and are to be reported with `source_drained`; the others count as drained. An
        operation whose sources are not all ready (a rank was lost meanwhile, or another operation has them) or whose
        degrees are unsupported is refused; the rest of the bundle starts.
        """
        effects: list[Effect] = []
        for operation in operations:
            supported = all(group.degree in self.degrees for group in operation.results)
            if not supported or not all(group in self._ready for group in operation.sources):
                effects.append(OperationRefused(operation, Reason.SOURCE_NOT_READY))
                continue
            deadline_s = now_s + self.settings.drain_timeout_s
            flight = _Flight(
                operation=operation,
                started_s=now_s,
                deadline_s=deadline_s,
                source_epochs={group: self._ready.pop(group) for group in operation.sources},
                drained={group for group in operation.sources if group not in busy},
            )
            self._flights.append(flight)
            effects.append(OperationStarted(operation, deadline_s))
            self._switch_if_drained(flight, now_s, effects)
        return tuple(effects)

    def source_drained(self, group: RankGroup, now_s: float) -> tuple[Effect, ...]:
        """A source's running steps have finished and its ranks wait. Ignored for a group that does not drain."""
        effects: list[Effect] = []
        for flight in self._draining():
            if group in flight.source_epochs:
                flight.drained.add(group)
                self._switch_if_drained(flight, now_s, effects)
        return tuple(effects)

    def rank_confirmed(self, rank: int, epoch: int, now_s: float) -> tuple[Effect, ...]:
        """A rank reports that it has adopted an epoch. Ignored unless it is the one last sent to it."""
        effects: list[Effect] = []
        pending = self._pending_of(rank)
        if pending is None or pending.epoch != epoch:
            return ()
        pending.confirmed.add(rank)
        self._rank_epochs[rank] = epoch
        if len(pending.confirmed) == pending.group.degree:
            del self._pending[pending.group]
            self._ready[pending.group] = epoch
            flight = pending.flight
            effects.append(GroupReady(pending.group, epoch, flight.operation if flight else None))
            if flight is not None:
                self._result_ready(flight, pending, now_s, effects)
        return tuple(effects)

    def rank_failed(self, rank: int, now_s: float) -> tuple[Effect, ...]:
        """A rank is out of service. Its group is lost; the surviving ranks of that group are activated anew."""
        self._check_rank(rank)
        if rank in self._lost:
            return ()
        effects: list[Effect] = []
        self._spare.discard(rank)
        for group in list(self._ready):
            if rank in group.ranks:
                del self._ready[group]
                self._dissolve(group, {rank}, Reason.RANK_FAILED, now_s, effects)
        for flight in self._draining():
            if rank in flight.operation.ranks:
                self._abort_drain(flight, {rank}, Reason.RANK_FAILED, now_s, effects)
        pending = self._pending_of(rank)
        # What was just activated anew does not contain the rank, so this is a group that was pending before.
        if pending is not None:
            self._lose_pending(pending, {rank}, Reason.RANK_FAILED, now_s, effects)
        self._lost.add(rank)
        return tuple(effects)

    def rank_recovered(self, rank: int, now_s: float) -> tuple[Effect, ...]:
        """A lost rank is back: with the spare ranks beside it, it forms the largest group that fits."""
        self._check_rank(rank)
        if rank not in self._lost:
            return ()
        effects: list[Effect] = []
        self._lost.remove(rank)
        self._spare.add(rank)
        blocks = self.topology.blocks(self._spare, self.degrees[-1])
        block = next(group for group in blocks if rank in group.ranks)
        self._activate_blocks(set(block.ranks), block.degree, now_s, effects)
        return tuple(effects)

    def tick(self, now_s: float) -> tuple[Effect, ...]:
        """Ends everything whose deadline has passed, drains first, then activations, each in rank order."""
        effects: list[Effect] = []
        for flight in self._draining():
            if flight.deadline_s <= now_s:
                self._abort_drain(flight, set(), Reason.DRAIN_TIMEOUT, now_s, effects)
        for pending in sorted(self._pending.values(), key=lambda each: each.group):
            if pending.deadline_s <= now_s:
                missing = set(pending.group.ranks) - pending.confirmed
                self._lose_pending(pending, missing, Reason.SWITCH_TIMEOUT, now_s, effects)
                self._lost |= missing
        return tuple(effects)

    def check_invariants(self) -> None:
        """Raises InvariantError unless every rank is in exactly one place and all epochs are consistent."""
        places: dict[int, list[str]] = {rank: [] for rank in range(self.topology.num_gpus)}
        owned: list[tuple[str, RankGroup]] = [("ready", group) for group in self._ready]
        owned += [("draining", group) for flight in self._draining() for group in flight.source_epochs]
        owned += [("pending", group) for group in self._pending]
        for place, group in owned:
            if not self.topology.contains(group):
                raise InvariantError(f"{place} group {group} is not aligned inside a node")
            for rank in group.ranks:
                places[rank].append(f"{place} {group}")
        for rank in self._lost:
            places[rank].append("lost")
        for rank in self._spare:
            places[rank].append("spare")
        for rank, found in places.items():
            if len(found) != 1:
                raise InvariantError(f"rank {rank} is in {found}, which should be exactly one place")
        for group, epoch in self._ready.items():
            if {self._rank_epochs[rank] for rank in group.ranks} != {epoch}:
                raise InvariantError(f"ready group {group} of epoch {epoch} has ranks of another epoch")
        for pending in self._pending.values():
            if not pending.confirmed < set(pending.group.ranks) or not 0 < pending.epoch <= self.epoch:
                raise InvariantError(f"pending group {pending.group} has confirmations that do not belong to it")
        for flight in self._flights:
            waiting = {group for group, pending in self._pending.items() if pending.flight is flight}
            if waiting != flight.waiting or (flight.stage is _Stage.SWITCHING and not waiting):
                raise InvariantError(f"{flight.operation} waits for {flight.waiting}, pending are {waiting}")

    def _draining(self) -> list[_Flight]:
        """The operations that drain, oldest first; a copy, safe to change while walked."""
        return [flight for flight in self._flights if flight.stage is _Stage.DRAINING]

    def _pending_of(self, rank: int) -> _Pending | None:
        return next((pending for pending in self._pending.values() if rank in pending.group.ranks), None)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.topology.num_gpus:
            raise ConfigError(f"rank is {rank}; accepted: 0 to {self.topology.num_gpus - 1}")

    def _switch_if_drained(self, flight: _Flight, now_s: float, effects: list[Effect]) -> None:
        if len(flight.drained) < len(flight.source_epochs):
            return
        flight.stage = _Stage.SWITCHING
        flight.drained_s = now_s
        flight.waiting = set(flight.operation.results)
        self._activate(flight.operation.results, flight, now_s, effects)

    def _activate(self, groups: Layout, flight: _Flight | None, now_s: float, effects: list[Effect]) -> None:
        """Sends groups a new epoch, which makes them pending."""
        self.epoch += 1
        deadline_s = now_s + self.settings.switch_timeout_s
        for group in groups:
            self._pending[group] = _Pending(group, self.epoch, deadline_s, flight)
        effects.append(Activate(self.epoch, groups, tuple(rank for group in groups for rank in group.ranks)))

    def _activate_blocks(self, ranks: set[int], max_degree: int, now_s: float, effects: list[Effect]) -> None:
        """Activates the largest supported groups that these ranks form; ranks that form none are spare."""
        self._spare |= ranks
        blocks = self.topology.blocks(ranks, max_degree)
        groups = tuple(group for group in blocks if group.degree >= self.degrees[0])
        if groups:
            self._spare.difference_update(rank for group in groups for rank in group.ranks)
            self._activate(groups, None, now_s, effects)

    def _dissolve(self, group: RankGroup, lost: set[int], reason: Reason, now_s: float, effects: list[Effect]) -> None:
        """A group that has already left its place is gone; what survives of it is activated in smaller groups."""
        effects.append(GroupLost(group, tuple(sorted(lost)), reason))
        self._activate_blocks(set(group.ranks) - lost, group.degree, now_s, effects)

    def _abort_drain(
        self, flight: _Flight, lost: set[int], reason: Reason, now_s: float, effects: list[Effect]
    ) -> None:
        """Sources without a lost rank resume under their old epoch; nothing was activated yet."""
        self._flights.remove(flight)
        hit = [group for group in flight.source_epochs if not lost.isdisjoint(group.ranks)]
        restored = {group: epoch for group, epoch in flight.source_epochs.items() if group not in hit}
        self._ready.update(restored)
        effects.append(OperationAborted(flight.operation, tuple(restored), reason))
        for group in hit:
            self._dissolve(group, lost.intersection(group.ranks), reason, now_s, effects)

    def _lose_pending(
        self, pending: _Pending, lost: set[int], reason: Reason, now_s: float, effects: list[Effect]
    ) -> None:
        """A pending group is gone. Its operation has failed with it, though a sibling result may still come up."""
        del self._pending[pending.group]
        flight = pending.flight
        if flight is not None:
            if not flight.aborted:
                flight.aborted = True
                effects.append(OperationAborted(flight.operation, (), reason))
            self._drop_result(flight, pending.group)
        self._dissolve(pending.group, lost, reason, now_s, effects)

    def _result_ready(self, flight: _Flight, pending: _Pending, now_s: float, effects: list[Effect]) -> None:
        self._drop_result(flight, pending.group)
        if not flight.waiting and not flight.aborted:
            drain_s, switch_s = flight.drained_s - flight.started_s, now_s - flight.drained_s
            effects.append(OperationCommitted(flight.operation, pending.epoch, drain_s, switch_s))

    def _drop_result(self, flight: _Flight, group: RankGroup) -> None:
        flight.waiting.discard(group)
        if not flight.waiting:
            self._flights.remove(flight)
