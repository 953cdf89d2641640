"""Every metric that /metrics shows, once: name, kind, labels and what it says.

Seconds, tokens, blocks and ratios (0 to 1 unless said otherwise) are in the names. `degree` is the CP degree of the
worker that prefilled.
"""

from dataclasses import dataclass
from enum import Enum

__all__ = ["ALL", "Family", "Kind"]


class Kind(Enum):
    """As Prometheus has them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric, told apart by identity. `bounds`: upper ends of a histogram's buckets, ascending, without +Inf."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
_SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_RATIOS = (0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


def _counter(name: str, text: str, *labels: str) -> Family:
    return Family(f"vertumnus_{name}_total", Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Family:
    return Family(f"vertumnus_{name}", Kind.GAUGE, text, labels)


def _histogram(name: str, text: str, *labels: str, bounds: tuple[float, ...] = _SECONDS) -> Family:
    return Family(f"vertumnus_{name}", Kind.HISTOGRAM, text, labels, bounds)


# Requests

ACCEPTED = _counter("requests_accepted", "Requests that were taken on")
ENDED = _counter(
    "requests_ended",
    "Accepted requests that have ended: stop and length are answers; cancelled, deadline, refused, failed",
    "outcome",
)
REFUSED = _counter("requests_refused", "Requests that no room was found for, most of them before acceptance", "kind")
HTTP_ERRORS = _counter(
    "http_errors",
    "HTTP requests that got an error, from the front end or from the pool, or whose client left before the end (499)",
    "status",
    "code",
)
RESTARTED = _counter(
    "requests_restarted",
    "Times that a request's KV, or the step that it was in, was lost or given up and is computed again",
)
PLACED = _counter("placements", "Placements; redirected ones are any but a request's first", "redirected")
OPEN = _gauge("requests_open", "Accepted requests that have not ended")
UNANSWERED = _gauge("requests_unanswered", "Accepted requests without a first token")
WAITING = _gauge("requests_waiting", "Requests that no worker, or no decode rank, has room for yet", "wait")

TTFT = _histogram("ttft_seconds", "From acceptance to the first token", "degree")
QUEUE = _histogram("queue_seconds", "From acceptance to the start of the first step", "degree")
SERVICE = _histogram("service_seconds", "From the start of the first step to the end of the last", "degree")
T_EXT = _histogram("t_ext_seconds", "From the end of the prefill to the first token: the KV's way to decode", "degree")
TPOT = _histogram(
    "time_per_output_token_seconds",
    "Mean gap between the tokens of one answer, of two tokens at least",
    "degree",
    bounds=_SHORT_SECONDS,
)
INTER_TOKEN = _histogram(
    "inter_token_seconds", "Gaps between decode steps, each counted once per sequence", bounds=_SHORT_SECONDS
)

# Tokens; all four of them when a request has its first token, so that their ratios are over the same requests

PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of the requests with a first token")
REUSED_TOKENS = _counter("reused_tokens", "Of these, tokens whose KV was cached where the request ran: hits reached")
REACHABLE_TOKENS = _counter(
    "reachable_tokens",
    "Of these, tokens whose KV any worker was known to hold when the request was placed: hits reachable",
)
GENERATED_TOKENS = _counter("generated_tokens", "Tokens given out, counted when their request ends")
SLO_TOKENS = _counter("slo_tokens", "Prompt tokens of the requests that count for SLO attainment")
SLO_MET_TOKENS = _counter("slo_met_tokens", "Of these, tokens of requests whose TTFT was within its target")

# Prefill steps

STEP = _histogram("prefill_step_seconds", "Duration of prefill steps", "degree")
STEP_PREDICTED = _counter("prefill_step_predicted_seconds", "What the cost model says of the same steps", "degree")
STEP_RATIO = _histogram(
    "prefill_step_prediction_ratio", "Actual over predicted duration of a prefill step", "degree", bounds=_RATIOS
)
STEP_TOKENS = _counter("prefill_computed_tokens", "Tokens whose KV prefill steps computed", "degree")
FAILED_STEPS = _counter("failed_steps", "Prefill or decode steps and switches that did not end well")

# Decode

HANDOFF = _histogram("handoff_seconds", "Duration of copying a prompt's KV to its decode rank", bounds=_SHORT_SECONDS)
HANDOFFS = _counter("handoffs", "Prompts whose KV went to a decode rank", "result")
HANDOFF_BLOCKS = _counter("handoff_blocks", "KV blocks copied to decode ranks")
DECODE_STEP = _histogram("decode_step_seconds", "Duration of decode steps", bounds=_SHORT_SECONDS)
DECODE_BATCH = _histogram("decode_batch_sequences", "Sequences that take part in a decode step", bounds=_SEQUENCES)
DECODE_SEQUENCES = _gauge("decode_sequences", "Sequences that decode now", "rank")
DECODE_FREE = _gauge("decode_free_blocks", "KV blocks of a decode rank that nobody holds", "rank")

# Cache

COPIES = _counter(
    "copies",
    "Copies between workers that ended by themselves; partial: not all of it was installed",
    "reason",
    "result",
)
COPIED_BLOCKS = _counter("copied_blocks", "KV blocks installed by copies between workers", "reason")
RECLAIMED = _counter("reclaimed_blocks", "KV blocks of replicas given up")
RESIDENT = _gauge("worker_resident_blocks", "KV blocks that a worker has cached", "worker", "degree")
FREE = _gauge("worker_free_blocks", "KV slots of a worker that hold nothing", "worker", "degree")
INDEX_BLOCKS = _gauge("index_blocks", "Distinct KV blocks that the global index knows")
INDEX_STATE = _gauge(
    "worker_index_state", "1 for the state that the index is in about a worker, else 0", "worker", "state"
)

# Pool

COMPOSITION = _gauge("composition_workers", "Workers of each degree once what is under way has ended well", "degree")
WORKERS = _gauge("workers", "Workers that there are now", "degree", "status")
WORKER_QUEUE = _gauge(
    "worker_outstanding_seconds", "q_w: predicted seconds queued at a worker and left of its step", "worker", "degree"
)
RANKS = _gauge("ranks", "Prefill ranks by what they do: serving, opening, draining, switching, spare, lost", "state")
DRIFT = _gauge(
    "step_drift_ratio",
    "What recent prefill steps took over what the cost model in force says, 1 where it is right",
    "degree",
)
CORRECTION = _gauge(
    "cost_correction_ratio", "What the profile's times are multiplied by, as `refit` has it; 1 without", "degree"
)
EPOCH = _gauge("epoch", "The newest configuration epoch")
TRANSITIONS = _counter("transitions", "Splits and merges that were carried out", "kind")
DRAIN = _histogram("transition_drain_seconds", "From the end of admission to the end of the last step", "kind")
SWITCH = _histogram("transition_switch_seconds", "From there to the new workers being ready", "kind")
ACTIVATIONS = _counter("activations", "Times that ranks were told to take up new groups", "result")
CONTROLLER_FAULTS = _counter(
    "controller_faults", "Times that the controller, or planning its way, raised, and the composition stayed"
)
RANKS_LOST = _counter("ranks_lost", "Times that a rank's process was lost", "rank")
RANKS_BACK = _counter("ranks_back", "Times that a rank came back", "rank")
DRAINING = _gauge("draining", "1 while an operator has the pool take nothing new")
POOL_FAILED = _gauge("pool_failed", "1 once nothing can be served any more")

# Controller, as of the last observation window that has ended

PAUSED = _gauge("controller_paused", "1 while the composition changes by hand only")
DEMAND = _gauge("demand_seconds_per_second", "Predicted service seconds that arrived per second")
CAPACITY = _gauge("capacity_seconds_per_second", "Sum of kappa over the workers, where the profile knows it")
LONG_RATIO = _gauge("long_requests_ratio", "Share of requests above the long-request threshold")

LAG = _histogram(
    "event_loop_lag_seconds", "By how much the event loop came late, looked at 20 times a second", bounds=_SHORT_SECONDS
)

ALL = tuple(each for each in list(globals().values()) if isinstance(each, Family))
"""In the order in which they stand here."""
