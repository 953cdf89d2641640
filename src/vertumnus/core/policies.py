"""The placement policies that people run today, as baselines behind the same one-method interface.

Each docstring cites its public source. All see the same view (same cost model, same local caches, same queues), and
each runs with either queue discipline.
"""

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.cost import FloatArray
from vertumnus.core.long_threshold import DEFAULT_LONG_TOKENS
from vertumnus.core.placement import PaperPolicy, Placement, PlacementPolicy, PlacementView, VertumnusPolicy, choose
from vertumnus.errors import ConfigError


class RoundRobin:
    """Every worker in turn, whatever its degree or load (the default of most load balancers, nginx among them)."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last_worker_id = -1

    def place(self, view: PlacementView) -> Placement:
        later = np.flatnonzero(view.worker_ids > self._last_worker_id)
        turn = int(later[0]) if later.size else 0
        self._last_worker_id = int(view.worker_ids[turn])
        cost = np.ones(view.worker_ids.size)
        cost[turn] = 0.0
        return choose(view, cost, "next in turn")


class LeastLoaded:
    """The worker with the least predicted seconds outstanding (join the shortest queue, by work instead of count)."""

    name = "least-loaded"

    def place(self, view: PlacementView) -> Placement:
        return choose(view, view.outstanding_s, "least outstanding seconds")


class CacheFirst:
    """The longest reusable prefix, ties by load (prefix-affinity routing as in SGLang's and vLLM's routers)."""

    name = "cache-first"

    def place(self, view: PlacementView) -> Placement:
        longest = view.reusable_tokens.max()
        cost = np.where(view.reusable_tokens == longest, view.outstanding_s, np.inf)
        return choose(view, cost, "longest reusable prefix")


class LengthThreshold:
    """Long requests to the large degrees, the others to the small ones, each to the least loaded worker there.

    The rule of thumb of length-specialised pools (the paper's length-based baseline). Large are the degrees above the
    cut that comes nearest to halving the GPUs, since long requests make up about half of the work; with one degree
    only it is least loaded.
    """

    name = "length"

    def __init__(self, long_tokens: int = DEFAULT_LONG_TOKENS) -> None:
        self._long_tokens = long_tokens

    def place(self, view: PlacementView) -> Placement:
        cost = np.where(self._eligible(view), view.outstanding_s, np.inf)
        return choose(view, cost, "least outstanding seconds in its length class")

    def _eligible(self, view: PlacementView) -> NDArray[np.bool_]:
        degrees = np.unique(view.degrees)
        if degrees.size == 1:
            return np.ones(view.degrees.size, dtype=bool)
        num_gpus = view.degrees.sum()
        cuts = [(abs(view.degrees[view.degrees > cut].sum() / num_gpus - 0.5), cut) for cut in degrees[:-1].tolist()]
        is_large: NDArray[np.bool_] = view.degrees > min(cuts)[1]
        return is_large if view.input_tokens > self._long_tokens else ~is_large


class LengthThresholdWithCache(LengthThreshold):
    """The length rule, and within the class the least outstanding seconds plus cache-aware service time."""

    name = "length-cache"

    def place(self, view: PlacementView) -> Placement:
        cost = np.where(self._eligible(view), view.load_s + view.service_s, np.inf)
        return choose(view, cost, "least predicted TTFT in its length class")


class CacheAware:
    """Cache affinity unless the load is out of balance, as sglang-router's `cache_aware` policy.

    Out of balance (the counts of outstanding requests differ by more than `balance_abs` and by more than a factor
    `balance_rel`): the fewest outstanding requests. Else the longest match if it covers more than `cache_threshold`
    of the prompt, and otherwise the worker with the least cached. Source: the sglang-router documentation (now
    lightseekorg/smg, `docs/getting-started/load-balancing.md`), with its default thresholds.
    """

    name = "cache-aware"

    def __init__(self, cache_threshold: float = 0.3, balance_abs: int = 64, balance_rel: float = 1.5) -> None:
        self._cache_threshold = cache_threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel

    def place(self, view: PlacementView) -> Placement:
        counts = view.num_outstanding
        most, fewest = int(counts.max()), int(counts.min())
        if most - fewest > self._balance_abs and most > self._balance_rel * fewest:
            return choose(view, counts.astype(float), "out of balance: fewest outstanding requests")
        if view.reusable_tokens.max() > self._cache_threshold * view.input_tokens:
            return choose(view, -view.reusable_tokens, "longest reusable prefix")
        return choose(view, view.resident_blocks.astype(float), "smallest cache")


class Preble:
    """Exploit a hit on more than half of the prompt, else explore by load (E2 of Preble, arXiv 2407.00023).

    Exploit: the worker with the longest reusable prefix, ties by load. Explore: least load cost, which is the
    outstanding work plus this prompt's own prefill there. Preble's cost of evictions and its shift of load away from
    workers that are overloaded are left out. `exploit_ratio` is the share of the prompt, half in Preble.
    """

    name = "preble"

    def __init__(self, exploit_ratio: float = 0.5) -> None:
        self._exploit_ratio = exploit_ratio

    def place(self, view: PlacementView) -> Placement:
        longest = view.reusable_tokens.max()
        if longest > self._exploit_ratio * view.input_tokens:
            cost = np.where(view.reusable_tokens == longest, view.load_s, np.inf)
            return choose(view, cost, f"exploit: more than {self._exploit_ratio:.0%} is cached")
        return choose(view, view.load_s + view.service_s, "explore: least load")


class Dynamo:
    """Overlap-weighted prefill blocks plus load, as the KV router of ai-dynamo/dynamo (its default cost).

    cost = overlap_weight * (uncached blocks of this prompt + uncached blocks already waiting) + active blocks, where
    in a prefill pool the active blocks are those of this prompt. It knows neither degrees nor the quadratic term.
    Source: ai-dynamo/dynamo, `lib/kv-router`, router documentation. Queued tokens count per worker, as there.
    """

    name = "dynamo"

    def __init__(self, overlap_weight: float = 1.0) -> None:
        self._overlap_weight = overlap_weight

    def place(self, view: PlacementView) -> Placement:
        prefill = self._overlap_weight * (view.outstanding_tokens + view.suffix_tokens) / view.block_tokens
        active = np.full(view.worker_ids.size, view.input_tokens / view.block_tokens)
        return choose(view, prefill + active, "fewest prefill and active blocks", prefill=prefill, active=active)


class MinimumTTFT:
    """Least predicted TTFT, q + s: J without its third term and with beta = 1 (llm-d's and Mooncake's schedulers)."""

    name = "min-ttft"

    def place(self, view: PlacementView) -> Placement:
        return choose(
            view,
            view.load_s + view.service_s,
            "least predicted TTFT",
            wait=view.wait_s,
            delay=view.delay_s,
            service=view.service_s,
        )


class ShortestTTFT:
    """Among the best 30% by predicted TTFT, the least recently chosen (RTP-LLM FlexLB's shortest-TTFT strategy).

    Source: alibaba/rtp-llm, `rtp_llm/flexlb`: spreading over near-equals keeps a burst off one worker.
    """

    name = "flexlb"

    def __init__(self, best_ratio: float = 0.3) -> None:
        self._best_ratio = best_ratio
        self._turn = 0
        self._chosen_at: dict[int, int] = {}

    def place(self, view: PlacementView) -> Placement:
        ttft_s: FloatArray = view.load_s + view.service_s
        num_best = max(1, int(self._best_ratio * ttft_s.size))
        best = np.argsort(ttft_s, kind="stable")[:num_best]
        row = min(best.tolist(), key=lambda row: (self._chosen_at.get(int(view.worker_ids[row]), -1), row))
        self._turn += 1
        self._chosen_at[int(view.worker_ids[row])] = self._turn
        cost = np.full(ttft_s.size, np.inf)
        cost[row] = ttft_s[row]
        return choose(view, cost, "least recently chosen of the best 30% by predicted TTFT")


POLICIES: dict[str, Callable[..., PlacementPolicy]] = {
    "vertumnus": VertumnusPolicy,
    "paper": PaperPolicy,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "cache-first": CacheFirst,
    "length": LengthThreshold,
    "length-cache": LengthThresholdWithCache,
    "cache-aware": CacheAware,
    "preble": Preble,
    "dynamo": Dynamo,
    "min-ttft": MinimumTTFT,
    "flexlb": ShortestTTFT,
}

PAPER_SYSTEM = "vertumnus-paper"
"""The name of a whole system rather than of a placement alone: policy `paper` in a pool as the paper has it."""


class SystemSettings(NamedTuple):
    """What a system settles beside the placement, under the names and in the words that operators use."""

    queue: str
    controller: str
    pulls: str
    moves: bool
    waits: bool


PAPER_SETTINGS = SystemSettings(queue="fifo", controller="threshold", pulls="none", moves=False, waits=False)
"""What that name stands for beside the placement: pending blocks are misses, Algorithms 1 and 2 do all copying."""


def make_policy(name: str, **options: float) -> PlacementPolicy:
    """A fresh policy by name, with parameters of its class; ConfigError for unknown ones, listing the known.

    `PAPER_SYSTEM` gives the paper's policy under that name: whoever drives it sets the pool up by `PAPER_SETTINGS`.
    """
    made = partial(PaperPolicy, name=PAPER_SYSTEM) if name == PAPER_SYSTEM else POLICIES.get(name)
    if made is None:
        raise ConfigError(f"policy is {name!r}; accepted: {', '.join(POLICIES)}, {PAPER_SYSTEM}")
    known = [each for each in signature(made).parameters if each != "name"]
    for option in options:
        if option not in known:
            raise ConfigError(f"option {option!r} of policy {name}; accepted: {', '.join(known) or 'none'}")
    return made(**options)
