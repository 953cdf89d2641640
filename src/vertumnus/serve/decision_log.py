"""The last decisions of a pool, each with what it was made from. Never a prompt or a token.

Placements have a ring of their own, as they would soon push everything else out of a common one. They are kept as the
core made them and become JSON only when somebody looks.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from typing import Any

from vertumnus.core.composition import Composition, RankGroup
from vertumnus.core.control_plane import Transition
from vertumnus.core.controller import Proposal, Window
from vertumnus.core.events import ActivateGroups, CopyBlocks, OpenWorker, ReclaimBlocks, RequestPlaced
from vertumnus.serve.live_request import LiveRequest
from vertumnus.serve.telemetry import Telemetry

__all__ = ["DecisionLog"]

_Entry = tuple[int, float, Any]
"""Sequence number, when, and a placement or the facts of something else."""
_Placement = tuple[str, int, RequestPlaced]
"""The client's id of the request, its input tokens, and the decision."""


class DecisionLog(Telemetry):
    """The last `size` placements and the last `size` other decisions, numbered 1, 2, 3, ... together."""

    def __init__(self, size: int = 500) -> None:
        self._placements: deque[_Entry] = deque(maxlen=size)
        self._others: deque[_Entry] = deque(maxlen=size)
        self._num_decisions = 0
        self._listeners: set[asyncio.Future[None]] = set()
        self.wall_offset_s = 0.0
        """What has to be added to the loop's time for seconds since 1970."""

    @property
    def last(self) -> int:
        """The number of the newest decision; 0 before the first."""
        return self._num_decisions

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """At most so many decisions, newest first."""
        return [self._facts(entry) for entry in islice(self._backwards(), limit)]

    def since(self, sequence: int, limit: int) -> list[dict[str, Any]]:
        """The newest `limit` decisions after this one, oldest first."""
        found: list[_Entry] = []
        for entry in self._backwards():
            if entry[0] <= sequence or len(found) == limit:
                break
            found.append(entry)
        return [self._facts(entry) for entry in reversed(found)]

    async def wait(self, sequence: int, timeout_s: float) -> None:
        """Returns once there is a decision after this one, or after `timeout_s`."""
        if sequence < self._num_decisions:
            return
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._listeners.add(changed)
        try:
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(changed, timeout_s)
        finally:
            self._listeners.discard(changed)

    # Telemetry

    def request_placed(self, now_s: float, request: LiveRequest, action: RequestPlaced) -> None:
        entry: _Placement = (request.generation.request.request_id, request.attempt.input_tokens, action)
        self._append(self._placements, now_s, entry)

    def request_restarted(self, now_s: float, request: LiveRequest, reason: str) -> None:
        self._note(now_s, "restart", request_id=request.generation.request.request_id, reason=reason)

    def copy_started(self, now_s: float, action: CopyBlocks) -> None:
        self._note(
            now_s,
            "copy",
            copy_id=action.copy_id,
            reason=action.reason.value,
            source_worker_id=action.source_worker_id,
            destination_worker_id=action.destination_worker_id,
            num_blocks=len(action.blocks),
        )

    def reclaim_started(self, now_s: float, action: ReclaimBlocks) -> None:
        self._note(now_s, "reclaim", worker_id=action.worker_id, num_blocks=len(action.blocks))

    def window_ended(self, now_s: float, window: Window, proposal: Proposal | None) -> None:
        if proposal is not None:
            self._note(
                now_s,
                "proposal",
                composition=str(proposal.target),
                reason=proposal.reason.value,
                figures=dict(proposal.figures),
            )

    def composition_requested(self, now_s: float, composition: Composition) -> None:
        self._note(now_s, "composition_requested", composition=str(composition))

    def controller_paused(self, now_s: float, is_paused: bool) -> None:
        self._note(now_s, "controller_paused" if is_paused else "controller_resumed")

    def pool_drained(self, now_s: float, is_draining: bool) -> None:
        self._note(now_s, "pool_drained" if is_draining else "pool_resumed")

    def switch_started(self, now_s: float, action: ActivateGroups) -> None:
        self._note(now_s, "activation", epoch=action.epoch, groups=_ranks(action.groups))

    def transition_committed(self, now_s: float, transition: Transition) -> None:
        operation = transition.operation
        self._note(
            now_s,
            operation.kind.value,
            sources=_ranks(operation.sources),
            results=_ranks(operation.results),
            drain_s=transition.drain_s,
            switch_s=transition.switch_s,
        )

    def worker_opened(self, now_s: float, action: OpenWorker) -> None:
        self._note(
            now_s, "worker_opened", worker_id=action.worker_id, ranks=list(action.group.ranks), epoch=action.epoch
        )

    def worker_closed(self, now_s: float, worker_id: int) -> None:
        self._note(now_s, "worker_closed", worker_id=worker_id)

    def rank_gone(self, now_s: float, rank: int, reason: str) -> None:
        self._note(now_s, "rank_lost", rank=rank, reason=reason)

    def rank_back(self, now_s: float, rank: int) -> None:
        self._note(now_s, "rank_back", rank=rank)

    def step_failed(self, now_s: float, ranks: Sequence[int], reason: str) -> None:
        self._note(now_s, "step_failed", ranks=list(ranks), reason=reason)

    def controller_failed(self, now_s: float, fault: Exception) -> None:
        self._note(now_s, "controller_failed", reason=repr(fault))

    def pool_failed(self, now_s: float, error: Exception) -> None:
        self._note(now_s, "pool_failed", reason=str(error))

    # Keeping and showing

    def _note(self, now_s: float, kind: str, **facts: Any) -> None:
        self._append(self._others, now_s, {"kind": kind, **facts})

    def _append(self, ring: "deque[_Entry]", now_s: float, what: Any) -> None:
        self._num_decisions += 1
        ring.append((self._num_decisions, now_s, what))
        if self._listeners:
            for listener in self._listeners:
                if not listener.done():
                    listener.set_result(None)
            self._listeners.clear()

    def _backwards(self) -> Iterator[_Entry]:
        rings: Iterable[Iterator[_Entry]] = (reversed(self._placements), reversed(self._others))
        return merge(*rings, key=lambda entry: entry[0], reverse=True)

    def _facts(self, entry: _Entry) -> dict[str, Any]:
        sequence, now_s, what = entry
        facts = _placement_facts(*what) if isinstance(what, tuple) else what
        return {"sequence": sequence, "time": round(now_s + self.wall_offset_s, 3), **facts}


