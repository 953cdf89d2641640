"""A request trace: columns of arrivals, lengths and block ids, immutable once made.

A block id stands for a block of input tokens *and everything before it*: equal ids mean equal prefixes. Ids are small
integers, only ever compared with each other; the blocks of all requests lie end to end in one array.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vertumnus.errors import ConfigError, InvariantError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_TOKENS = 1 << 24
"""Longest input or output that is believed; anything above is taken for a corrupt field."""

MAX_NUM_ENTRIES = 1 << 30
"""Most requests or block entries that a repetition may make (8 GiB of ids); above it memory would run out."""

COARSE_TIED_RATIO = 0.1
"""Stamps count as coarse when at least this share of the requests has its stamp in common with another."""

RESOLUTION_QUANTILE = 0.01
"""Which quantile of the gaps between distinct stamps is their resolution: nearly the least, yet deaf to odd ones."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests in order of arrival, one row each; the first arrives at 0 s.

    `block_ids[block_offsets[i]:block_offsets[i + 1]]` are the blocks of request i, its leading ones first; a last,
    partly filled block is there if the source names it. Without prefix information `has_block_ids` is False and
    there are none. `synthesised` marks generated requests, `warnings` what the reader had to put right.
    The arrays are read-only. Raises ConfigError if they contradict each other.
    """

    name: str
    block_tokens: int
    has_block_ids: bool
    arrival_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    block_ids: IntArray
    block_offsets: IntArray
    synthesised: bool = False
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field, dtype in (
            ("arrival_s", np.float64),
            ("input_tokens", np.int64),
            ("output_tokens", np.int64),
            ("block_ids", np.int64),
            ("block_offsets", np.int64),
        ):
            column = np.ascontiguousarray(getattr(self, field), dtype=dtype).view()
            column.setflags(write=False)
            object.__setattr__(self, field, column)
        if problem := self._problem():
            raise ConfigError(f"trace {self.name!r}: {problem}")

    @property
    def num_requests(self) -> int:
        return len(self.arrival_s)

    @property
    def num_block_ids(self) -> int:
        """One more than the largest block id, so that an array of this length can be indexed by id."""
        return int(self.block_ids.max()) + 1 if len(self.block_ids) else 0

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival_s[-1])

    @property
    def mean_rate_per_s(self) -> float:
        """The reciprocal of the mean gap between arrivals; 0 where all arrive at one instant."""
        return (self.num_requests - 1) / self.duration_s if self.duration_s > 0 else 0.0

    def blocks(self, index: int) -> IntArray:
        """Block ids of one request, a partial last block included if the trace has it; a view."""
        return self.block_ids[self.block_offsets[index] : self.block_offsets[index + 1]]

    def full_blocks(self, index: int) -> IntArray:
        """Block ids of the wholly filled blocks of one request; a view."""
        start = self.block_offsets[index]
        end = min(int(start + self.input_tokens[index] // self.block_tokens), int(self.block_offsets[index + 1]))
        return self.block_ids[start:end]

    def limited(self, num_requests: int) -> "Trace":
        """The first requests only."""
        if num_requests < 1:
            raise ConfigError(f"limit is {num_requests}; accepted: 1 or more requests")
        n = min(num_requests, self.num_requests)
        return replace(
            self,
            arrival_s=self.arrival_s[:n],
            input_tokens=self.input_tokens[:n],
            output_tokens=self.output_tokens[:n],
            block_ids=self.block_ids[: self.block_offsets[n]],
            block_offsets=self.block_offsets[: n + 1],
        )

    def selected(self, rows: IntArray) -> "Trace":
        """Some of the requests, by ascending index; the first of them arrives at 0 s."""
        num_blocks = np.diff(self.block_offsets)[rows]
        offsets = np.concatenate(([0], np.cumsum(num_blocks)))
        entries = np.arange(offsets[-1]) + np.repeat(self.block_offsets[rows] - offsets[:-1], num_blocks)
        return replace(
            self,
            arrival_s=self.arrival_s[rows] - self.arrival_s[rows[0]],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            block_ids=self.block_ids[entries],
            block_offsets=offsets,
        )

    def rescaled(self, rate_per_s: float) -> "Trace":
        """The same requests with all gaps scaled to a mean arrival rate."""
        if not (np.isfinite(rate_per_s) and rate_per_s > 0):
            raise ConfigError(f"rate is {rate_per_s}; accepted: a finite number of requests per second above 0")
        if self.num_requests == 1:
            return self
        if self.duration_s == 0:
            raise ConfigError(
                f"rate is {rate_per_s}, but all arrivals of trace {self.name!r} share one instant; "
                "accepted: a trace with a duration"
            )
        return replace(self, arrival_s=self.arrival_s * (self.mean_rate_per_s / rate_per_s))

    def repeated(self, times: int) -> "Trace":
        """The trace played several times back to back, one mean gap apart, with new block ids in every play.

        The mean rate stays as it is, and no play finds a block of another in a cache.
        """
        if times < 1:
            raise ConfigError(f"repeat is {times}; accepted: 1 or more times")
        num_entries = times * max(self.num_requests, len(self.block_ids))
        if num_entries > MAX_NUM_ENTRIES:
            raise ConfigError(
                f"repeat is {times}, which makes {num_entries:,} requests or blocks; "
                f"accepted: at most {MAX_NUM_ENTRIES:,}"
            )
        mean_gap_s = self.duration_s / (self.num_requests - 1) if self.num_requests > 1 else 0.0
        play = np.arange(times)
        starts_s = play * (self.duration_s + mean_gap_s)
        ends = self.block_offsets[1:] + play[:, None] * len(self.block_ids)
        return replace(
            self,
            arrival_s=(starts_s[:, None] + self.arrival_s).ravel(),
            input_tokens=np.tile(self.input_tokens, times),
            output_tokens=np.tile(self.output_tokens, times),
            block_ids=(self.block_ids + play[:, None] * self.num_block_ids).ravel(),
            block_offsets=np.concatenate(([0], ends.ravel())),
        )

    def spread(self, seed: int) -> "Trace":
        """Coarse arrival stamps spread uniformly within their resolution; fine stamps stay as they are.

        Every arrival moves to a random instant between its stamp and one resolution later, but never past the next
        stamp; requests of one stamp keep their order. The same seed gives the same instants.
        """
        if seed < 0:
            raise ConfigError(f"seed is {seed}; accepted: 0 or more")
        resolution_s = stamp_resolution_s(self.arrival_s)
        if resolution_s is None:
            return self
        stamps_s, row = np.unique(self.arrival_s, return_inverse=True)
        room_s = np.minimum(np.append(np.diff(stamps_s), resolution_s), resolution_s)
        fraction = np.random.default_rng(seed).random(self.num_requests)
        fraction = fraction[np.lexsort((fraction, row))]
        arrival_s = self.arrival_s + fraction * room_s[row]
        return replace(self, arrival_s=np.maximum.accumulate(arrival_s - arrival_s[0]))

    def check_invariants(self) -> None:
        """Raises InvariantError unless the columns agree and equal block ids stand for equal prefixes."""
        if problem := self._problem():
            raise InvariantError(problem)
        if num_unchained(self.block_ids, self.block_offsets):
            raise InvariantError("a block id follows two different blocks")

    def _problem(self) -> str | None:
        n = len(self.arrival_s)
        num_blocks = np.diff(self.block_offsets)
        if n == 0:
            return "it has no request; accepted: at least one"
        if self.block_tokens < 1:
            return f"block_tokens is {self.block_tokens}; accepted: 1 or more"
        if not (len(self.input_tokens) == len(self.output_tokens) == n == len(num_blocks)):
            return "its columns differ in length"
        if not np.isfinite(self.arrival_s).all() or self.arrival_s[0] != 0 or (np.diff(self.arrival_s) < 0).any():
            return "arrival_s must start at 0 and never fall"
        for field, least in (("input_tokens", 1), ("output_tokens", 0)):
            column = getattr(self, field)
            if column.min() < least or column.max() > MAX_TOKENS:
                return f"{field} goes from {column.min()} to {column.max()}; accepted: {least} to {MAX_TOKENS}"
        if self.block_offsets[0] != 0 or (num_blocks < 0).any() or self.block_offsets[-1] != len(self.block_ids):
            return "block_offsets must rise from 0 to the number of block ids"
        if len(self.block_ids) and self.block_ids.min() < 0:
            return "block ids must be 0 or more"
        if not self.has_block_ids:
            return "it has block ids but says that it has none" if len(self.block_ids) else None
        least_blocks = self.input_tokens // self.block_tokens
        if (num_blocks < least_blocks).any() or (num_blocks > -(-self.input_tokens // self.block_tokens)).any():
            return "a request has more or fewer block ids than its input_tokens need"
        return None


def stamp_resolution_s(arrival_s: FloatArray) -> float | None:
    """Resolution of coarse arrival stamps; None where stamps are fine, or too few to tell.

    Stamps are coarse when a tenth of the requests or more share theirs with another. Their resolution is then the
    first percentile of the gaps between distinct stamps: a multiple of the true tick when traffic is too thin to show
    it, and not misled by a few stamps that came early.
    """
    stamps_s, num_sharing = np.unique(arrival_s, return_counts=True)
    tied_ratio = num_sharing[num_sharing > 1].sum() / max(1, len(arrival_s))
    if len(stamps_s) < 2 or tied_ratio < COARSE_TIED_RATIO:
        return None
    return float(np.quantile(np.diff(stamps_s), RESOLUTION_QUANTILE, method="lower"))


def previous_blocks(block_ids: IntArray, block_offsets: IntArray) -> IntArray:
    """For every block entry the id of the block before it in its request; -1 for a first block."""
    parents = np.empty_like(block_ids)
    parents[1:] = block_ids[:-1]
    parents[block_offsets[:-1][np.diff(block_offsets) > 0]] = -1
    return parents


def num_unchained(block_ids: IntArray, block_offsets: IntArray) -> int:
    """Number of block entries whose id also appears after some other block, so that it cannot name a prefix."""
    if not len(block_ids):
        return 0
    parents = previous_blocks(block_ids, block_offsets)
    parent_of = np.empty(int(block_ids.max()) + 1, dtype=np.int64)
    parent_of[block_ids] = parents
    return int((parent_of[block_ids] != parents).sum())


def numbered_by_appearance(block_ids: IntArray) -> IntArray:
    """The same ids renamed 0, 1, 2, ... in the order in which they first appear."""
    _, first_at, inverse = np.unique(block_ids, return_index=True, return_inverse=True)
    rank = np.empty(len(first_at), dtype=np.int64)
    rank[np.argsort(first_at)] = np.arange(len(first_at))
    return rank[inverse]
