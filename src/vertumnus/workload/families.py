"""Agentic traffic: families of requests that share one growing context, popular by Zipf's law.

Every family has a stem, an endless stream of blocks. A request of the family repeats the first part of the stem and
goes on with blocks of its own, so it finds what earlier requests have already shown of the stem. Some requests are
cold: they belong to no family. Lengths have exactly their distribution and are alike within a family.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vertumnus.workload.sampling import Quantiles, Streams
from vertumnus.workload.trace import FloatArray, IntArray, numbered_by_appearance

OWN_EXPONENT = 0.3
"""The part of a prompt that is its own falls with this power of its blocks."""

MAX_OWN_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyModel:
    """`cold_ratio` of the requests find nothing: the first of each family, and `loner_ratio` that have none.

    `likeness` (0..1) is the correlation of log lengths within a family; those without one are `loner_shift` standard
    deviations shorter, as contexts at their beginning are.
    """

    lengths: Quantiles
    exponent: float
    cold_ratio: float
    loner_ratio: float
    likeness: float
    loner_shift: float
    shared_token_ratio: float


@dataclass(frozen=True, slots=True)
class FamilyBlocks:
    input_tokens: IntArray
    block_ids: IntArray
    block_offsets: IntArray


def family_blocks(model: FamilyModel, streams: Streams, num_requests: int, block_tokens: int) -> FamilyBlocks:
    """Lengths and block ids of so many requests, in order of arrival."""
    family, is_alone = _families(model, streams["family"], num_requests)
    input_tokens = _lengths(model, streams, family, is_alone)
    full_blocks = input_tokens // block_tokens
    # A long context is shared to a larger part than a short one: its last step is a smaller part of it.
    own = streams["own"].exponential(1.0, num_requests) * np.maximum(1, full_blocks) ** -OWN_EXPONENT
    wanted_blocks = model.shared_token_ratio * float(input_tokens.sum()) / block_tokens

    def stem_blocks(own_ratio: float) -> IntArray:
        return np.rint(full_blocks * np.exp(-own_ratio * own)).astype(np.int64)

    # The less is a request's own, the more is shared: bisect for the share that was asked for.
    low, high = 0.0, MAX_OWN_RATIO
    for _ in range(40):
        middle = (low + high) / 2
        if _num_found(family, stem_blocks(middle)) > wanted_blocks:
            low = middle
        else:
            high = middle
    stem = stem_blocks(low)

    num_blocks = -(-input_tokens // block_tokens)
    offsets = np.concatenate(([0], np.cumsum(num_blocks)))
    request = np.repeat(np.arange(num_requests), num_blocks)
    depth = np.arange(offsets[-1]) - offsets[request]
    longest = np.zeros(int(family.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, family, stem)
    start = np.concatenate(([0], np.cumsum(longest)))
    ids = start[family[request]] + depth
    is_own = depth >= stem[request]
    ids[is_own] = start[-1] + np.arange(is_own.sum())
    return FamilyBlocks(input_tokens, numbered_by_appearance(ids), offsets)


def _families(model: FamilyModel, rng: np.random.Generator, num_requests: int) -> tuple[IntArray, NDArray[np.bool_]]:
    """A family for every request, and which requests have none; those get a number that no other has."""
    num_families = _num_families(model, num_requests)
    popularity = _popularity(model, num_families)
    family = np.searchsorted(np.cumsum(popularity)[:-1], rng.random(num_requests), side="right").astype(np.int64)
    is_alone = rng.random(num_requests) < model.loner_ratio
    family[is_alone] = num_families + np.arange(is_alone.sum())
    return family, is_alone


def _popularity(model: FamilyModel, num_families: int) -> FloatArray:
    weights = 1.0 / np.arange(1, num_families + 1) ** model.exponent
    return np.asarray(weights / weights.sum())


def _num_families(model: FamilyModel, num_requests: int) -> int:
    """How many families there must be for the expected number that appear to be the cold requests but the loners."""
    num_members = (1 - model.loner_ratio) * num_requests
    wanted = (model.cold_ratio - model.loner_ratio) * num_requests
    low, high = 1, max(2, num_requests)
    while low < high:
        middle = (low + high) // 2
        if (1 - np.exp(-num_members * _popularity(model, middle))).sum() < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def _lengths(model: FamilyModel, streams: Streams, family: IntArray, is_alone: NDArray[np.bool_]) -> IntArray:
    """Lengths by the rank of a score that members of a family partly share, so their distribution is exact."""
    n = len(family)
    shared = streams["family lengths"].normal(size=int(family.max()) + 1)[family]
    score = model.likeness * shared + np.sqrt(1 - model.likeness**2) * streams["lengths"].normal(size=n)
    score[is_alone] -= model.loner_shift
    rank = np.empty(n)
    rank[np.argsort(score, kind="stable")] = np.arange(n)
    return model.lengths.at(np.asarray((rank + 0.5) / n))


def _num_found(family: IntArray, stem_blocks: IntArray) -> int:
    """Blocks that an unlimited cache finds: of each stem part what the family has shown before."""
    order = np.argsort(family, kind="stable")
    stem = stem_blocks[order]
    # A running maximum per family: families in turn are lifted above all before them.
    lift = family[order] * (int(stem.max()) + 1)
    shown = np.maximum.accumulate(stem + lift)[:-1] - lift[1:]
    return int(np.minimum(stem[1:], np.maximum(shown, 0)).sum())
