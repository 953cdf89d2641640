"""What happens to the pool, as JSON lines through `logging`. Never a prompt, a token or a key.

One line is one event with its fields, at state changes only; who asked for what and got it is `http.request_log`'s.
"""

import json
import logging
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vertumnus.core.composition import Composition
from vertumnus.core.control_plane import Transition
from vertumnus.core.controller import Proposal, Window
from vertumnus.core.events import ActivateGroups, OpenWorker
from vertumnus.serve.live_request import LiveRequest
from vertumnus.serve.telemetry import Telemetry

__all__ = ["POOL", "PoolLog"]

POOL = logging.getLogger("vertumnus.serve.pool")
"""The message is the whole line; whoever configures logging adds nothing to it."""

REFUSED_PERIOD_S = 1.0
MAX_REASON_CHARS = 300
"""Of what ranks say themselves."""


class PoolLog(Telemetry):
    """An overload refuses thousands of requests a second: of each kind at most one line a second, which counts them."""

    def __init__(self) -> None:
        self._refused: Counter[str] = Counter()
        """Since the last line, by kind."""
        self._refused_s: dict[str, float] = {}
        """When the last line of each kind was written."""

    def request_refused(self, now_s: float, kind: str, num_tokens: int) -> None:
        self._refused[kind] += 1
        last_s = self._refused_s.get(kind)
        if last_s is None or now_s - last_s >= REFUSED_PERIOD_S:
            self._refused_s[kind] = now_s
            _write(logging.WARNING, "refused", kind=kind, num_requests=self._refused.pop(kind))

    def request_restarted(self, now_s: float, request: LiveRequest, reason: str) -> None:
        _write(
            logging.WARNING,
            "restarted",
            request_id=request.generation.request.request_id,
            reason=reason,
            attempt=request.num_attempts + request.num_lost_steps + 1,
        )

    def window_ended(self, now_s: float, window: Window, proposal: Proposal | None) -> None:
        if proposal is not None:
            _write(
                logging.INFO,
                "proposal",
                composition=str(proposal.target),
                reason=proposal.reason.value,
                figures=dict(proposal.figures),
            )

    def composition_requested(self, now_s: float, composition: Composition) -> None:
        _write(logging.INFO, "composition_requested", composition=str(composition))

    def controller_paused(self, now_s: float, is_paused: bool) -> None:
        _write(logging.INFO, "controller_paused" if is_paused else "controller_resumed")

    def pool_drained(self, now_s: float, is_draining: bool) -> None:
        _write(logging.INFO, "pool_drained" if is_draining else "pool_resumed")

    def switch_started(self, now_s: float, action: ActivateGroups) -> None:
        groups = [list(group.ranks) for group in action.groups]
        _write(logging.INFO, "switch_started", epoch=action.epoch, groups=groups)

    def switch_ended(self, now_s: float, *, epoch: int, num_ranks: int, started_s: float, is_ok: bool) -> None:
        level = logging.INFO if is_ok else logging.WARNING
        _write(level, "switch_ended", epoch=epoch, num_ranks=num_ranks, switch_s=now_s - started_s, ok=is_ok)

    def transition_committed(self, now_s: float, transition: Transition) -> None:
        _write(
            logging.INFO,
            "transition",
            operation=str(transition.operation),
            drain_s=transition.drain_s,
            switch_s=transition.switch_s,
        )

    def worker_opened(self, now_s: float, action: OpenWorker) -> None:
        ranks = list(action.group.ranks)
        _write(logging.INFO, "worker_opened", worker=action.worker_id, ranks=ranks, epoch=action.epoch)

    def worker_closed(self, now_s: float, worker_id: int) -> None:
        _write(logging.INFO, "worker_closed", worker=worker_id)

    def rank_gone(self, now_s: float, rank: int, reason: str) -> None:
        _write(logging.WARNING, "rank_lost", rank=rank, reason=reason[:MAX_REASON_CHARS])

    def rank_back(self, now_s: float, rank: int) -> None:
        _write(logging.INFO, "rank_back", rank=rank)

    def step_failed(self, now_s: float, ranks: Sequence[int], reason: str) -> None:
        _write(logging.WARNING, "step_failed", ranks=list(ranks), reason=reason[:MAX_REASON_CHARS])

    def controller_failed(self, now_s: float, fault: Exception) -> None:
        frames = traceback.extract_tb(fault.__traceback__)
        raised_in = next((frame for frame in reversed(frames) if "site-packages" not in frame.filename), frames[-1])
        where = f"{Path(raised_in.filename).name}:{raised_in.lineno}"
        _write(logging.ERROR, "controller_failed", reason=repr(fault)[:MAX_REASON_CHARS], where=where)

    def pool_failed(self, now_s: float, error: Exception) -> None:
        _write(logging.ERROR, "pool_failed", reason=str(error)[:MAX_REASON_CHARS])


def _write(level: int, event: str, **fields: Any) -> None:
    if POOL.isEnabledFor(level):
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
        POOL.log(level, "%s", json.dumps({"event": event, "time": round(time.time(), 3), **rounded}))
