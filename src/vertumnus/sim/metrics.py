"""What a run is judged by. `docs/metrics.md` defines every figure in symbols; each is computed here alone."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.slo import Slo

FloatArray = NDArray[np.float64]


@dataclass(slots=True)
class RequestRecords:
    """One entry per finished request, in order of completion."""

    request_id: list[int] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    reused_tokens: list[int] = field(default_factory=list)
    degree: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.request_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """The figures of a run that are means and quantiles over requests; None where no request was measured.

    The attainment is 0 where all requests were rejected.
    """

    num_measured: int
    mean_ttft_s: float | None
    p50_ttft_s: float | None
    p90_ttft_s: float | None
    p99_ttft_s: float | None
    mean_wait_s: float | None
    slo_attainment_ratio: float | None
    token_hit_ratio: float | None


def summarise(records: RequestRecords, rejected_tokens: int, slo: Slo, warmup_s: float) -> LatencySummary:
    """Summarises the requests that arrived at `warmup_s` or later.

    Rejected requests' tokens (those after the warm-up) count in the denominator of the attainment: a refused request
    did not meet its target.
    """
    arrival_s = np.array(records.arrival_s)
    measured = arrival_s >= warmup_s
    num_measured = int(measured.sum())
    if num_measured == 0:
        return LatencySummary(
            num_measured=0,
            mean_ttft_s=None,
            p50_ttft_s=None,
            p90_ttft_s=None,
            p99_ttft_s=None,
            mean_wait_s=None,
            slo_attainment_ratio=0.0 if rejected_tokens else None,
            token_hit_ratio=None,
        )
    ttft_s = np.array(records.ttft_s)[measured]
    tokens = np.array(records.input_tokens, dtype=np.float64)[measured]
    reused = np.array(records.reused_tokens, dtype=np.float64)[measured]
    wait_s = (np.array(records.start_s) - arrival_s)[measured]
    p50, p90, p99 = np.percentile(ttft_s, (50, 90, 99))
    attained = float(tokens[ttft_s <= slo.tau_s(tokens)].sum())
    return LatencySummary(
        num_measured=num_measured,
        mean_ttft_s=float(ttft_s.mean()),
        p50_ttft_s=float(p50),
        p90_ttft_s=float(p90),
        p99_ttft_s=float(p99),
        mean_wait_s=float(wait_s.mean()),
        slo_attainment_ratio=attained / (float(tokens.sum()) + rejected_tokens),
        token_hit_ratio=float(reused.sum() / tokens.sum()),
    )
