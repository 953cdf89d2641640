"""Synthesised traces: seeded generators held to published figures (docs/traces.md lists which).

All have blocks of 512 tokens and arrivals in whole milliseconds, so the Mooncake schema holds them without loss. The
same seed gives the same trace.
"""

from collections.abc import Callable
from math import isfinite

import numpy as np

from vertumnus.errors import ConfigError
from vertumnus.workload.families import FamilyModel, family_blocks
from vertumnus.workload.formats import MOONCAKE_BLOCK_TOKENS
from vertumnus.workload.sampling import Quantiles, Streams, arrivals, phased_arrivals, stratified
from vertumnus.workload.sessions import SessionModel, linked, session_blocks
from vertumnus.workload.trace import FloatArray, IntArray, Trace

HOUR_S = 3600.0
DAY_S = 86400.0
MAX_NUM_REQUESTS = 20_000_000
MAX_NUM_PHASES = 10_000

CONVERSATION_LENGTHS = Quantiles.of(
    {
        0: 891, 5: 901, 10: 964, 20: 1662, 30: 3263, 40: 4993, 50: 6909, 60: 9570, 70: 13196, 80: 17869, 85: 21464,
        90: 27367, 92: 30462, 94: 35007, 95: 39550, 96: 44612, 97: 52215, 98: 66448, 99: 85400, 99.5: 100810,
        100: 126195,
    }
)  # fmt: skip
CHAT_OUTPUTS = Quantiles.of(
    {0: 1, 1: 3, 5: 10, 10: 24, 25: 157, 50: 350, 75: 472, 90: 597, 95: 698, 99: 1119, 100: 2000}
).scaled_to(343)
CONVERSATION = SessionModel(
    block_tokens=MOONCAKE_BLOCK_TOKENS,
    growth_tokens=900,
    growth_sigma=1.8,
    think_s=120,
    think_sigma=0.95,
    app_prefix_blocks=(1,),
)
CONVERSATION_HIT_RATIO = 0.374
CONVERSATION_RATE_PER_S = 12031 / 3537

TOOLAGENT_LENGTHS = Quantiles.of(
    {0: 900, 5: 1800, 10: 2600, 25: 4600, 50: 6700, 75: 9300, 90: 15000, 95: 21500, 99: 48000, 100: 123000}
).scaled_to(8596)
TOOL_OUTPUTS = Quantiles.of(
    {0: 1, 5: 12, 10: 20, 25: 32, 50: 70, 75: 190, 90: 480, 95: 730, 99: 1400, 100: 2000}
).scaled_to(182)
TOOLAGENT = SessionModel(
    block_tokens=MOONCAKE_BLOCK_TOKENS,
    growth_tokens=500,
    growth_sigma=1.0,
    think_s=20,
    think_sigma=1.1,
    app_prefix_blocks=(6, 10, 3, 8, 4, 12, 5, 7, 2, 9, 6, 14, 4, 8, 3, 11, 5, 6, 10, 7, 4, 9, 3, 8, 12, 5, 6, 7, 4, 10),
)
TOOLAGENT_BLOCK_HIT_RATIO = 0.59

PRODUCTION_SHORT_LENGTHS = Quantiles.of(
    {0: 120, 5: 350, 10: 600, 25: 1300, 50: 2900, 75: 5900, 90: 11000, 95: 16500, 99: 27000, 100: 32768}
)
PRODUCTION_LONG_LENGTHS = Quantiles.of({0: 32769, 25: 39000, 50: 49000, 75: 68000, 90: 96000, 97: 130000, 100: 200000})
PRODUCTION = SessionModel(
    block_tokens=MOONCAKE_BLOCK_TOKENS,
    growth_tokens=700,
    growth_sigma=1.2,
    think_s=60,
    think_sigma=1.0,
    app_prefix_blocks=(2, 4, 1, 3, 6, 2, 1, 8, 3, 2, 4, 1, 5, 2, 3, 1, 6, 2, 4, 3),
    remembered_ratio=0.998,
)
PRODUCTION_RATE_PER_S = 2.0
# By hour of the day: requests relative to each other, share of long ones, share of tokens that a cache finds.
PRODUCTION_HOURS = np.array([0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24]) / 24
PRODUCTION_RATES = np.array([0.80, 0.52, 0.42, 0.48, 0.90, 1.50, 1.32, 1.46, 1.62, 1.30, 1.15, 1.05, 0.80])
PRODUCTION_LONG_RATIO = np.array(
    [0.050, 0.047, 0.050, 0.056, 0.064, 0.072, 0.066, 0.070, 0.073, 0.064, 0.055, 0.050, 0.050]
)
PRODUCTION_HIT_RATIO = np.array([0.41, 0.39, 0.40, 0.42, 0.45, 0.50, 0.48, 0.49, 0.51, 0.47, 0.44, 0.42, 0.41])

