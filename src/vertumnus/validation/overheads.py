"""What a live pool adds to its ranks' time, measured by requests of their own on an idle pool: nothing is fitted to
the run that is validated."""

import numpy as np

from vertumnus.core.cost import chunked_prefill_s
from vertumnus.core.profile import Profile
from vertumnus.sim.overheads import LiveOverheads
from vertumnus.validation.live import LiveRun
from vertumnus.workload.trace import FloatArray, Trace

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of the trace's lengths: what is asked, shortest first, again and again."""
NUM_ROUNDS = 5
PAUSE_S = 0.2
"""Between the answer expected and the next request."""


def calibration_trace(trace: Trace, profile: Profile, step_tokens: int | None) -> Trace:
    """One request after another, with nothing in common, each long after the one before has been answered."""
    lengths = np.quantile(trace.input_tokens, QUANTILES, method="nearest")
    tokens = np.tile(lengths, NUM_ROUNDS).astype(np.int64)
    costs = profile.cost_model().for_degrees(profile.degrees)
    alone_s = [
        float(chunked_prefill_s(costs, np.array(float(each)), np.array(0.0), step_tokens or int(each)).max())
        + transfer_s(profile, int(each))
        + PAUSE_S
        for each in tokens
    ]
    return Trace(
        name="calibration",
        block_tokens=trace.block_tokens,
        has_block_ids=False,
        arrival_s=np.concatenate(([0.0], np.cumsum(alone_s)[:-1])),
        input_tokens=tokens,
        output_tokens=np.full(len(tokens), 2),
        block_ids=np.empty(0, dtype=np.int64),
        block_offsets=np.zeros(len(tokens) + 1, dtype=np.int64),
    )


def transfer_s(profile: Profile, input_tokens: int) -> float:
    """T_ext of a prompt."""
    sent_s = input_tokens * profile.kv_bytes_per_token / profile.decode_bytes_per_s
    return profile.decode_latency_s + sent_s + profile.first_token_s


def measured_overheads(run: LiveRun, profile: Profile) -> LiveOverheads:
    """Medians over the requests of a calibration, for each stage of a request's way; see `LiveOverheads`.

    Steps run one at a time here, so those that ended between a request's placement and its prefill are its own.
    """
    tokens, placed_s, step_s, handover_s = [], [], [], []
    ended_s = np.array([step.ended_s for step in run.record.steps])
    predicted_s = np.array([step.predicted_s for step in run.record.steps])
    seen = run.seen()
    for outcome in run.report.outcomes:
        known = seen.get(outcome.index)
        if not outcome.is_completed or outcome.ttft_s is None or known is None or known.prefilled_s is None:
            continue
        sent_s = run.report.played.started_s + outcome.sent_s
        is_own = (ended_s > known.accepted_s) & (ended_s <= known.prefilled_s)
        if not is_own.any():
            continue
        tokens.append(float(outcome.input_tokens))
        placed_s.append(known.accepted_s - sent_s)
        step_s.append((known.prefilled_s - known.accepted_s - predicted_s[is_own].sum()) / is_own.sum())
        handover_s.append(sent_s + outcome.ttft_s - known.prefilled_s - transfer_s(profile, outcome.input_tokens))
    if not tokens:
        return LiveOverheads()
    request_s, request_s_per_token = line_through_medians(np.array(tokens), np.array(placed_s))
    return LiveOverheads(
        request_s=request_s,
        request_s_per_token=request_s_per_token,
        step_s=max(0.0, float(np.median(step_s))),
        handover_s=max(0.0, float(np.median(handover_s))),
    )


def idle_step_ratio(run: LiveRun) -> float | None:
    """Median of what steps took over E_C of them, on the idle pool of a calibration: how true the profile is here.

    For people to look at. The simulator is not told: it would be tuned to the ranks that it is compared with.
    """
    ratios = [step.seconds / step.predicted_s for step in run.record.steps if step.predicted_s > 0]
    return float(np.median(ratios)) if ratios else None


def line_through_medians(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """(intercept, slope), neither below 0, of the least-squares line through the median of y at every x."""
    places = np.unique(x)
    medians = np.array([np.median(y[x == place]) for place in places])
    slope = 0.0
    if len(places) > 1:
        off = places - places.mean()
        slope = max(0.0, float((off * (medians - medians.mean())).sum() / (off * off).sum()))
    return max(0.0, float(np.median(medians - slope * places))), slope