def _placement_facts(request_id: str, input_tokens: int, action: RequestPlaced) -> dict[str, Any]:
    """With the candidates as columns, in the order of their worker ids; where waiting for another request's prefix was
    among the choices, in that order twice: without and with waiting."""
    placement = action.placement
    row = placement.row
    return {
        "kind": "placement",
        "request_id": request_id,
        "attempt": action.request_id,
        "worker_id": action.worker_id,
        "degree": int(placement.degrees[row]),
        "is_redirected": action.is_redirected,
        "input_tokens": input_tokens,
        "matched_tokens": placement.matched_tokens,
        "reusable_tokens": int(placement.reusable_tokens[row]),
        "predicted_s": float(placement.service_s[row]),
        "preferred_degree": placement.preferred_degree,
        "reason": placement.reason,
        "awaited_attempt": placement.awaited_request_id,
        "candidates": {
            "chosen": row,
            "worker_id": placement.worker_ids.tolist(),
            "degree": placement.degrees.astype(int).tolist(),
            "reusable_tokens": placement.reusable_tokens.astype(int).tolist(),
            "awaited_tokens": None
            if placement.awaited_tokens is None
            else placement.awaited_tokens.astype(int).tolist(),
            "service_s": placement.service_s.tolist(),
            "cost": placement.cost.tolist(),
            "terms": {name: values.tolist() for name, values in placement.terms.items()},
        },
    }


def _ranks(groups: Iterable[RankGroup]) -> list[list[int]]:
    return [list(group.ranks) for group in groups]
