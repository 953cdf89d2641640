"""Counts what the live pool does, and shows it to Prometheus.

Counting is a dictionary's or a list's increment, as every request passes here some twenty times; what can be read off
the pool is read when somebody asks (`pool_gauges`).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vertumnus.core.control_plane import Transition
from vertumnus.core.events import CopyBlocks, CopyReason, RequestPlaced
from vertumnus.core.slo import Slo
from vertumnus.engine.step import StepOutput
from vertumnus.serve import metric_families as families
from vertumnus.serve.errors import Overloaded, PoolFailed
from vertumnus.serve.live_request import LiveRequest
from vertumnus.serve.metric_families import Family, Kind
from vertumnus.serve.telemetry import Telemetry

__all__ = ["Distribution", "Metrics", "Reading", "slo_verdict"]

Reading = tuple[Family, tuple[str, ...], float]
"""A gauge's value under these labels."""

REASONS = {
    CopyReason.INTER_DEGREE: "inter_degree",
    CopyReason.INTRA_DEGREE: "intra_degree",
    CopyReason.RECONCILIATION: "reconciliation",
    CopyReason.PULL: "pull",
}

MISSED_BY_REFUSAL = frozenset({Overloaded.__name__, PoolFailed.__name__})
"""Refusals that are the pool's fault. A prompt that is too long misses nothing, and a pool that shuts down has
others beside it."""


class Distribution:
    """A histogram. Owned by whoever observes; costs a bisection."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_observed(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus shows them."""
        return [
            (f"{bound:g}" if bound != float("inf") else "+Inf", float(count))
            for bound, count in zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True)
        ]


def slo_verdict(slo: Slo, num_tokens: int, waited_s: float, outcome: str | None) -> bool | None:
    """Whether a request met its TTFT target; None if it does not count.

    outcome: None when its first token comes, after `waited_s`; else how it ended without one. Whoever went away before
    the target was missed does not count, nor what no worker could ever hold.
    """
    is_late = waited_s > slo.tau_s(float(num_tokens))
    if outcome is None:
        return not is_late
    if outcome == "refused" or (outcome == "cancelled" and not is_late):
        return None
    return False


