"""A controller that lets other compositions shadow the traffic and goes where it would have been served better.

Thresholds on demand over capacity say that something is wrong, not what would be right; so far from the right
composition they are slow, and near it they fidget. Here every window's arrivals are replayed through shadows of other
compositions (`core.rollout`): the target is the one of least TTFT, surges counted in, however many operations away.

Shadows queue in order of arrival; how much less the pool itself waits than its own shadow is measured, and believed of
the others too.

What keeps it calm: all compositions are judged on the same arrivals, over as long as the traffic has not changed, so
that evidence adds up; the gain must exceed a margin and, unless it is large, stand out from chance; and under the same
traffic no composition is entered more than twice. What a composition would lose in a surge counts beside what it saves,
the less the longer the traffic has stayed the same.

What keeps it quick: when the traffic changes, all compositions start anew; as evidence comes in, those that are clearly
worse are dropped. A large pool is judged as five of its nodes with their share of the arrivals, and of a window at most
`max_requests` are replayed.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vertumnus.core.composition import Composition
from vertumnus.core.controller import Arrivals, PoolState, Proposal, Reason, Window
from vertumnus.core.cost import CostModel, FloatArray
from vertumnus.core.evidence import Evidence, WaitRatio
from vertumnus.core.rollout import Shadows
from vertumnus.core.search_space import SearchSpace, search_space
from vertumnus.core.slices import Slices, finish
from vertumnus.core.topology import Topology
from vertumnus.errors import ConfigError

_SURGE_REQUESTS = 1500
"""Arrivals of a surge that are replayed at most: fifteen milliseconds for the compositions that are followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadSettings:
    """Patience and memory of the controller."""

    min_gain_ratio: float = 0.05
    """Share of the predicted mean TTFT that another composition must save."""
    urgent_gain_ratio: float = 0.5
    """Gain at which a single window is reason enough."""
    min_windows: int = 2
    """Windows of the same traffic before a smaller gain counts."""
    min_requests: int = 6
    """Requests of the same traffic before it does."""
    fine_windows: int = 6
    """Up to that many, evidence is weighed request by request: a few windows say little of how much windows differ."""
    gain_sigmas: float = 4.0
    """Standard errors by which a smaller gain must stand out (what follows each other near saturation is far from
    independent)."""
    doubt_sigmas: float = 2.0
    """Standard errors by which each composition's mean TTFT counts as more than it seems, when the best is chosen."""
    half_life_windows: float = 30.0
    """Age at which a window's evidence weighs half."""
    change_sigmas: float = 5.0
    """Standard errors by which rate or work per request must differ from before to count as other traffic."""
    recent_windows: int = 6
    """Windows that are compared with all before them, beside the last one alone, to see a slower change."""
    max_shadows: int = 24
    """Compositions followed once the first window, or the last review, has ranked them all."""
    review_windows: int = 12
    """Windows of the same traffic after which all compositions are looked at again, and again: the first window may
    have ranked them in the backlog of a surge or with cold caches."""
    reviewed_windows: int = 8
    """The last windows, which they are looked at on; what came before is forgotten."""
    max_requests: int = 6000
    """Arrivals of a window that are replayed at most, its first ones: with `review_windows` the budget of time."""
    backlog_windows: int = 6
    """Windows after which a pool with a backlog looks at all compositions again: those followed may all be too slow."""

    surge_ratio: float = 3.0
    """Arrivals of a surge, which may come at any time, over those of now; never more than the pool could serve."""
    surge_windows: float = 1.0
    """Windows of a surge, and of the traffic before, that count beside the traffic so far: the two until the pool has
    been changed, times one half, as not all traffic ends so. 0: surges are not thought of."""

    def __post_init__(self) -> None:
        for name in ("min_gain_ratio", "urgent_gain_ratio"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: above 0 and below 1")
        for name in (
            "min_windows",
            "min_requests",
            "fine_windows",
            "recent_windows",
            "max_shadows",
            "review_windows",
            "reviewed_windows",
            "max_requests",
            "backlog_windows",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        for name in ("gain_sigmas", "half_life_windows", "change_sigmas"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: above 0")
        for name in ("doubt_sigmas", "surge_windows"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; accepted: 0 or more")
        if not 1 <= self.surge_ratio < np.inf:
            raise ConfigError(f"surge_ratio is {self.surge_ratio}; accepted: 1 or more, finite")


@dataclass(frozen=True, slots=True)
class _Traffic:
    """One window in numbers: its length, and the sums over its arrivals of 1, w and w^2 with w = E_1(L, 0).

    Cold work, since reuse depends on what the controller does.
    """

    duration_s: float
    num_requests: int
    work_s: float
    work_squared_s2: float


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the compositions promise, [compositions] each."""

    mean_ttft_s: FloatArray
    """Of the traffic as it is."""
    ttft_s: FloatArray
    """Over all requests that are to be thought of, surges counted in."""
    errors_s: FloatArray
    """Standard errors of what `ttft_s` differs by from that of the pool's own composition."""


@dataclass(slots=True)
class LookaheadController:
    """Proposes the composition whose shadow serves the traffic best. See the module's text."""

    cost_model: CostModel
    settings: LookaheadSettings = LookaheadSettings()
    _traffic: deque[_Traffic] = field(default_factory=lambda: deque(maxlen=180))
    _space: SearchSpace | None = None
    _shadows: Shadows | None = None
    """Of compositions of the pool that is judged."""
    _evidence: Evidence = field(init=False)
    """Of the traffic as it is."""
    _surges: Evidence = field(init=False)
    """Of the same windows, each met by an idle pool at up to `surge_ratio` times the speed."""
    _surge_requests: float = 0.0
    """Arrivals of such a window, the last one."""
    _returns: Evidence = field(init=False)
    """Of the last window of the traffic before, met by an idle pool."""
    _before: Arrivals | None = None
    """That window's arrivals."""
    _recent: deque[Window] = field(init=False)
    """The last windows of the traffic as it is."""
    _age: int = 0
    """Windows of that traffic."""
    _waits: WaitRatio = field(default_factory=WaitRatio)
    _entered: Counter[Composition] = field(default_factory=Counter)
    _topology: Topology | None = None
    _began_with_backlog: bool = False
    _is_thinking: bool = False
    """Between the slices of a window; still so when the next one comes if it was given up."""
    _last: Composition | None = None
    """At the end of the window before; None before the first one and in a transition."""

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.settings.reviewed_windows)
        self._evidence = Evidence(self.settings.fine_windows, self.settings.half_life_windows)
        self._surges = Evidence(0, self.settings.half_life_windows)
        self._returns = Evidence(0, self.settings.half_life_windows)

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        """A target of less predicted mean TTFT, or None."""
        return finish(self.observing(window, state))

    def observing(self, window: Window, state: PoolState) -> Slices[Proposal | None]:
        """`observe` in slices of a few milliseconds; some microseconds per arrival, more where the traffic changed."""
        if self._space is None or state.topology != self._topology:
            self._space = search_space(state.topology, state.degrees)
        window = self._seen(window)
        windows, queued = self._begin_window(window, state)
        was_steady = not state.in_transition and (self._last == state.composition or self._last is None)
        self._last = None if state.in_transition else state.composition
        if not windows or self._shadows is None:
            return None
        row = self._shadows.compositions.index(self._space.judged(state.composition))
        self._is_thinking = True
        for number, each in enumerate(windows):
            arrivals = _with_queued(queued, each) if number == 0 else each.arrivals
            played = arrivals.part(0, self.settings.max_requests)
            replayed = yield from self._shadows.replay(played)
            self._evidence.add(replayed)
            is_cut = len(played) < len(arrivals)
            if is_cut:
                self._shadows.skip(each.end_s - float(played.arrival_s[-1]))
        if was_steady and len(window.arrivals) and not is_cut:
            own_wait_s = replayed.wait_s[-len(window.arrivals) :, row]
            until_end_s = window.end_s - window.arrivals.arrival_s
            self._waits.record(window.waited_s, float(np.minimum(own_wait_s, until_end_s).sum()), len(own_wait_s))
        row = self._drop_hopeless(row)
        if self.settings.surge_windows:
            yield from self._meet_surges(windows)
        self._is_thinking = False
        expected = self._expect(row)
        best = self._best(row, expected, state)
        proposal = None
        if not state.in_transition and self._is_worth_it(row, best, expected):
            target = self._shadows.compositions[best]
            self._entered[target] += 1
            proposal = Proposal(
                self._space.candidates[target],
                (),
                Reason.BETTER_COMPOSITION,
                {
                    "mean_ttft_s": float(expected.mean_ttft_s[row]),
                    "target_mean_ttft_s": float(expected.mean_ttft_s[best]),
                    "ttft_with_surges_s": float(expected.ttft_s[row]),
                    "target_ttft_with_surges_s": float(expected.ttft_s[best]),
                    "wait_ratio": self._waits.ratio,
                    "num_requests": float(sum(self._evidence.counts)),
                    "num_windows": float(len(self._evidence.counts)),
                },
            )
        return proposal

    def _begin_window(self, window: Window, state: PoolState) -> tuple[list[Window], Arrivals]:
        """The windows to replay, those without arrivals left out, and what waits now, to go before the first of them
        where that begins anew; forgets what was learnt where that says nothing of the traffic that goes on."""
        current = state.composition
        is_other = self._remember(window)
        if is_other and self._recent:
            self._before = self._recent[-1].arrivals
        has_changed = is_other or state.topology != self._topology
        if has_changed:
            self._entered.clear()
            self._recent.clear()
            self._age = 0
        self._age += 1
        self._recent.append(window)
        assert self._space is not None
        is_known = self._shadows is not None and self._space.judged(current) in self._shadows.compositions
        backlog = len(state.queued) / current.num_workers
        is_behind = backlog > 2 and len(self._evidence.counts) >= self.settings.backlog_windows
        # While a backlog was worked off, the shadows told who is quickest at that, not who serves this traffic best.
        is_through = self._began_with_backlog and backlog <= 1 and not state.in_transition
        # An unknown composition is one that was dropped, passed through on the way; a backlog means that the first
        # window ranked too little. None of this is news of the traffic, so what was entered before still counts.
        windows, waiting = [window], self._sample(state.queued, window.start_s)
        queued = waiting.part(0, 0)
        if has_changed or not is_known or is_behind or is_through:
            self._start_anew(state)
            self._began_with_backlog = backlog > 0.5 and not is_through
            queued = waiting
        elif self._is_thinking or self._is_review_due(backlog, state):
            self._start_anew(state)
            windows = list(self._recent)
        return [each for each in windows if len(each.arrivals) or len(queued)], queued

    def _seen(self, window: Window) -> Window:
        """The window as the pool that is judged sees it: with its share of the arrivals, and of what they waited."""
        arrivals = self._sample(window.arrivals, window.start_s)
        if len(arrivals) == len(window.arrivals):
            return window
        return replace(window, arrivals=arrivals, waited_s=window.waited_s * len(arrivals) / len(window.arrivals))

    def _sample(self, arrivals: Arrivals, start_s: float) -> Arrivals:
        assert self._space is not None
        if self._space.share == 1:
            return arrivals
        return arrivals.thinned(self._space.share, seed=abs(int(1000 * start_s)))

    def _is_review_due(self, backlog: float, state: PoolState) -> bool:
        return self._age % self.settings.review_windows == 0 and backlog <= 1 and not state.in_transition

    def _meet_surges(self, windows: Sequence[Window]) -> Slices[None]:
        """What would become of idle shadows in a surge of this traffic, and if the traffic before it came back."""
        assert self._shadows is not None
        compositions = self._shadows.compositions
        for window in windows:
            if len(window.arrivals):
                ratio = self._surge_ratio(window)
                surge = _faster(window, ratio).part(0, _SURGE_REQUESTS)
                self._surges.add((yield from Shadows(compositions, self.cost_model).replay(surge)))
                self._surge_requests = ratio * len(window.arrivals)
        if self._before is not None and len(self._before) and not self._returns.counts:
            before = self._before.part(0, _SURGE_REQUESTS)
            self._returns.add((yield from Shadows(compositions, self.cost_model).replay(before)))

    def _surge_ratio(self, window: Window) -> float:
        """What comes `surge_ratio` times as fast, or as fast as the pool can serve at all: at its smallest degree."""
        assert self._shadows is not None
        costs = self.cost_model.for_degrees(self.cost_model.degrees[:1])
        arrivals = window.arrivals
        work_s = costs.prefill_s(arrivals.input_tokens - arrivals.prefix_tokens, arrivals.prefix_tokens)
        num_workers = self._shadows.compositions[0].num_gpus / self.cost_model.degrees[0]
        could_s = window.duration_s * num_workers
        return max(1.0, min(self.settings.surge_ratio, could_s / float(work_s.sum())))

    def _expect(self, row: int) -> _Expected:
        """What each composition's TTFT would be.

        Counted are as many requests again as the traffic has had so far, and those of a surge and of the traffic before
        until the pool has been changed: few large workers serve light traffic best, and lose most when it ends.
        """
        mean_ttft_s = self._evidence.mean_ttft_s(self._waits.ratio)
        num_seen = max(1, sum(each.num_requests for each in self._traffic))
        total_s, num_requests = num_seen * mean_ttft_s, float(num_seen)
        for surges, per_window in (
            (self._surges, self._surge_requests),
            (self._returns, 0 if self._before is None else len(self._before)),
        ):
            if surges.counts:
                weight = self.settings.surge_windows * per_window
                total_s += weight * surges.mean_ttft_s(self._waits.ratio)
                num_requests += weight
        errors_s = num_seen / num_requests * self._evidence.standard_errors_s(row, self._waits.ratio)
        return _Expected(mean_ttft_s, total_s / num_requests, errors_s)

    def _best(self, row: int, expected: _Expected, state: PoolState) -> int:
        """The composition to go for: of least TTFT, surges counted in.

        Of many compositions that were seen on few requests, the one that looks best is mostly one that was lucky, so
        that doubt counts against each; but where the pool is far from right, any of the best will do. Under the same
        traffic one that was entered twice is not entered a third time, nor one that the pool has been in but that could
        not be gone to (ranks idle, too little memory for what has come since).
        """
        assert self._shadows is not None
        assert self._space is not None
        settings = self.settings
        mean_ttft_s, ttft_s = expected.mean_ttft_s, expected.ttft_s
        candidates = self._space.candidates
        is_open = np.array(
            [
                self._entered[each] < 2 and each in candidates and state.admits(candidates[each])
                for each in self._shadows.compositions
            ]
        )
        is_open &= ttft_s <= ttft_s[row]
        is_open[row] = True
        best = int(np.where(is_open, mean_ttft_s, np.inf).argmin())
        if mean_ttft_s[best] <= (1.0 - settings.urgent_gain_ratio) * mean_ttft_s[row]:
            return best
        return int(np.where(is_open, ttft_s + settings.doubt_sigmas * expected.errors_s, np.inf).argmin())

    def use_costs(self, cost_model: CostModel) -> None:
        """Another cost model: what the shadows showed with the old one is forgotten. How long requests wait over what a
        shadow says is learnt anew within some windows, and compositions that were entered still count."""
        self.cost_model = cost_model
        self._shadows = None
        self._traffic.clear()

    def _is_worth_it(self, row: int, best: int, expected: _Expected) -> bool:
        """Whether the best is better by enough, of the traffic as it is, and beyond doubt, surges counted in."""
        settings = self.settings
        gain_ratio = 1.0 - float(expected.mean_ttft_s[best] / expected.mean_ttft_s[row])
        if best == row or gain_ratio < settings.min_gain_ratio:
            return False
        if expected.ttft_s[best] <= (1.0 - settings.urgent_gain_ratio) * expected.ttft_s[row]:
            return True
        counts = self._evidence.counts
        if len(counts) < settings.min_windows or sum(counts) < settings.min_requests:
            return False
        return bool(expected.ttft_s[row] - expected.ttft_s[best] >= settings.gain_sigmas * expected.errors_s[best])

    def _drop_hopeless(self, row: int) -> int:
        """Follows the pool's own composition, whose new row is returned, the best others and the best of every number
        of workers: those stand surges differently. Later those alone that may still turn out better than the own."""
        assert self._shadows is not None
        compositions = self._shadows.compositions
        mean_ttft_s = self._evidence.mean_ttft_s(self._waits.ratio)
        order = np.argsort(mean_ttft_s, kind="stable").tolist()
        best_of = {compositions[each].num_workers: each for each in reversed(order)}
        rows = sorted({row, *order[: self.settings.max_shadows], *best_of.values()})
        if len(self._evidence.counts) > self.settings.fine_windows:
            errors_s = self.settings.gain_sigmas * self._evidence.standard_errors_s(row, self._waits.ratio)
            is_hopeless = mean_ttft_s - errors_s > mean_ttft_s[row]
            rows = [each for each in rows if not is_hopeless[each]]
        if len(rows) < len(mean_ttft_s):
            self._shadows.keep(rows)
            for evidence in (self._evidence, self._surges, self._returns):
                evidence.keep(rows)
        return rows.index(row)

    def _start_anew(self, state: PoolState) -> None:
        """Shadows of everything that could be gone to; what was learnt under other traffic is forgotten."""
        self._topology = state.topology
        assert self._space is not None
        own = self._space.judged(state.composition)
        others = [each for each, real in self._space.candidates.items() if each != own and state.admits(real)]
        self._shadows = Shadows([own, *others], self.cost_model)
        self._evidence.clear()
        self._surges.clear()
        self._returns.clear()

    def _remember(self, window: Window) -> bool:
        """Appends a window to the history of the traffic; a change (True) ends the history before it."""
        work_s = self.cost_model.for_degrees((self.cost_model.degrees[0],)).prefill_s(window.arrivals.input_tokens, 0.0)
        traffic = _Traffic(window.duration_s, len(work_s), float(work_s.sum()), float((work_s**2).sum()))
        self._traffic.append(traffic)
        history = list(self._traffic)
        for num_recent in (1, self.settings.recent_windows):
            before, recent = history[:-num_recent], history[-num_recent:]
            if before and self._differ(before, recent):
                self._traffic.clear()
                self._traffic.extend(recent)
                return True
        return False

    def _differ(self, before: Sequence[_Traffic], recent: Sequence[_Traffic]) -> bool:
        """Whether arrival rate or mean work of some windows lie outside what chance makes of those before."""
        sigmas = self.settings.change_sigmas
        duration_before_s, duration_s = (sum(each.duration_s for each in part) for part in (before, recent))
        num_before, num_recent = (sum(each.num_requests for each in part) for part in (before, recent))
        scale = duration_s / duration_before_s
        # Both counts are Poisson: the variance of the scaled difference is the sum of both.
        if abs(num_recent - num_before * scale) > sigmas * np.sqrt(num_recent + num_before * scale**2 + 1):
            return True
        if num_before < 2 or num_recent < 2:
            return False
        means, errors = [], []
        for part, num_requests in ((before, num_before), (recent, num_recent)):
            mean = sum(each.work_s for each in part) / num_requests
            means.append(mean)
            errors.append((sum(each.work_squared_s2 for each in part) / num_requests - mean**2) / num_requests)
        # Requests of one length have no variance; what rounding makes of their mean is no news.
        return bool(abs(means[0] - means[1]) > sigmas * np.sqrt(max(sum(errors), 0.0)) + 1e-6 * means[0])


def _faster(window: Window, ratio: float) -> Arrivals:
    """A window as long as this one in which its arrivals come `ratio` times as fast, again and again."""
    arrivals = window.arrivals
    num_requests = round(ratio * len(arrivals))
    order = np.arange(num_requests) % len(arrivals)
    times_s = window.duration_s * (np.arange(num_requests) // len(arrivals))
    return Arrivals(
        arrival_s=window.start_s + (times_s + arrivals.arrival_s[order] - window.start_s) / ratio,
        input_tokens=arrivals.input_tokens[order],
        prefix_tokens=arrivals.prefix_tokens[order],
    )


def _with_queued(queued: Arrivals, window: Window) -> Arrivals:
    """What waits at the window's end, followed by the window's arrivals, which stand for those to come: so this is a
    forecast, not history, and arrivals that still wait are in it twice. Where there are none, at the window's end."""
    arrivals = window.arrivals
    if len(queued) == 0:
        return arrivals
    start_s = float(arrivals.arrival_s[0]) if len(arrivals) else window.end_s
    return Arrivals(
        arrival_s=np.concatenate((np.full(len(queued), start_s), arrivals.arrival_s)),
        input_tokens=np.concatenate((queued.input_tokens, arrivals.input_tokens)),
        prefix_tokens=np.concatenate((queued.prefix_tokens, arrivals.prefix_tokens)),
    )
