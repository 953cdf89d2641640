"""Placement: which worker a request goes to, and why (the paper's cost J).

A policy is one method: a view of the candidates in, a `Placement` out. It never mutates anything outside itself; the
control plane reserves the request at the chosen worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.cost import DegreeCosts, FloatArray
from vertumnus.errors import ConfigError

IntArray = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class PlacementView:
    """What a policy may look at: one request and its candidates, as vectors with one entry per candidate worker.

    Candidates are active (not draining, not failed) and can hold the request; they come in ascending worker id.
    """

    now_s: float
    request_id: int
    input_tokens: int
    matched_tokens: int
    """Longest prefix known anywhere in the pool (MatchedPath); no candidate reuses more."""
    worker_ids: IntArray
    degrees: FloatArray
    costs: DegreeCosts
    """The cost model at each candidate's degree."""
    smallest_degree: int
    """C_min among the candidates."""
    smallest_costs: DegreeCosts
    """The cost model at C_min."""
    reusable_tokens: FloatArray
    """P: the block-aligned prefix that the worker holds, below the input length."""
    suffix_tokens: FloatArray
    """R = L - P."""
    service_s: FloatArray
    """s = E_C(R, P) (eq. 2)."""
    outstanding_s: FloatArray
    """q: reserved, queued and what is left of the running step, in predicted seconds."""
    wait_s: FloatArray
    """What this request would wait itself: q under FIFO, less where it may overtake."""
    delay_s: FloatArray
    """Seconds that longer queued requests together would wait for this one; 0 under FIFO."""
    num_outstanding: IntArray
    """Requests queued or running."""
    outstanding_tokens: IntArray
    """Uncached tokens of the requests queued or running."""
    resident_blocks: IntArray
    """KV blocks that the index knows at the worker."""
    block_tokens: int
    awaited_request_id: int | None = None
    """A request that is computing a prefix of this one, where waiting for it is among the choices."""
    awaited_tokens: FloatArray | None = None
    """The prefix that the choice waits for; 0 where it does not wait."""

    @property
    def smallest_service_s(self) -> FloatArray:
        """E_Cmin(R, P): what the smallest degree would take for each candidate's own R and P."""
        return self.smallest_costs.prefill_s(self.suffix_tokens, self.reusable_tokens)

    def restricted(self, eligible: NDArray[np.bool_]) -> "PlacementView | None":
        """The view with some of its candidates only; None if none is left. C_min is theirs."""
        rows = np.flatnonzero(eligible)
        return self._of(rows) if rows.size else None

    def _of(self, rows: NDArray[np.intp]) -> "PlacementView":
        smallest = int(np.argmin(self.degrees[rows]))
        smallest_row = rows[smallest : smallest + 1]
        vectors = {
            name: getattr(self, name)[rows]
            for name in (
                "worker_ids",
                "degrees",
                "reusable_tokens",
                "suffix_tokens",
                "service_s",
                "outstanding_s",
                "wait_s",
                "delay_s",
                "num_outstanding",
                "outstanding_tokens",
                "resident_blocks",
            )
        }
        return replace(
            self,
            smallest_degree=int(self.degrees[smallest_row[0]]),
            smallest_costs=self.costs.take(smallest_row),
            costs=self.costs.take(rows),
            awaited_tokens=None if self.awaited_tokens is None else self.awaited_tokens[rows],
            **vectors,
        )

    def with_waits(
        self,
        request_id: int,
        *,
        reusable_tokens: FloatArray,
        service_s: FloatArray,
        wait_s: FloatArray,
        delay_s: FloatArray,
        awaited_tokens: FloatArray,
    ) -> "PlacementView":
        """The view with every candidate a second time, as it would be if the request waited there for another."""
        num_rows = len(self.worker_ids)
        twice = self._of(np.tile(np.arange(num_rows), 2))
        twice.reusable_tokens[num_rows:] = reusable_tokens
        twice.suffix_tokens[num_rows:] = self.input_tokens - reusable_tokens
        twice.service_s[num_rows:] = service_s
        twice.wait_s[num_rows:] = wait_s
        twice.delay_s[num_rows:] = delay_s
        twice.matched_tokens = max(twice.matched_tokens, int(awaited_tokens.max()))
        twice.awaited_request_id = request_id
        twice.awaited_tokens = np.concatenate([np.zeros(num_rows), awaited_tokens])
        return twice

    @property
    def load_s(self) -> FloatArray:
        """The waiting that a placement costs in all: this request's own and what it puts on others."""
        return self.wait_s + self.delay_s


@dataclass(slots=True, kw_only=True)
class Placement:
    """A decision: the chosen row of the view, and every term of the cost for every candidate."""

    row: int
    worker_id: int
    worker_ids: IntArray
    degrees: FloatArray
    reusable_tokens: FloatArray
    service_s: FloatArray
    matched_tokens: int
    """These as in the view: what the cost was made from."""
    cost: FloatArray
    """What was minimised, in the policy's own unit."""
    terms: Mapping[str, FloatArray] = field(default_factory=dict)
    """The summands of `cost` by name; empty for policies that are no sum."""
    preferred_degree: int | None = None
    """C_pref: the degree of the candidate that costs least when its load is left out; None if the policy has none."""
    reason: str = ""
    awaited_request_id: int | None = None
    """The request whose prefix the chosen row waits for, if it waits."""
    awaited_tokens: FloatArray | None = None
    """As in the view."""