class Metrics(Telemetry, Collector):
    """Give it to the pool as (part of) its telemetry; `text` is what /metrics answers."""

    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo or Slo()
        self.counts: defaultdict[tuple[Family, str] | tuple[Family, str, str], float] = defaultdict(float)
        """By family and labels; a family without labels has one empty label."""
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._distributions: dict[tuple[Family, str], Distribution] = {}
        self._decoded_s: dict[int, float] = {}
        """When each decode rank's last step ended."""
        self._read: Callable[[], Iterator[Reading]] = lambda: iter(())

    def text(self) -> bytes:
        """In Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def show_gauges(self, read: Callable[[], Iterator[Reading]]) -> None:
        """`read` is called whenever somebody looks."""
        self._read = read

    def count(self, family: Family, label: str = "") -> float:
        """What a counter of at most one label stands at."""
        return self.counts.get((family, label), 0.0)

    def distribution(self, family: Family, label: str = "") -> Distribution:
        """The histogram of a family under its label, if it has one."""
        key = family, label
        found = self._distributions.get(key)
        if found is None:
            found = self._distributions[key] = Distribution(family.bounds)
        return found

    # Requests

    def request_accepted(self, now_s: float, request: LiveRequest) -> None:
        self.counts[families.ACCEPTED, ""] += 1

    def request_refused(self, now_s: float, kind: str, num_tokens: int) -> None:
        self.counts[families.REFUSED, kind] += 1
        if kind in MISSED_BY_REFUSAL:
            self.counts[families.SLO_TOKENS, ""] += num_tokens

    def request_placed(self, now_s: float, request: LiveRequest, action: RequestPlaced) -> None:
        self.counts[families.PLACED, "true" if action.is_redirected else "false"] += 1

    def request_restarted(self, now_s: float, request: LiveRequest, reason: str) -> None:
        self.counts[families.RESTARTED, ""] += 1

    def first_token(self, now_s: float, request: LiveRequest) -> None:
        arrival_s, started_s, num_tokens = request.arrival_s, request.started_s, request.num_prompt_tokens
        assert started_s is not None
        degree = str(request.degree)
        self.distribution(families.TTFT, degree).observe(now_s - arrival_s)
        self.distribution(families.QUEUE, degree).observe(started_s - arrival_s)
        self.distribution(families.SERVICE, degree).observe(request.prefilled_s - started_s)
        self.distribution(families.T_EXT, degree).observe(now_s - request.prefilled_s)
        self.counts[families.PROMPT_TOKENS, ""] += num_tokens
        self.counts[families.REUSED_TOKENS, ""] += request.reused_tokens
        self.counts[families.REACHABLE_TOKENS, ""] += request.reachable_tokens
        self._judge(request, now_s, None)

    def request_ended(self, now_s: float, request: LiveRequest, outcome: str) -> None:
        self.counts[families.ENDED, outcome] += 1
        num_tokens = request.generation.num_tokens
        self.counts[families.GENERATED_TOKENS, ""] += num_tokens
        if request.first_token_s is None:
            self._judge(request, now_s, outcome)
        elif num_tokens > 1:
            gap_s = (now_s - request.first_token_s) / (num_tokens - 1)
            self.distribution(families.TPOT, str(request.degree)).observe(gap_s)

    def _judge(self, request: LiveRequest, now_s: float, outcome: str | None) -> None:
        num_tokens = request.num_prompt_tokens
        verdict = slo_verdict(self.slo, num_tokens, now_s - request.arrival_s, outcome)
        if verdict is not None:
            self.counts[families.SLO_TOKENS, ""] += num_tokens
            if verdict:
                self.counts[families.SLO_MET_TOKENS, ""] += num_tokens

    # Steps

    def step_ended(
        self,
        now_s: float,
        *,
        worker_id: int,
        degree: int,
        started_s: float,
        predicted_s: float,
        num_tokens: int,
        num_prefix_tokens: int,
        outputs: Sequence[StepOutput],
    ) -> None:
        label, duration_s = str(degree), now_s - started_s
        self.distribution(families.STEP, label).observe(duration_s)
        self.counts[families.STEP_TOKENS, label] += num_tokens
        if predicted_s > 0:
            self.counts[families.STEP_PREDICTED, label] += predicted_s
            self.distribution(families.STEP_RATIO, label).observe(duration_s / predicted_s)

    def step_failed(self, now_s: float, ranks: Sequence[int], reason: str) -> None:
        self.counts[families.FAILED_STEPS, ""] += 1

    def decode_step_ended(self, now_s: float, *, rank: int, started_s: float, num_sequences: int) -> None:
        self.distribution(families.DECODE_STEP).observe(now_s - started_s)
        self.distribution(families.DECODE_BATCH).observe(num_sequences)
        # Whoever decodes on saw its last token when the step before ended; a rank that was idle starts anew.
        last_s = self._decoded_s.get(rank, started_s)
        since_s = last_s if started_s - last_s < now_s - started_s else started_s
        self.distribution(families.INTER_TOKEN).observe(now_s - since_s, num_sequences)
        self._decoded_s[rank] = now_s

    def handoff_ended(self, now_s: float, *, started_s: float, num_blocks: int, is_ok: bool) -> None:
        self.counts[families.HANDOFFS, "ok" if is_ok else "failed"] += 1
        if is_ok:
            self.counts[families.HANDOFF_BLOCKS, ""] += num_blocks
            self.distribution(families.HANDOFF).observe(now_s - started_s)

    # Cache

    def copy_ended(self, now_s: float, action: CopyBlocks, *, started_s: float, num_installed: int) -> None:
        reason = REASONS[action.reason]
        self.counts[families.COPIES, reason, "complete" if num_installed == len(action.blocks) else "partial"] += 1
        self.counts[families.COPIED_BLOCKS, reason] += num_installed

    def blocks_reclaimed(self, now_s: float, num_blocks: int) -> None:
        self.counts[families.RECLAIMED, ""] += num_blocks

    # Pool

    def transition_committed(self, now_s: float, transition: Transition) -> None:
        kind = transition.operation.kind.value
        self.counts[families.TRANSITIONS, kind] += 1
        self.distribution(families.DRAIN, kind).observe(transition.drain_s)
        self.distribution(families.SWITCH, kind).observe(transition.switch_s)

    def switch_ended(self, now_s: float, *, epoch: int, num_ranks: int, started_s: float, is_ok: bool) -> None:
        self.counts[families.ACTIVATIONS, "ok" if is_ok else "failed"] += 1

    def controller_failed(self, now_s: float, fault: Exception) -> None:
        self.counts[families.CONTROLLER_FAULTS, ""] += 1

    def rank_gone(self, now_s: float, rank: int, reason: str) -> None:
        self.counts[families.RANKS_LOST, str(rank)] += 1

    def rank_back(self, now_s: float, rank: int) -> None:
        self.counts[families.RANKS_BACK, str(rank)] += 1

    def http_error(self, status: int, code: str) -> None:
        """A request over HTTP got this error, from the front end or from the pool."""
        self.counts[families.HTTP_ERRORS, str(status), code] += 1

    def loop_lagged(self, lag_s: float) -> None:
        """How late a look at the event loop's clock came."""
        self.distribution(families.LAG).observe(lag_s)

    # Showing it

    def collect(self) -> Iterator[Metric]:
        """Every family, also those without a sample yet."""
        singles = {each: _SINGLES[each.kind](each.name, each.text, labels=each.labels) for each in _of(_SINGLES)}
        histograms = {
            each: HistogramMetricFamily(each.name, each.text, labels=each.labels) for each in _of((Kind.HISTOGRAM,))
        }
        for family in families.ALL:  # what has no labels exists from the start
            if not family.labels and family.kind is Kind.COUNTER:
                self.counts.setdefault((family, ""), 0.0)
            elif not family.labels and family.kind is Kind.HISTOGRAM:
                self.distribution(family)
        for (family, *labels), value in self.counts.items():
            singles[family].add_metric(labels if family.labels else [], value)
        for family, values, value in self._read():
            singles[family].add_metric(values, value)
        for (family, label), distribution in self._distributions.items():
            histograms[family].add_metric([label] if family.labels else [], distribution.buckets(), distribution.total)
        for family in families.ALL:
            yield histograms[family] if family in histograms else singles[family]

    def describe(self) -> list[Metric]:
        """What may be registered beside this."""
        return []


_SINGLES: dict[Kind, type[CounterMetricFamily] | type[GaugeMetricFamily]] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
}


def _of(kinds: Collection[Kind]) -> list[Family]:
    return [each for each in families.ALL if each.kind in kinds]