AGENTIC = FamilyModel(
    lengths=Quantiles.of(
        {
            0: 512, 10: 4096, 25: 17000, 50: 46080, 75: 88000, 90: 160256, 95: 222720, 99: 415744, 99.9: 600000,
            100: 1046528,
        }
    ),
    exponent=1.04,
    cold_ratio=0.105,
    loner_ratio=0.05,
    likeness=0.985,
    loner_shift=0.7,
    shared_token_ratio=0.845,
)  # fmt: skip
AGENTIC_OUTPUTS = Quantiles.of({0: 1, 10: 30, 50: 160, 90: 900, 99: 4000, 100: 16000})
AGENTIC_RATE_PER_S = 2.0

PHASE_SHAPE = Quantiles.of({0: 0.2, 10: 0.4, 25: 0.6, 50: 0.9, 75: 1.3, 90: 1.8, 99: 2.6, 100: 3.0})
PHASES = SessionModel(
    block_tokens=MOONCAKE_BLOCK_TOKENS,
    growth_tokens=800,
    growth_sigma=1.0,
    think_s=60,
    think_sigma=0.9,
    app_prefix_blocks=(1,),
    remembered_ratio=0.998,
)
PHASES_HIT_RATIO = 0.3

CONSTANT = (np.array([0.0, 1.0]), np.array([1.0, 1.0]))


def conversation(*, seed: int, duration_s: float = HOUR_S, rate_per_s: float = CONVERSATION_RATE_PER_S) -> Trace:
    """Chat shaped like the Mooncake conversation trace: its lengths, its rate, its sessions and its cache hits."""
    streams, n = Streams("conversation", seed), _num_requests(duration_s, rate_per_s)
    input_tokens = CONVERSATION_LENGTHS.at(stratified(streams["lengths"], n))
    return _sessions_trace(
        "conversation",
        seed,
        CONVERSATION,
        streams,
        arrivals(streams["arrivals"], n, duration_s, np.array([0, 0.1, 0.6, 1]), np.array([0.87, 0.88, 1.05, 1.07])),
        input_tokens,
        CHAT_OUTPUTS.at(stratified(streams["outputs"], n)),
        wanted_hit_tokens=np.asarray(CONVERSATION_HIT_RATIO * input_tokens),
    )