class PlacementPolicy(Protocol):
    """Chooses a worker for a request. `view` has at least one candidate."""

    @property
    def name(self) -> str: ...

    def place(self, view: PlacementView) -> Placement: ...


def choose(view: PlacementView, cost: FloatArray, reason: str, **terms: FloatArray) -> Placement:
    """The candidate of least cost, the lowest worker id among equals."""
    row = int(cost.argmin())
    does_wait = view.awaited_tokens is not None and view.awaited_tokens[row] > 0
    return Placement(
        row=row,
        worker_id=int(view.worker_ids[row]),
        worker_ids=view.worker_ids,
        degrees=view.degrees,
        reusable_tokens=view.reusable_tokens,
        service_s=view.service_s,
        matched_tokens=view.matched_tokens,
        cost=cost,
        terms=terms,
        reason=reason,
        awaited_request_id=view.awaited_request_id if does_wait else None,
        awaited_tokens=view.awaited_tokens,
    )


@dataclass(frozen=True, slots=True)
class PaperPolicy:
    """The paper's placement cost, with constant weights.

    J = q + beta*s + lambda*(C*s - C_min*E_Cmin(R, P)), the third term being the GPU seconds that a candidate takes
    beyond what the smallest degree would take for the same R and P.

    `beta` >= 1 weighs the request's own service against waiting, `lambda_` >= 0 prices GPU time.
    """

    beta: float = 2.0
    lambda_: float = 0.3
    name: str = "paper"

    def __post_init__(self) -> None:
        if not 1 <= self.beta < np.inf:
            raise ConfigError(f"beta is {self.beta!r}; accepted: a number >= 1")
        if not 0 <= self.lambda_ < np.inf:
            raise ConfigError(f"lambda is {self.lambda_!r}; accepted: a number >= 0")

    def place(self, view: PlacementView) -> Placement:
        return _least_j(view, self.beta, self.lambda_)


@dataclass(frozen=True, slots=True)
class VertumnusPolicy:
    """The paper's placement cost, with a price of needless recomputing, at weights that follow scarcity.

    J = q + beta*s + lambda*(C*s - C_min*E_Cmin(R, P)) + mu*C_min*(E_Cmin(R, P) - E_Cmin(R*, P*)). The fourth term is
    the GPU time that the smallest degree would take beyond what it would with the best prefix (R*, P*) of any
    candidate; the third compares each candidate with its own prefix and thus leaves a miss free.

    A request only takes something from others while others wait that no idle worker could take. With x the number
    of such requests per worker, at most 1, the weights are 1 + (beta - 1)*x, lambda*x and mu*x: an idle pool serves
    every request as fast as it can, a full one as cheaply as it can.
    """

    beta: float = 3.0
    lambda_: float = 0.3
    mu: float = 4.0
    name: str = "vertumnus"

    def __post_init__(self) -> None:
        PaperPolicy(self.beta, self.lambda_)
        if not 0 <= self.mu < np.inf:
            raise ConfigError(f"mu is {self.mu!r}; accepted: a number >= 0")

    def place(self, view: PlacementView) -> Placement:
        num_outstanding: list[int] = view.num_outstanding.tolist()
        # An idle worker counts -1: it could take one of those who wait.
        num_stranded = sum(num_outstanding) - len(num_outstanding)
        scarcity = min(1.0, max(0, num_stranded) / len(num_outstanding))
        return _least_j(view, 1.0 + (self.beta - 1.0) * scarcity, self.lambda_ * scarcity, self.mu * scarcity)


def _least_j(view: PlacementView, beta: float, lambda_: float, mu: float | None = None) -> Placement:
    # Arrays of no dimension, as NumPy takes Python numbers more slowly.
    service = np.array(beta) * view.service_s
    least_gpu_s = np.array(float(view.smallest_degree)) * view.smallest_service_s
    gpu_time = np.array(lambda_) * (view.degrees * view.service_s - least_gpu_s)
    terms = {"wait": view.wait_s, "delay": view.delay_s, "service": service, "gpu_time": gpu_time}
    load_free = service + gpu_time
    if mu is not None:
        terms["miss"] = np.array(mu) * (least_gpu_s - least_gpu_s.min())
        load_free = load_free + terms["miss"]
    placement = choose(view, view.load_s + load_free, "least J", **terms)
    placement.preferred_degree = int(view.degrees[load_free.argmin()])
    return placement


def names_preferred_degrees(policy: PlacementPolicy) -> bool:
    """Whether the policy's placements say which degree they would prefer, as Algorithm 1 needs it."""
    return isinstance(policy, VertumnusPolicy | PaperPolicy)
