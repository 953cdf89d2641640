"""Prints the tables of docs/results.md from the records in benchmarks/results/.

python benchmarks/tables.py placement|adaptation|cache|speed|engine|memory|vllm|live|real|validate|reproduction
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return rows


def table(headings: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(headings) + " |")
    print("|" + " --- |" * len(headings))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def placement() -> None:
    """One table per queue: policies down, compositions across, mean TTFT in seconds / attainment."""
    rows = load("quality-placement")
    for queue in ("fifo", "shortest"):
        cells = {(row["policy"], case(row)): row for row in rows if row["queue"] == queue}
        cases = list(dict.fromkeys(each for _, each in cells))
        policies = list(dict.fromkeys(policy for policy, _ in cells))
        lines = [
            [policy, *(f"{cells[policy, each]['mean_ttft_s']:.2f} / {percent(cells[policy, each])}" for each in cases)]
            for policy in policies
        ]
        table([f"{queue}: mean TTFT s / attainment", *cases], lines)


def adaptation() -> None:
    rows = load("quality-adaptation")
    lines = [
        [
            f"{row['rate_per_s']:.0f}",
            row["label"],
            f"{row['mean_ttft_s']:.3f}",
            f"{row['p99_ttft_s']:.1f}",
            percent(row),
            f"{row['num_splits'] + row['num_merges']:.0f}",
        ]
        for row in rows
    ]
    table(["req/s", "pool", "mean TTFT s", "P99 s", "attainment", "splits + merges"], lines)


def cache() -> None:
    rows = load("quality-cache")
    lines = [
        [
            case(row),
            row["label"],
            f"{row['mean_ttft_s']:.3f}",
            f"{row['p90_ttft_s']:.2f}",
            f"{row['token_hit_ratio']:.3f}",
            f"{row['num_replications']:.0f}",
            f"{row['num_pulls']:.0f}",
        ]
        for row in rows
    ]
    table(["composition @ req/s", "variant", "mean TTFT s", "P90 s", "token hit", "replicas", "pulls"], lines)


def speed() -> None:
    lines = [
        [
            str(row["num_workers"]),
            f"{row['prompt_tokens'] // 1024}K",
            f"{row['cached_ratio']:.0%}",
            str(row["num_queued"]),
            f"{1000 * row['p50_s']:.2f}",
            f"{1000 * row['p99_s']:.2f}",
        ]
        for row in load("bench-placement")
    ]
    table(["workers", "prompt", "cached", "queued per worker", "p50 ms", "p99 ms"], lines)
    for row in [*load("bench-trie"), *load("bench-sim")]:
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})


def case(row: dict[str, Any]) -> str:
    return f"`{row['composition']}` @ {row['rate_per_s']:.0f}"


def percent(row: dict[str, Any]) -> str:
    return f"{row['slo_attainment_ratio']:.1%}"


def engine() -> None:
    """Prefill of both records, then decode, then switches."""
    for name in ("bench-engine", "bench-engine-large"):
        rows = [entry for entry in load(name) if "prompt_tokens" in entry]
        table(
            [
                "tokens",
                "cached",
                "degree",
                "prefix path",
                "p50 s",
                "speed-up",
                "over predicted",
                "wait s",
                "MB received",
            ],
            [
                [
                    f"{entry['prompt_tokens']:,}",
                    f"{entry['prefix_tokens']:,}",
                    str(entry["degree"]) if "path" in entry else "transformers",
                    entry.get("path", "-"),
                    f"{entry['p50_s']:.2f}",
                    f"{entry['speedup']:.2f}" if entry.get("degree", 1) > 1 and "speedup" in entry else "",
                    f"{entry['over_predicted']:.2f}" if "over_predicted" in entry else "",
                    f"{entry['wait_s']:.2f}" if "wait_s" in entry else "",
                    f"{entry['received_bytes'] / 1e6:.0f}" if "received_bytes" in entry else "",
                ]
                for entry in rows
            ],
        )
    table(
        ["streams", "tokens/s", "times one stream"],
        [
            [str(entry["streams"]), f"{entry['tokens_per_s']:.0f}", f"{entry['throughput_ratio']:.1f}"]
            for entry in load("bench-engine")
            if "streams" in entry
        ],
    )


def memory() -> None:
    """Of a step: tokens and degree down, what was measured and what the formula says across."""
    table(
        ["model", "new tokens", "cached", "degree", "peak MiB", "formula MiB", "peak over formula"],
        [
            [
                entry["model"],
                f"{entry['new_tokens']:,}",
                f"{entry['prefix_tokens']:,}",
                str(entry["degree"]),
                f"{entry['peak_bytes'] / 2**20:.0f}",
                f"{entry['formula_bytes'] / 2**20:.0f}",
                f"{entry['over_formula']:.2f}",
            ]
            for entry in load("bench-engine-memory")
        ],
    )


def live() -> None:
    """The router, then adaptation on the live pool: mean TTFT by phase, transients left out, and overall."""
    table(
        ["load", "TTFT p50 ms", "p99 ms", "CPU us/request", "requests per CPU s", "longest turn ms", "collection ms"],
        [
            [
                f"{row['rate_per_s']:.0f}/s" if "max_in_flight" not in row else f"{row['max_in_flight']:,} streams",
                f"{1000 * row['p50_ttft_s']:.1f}",
                f"{1000 * row['p99_ttft_s']:.1f}",
                f"{row['cpu_us_per_request']:,.0f}",
                f"{row['requests_per_cpu_s']:,.0f}",
                f"{1000 * row['max_loop_busy_cpu_s']:.0f}",
                f"{1000 * row['longest_collection_cpu_s']:.1f}",
            ]
            for row in load("bench-router")
        ],
    )
    rows = load("adaptation-live")
    num_phases = len(rows[0]["num_by_phase"])
    table(
        ["pool", *(f"phase {number + 1}" for number in range(num_phases)), "overall", "attainment"],
        [
            [
                row["label"],
                *(f"{ttft_s:.2f}" for ttft_s in row["mean_ttft_s_by_phase_without_transients"]),
                f"{row['mean_ttft_s']:.2f}",
                percent(row),
            ]
            for row in rows
        ],
    )


def vllm() -> None:
    """Prefill and decode beside vLLM's CPU build."""
    rows = load("bench-vllm")
    table(
        ["engine", "prompt tokens", "p50 s", "vLLM over it"],
        [
            [row["engine"], f"{row['prompt_tokens']:,}", f"{row['p50_s']:.2f}", f"{row['over_vllm_ratio']:.2f}"]
            for row in rows
            if "prompt_tokens" in row
        ],
    )
    table(
        ["engine", "streams", "tokens/s", "vLLM over it"],
        [
            [row["engine"], str(row["streams"]), f"{row['tokens_per_s']:.0f}", f"{row['over_vllm_ratio']:.2f}"]
            for row in rows
            if "streams" in row
        ],
    )