def toolagent(*, seed: int, duration_s: float = HOUR_S, rate_per_s: float = 23608 / HOUR_S) -> Trace:
    """Tools and agents as published for Mooncake: thirty applications with long fixed prompts, many quick steps."""
    streams, n = Streams("toolagent", seed), _num_requests(duration_s, rate_per_s)
    input_tokens = TOOLAGENT_LENGTHS.at(stratified(streams["lengths"], n))
    num_blocks = -(-input_tokens // MOONCAKE_BLOCK_TOKENS)
    return _sessions_trace(
        "toolagent",
        seed,
        TOOLAGENT,
        streams,
        arrivals(streams["arrivals"], n, duration_s, *CONSTANT),
        input_tokens,
        TOOL_OUTPUTS.at(stratified(streams["outputs"], n)),
        wanted_hit_tokens=np.asarray(TOOLAGENT_BLOCK_HIT_RATIO * MOONCAKE_BLOCK_TOKENS * num_blocks),
    )


def production(*, seed: int, duration_s: float = DAY_S, rate_per_s: float = PRODUCTION_RATE_PER_S) -> Trace:
    """A day of mixed traffic whose rate, long share and hit share vary as published for the paper's Production trace.

    A duration other than 24 h plays the same day faster or slower.
    """
    streams, n = Streams("production", seed), _num_requests(duration_s, rate_per_s)
    arrival_s = arrivals(streams["arrivals"], n, duration_s, PRODUCTION_HOURS, PRODUCTION_RATES)
    day_ratio = arrival_s / duration_s
    long_ratio = np.interp(day_ratio, PRODUCTION_HOURS, PRODUCTION_LONG_RATIO)
    uniform = stratified(streams["lengths"], n)
    is_long = uniform < long_ratio
    input_tokens = np.where(
        is_long,
        PRODUCTION_LONG_LENGTHS.at(uniform / long_ratio),
        PRODUCTION_SHORT_LENGTHS.at((uniform - long_ratio) / (1 - long_ratio)),
    )
    return _sessions_trace(
        "production",
        seed,
        PRODUCTION,
        streams,
        arrival_s,
        input_tokens,
        CHAT_OUTPUTS.at(stratified(streams["outputs"], n)),
        wanted_hit_tokens=np.interp(day_ratio, PRODUCTION_HOURS, PRODUCTION_HIT_RATIO) * input_tokens,
    )


def agentic(*, seed: int, duration_s: float = HOUR_S, rate_per_s: float = AGENTIC_RATE_PER_S) -> Trace:
    """Agents with long, mostly shared contexts, as published for the GLM-5.3 capture (whose rate is 54.7/s)."""
    streams, n = Streams("agentic", seed), _num_requests(duration_s, rate_per_s)
    blocks = family_blocks(AGENTIC, streams, n, MOONCAKE_BLOCK_TOKENS)
    return _trace(
        "agentic",
        seed,
        arrivals(streams["arrivals"], n, duration_s, *CONSTANT),
        blocks.input_tokens,
        AGENTIC_OUTPUTS.at(stratified(streams["outputs"], n)),
        (blocks.block_ids, blocks.block_offsets),
    )


def phases(
    *,
    seed: int,
    duration_s: float = HOUR_S,
    rate_per_s: float | None = None,
    phase_s: float = 600.0,
    short_rate_per_s: float = 30.0,
    short_tokens: float = 3000.0,
    long_rate_per_s: float = 1.0,
    long_tokens: float = 50000.0,
) -> Trace:
    """Phases of many short requests and phases of few long ones, in turn, short first; `*_tokens` are means.

    `rate_per_s`, if given, scales both rates to that mean.
    """
    _check_positive(
        duration_s=duration_s, phase_s=phase_s, short_rate_per_s=short_rate_per_s, long_rate_per_s=long_rate_per_s
    )
    for field, value in (("short_tokens", short_tokens), ("long_tokens", long_tokens)):
        if not 1 <= value <= 2_000_000:
            raise ConfigError(f"{field} is {value}; accepted: a mean of 1 to 2,000,000 tokens")
    if duration_s / phase_s > MAX_NUM_PHASES:
        raise ConfigError(f"phase_s is {phase_s}; accepted: seconds for at most {MAX_NUM_PHASES:,} phases in all")
    streams = Streams("phases", seed)
    starts_s = np.arange(0.0, duration_s, phase_s)
    lengths_s = np.minimum(phase_s, duration_s - starts_s)
    is_short_phase = np.arange(len(starts_s)) % 2 == 0
    rates = np.where(is_short_phase, short_rate_per_s, long_rate_per_s)
    mean_rate_per_s = float((rates * lengths_s).sum() / duration_s)
    n = _num_requests(duration_s, mean_rate_per_s if rate_per_s is None else rate_per_s)
    arrival_s, phase = phased_arrivals(streams["arrivals"], n, starts_s, lengths_s, rates)
    uniform = stratified(streams["lengths"], n)
    input_tokens = np.where(
        is_short_phase[phase],
        PHASE_SHAPE.scaled_to(short_tokens).at(uniform),
        PHASE_SHAPE.scaled_to(long_tokens).at(uniform),
    )
    return _sessions_trace(
        "phases",
        seed,
        PHASES,
        streams,
        arrival_s,
        input_tokens,
        CHAT_OUTPUTS.at(stratified(streams["outputs"], n)),
        wanted_hit_tokens=PHASES_HIT_RATIO * input_tokens,
    )


def _check_positive(**fields: float) -> None:
    for field, value in fields.items():
        if not (isfinite(value) and value > 0):
            raise ConfigError(f"{field} is {value}; accepted: a finite number above 0")


def _num_requests(duration_s: float, rate_per_s: float) -> int:
    _check_positive(duration_s=duration_s, rate_per_s=rate_per_s)
    num_requests = max(1, round(duration_s * rate_per_s))
    if num_requests > MAX_NUM_REQUESTS:
        raise ConfigError(
            f"duration_s {duration_s} at rate_per_s {rate_per_s} makes {num_requests:,} requests; "
            f"accepted: at most {MAX_NUM_REQUESTS:,}"
        )
    return num_requests


def _sessions_trace(
    kind: str,
    seed: int,
    model: SessionModel,
    streams: Streams,
    arrival_s: FloatArray,
    input_tokens: IntArray,
    output_tokens: IntArray,
    wanted_hit_tokens: FloatArray,
) -> Trace:
    sessions = linked(model, streams, arrival_s, input_tokens, output_tokens, wanted_hit_tokens)
    blocks = session_blocks(sessions, model.app_prefix_blocks, input_tokens, model.block_tokens)
    return _trace(kind, seed, arrival_s, input_tokens, output_tokens, blocks)


def _trace(
    kind: str,
    seed: int,
    arrival_s: FloatArray,
    input_tokens: IntArray,
    output_tokens: IntArray,
    blocks: tuple[IntArray, IntArray],
) -> Trace:
    return Trace(
        name=f"{kind} (synthesised, seed {seed})",
        block_tokens=MOONCAKE_BLOCK_TOKENS,
        has_block_ids=True,
        arrival_s=arrival_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        block_ids=blocks[0],
        block_offsets=blocks[1],
        synthesised=True,
    )


KINDS: dict[str, Callable[..., Trace]] = {
    "conversation": conversation,
    "toolagent": toolagent,
    "production": production,
    "agentic": agentic,
    "phases": phases,
}


def synthesise(
    kind: str, *, seed: int = 0, duration_s: float | None = None, rate_per_s: float | None = None, **options: float
) -> Trace:
    """A trace of one of the KINDS; what is None takes the kind's own default.

    Only `phases` has further options: phase_s, short_rate_per_s, short_tokens, long_rate_per_s, long_tokens.
    """
    if kind not in KINDS:
        raise ConfigError(f"kind is {kind!r}; accepted: {', '.join(KINDS)}")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; accepted: 0 or more")
    if options and kind != "phases":
        raise ConfigError(f"option {next(iter(options))!r} is not for kind {kind!r}; accepted: only with 'phases'")
    if duration_s is not None:
        options["duration_s"] = duration_s
    if rate_per_s is not None:
        options["rate_per_s"] = rate_per_s
    return KINDS[kind](seed=seed, **options)
