"""By how much one policy leads the strongest of the others, at the highest rates that are sustained."""

from collections.abc import Sequence
from dataclasses import dataclass

from vertumnus.reproduction.rows import Row
from vertumnus.reproduction.tuning import mean_ttft_s

SUSTAINED_RATIO = 0.9
"""A rate is sustained if the token-weighted attainment is at least this."""

NUM_HIGHEST = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """One rate. Positive where ours is better."""

    rate_per_s: float
    is_highest: bool
    rival: str
    """The other of least mean TTFT."""
    mean_ratio: float
    """Share of the rival's mean TTFT that ours saves."""
    attainment_rival: str
    """The other of most attainment."""
    attainment_points: float
    """Difference of the attainment ratios."""


def sustained_rates(rows: Sequence[Row]) -> list[float]:
    """Rates that at least one of the rows sustains, highest first; the lowest rate where none is."""
    rates = {row["rate_per_s"] for row in rows if (row["slo_attainment_ratio"] or 0.0) >= SUSTAINED_RATIO}
    return sorted(rates or {min(row["rate_per_s"] for row in rows)}, reverse=True)


def leads(rows: Sequence[Row], ours: str) -> list[Lead]:
    """At the highest rates that are sustained, highest first. What begins with our name is no rival."""
    made: list[Lead] = []
    for rate_per_s in sustained_rates(rows)[:NUM_HIGHEST]:
        at_rate = [row for row in rows if row["rate_per_s"] == rate_per_s]
        own = next(row for row in at_rate if row["policy"] == ours)
        rivals = [row for row in at_rate if not row["policy"].startswith("vertumnus")]
        fastest = min(rivals, key=mean_ttft_s)
        surest = max(rivals, key=lambda row: row["slo_attainment_ratio"] or 0.0)
        made.append(
            Lead(
                rate_per_s=rate_per_s,
                is_highest=not made,
                rival=fastest["policy"],
                mean_ratio=1 - mean_ttft_s(own) / mean_ttft_s(fastest),
                attainment_rival=surest["policy"],
                attainment_points=(own["slo_attainment_ratio"] or 0.0) - (surest["slo_attainment_ratio"] or 0.0),
            )
        )
    return made
