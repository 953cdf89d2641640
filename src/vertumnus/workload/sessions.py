"""Multi-turn sessions over given arrivals and lengths: who continues whom, and the block ids that follow from it.

Arrivals and lengths are drawn first, so they have exactly their distributions. Then every request in turn either
starts a session or continues an open one: its prompt is the last prompt of that session, the answer to it, and
something new. Which session is chosen by how much the prompt grows and how long its user thinks; how often requests
continue is steered so that an unlimited prefix cache finds the share of tokens that is asked for.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from math import log

import numpy as np

from vertumnus.workload.sampling import Streams
from vertumnus.workload.trace import FloatArray, IntArray, numbered_by_appearance

BUCKETS_PER_DOUBLING = 10
MAX_THINK_MEDIANS = 12
"""A session that waits longer than so many median think times is not continued."""

MIN_THINK_MEDIANS = 0.1
CHOICE = 4
"""How many sessions of about the right length and pause a request chooses from."""
BASE_CONTINUE_RATIO = 0.4
STEER_REQUESTS = 30
"""A shortfall of so many mean prompts of hits raises the chance to continue by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionModel:
    """How sessions behave. Growth (tokens of a prompt beyond the one it continues) and think time are log-normal.

    A session belongs to one of several applications, popular by Zipf's law, whose prompts all begin with the same
    `app_prefix_blocks[app]` blocks (system prompt and tools). `remembered_ratio` is what a request keeps of the
    shortfall before it: 1 holds the hit share over the whole trace, less holds it locally.
    """

    block_tokens: int
    growth_tokens: float
    growth_sigma: float
    think_s: float
    think_sigma: float
    app_prefix_blocks: tuple[int, ...]
    app_exponent: float = 1.0
    remembered_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Sessions:
    """Per request the request that began its session, and its application."""

    root: IntArray
    app: IntArray


def linked(
    model: SessionModel,
    streams: Streams,
    arrival_s: FloatArray,
    input_tokens: IntArray,
    output_tokens: IntArray,
    wanted_hit_tokens: FloatArray,
) -> Sessions:
    """Sessions in which an unlimited cache finds about the wanted tokens, summed over requests."""
    n = len(arrival_s)
    growth = np.exp(streams["growth"].normal(log(model.growth_tokens), model.growth_sigma, n))
    think_s = np.exp(streams["think"].normal(log(model.think_s), model.think_sigma, n))
    coin = streams["continue"].random(n).tolist()
    prefixes = np.array(model.app_prefix_blocks)
    popularity = 1.0 / np.arange(1, len(prefixes) + 1) ** model.app_exponent
    app = np.searchsorted(np.cumsum(popularity) / popularity.sum(), streams["app"].random(n)).tolist()

    open_sessions = _OpenSessions(
        (input_tokens + output_tokens).tolist(),
        wanted=np.searchsorted(arrival_s, arrival_s - think_s).tolist(),
        oldest=np.searchsorted(arrival_s, arrival_s - MAX_THINK_MEDIANS * model.think_s).tolist(),
        newest=np.searchsorted(arrival_s, arrival_s - MIN_THINK_MEDIANS * model.think_s, side="right").tolist(),
    )
    full_blocks = (input_tokens // model.block_tokens).tolist()
    lengths, reached = input_tokens.tolist(), (input_tokens - growth).tolist()
    steer_tokens = STEER_REQUESTS * float(input_tokens.mean())
    root = list(range(n))
    seen_blocks = [0] * len(prefixes)
    shortfall = 0.0
    for request, wanted in enumerate(wanted_hit_tokens.tolist()):
        chance = min(0.95, max(0.02, BASE_CONTINUE_RATIO + shortfall / steer_tokens))
        before = None
        if coin[request] < chance:
            before = open_sessions.taken(request, lengths[request], reached[request])
        if before is not None:
            root[request], app[request] = root[before], app[before]
        hit_blocks = min(seen_blocks[app[request]], full_blocks[request])
        if before is not None:
            hit_blocks = max(hit_blocks, full_blocks[before])
        seen = min(int(prefixes[app[request]]), full_blocks[request])
        seen_blocks[app[request]] = max(seen_blocks[app[request]], seen)
        shortfall = model.remembered_ratio * shortfall + wanted - hit_blocks * model.block_tokens
        open_sessions.add(request, before)
    return Sessions(np.array(root), np.array(app))


class _OpenSessions:
    """Last requests of sessions that may go on, in buckets by the length they have reached, each in order of arrival.

    For every request `wanted`, `oldest` and `newest` bound, as request numbers, whom it may continue.
    """

    def __init__(self, reached_tokens: list[int], wanted: list[int], oldest: list[int], newest: list[int]) -> None:
        self._reached_tokens = reached_tokens
        self._wanted = wanted
        self._oldest = oldest
        self._newest = newest
        self._turn = [1] * len(reached_tokens)
        self._buckets: dict[int, list[int]] = {}

    def add(self, request: int, before: int | None) -> None:
        self._turn[request] = 1 if before is None else self._turn[before] + 1
        self._buckets.setdefault(_bucket(self._reached_tokens[request]), []).append(request)

    def taken(self, request: int, input_tokens: int, reached_tokens: float) -> int | None:
        """Removes and returns a session that has reached about so many tokens, and fewer than the request has.

        Of the few that wait about as long as is wanted, the one with most turns: who has gone on often goes on.
        """
        if reached_tokens < 1:
            return None
        around = _bucket(reached_tokens)
        for bucket in (around, around - 1, around + 1, around - 2, around - 3):
            rows = self._buckets.get(bucket)
            if not rows:
                continue
            del rows[: bisect_left(rows, self._oldest[request])]
            at = bisect_right(rows, self._wanted[request])
            fitting = [
                row
                for row in range(max(0, at - CHOICE // 2), min(len(rows), at + CHOICE // 2))
                if rows[row] < self._newest[request] and self._reached_tokens[rows[row]] < input_tokens
            ]
            if fitting:
                return rows.pop(max(fitting, key=lambda row: self._turn[rows[row]]))
        return None


def _bucket(tokens: float) -> int:
    return int(log(tokens) * (BUCKETS_PER_DOUBLING / log(2)))


def session_blocks(
    sessions: Sessions, app_prefix_blocks: tuple[int, ...], input_tokens: IntArray, block_tokens: int
) -> tuple[IntArray, IntArray]:
    """Block ids and offsets: the application's prefix, then the session's stream; a partial last block is unique."""
    num_blocks = -(-input_tokens // block_tokens)
    longest = np.zeros(len(input_tokens), dtype=np.int64)
    np.maximum.at(longest, sessions.root, num_blocks)
    prefixes = np.array(app_prefix_blocks)
    app_start = np.concatenate(([0], np.cumsum(prefixes)))
    root_start = app_start[-1] + np.concatenate(([0], np.cumsum(longest)))

    offsets = np.concatenate(([0], np.cumsum(num_blocks)))
    request = np.repeat(np.arange(len(input_tokens)), num_blocks)
    depth = np.arange(offsets[-1]) - offsets[request]
    app = sessions.app[request]
    ids = np.where(depth < prefixes[app], app_start[app], root_start[sessions.root[request]]) + depth
    is_partial = (depth + 1) * block_tokens > input_tokens[request]
    ids[is_partial] = root_start[-1] + np.arange(is_partial.sum())
    return numbered_by_appearance(ids), offsets
