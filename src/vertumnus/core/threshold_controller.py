"""The paper's controller: one split or merge at a time, by load thresholds and the share of long requests."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from vertumnus.core.composition import Composition, Operation, OperationKind, operations
from vertumnus.core.controller import PoolState, Proposal, Reason, Window
from vertumnus.errors import ConfigError

_DIRECTIONS = {
    Reason.LOAD_HIGH: OperationKind.SPLIT,
    Reason.LOAD_LOW: OperationKind.MERGE,
    Reason.LONG_ROSE: OperationKind.MERGE,
    Reason.LONG_FELL: OperationKind.SPLIT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdSettings:
    """When to move. Load ratios are load over the profiled capacity of a composition."""

    window_s: float = 20.0
    upper_ratio: float = 0.85
    """Split above this load ratio."""
    lower_ratio: float = 0.6
    """Merge below this load ratio."""
    retain_ratio: float = 0.75
    """Merge only if the load stays at or below this ratio of the capacity that is left."""
    long_rise_factor: float = 1.5
    """The share of long requests rose clearly at this multiple of its reference, and fell clearly at the inverse."""
    long_change_ratio: float = 0.02
    """Smallest difference in the share of long requests that counts."""
    long_change_sigmas: float = 3.0
    """The difference must also exceed this many standard errors of two samples of one share."""
    reference_windows: int = 6
    """Windows after each change of composition that give the reference share of long requests; also the windows
    over which traffic is averaged to tell whether it is still the same."""
    persistence_windows: int = 2
    """Consecutive windows for which a condition must hold."""
    cooldown_windows: int = 2
    """Windows after the end of a change of composition in which nothing is decided."""
    same_traffic_ratio: float = 0.25
    """Traffic counts as the same while arrivals and tokens per second differ by no more than this share."""
    max_exits: int = 2
    """A composition that was left this often under the same traffic is not returned to until the traffic changes."""
    max_doublings: int = 4
    """Each reversal of direction under the same traffic doubles persistence_windows, at most this often."""

    def __post_init__(self) -> None:
        if not 0 < self.lower_ratio < self.retain_ratio <= self.upper_ratio:
            raise ConfigError(
                f"lower_ratio, retain_ratio, upper_ratio are {self.lower_ratio}, {self.retain_ratio}, "
                f"{self.upper_ratio}; accepted: 0 < lower < retain <= upper"
            )
        if not self.long_rise_factor > 1:
            raise ConfigError(f"long_rise_factor is {self.long_rise_factor}; accepted: above 1")
        for name in ("long_change_ratio", "same_traffic_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 0 or more, below 1")
        if not self.window_s > 0:
            raise ConfigError(f"window_s is {self.window_s}; accepted: above 0")
        for name, least in (
            ("long_change_sigmas", 0),
            ("cooldown_windows", 0),
            ("persistence_windows", 1),
            ("reference_windows", 1),
            ("max_exits", 1),
            ("max_doublings", 0),
        ):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: {least} or more")


class _LongShare:
    """The share of long requests against what it was just after the composition last changed."""

    def __init__(self, settings: ThresholdSettings) -> None:
        self._settings = settings
        self.restart()

    def restart(self) -> None:
        """Takes the windows from now on as the new reference."""
        self._num_windows = self._num_long = self._num_requests = 0

    def observe(self, window: Window) -> Reason | None:
        """LONG_ROSE or LONG_FELL if this window's share is clearly above or below the reference."""
        if self._num_windows < self._settings.reference_windows:
            self._num_windows += 1
            self._num_long += window.num_long
            self._num_requests += window.num_requests
            return None
        if not window.num_requests or not self._num_requests:
            return None
        share, reference = window.num_long / window.num_requests, self._num_long / self._num_requests
        pooled = (window.num_long + self._num_long) / (window.num_requests + self._num_requests)
        error = sqrt(pooled * (1 - pooled) * (1 / window.num_requests + 1 / self._num_requests))
        if abs(share - reference) <= max(self._settings.long_change_ratio, self._settings.long_change_sigmas * error):
            return None
        if share > self._settings.long_rise_factor * reference:
            return Reason.LONG_ROSE
        if share * self._settings.long_rise_factor < reference:
            return Reason.LONG_FELL
        return None


class _Restraint:
    """What the controller did under the present traffic: keeps it from going in circles, and from following noise.

    Thresholds alone cannot promise that, as the measured demand depends on the composition itself and on chance. So a
    composition that was left `max_exits` times is not returned to (more than once, as a backlog may have driven the
    controller too far), and each reversal of direction doubles the persistence asked for. Both are forgotten when
    the traffic changes.
    """

    def __init__(self, settings: ThresholdSettings) -> None:
        self._settings = settings
        self._recent: deque[tuple[float, float]] = deque(maxlen=settings.reference_windows)
        self._anchor: tuple[float, float] | None = None
        self._exits: Counter[Composition] = Counter()
        self._last_kind: OperationKind | None = None
        self._num_reversals = 0

    @property
    def persistence_windows(self) -> int:
        """Consecutive windows for which a condition must hold now."""
        return self._settings.persistence_windows << min(self._num_reversals, self._settings.max_doublings)

    def observe(self, window: Window) -> None:
        """Forgets everything once arrivals or tokens per second have moved away from where the first exit was."""
        self._recent.append((window.arrivals_per_s, window.input_tokens_per_s))
        if self._anchor is not None and not all(map(self._is_same, self._anchor, self._mean())):
            self._anchor = self._last_kind = None
            self._num_reversals = 0
            self._exits.clear()

    def leave(self, composition: Composition, kind: OperationKind) -> None:
        """Counts one exit by an operation of this kind."""
        if self._anchor is None:
            self._anchor = self._mean()
        self._exits[composition] += 1
        self._num_reversals += self._last_kind not in (None, kind)
        self._last_kind = kind

    def allows(self, composition: Composition) -> bool:
        """Whether the controller may go (back) to this composition."""
        return self._exits[composition] < self._settings.max_exits

    def _mean(self) -> tuple[float, float]:
        num_windows = len(self._recent)
        return sum(each[0] for each in self._recent) / num_windows, sum(each[1] for each in self._recent) / num_windows

    def _is_same(self, before: float, now: float) -> bool:
        return abs(before - now) <= self._settings.same_traffic_ratio * max(before, now)


