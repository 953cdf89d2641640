"""What the live pool needs to know of its ranks and of how much it may take on."""

from dataclasses import dataclass

from vertumnus.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """Prefill ranks are 0 .. num_prefill_ranks - 1, decode ranks follow. Durations in seconds.

    blocks_per_rank: KV blocks of `block_tokens` tokens that each rank stores, prefill or decode.
    max_queued_requests: requests without a first token yet; more are refused.
    max_wait_s: predicted seconds until a new request's turn above which it is refused; None: no such bound.
    max_decode_sequences: at a time per decode rank.
    max_attempts: how often a request may lose its KV, or the step that it is in, before it is given up.
    slot_wait_s: how long a step waits for a slot that a copy still reads or writes.
    group_wait_s: how long a step or a switch waits for a group that is being formed anew.
    """

    num_prefill_ranks: int
    num_decode_ranks: int
    block_tokens: int
    blocks_per_rank: int
    max_sequence_tokens: int
    vocab_size: int
    max_queued_requests: int = 1024
    max_wait_s: float | None = None
    max_decode_sequences: int = 256
    max_attempts: int = 16
    slot_wait_s: float = 30.0
    group_wait_s: float = 20.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; accepted: above 0")

    @property
    def decode_ranks(self) -> range:
        return range(self.num_prefill_ranks, self.num_prefill_ranks + self.num_decode_ranks)

    @property
    def max_tokens(self) -> int:
        """Prompt and answer together: what the model takes and one decode rank can hold."""
        return min(self.max_sequence_tokens, self.blocks_per_rank * self.block_tokens)
