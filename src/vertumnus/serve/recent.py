"""The last minutes: what arrived, what it asked for, and how it was served."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vertumnus.core.events import RequestPlaced
from vertumnus.core.slo import Slo
from vertumnus.serve.live_request import LiveRequest
from vertumnus.serve.metrics import MISSED_BY_REFUSAL, slo_verdict
from vertumnus.serve.telemetry import Telemetry

__all__ = ["Recent"]

SLOT_S = 5.0
MAX_TTFTS = 4096


@dataclass(slots=True)
class _Slot:
    """Sums over the events of SLOT_S seconds."""

    number: int
    capacity_s_per_s: float | None
    num_arrivals: int = 0
    num_long: int = 0
    demand_s: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    reachable_tokens: int = 0
    slo_tokens: int = 0
    slo_met_tokens: int = 0


class Recent(Telemetry):
    """Of the last `horizon_s` seconds; percentiles of the last 4096 TTFTs of them."""

    def __init__(self, slo: Slo | None = None, horizon_s: float = 300.0) -> None:
        self._slo = slo or Slo()
        self._horizon_s = horizon_s
        self._slots: deque[_Slot] = deque(maxlen=int(horizon_s / SLOT_S))
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MAX_TTFTS)
        """(when, seconds)."""
        self._capacity: Callable[[], float | None] = lambda: None
        self._long_tokens: Callable[[], int] = lambda: 1 << 62

    def watch(self, capacity: Callable[[], float | None], long_tokens: Callable[[], int]) -> None:
        """Where to ask what the pool can carry and which requests are long."""
        self._capacity, self._long_tokens = capacity, long_tokens

    def request_placed(self, now_s: float, request: LiveRequest, action: RequestPlaced) -> None:
        if action.is_redirected or request.num_attempts > 1:
            return
        slot = self._slot(now_s)
        slot.num_arrivals += 1
        slot.num_long += request.num_prompt_tokens > self._long_tokens()
        slot.demand_s += request.predicted_s

    def request_refused(self, now_s: float, kind: str, num_tokens: int) -> None:
        if kind in MISSED_BY_REFUSAL:
            self._slot(now_s).slo_tokens += num_tokens

    def first_token(self, now_s: float, request: LiveRequest) -> None:
        slot = self._slot(now_s)
        slot.prompt_tokens += request.num_prompt_tokens
        slot.reused_tokens += request.reused_tokens
        slot.reachable_tokens += request.reachable_tokens
        self._ttfts.append((now_s, now_s - request.arrival_s))
        self._judge(now_s, request, None)

    def request_ended(self, now_s: float, request: LiveRequest, outcome: str) -> None:
        if request.first_token_s is None:
            self._judge(now_s, request, outcome)

    def _judge(self, now_s: float, request: LiveRequest, outcome: str | None) -> None:
        num_tokens = request.num_prompt_tokens
        verdict = slo_verdict(self._slo, num_tokens, now_s - request.arrival_s, outcome)
        if verdict is not None:
            slot = self._slot(now_s)
            slot.slo_tokens += num_tokens
            slot.slo_met_tokens += num_tokens * verdict

    def _slot(self, now_s: float) -> _Slot:
        number = int(now_s / SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            self._slots.append(_Slot(number, self._capacity()))
        return self._slots[-1]

    def figures(self, now_s: float) -> dict[str, Any]:
        """Sums and percentiles; None for what nothing is known of."""
        slots = self._since(now_s - self._horizon_s)
        tokens = sum(slot.prompt_tokens for slot in slots)
        arrivals = sum(slot.num_arrivals for slot in slots)
        ttfts = [ttft_s for when_s, ttft_s in self._ttfts if when_s >= now_s - self._horizon_s]
        p50, p90, p99 = np.percentile(ttfts, [50, 90, 99]).tolist() if ttfts else (None, None, None)
        return {
            "horizon_s": self._horizon_s,
            "num_answered": len(ttfts),
            "num_arrivals": arrivals,
            "ttft_s": {"mean": sum(ttfts) / len(ttfts) if ttfts else None, "p50": p50, "p90": p90, "p99": p99},
            "slo_attainment_ratio": _ratio(
                sum(slot.slo_met_tokens for slot in slots), sum(slot.slo_tokens for slot in slots)
            ),
            "hit_ratio": _ratio(sum(slot.reused_tokens for slot in slots), tokens),
            "reachable_hit_ratio": _ratio(sum(slot.reachable_tokens for slot in slots), tokens),
            "long_ratio": _ratio(sum(slot.num_long for slot in slots), arrivals),
        }

    def history(self, now_s: float, wall_offset_s: float) -> dict[str, list[Any]]:
        """One point every 5 seconds, oldest first, the present one left out as it is not full yet.

        `wall_offset_s`: what has to be added to the loop's time for seconds since 1970.
        """
        last = int(now_s / SLOT_S)
        by_number = {slot.number: slot for slot in self._slots}
        points: dict[str, list[Any]] = {
            name: [] for name in ("time", "demand_s_per_s", "capacity_s_per_s", "long_ratio", "hit_ratio")
        }
        capacity_s_per_s: float | None = None
        if self._slots:
            for number in range(max(self._slots[0].number, last - self._slots.maxlen), last):  # type: ignore[operator]
                slot = by_number.get(number) or _Slot(number, capacity_s_per_s)
                capacity_s_per_s = slot.capacity_s_per_s
                points["time"].append(round((number + 1) * SLOT_S + wall_offset_s, 3))
                points["demand_s_per_s"].append(slot.demand_s / SLOT_S)
                points["capacity_s_per_s"].append(capacity_s_per_s)
                points["long_ratio"].append(_ratio(slot.num_long, slot.num_arrivals))
                points["hit_ratio"].append(_ratio(slot.reused_tokens, slot.prompt_tokens))
        return points

    def _since(self, start_s: float) -> list[_Slot]:
        first = int(start_s / SLOT_S)
        return [slot for slot in self._slots if slot.number >= first]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
