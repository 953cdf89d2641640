"""What goes into one step of a rank group and what comes out: plain data, the same on every member of the group.

Who decides lives elsewhere: a step names the tokens, their positions and the slots to read and to write. A rank that
gets one runs it or refuses it; it never fills in anything itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from vertumnus.errors import ConfigError

Address = tuple[int, int]
"""(rank, slot): where a KV block lies. `rank` is the rank's number in the pool, not its place in the group."""


LABEL_BYTES = 16
"""Of what a block is called by whoever asks for steps."""
MAX_TOP_LOGPROBS = 20


class PrefixPath(Enum):
    """How the group attends to cached keys and values that lie on several of its ranks."""

    AUTO = "auto"
    """Whichever the byte and pair counts predict to be quicker."""
    PASS_KV = "pass-kv"
    """Every rank gathers the prefix's keys and values, one layer at a time."""
    PASS_Q = "pass-q"
    """Every rank attends all new queries to the prefix blocks that it holds; partial results are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits of a request's last new position.

    temperature: 0 takes the most likely token. top_k: only the k most likely, None for all. top_p: only the fewest
    whose probability adds up to p. seed: of the draw at this position; the same seed and position give the same token.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; accepted: 0 (greedy) or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; accepted: 1 or more, or none")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; accepted: above 0, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """One request's share of a step: a run of new tokens behind a cached prefix.

    token_ids: the R new tokens, at positions num_prefix_tokens .. num_prefix_tokens + R - 1.
    num_prefix_tokens: P, tokens whose keys and values are in `blocks` already.
    blocks: the addresses of the sequence's KV blocks in order, as many as P + R tokens need; block j holds positions
    [j * block_tokens, (j + 1) * block_tokens). Those from P on are written by the step.
    sampling: None where no next token is wanted (the prompt goes on in a later step).
    labels: what the sequence's full blocks are called, in order, LABEL_BYTES each; may name fewer of them. A rank keeps
    the labels of those that the step fills, for as long as nobody writes to them (`RankPool.labels`).
    num_top_logprobs: k returns the log-probability of the sampled token and the k most likely tokens with theirs.
    has_all_logits: return the logits of every new position (tests, scoring).
    prefix_path: PASS_KV or PASS_Q force the way a prefix is attended to.
    """

    request_id: int
    token_ids: Sequence[int]
    num_prefix_tokens: int
    blocks: Sequence[Address]
    sampling: Sampling | None = None
    labels: Sequence[bytes] = ()
    num_top_logprobs: int | None = None
    has_all_logits: bool = False
    prefix_path: PrefixPath = PrefixPath.AUTO

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """P + R."""
        return self.num_prefix_tokens + len(self.token_ids)

    def prefix_blocks(self, block_tokens: int) -> Sequence[Address]:
        """The blocks that the prefix reaches into; the last may be filled in part, and written on by the step."""
        return self.blocks[: -(-self.num_prefix_tokens // block_tokens)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass of the group of `degree` ranks from `first_rank` on, under `epoch`."""

    step_id: int
    first_rank: int
    degree: int
    epoch: int
    requests: Sequence[StepRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What a step found for one request; only the rank that computed the request's last new position returns it.

    logprob: natural, at temperature 1; None unless it was asked for. top_logprobs: (token id, logprob) of the most
    likely tokens, equal ones by their ids. Without sampling there is no output.
    """

    request_id: int
    token_id: int
    logprob: float | None
    top_logprobs: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Seconds of one rank's step by stage; what is in none of them is `other_s` (embedding, norms, logits)."""

    total_s: float
    gather_s: float
    """Packing, reordering and copying what is exchanged, and the KV store's reads and writes."""
    attention_s: float
    mlp_s: float
    projection_s: float
    """Query, key, value and output projections with rotary embedding."""
    wait_s: float
    """Waiting for other ranks."""

    @property
    def other_s(self) -> float:
        return self.total_s - self.gather_s - self.attention_s - self.mlp_s - self.projection_s - self.wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """One rank's result of a step.

    logits: for requests with `has_all_logits`, (request_id, position) of each row of this rank and the float32 rows
    themselves, [num_rows, vocab_size] in row-major bytes. received_bytes: what this rank got from others.
    num_pass_q: how many requests with a prefix on several ranks took pass-Q.
    """

    step_id: int
    rank: int
    epoch: int
    outputs: Sequence[RequestOutput]
    timings: StepTimings
    received_bytes: int
    num_pass_q: int = 0
    logits_of: Sequence[tuple[int, int]] = field(default_factory=tuple)
    logits: bytes = b""
