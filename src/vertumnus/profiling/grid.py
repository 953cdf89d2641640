"""Which steps are timed: degrees, suffixes and cached prefixes, alone and packed."""

from collections.abc import Iterable
from dataclasses import dataclass

BLOCK_TOKENS = 64
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PACKED = ((2, 128), (4, 64), (4, 256), (8, 64))
"""(requests, new tokens of each)."""


@dataclass(frozen=True, slots=True, order=True)
class StepCell:
    """A step of equal requests at a degree."""

    degree: int
    suffix_tokens: int
    prefix_tokens: int
    num_requests: int = 1

    @property
    def num_tokens(self) -> int:
        """Of all its requests, cached ones included."""
        return self.num_requests * (self.suffix_tokens + self.prefix_tokens)

    @property
    def work(self) -> float:
        """Roughly how long it takes, in units of no meaning: to order steps, and to guess one from another."""
        pairs_per_token = self.prefix_tokens + self.suffix_tokens / 2
        return self.num_requests * self.suffix_tokens * (1000 + pairs_per_token) / self.degree


def cells_of(degrees: Iterable[int], max_tokens: int) -> list[StepCell]:
    """Least work first: cold prompts of doubling length, suffixes up to a quarter of `max_tokens` behind prefixes of
    one to three quarters of it, and short requests packed into one step, cold and behind an eighth. A step has
    `max_tokens` at most, cached ones included."""
    quarter = max_tokens // 4 // BLOCK_TOKENS * BLOCK_TOKENS
    single = [(length, 0) for length in LENGTHS if length <= max_tokens]
    suffixes = [length for length in LENGTHS if length <= quarter][::2]
    single += [(suffix, share * quarter) for suffix in suffixes for share in (1, 2, 3) if quarter]
    packed = [(suffix, prefix, count) for count, suffix in PACKED for prefix in (0, quarter // 2)]
    found = [StepCell(degree, suffix, prefix) for degree in degrees for suffix, prefix in single]
    found += [
        cell
        for degree in degrees
        for suffix, prefix, count in packed
        if (cell := StepCell(degree, suffix, prefix // BLOCK_TOKENS * BLOCK_TOKENS, count)).num_tokens <= max_tokens
    ]
    return sorted(set(found), key=lambda cell: (cell.work, cell))
