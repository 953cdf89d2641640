"""How well requests are served: placement alone, adaptation, and copies, on a real trace; writes JSON and a table.

    python benchmarks/quality.py placement TRACE      policies x compositions, FIFO and shortest, controller off
    python benchmarks/quality.py adaptation TRACE     from wrong compositions and auto, against fixed compositions
    python benchmarks/quality.py cache TRACE          replication and pulls on and off, synthesised tool-agent traffic

Every figure is a mean over seeds (`--seeds`), which spread the trace's coarse stamps. 40 GPUs, the H20-3e profile
(estimated coefficients), 1,400 KV blocks of 512 tokens per GPU. Results are simulated, and say so.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from vertumnus import POLICIES, Composition, Discipline, SimulationSettings, Trace, load_profile, read_trace, synthesise
from vertumnus.bench.environment import environment
from vertumnus.sim.compare import Cell, policy_maker, run_cells
from vertumnus.sim.simulate import Pulls

RESULTS = Path(__file__).parent / "results"
BASE = SimulationSettings(num_gpus=40, blocks_per_rank=1400)
PLACEMENT_CASES = (("8x2,4x4,1x8", 12.0), ("8x2,4x4,1x8", 18.0), ("12x2,4x4", 20.0), ("16x1,8x2,2x4", 25.0))
ADAPTATION_CASES = (("20x2", 10.0), ("8x4,1x8", 15.0), ("8x4,1x8", 20.0), ("12x2,4x4", 25.0))
FIXED = {
    10.0: ("8x4,1x8", "4x2,4x4,2x8", "8x2,4x4,1x8"),
    15.0: ("8x4,1x8", "8x2,4x4,1x8", "4x1,6x2,6x4"),
    20.0: ("8x2,4x4,1x8", "12x2,4x4", "16x1,8x2,2x4"),
    25.0: ("12x2,4x4", "16x1,8x2,2x4", "24x1,4x2,2x4"),
}


def placement_cells(policies: Sequence[str]) -> list[Cell]:
    alone = replace(BASE, is_fixed=True, has_replication=False)
    return [
        Cell(
            make_policy=policy_maker(policy),
            settings=replace(alone, composition=Composition.parse(composition), discipline=discipline),
            rate_per_s=rate_per_s,
        )
        for discipline in Discipline
        for composition, rate_per_s in PLACEMENT_CASES
        for policy in policies
    ]


def adaptation_cells(trace: Trace) -> list[Cell]:
    cells = []
    for start, rate_per_s in ADAPTATION_CASES:
        half_s = trace.rescaled(rate_per_s).duration_s / 2
        base = replace(BASE, has_replication=False, warmup_s=half_s)
        cell = partial(Cell, make_policy=policy_maker("vertumnus"), rate_per_s=rate_per_s)
        cells.append(cell(settings=replace(base, composition=Composition.parse(start)), label=f"adaptive from {start}"))
        cells.append(cell(settings=base, label="adaptive from auto"))
        for fixed in FIXED[rate_per_s]:
            settings = replace(base, composition=Composition.parse(fixed), is_fixed=True)
            cells.append(cell(settings=settings, label=f"fixed {fixed}"))
    return cells


def cache_cells() -> list[Cell]:
    fixed = replace(BASE, is_fixed=True, blocks_per_rank=300)
    variants = (
        ("local LRU alone", {"has_replication": False, "pulls": Pulls.NONE}),
        ("+ replication", {"pulls": Pulls.NONE}),
        ("+ pulls", {"has_replication": False, "pulls": Pulls.ANY}),
        ("+ both", {"pulls": Pulls.ANY}),
    )
    return [
        Cell(
            make_policy=policy_maker("vertumnus"),
            settings=replace(fixed, composition=Composition.parse(composition), **options),
            rate_per_s=rate_per_s,
            label=label,
        )
        for composition, rate_per_s in (("16x1,8x2,2x4", 30.0), ("24x1,4x2,2x4", 40.0), ("32x1,4x2", 50.0))
        for label, options in variants
    ]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["queue"], row["composition"], row["rate_per_s"], row["policy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=("placement", "adaptation", "cache"))
    parser.add_argument("trace", nargs="?", help="Mooncake conversation trace (not for `cache`)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--policies", default=",".join(POLICIES), help="for `placement`")
    parser.add_argument("--label", default="", help="only the cells whose label begins so")
    options = parser.parse_args()
    if options.experiment == "cache":
        traces = [synthesise("toolagent", seed=seed) for seed in range(options.seeds)]
        cells = cache_cells()
    else:
        traces = [read_trace(options.trace, seed=seed) for seed in range(options.seeds)]
        if options.experiment == "adaptation":
            traces = [trace.repeated(3) for trace in traces]
            cells = adaptation_cells(traces[0])
        else:
            cells = placement_cells(options.policies.split(","))
    cells = [cell for cell in cells if cell.label.startswith(options.label)]
    results = run_cells(cells, traces, load_profile(), jobs=os.cpu_count() or 1)
    rows = []
    for result in results:
        entry = result.to_json()
        entry.pop("runs", None)
        entry["queue"] = result.cell.settings.discipline.value
        rows.append(entry)
    command = f"python benchmarks/quality.py {options.experiment} --seeds {options.seeds}"
    document = {"experiment": options.experiment, "seeds": options.seeds, "traffic": traces[0].name}
    document |= {"environment": environment(command), "results": rows}
    path = RESULTS / f"quality-{options.experiment}.json"
    if options.experiment == "placement" and path.exists():
        # Other policies keep their rows of the record; in its order, so that tables keep theirs.
        fresh = {_key(row): row for row in rows}
        kept = [fresh.pop(_key(row), row) for row in json.loads(path.read_text())["results"]]
        document["results"] = [*kept, *fresh.values()]
    path.write_text(json.dumps(document, indent=1) + "\n")
    print("| queue | composition | rate | policy or variant | mean TTFT s | P99 s | attainment | hit | splits+merges |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['queue']} | {row['composition']} | {row['rate_per_s']:.0f} | {row.get('label') or row['policy']} "
            f"| {row['mean_ttft_s']:.3f} | {row['p99_ttft_s']:.2f} | {row['slo_attainment_ratio']:.3f} "
            f"| {row['token_hit_ratio']:.3f} | {row['num_splits'] + row['num_merges']:.0f} |"
        )


if __name__ == "__main__":
    main()
