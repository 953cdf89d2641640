"""Results of runs as rows of a table."""

from typing import Any

from vertumnus.cli.output import percent, seconds

HEADINGS = (
    "policy",
    "composition",
    "req/s",
    "mean TTFT s",
    "P50",
    "P90",
    "P99",
    "SLO (by tokens)",
    "token hit",
    "done",
    "rejected",
    "splits",
    "merges",
    "copies",
    "wall s",
)


def result_row(entry: dict[str, Any]) -> list[str]:
    """One entry of `results` as cells under HEADINGS."""
    composition = entry["composition"]
    if entry["final_composition"] != composition:
        composition = f"{composition} > {entry['final_composition']}"
    return [
        entry["policy"],
        composition,
        f"{entry['rate_per_s']:.4g}",
        *(seconds(entry[f"{name}_ttft_s"]) for name in ("mean", "p50", "p90", "p99")),
        percent(entry["slo_attainment_ratio"]),
        percent(entry["token_hit_ratio"]),
        *(
            f"{entry[name]:,.6g}"
            for name in ("num_completed", "num_rejected", "num_splits", "num_merges", "num_replications")
        ),
        f"{entry['wall_s']:.1f}",
    ]