def real() -> None:
    """A real model: mean TTFT by phase and overall."""
    table(
        ["pool", "short 1", "long 1", "short 2", "long 2", "overall", "P90"],
        [
            [
                row["label"],
                *(f"{each:.2f}" for each in row["mean_ttft_s_by_phase"]),
                f"{row['mean_ttft_s']:.2f}",
                f"{row['p90_ttft_s']:.2f}",
            ]
            for row in load("adaptation-real")
        ],
    )


VALIDATED = ("mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "p99_ttft_s", "token_hit_ratio")


def validate() -> None:
    """Live and simulated, what they differ by, and the widest simulated range under arrivals a millisecond apart."""
    lines = []
    for path in sorted(RESULTS.glob("validate-*.json")):
        (row,) = json.loads(path.read_text())["results"]
        both, off = [(row["live"][name], row["simulated"][name]) for name in VALIDATED], row["difference"]
        lines.append(
            [
                path.stem.removeprefix("validate-"),
                f"{row['rate_per_s']:.2g}",
                *(f"{live:.3f} / {simulated:.3f}" for live, simulated in both[:4]),
                f"{both[4][0]:.1%} / {both[4][1]:.1%}",
                f"{off['mean_ttft_ratio']:+.1%}, {off['p90_ttft_ratio']:+.1%}, "
                f"{100 * off['token_hit_ratio']:+.1f} points",
                f"{row['decisions']['other_degree_ratio']:.0%} / {row['decisions']['other_ranks_ratio']:.0%}",
                f"{row['correlation']['spearman_of_ttft']:.3f}",
                " to ".join(f"{each:.3f}" for each in row["jittered"]["mean_ttft_s"]),
            ]
        )
    heads = ["run", "req/s", "mean", "P50", "P90", "P99", "token hit", "mean, P90, hit differ by"]
    table([*heads, "other degree / ranks", "rank correlation", "jittered mean"], lines)


def reproduction() -> None:
    """Published figures and other headlines beside ours, from the records of `vertumnus reproduce`."""
    for path in sorted((RESULTS / "reproduce").glob("*.json")):
        outcome = json.loads(path.read_text())["outcome"]
        print(f"\n{path.stem}\n" + "".join(f"\n{note}" for note in outcome["notes"]))
        table(
            ["what", "published", "ours", "label of ours"],
            [
                [one["what"], one["published"] or "-", one["ours"] or "-", one["label"]]
                for one in outcome["comparisons"]
            ],
        )


TABLES: dict[str, Callable[[], None]] = {
    "placement": placement,
    "adaptation": adaptation,
    "cache": cache,
    "speed": speed,
    "engine": engine,
    "live": live,
    "memory": memory,
    "vllm": vllm,
    "real": real,
    "validate": validate,
    "reproduction": reproduction,
}

if __name__ == "__main__":
    TABLES[sys.argv[1]]()