class ThresholdController:
    """Splits above the upper load threshold, merges below the lower; else follows the share of long requests.

    Load is the window's demand plus the backlog spread over one window. Capacity wins over the share of long
    requests, and no operation is proposed that would call for its own reversal: a merge must leave enough capacity, a
    split for load must add some, a split for the share of long requests must not make the load look low. Among what
    is left, the shortest predicted drain wins, then the least reconciliation traffic. A condition must persist, and a
    cool-down follows every change of composition, whoever made it.

    Under constant traffic it makes at most max_exits transitions per composition, whatever the demand that each
    composition shows, and in practice a handful.
    """

    def __init__(self, kappa: Mapping[int, float], settings: ThresholdSettings | None = None) -> None:
        """`kappa`: service seconds per second that one worker of each degree sustains."""
        self.settings = settings or ThresholdSettings()
        self.kappa = dict(kappa)
        for degree, value in self.kappa.items():
            if not value > 0:
                raise ConfigError(f"kappa of degree {degree} is {value}; accepted: above 0")
        self._long_share = _LongShare(self.settings)
        self._restraint = _Restraint(self.settings)
        self._composition: Composition | None = None
        self._cooldown_windows = 0
        self._condition: Reason | None = None
        self._num_persisted = 0

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        """A proposal of one operation, or None to stay."""
        self._restraint.observe(window)
        changed = self._composition is not None and state.composition != self._composition
        self._composition = state.composition
        if state.in_transition or changed:
            self._restart()
            return None
        long_change = self._long_share.observe(window)
        if self._cooldown_windows > 0:
            self._cooldown_windows -= 1
            return None
        condition = self._load_condition(window, state.composition) or long_change
        self._num_persisted = self._num_persisted + 1 if condition is self._condition else 1
        self._condition = condition
        if condition is None or self._num_persisted < self._restraint.persistence_windows:
            return None
        operation = self._choose(condition, window.load_s_per_s, state)
        if operation is None:
            return None
        self._restraint.leave(state.composition, operation.kind)
        self._restart()
        target = state.composition.after(operation)
        return Proposal(target, (operation,), condition, self._figures(window, state.composition, target))

    def _restart(self) -> None:
        """Forgets the running condition and waits a cool-down from here."""
        self._cooldown_windows = self.settings.cooldown_windows
        self._condition = None
        self._num_persisted = 0
        self._long_share.restart()

    def _load_condition(self, window: Window, composition: Composition) -> Reason | None:
        load_ratio = window.load_s_per_s / composition.capacity(self.kappa)
        if load_ratio > self.settings.upper_ratio:
            return Reason.LOAD_HIGH
        return Reason.LOAD_LOW if load_ratio < self.settings.lower_ratio else None

    def _choose(self, condition: Reason, load_s_per_s: float, state: PoolState) -> Operation | None:
        """The first admissible operation by drain, traffic and rank."""
        candidates = [
            operation
            for operation in operations(state.layout, state.topology, state.degrees)
            if operation.kind is _DIRECTIONS[condition] and not any(group in state.held for group in operation.sources)
        ]
        for operation in sorted(candidates, key=lambda each: (*state.cost(each), *each.order)):
            after = state.composition.after(operation)
            allowed = state.admits(after) and self._restraint.allows(after)
            if allowed and self._helps(condition, load_s_per_s, state.composition, after):
                return operation
        return None

    def _helps(self, condition: Reason, load_s_per_s: float, now: Composition, after: Composition) -> bool:
        capacity_after = after.capacity(self.kappa)
        if _DIRECTIONS[condition] is OperationKind.MERGE:
            return load_s_per_s <= self.settings.retain_ratio * capacity_after
        if condition is Reason.LOAD_HIGH:
            return capacity_after > now.capacity(self.kappa)
        lower, upper = self.settings.lower_ratio, self.settings.upper_ratio
        return lower * capacity_after <= load_s_per_s <= upper * capacity_after

    def _figures(self, window: Window, now: Composition, target: Composition) -> dict[str, float]:
        return {
            "demand_s_per_s": window.demand_s_per_s,
            "backlog_s": window.backlog_s,
            "load_s_per_s": window.load_s_per_s,
            "capacity_s_per_s": now.capacity(self.kappa),
            "target_capacity_s_per_s": target.capacity(self.kappa),
            "long_ratio": window.num_long / window.num_requests if window.num_requests else 0.0,
        }
