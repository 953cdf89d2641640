"""A validation from beginning to end: overheads of the idle live pool, the trace live, the trace simulated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vertumnus.errors import ConfigError
from vertumnus.replay.blocks import fully_named, scaled_lengths
from vertumnus.replay.load import Progress
from vertumnus.sim.overheads import LiveOverheads
from vertumnus.validation.choice import ChosenPool
from vertumnus.validation.comparison import Comparison, differences
from vertumnus.validation.live import LiveRun, play_live
from vertumnus.validation.overheads import calibration_trace, idle_step_ratio, measured_overheads
from vertumnus.validation.side import Side, simulated_side
from vertumnus.validation.spec import PoolSpec
from vertumnus.validation.virtual import virtual_side
from vertumnus.workload.trace import Trace

JITTER_S, NUM_JITTERED = 0.001, 8
"""How far arrivals are moved, and how often, to see what a millisecond can do."""

OUTPUT_TOKENS = 2
"""Of every request: with one, an answer ends before its KV is handed over, and has no T_ext."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What came of it. `overheads` and `live_run` are None on a virtual clock.

    idle_step_ratio: what steps took of E_C on the idle pool. without_overheads: the simulator told of E_C and T_ext
    alone. as_sent: told of the overheads, and of the instants at which requests really went out. jittered: figures of
    simulations whose arrivals were moved by up to a millisecond.
    """

    comparison: Comparison
    overheads: LiveOverheads | None
    live_run: LiveRun | None
    lead_s: float
    idle_step_ratio: float | None = None
    without_overheads: Comparison | None = None
    as_sent: Comparison | None = None
    jittered: tuple[dict[str, float | None], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """`results` of the command: every figure under the name that docs/validation.md defines."""
        trace = self.comparison.trace
        document: dict[str, Any] = {
            "num_requests": trace.num_requests,
            "rate_per_s": trace.mean_rate_per_s,
            "duration_s": trace.duration_s,
            "lead_s": self.lead_s,
            **self.comparison.to_json(),
            "overheads": None if self.overheads is None else {"source": "measured", **self.overheads.to_json()},
            "idle_step_ratio": self.idle_step_ratio,
            "lags": None,
            "num_failed": int((~np.isfinite(self.comparison.live.ttft_s)).sum()),
        }
        if self.live_run is not None:
            document["lags"] = self.live_run.lags()
        for name, other in (("without_overheads", self.without_overheads), ("as_sent", self.as_sent)):
            document[name] = None if other is None else _difference(other)
        document["jittered"] = _ranges(self.jittered)
        return document


def _ranges(found: Sequence[dict[str, float | None]]) -> dict[str, tuple[float, float]]:
    """(least, largest) of every figure."""
    values = {name: [each[name] or 0.0 for each in found] for name in (found[0] if found else ())}
    return {name: (min(each), max(each)) for name, each in values.items()}


def jittered(
    trace: Trace, live: Side, spec: PoolSpec, overheads: LiveOverheads | None, lead_s: float, warmup_s: float, seed: int
) -> tuple[dict[str, float | None], ...]:
    """Figures of the simulator where every arrival comes up to JITTER_S later: how much its answer hangs on less than
    any clock of a live pool keeps."""
    rng = np.random.default_rng((seed, 2))
    found = []
    for _ in range(NUM_JITTERED):
        arrival_s = np.sort(trace.arrival_s + rng.random(trace.num_requests) * JITTER_S)
        moved = replace(trace, arrival_s=arrival_s - arrival_s[0])
        other = _compared(moved, live, spec, overheads, lead_s, warmup_s)
        found.append(other.figures_of(other.simulated))
    return tuple(found)


def _difference(comparison: Comparison) -> dict[str, Any]:
    live, simulated = comparison.figures_of(comparison.live), comparison.figures_of(comparison.simulated)
    return {"simulated": simulated, "difference": differences(live, simulated)}


def as_validated(
    trace: Trace, *, rate_per_s: float | None = None, length_scale: float = 1.0, duration_s: float | None = None
) -> Trace:
    """The trace with every block named and two tokens of output, at a rate and of lengths that the pool can bear."""
    trace = scaled_lengths(fully_named(trace), length_scale)
    if rate_per_s is not None:
        trace = trace.rescaled(rate_per_s)
    if duration_s is not None:
        trace = trace.limited(max(1, int((trace.arrival_s <= duration_s).sum())))
    return replace(trace, output_tokens=np.full(trace.num_requests, OUTPUT_TOKENS))


def check_prompts(trace: Trace, spec: PoolSpec) -> None:
    """Raises ConfigError for a prompt that the pool could never take: it would be refused on both sides."""
    longest = int(trace.input_tokens.max()) + OUTPUT_TOKENS
    if longest > spec.max_tokens:
        raise ConfigError(
            f"trace has a prompt of {longest - OUTPUT_TOKENS:,} tokens as played; accepted: at most "
            f"{spec.max_tokens - OUTPUT_TOKENS:,} for this pool (--scale-lengths)"
        )


def validate(
    trace: Trace,
    chosen: ChosenPool,
    *,
    seed: int,
    is_virtual: bool = False,
    warmup_s: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Validation:
    """Plays a trace of `as_validated` on both sides; blocks for as long as it lasts unless `is_virtual`.

    Raises ConfigError for prompts that the pool cannot take, LiveSideFailed where the live pool does not come up.
    """
    spec, config, vocab = chosen.spec, chosen.config, chosen.vocab
    check_prompts(trace, spec)
    if is_virtual:
        live, lead_s = virtual_side(trace, spec, seed)
        return Validation(
            comparison=_compared(trace, live, spec, None, lead_s, warmup_s),
            overheads=None,
            live_run=None,
            lead_s=lead_s,
            jittered=jittered(trace, live, spec, None, lead_s, warmup_s, seed),
        )
    alone = calibration_trace(trace, spec.profile, spec.step_tokens)
    say(f"measuring what the live pool adds at idle: {alone.num_requests} requests, {alone.duration_s:.0f} s")
    held = replace(spec, controller=None) if config is None else config.model_copy(update={"controller": "none"})
    calibration = play_live(alone, held, seed=seed + 1, vocab=vocab)
    overheads = measured_overheads(calibration, spec.profile)
    say(f"playing {trace.num_requests:,} requests live: {trace.duration_s:.0f} s")
    run = play_live(trace, config or spec, seed=seed, vocab=vocab, slo=spec.slo, on_progress=on_progress)
    live = run.side()
    say("simulating")
    return Validation(
        comparison=_compared(trace, live, spec, overheads, run.lead_s, warmup_s),
        overheads=overheads,
        live_run=run,
        lead_s=run.lead_s,
        idle_step_ratio=idle_step_ratio(calibration),
        without_overheads=_compared(trace, live, spec, None, run.lead_s, warmup_s),
        as_sent=_as_sent(trace, run, live, spec, overheads, warmup_s),
        jittered=jittered(trace, live, spec, overheads, run.lead_s, warmup_s, seed),
    )


def _compared(
    trace: Trace, live: Side, spec: PoolSpec, overheads: LiveOverheads | None, lead_s: float, warmup_s: float
) -> Comparison:
    simulated = simulated_side(trace, spec, overheads, lead_s)
    return Comparison(trace=trace, live=live, simulated=simulated, warmup_s=warmup_s)


def _as_sent(
    trace: Trace, run: LiveRun, live: Side, spec: PoolSpec, overheads: LiveOverheads, warmup_s: float
) -> Comparison:
    """Simulated with the instants at which the load generator really sent."""
    sent_s = trace.arrival_s.copy()
    for outcome in run.report.outcomes:
        sent_s[outcome.index] = outcome.sent_s
    sent_s = np.maximum.accumulate(sent_s)
    lead_s = run.lead_s + float(sent_s[0])
    return _compared(replace(trace, arrival_s=sent_s - sent_s[0]), live, spec, overheads, lead_s, warmup_s)
