"""Large pools: what a decision and a scan take, and what several routers with stale views lose, with workers of their
own or sharing them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from matplotlib.figure import Figure

from vertumnus.bench import placement, trie
from vertumnus.core.composition import Composition
from vertumnus.core.profile import load_profile
from vertumnus.reproduction import figures
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.cells import Cell
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.rows import Label, Outcome, Row
from vertumnus.reproduction.sharding import BOUND, by_first_block, by_longest_prefix
from vertumnus.reproduction.traffic import NODE_GPUS, planned, settings, whole, workload
from vertumnus.sim.compare import policy_maker
from vertumnus.sim.several_routers import RouterSettings
from vertumnus.workload.synthesis import synthesise
from vertumnus.workload.trace import Trace

LOAD = 0.8
NUM_ROUTERS = (2, 4, 8)
STALE_S = 0.5
SHARED_STALE_S = (0.1, STALE_S)
SHARDS = {"first block": by_first_block, "longest prefix": by_longest_prefix}
WORKERS_PER_64 = 144
"""GPUs of the 64 workers that the placement benchmark's pools are multiples of."""
SCAN_BLOCKS = 200_000


def _run(bench: Bench) -> Outcome:
    simulated = ", ".join(f"{num_gpus:,}" for num_gpus in bench.scale.quality_gpus)
    return Outcome(
        rows=[*_quality(bench), *_timed(bench)],
        notes=[
            f"quality is simulated for {simulated} GPUs",
            "k routers by a rule are k control planes, each with a k-th of the nodes; none sees another's queues or "
            "caches, and cache reports come at once or half a second late. What is in front of them sends a request by "
            "the hash of its first block, or to the router that got most of its beginning before and has at most "
            f"{BOUND:g} times the mean load",
            "k routers that share get every k-th request and have all workers; a router knows its own placements at "
            "once, what others placed and what caches hold as late as said, and what ends or moves at once. Unless "
            "'ties alike', each has an order of its own for workers that cost the same",
            "decisions and scans are measured on this machine, whatever else it did",
        ],
    )


def _quality(bench: Bench) -> list[Row]:
    """Cells of one router, of several with a share of the workers each, and of several that share all of them."""
    profile = load_profile()
    traffic = workload(bench, "toolagent")
    unit = bench.scale.num_gpus
    per_gpu_per_s = LOAD * traffic.capacity_per_s(profile, unit) / unit
    shape = planned(bench, traffic, profile)
    cells = []
    for num_gpus in bench.scale.quality_gpus:
        trace = _of_more_users(bench, num_gpus / unit, round(bench.scale.requests_per_gpu * num_gpus))
        one = Cell(
            columns={
                "kind": "quality",
                "num_gpus": num_gpus,
                "num_routers": 1,
                "sharding": "",
                "report_delay_s": 0.0,
                "routers": "1 router",
            },
            trace=trace,
            profile=profile,
            make_policy=policy_maker("vertumnus"),
            settings=replace(
                settings(bench), num_gpus=num_gpus, composition=_stretched(shape, num_gpus), is_fixed=True
            ),
            rate_per_s=per_gpu_per_s * num_gpus,
        )
        cells.append(one)
        for num_routers in NUM_ROUTERS:
            share_gpus = num_gpus // num_routers
            if share_gpus >= 2 * NODE_GPUS:
                cells += [
                    replace(
                        _late(one, num_routers, f"by {shard}", delay_s),
                        num_routers=num_routers,
                        shard=SHARDS[shard],
                        routed=_stretched(shape, share_gpus),
                    )
                    for shard, delay_s in product(SHARDS, (0.0, STALE_S))
                ]
            cells += [_sharing(_late(one, num_routers, "that share", delay_s), delay_s) for delay_s in SHARED_STALE_S]
        most = max(NUM_ROUTERS)
        without = _sharing(_late(one, most, "that share, no moves", STALE_S), STALE_S)
        alike = _late(one, most, "that share, ties alike", STALE_S)
        cells.append(replace(without, settings=replace(without.settings, has_moves=False)))
        cells.append(_sharing(alike, STALE_S, has_own_order=False))
    return bench.measure(cells)


def _late(one: Cell, num_routers: int, how: str, delay_s: float) -> Cell:
    """The cell of one router, with several, whose caches' reports are late."""
    name = f"{num_routers} routers {how}" + (f", {delay_s:g} s late" if delay_s else "")
    columns = {"num_routers": num_routers, "sharding": how, "report_delay_s": delay_s, "routers": name}
    return replace(one, columns=one.columns | columns, settings=replace(one.settings, report_delay_s=delay_s))


def _sharing(cell: Cell, delay_s: float, has_own_order: bool = True) -> Cell:
    num_routers = cell.columns["num_routers"]
    routers = RouterSettings(num_routers=num_routers, delay_s=delay_s, has_own_order=has_own_order)
    return replace(cell, settings=replace(cell.settings, routers=routers))


def _of_more_users(bench: Bench, times: float, num_requests: int) -> Trace:
    """The traffic of so many times the users, who think no faster: playing one trace faster would squeeze all turns of
    a session into the time of its first."""
    rate_per_s = times * whole(bench, "toolagent").mean_rate_per_s
    return synthesise("toolagent", seed=bench.seed, rate_per_s=rate_per_s, duration_s=num_requests / rate_per_s)


def _stretched(shape: Composition, num_gpus: int) -> Composition:
    """About the same shares of GPUs in a pool of another size; what is left over goes to the smallest degree."""
    counts = {degree: count * num_gpus // shape.num_gpus for degree, count in shape}
    smallest = min(counts)
    left = num_gpus - sum(degree * count for degree, count in counts.items())
    counts[smallest] += left // smallest
    left %= smallest
    if left:
        counts[1] = counts.get(1, 0) + left
    return Composition.of({degree: count for degree, count in counts.items() if count})


def _timed(bench: Bench) -> list[Row]:
    """Decisions and scans of this program on this machine, by size of the pool."""
    rows: list[Row] = []
    num_samples = 10 if bench.scale.name == "tiny" else 60
    for num_gpus in bench.scale.pool_gpus:
        workers = 64 * max(1, round(num_gpus / WORKERS_PER_64))
        for entry in placement.run(
            seed=bench.seed,
            num_samples=num_samples,
            num_workers=(workers,),
            prompt_tokens=(8192,),
            cached_ratios=(0.5,),
        ):
            rows.append(
                {
                    "kind": "decision under load" if entry["num_queued"] else "decision",
                    "num_gpus": num_gpus,
                    "num_workers": workers,
                    "p50_s": entry["p50_s"],
                    "p99_s": entry["p99_s"],
                    "label": Label.MEASURED.value,
                }
            )
        num_blocks = 2_000 if bench.scale.name == "tiny" else SCAN_BLOCKS
        for entry in trie.run(num_blocks=num_blocks, num_workers=workers, seed=bench.seed, num_samples=50):
            if entry["operation"] == "scan":
                rows.append(
                    {
                        "kind": "scan, full stores" if entry["stores_full"] else "scan, room in all stores",
                        "num_gpus": num_gpus,
                        "num_workers": workers,
                        "p50_s": entry["p50_s"],
                        "label": Label.MEASURED.value,
                    }
                )
    return rows


def _draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    figure, (left, middle, right) = figures.panels("Large pools", 1, 3)
    quality = [row for row in rows if row["kind"] == "quality"]
    figures.lines(left, quality, "num_gpus", "mean_ttft_s", "routers")
    figures.lines(middle, quality, "num_gpus", "token_hit_ratio", "routers", scale=100)
    timed = [row | {"ms": 1000 * row["p50_s"]} for row in rows if row["kind"] != "quality"]
    figures.lines(right, timed, "num_gpus", "ms", "kind")
    right.set_yscale("log")
    right.legend(fontsize=7, frameon=False)
    for axis, title, unit in (
        (left, "mean TTFT (simulated)", "s"),
        (middle, "token hit (simulated)", "%"),
        (right, "decision and scan (measured)", "ms"),
    ):
        axis.set_xscale("log", base=2)
        figures.finish(axis, title, "GPUs", unit)
    figures.legend(figure, left, 4)
    return {"Scale": figure}


EXPERIMENTS = (
    Experiment(
        name="scale",
        title="Scale: 64 to 4,096 GPUs, one router or several",
        paper="64 GPUs, of which 40 prefill; nothing larger.",
        ours=(
            "Tool-agent traffic of as many more users as there are more GPUs, at the same load, the planned "
            "composition stretched. Quality is simulated; the time of a decision (8K prompt, half of it cached, "
            f"64-token blocks; under load with {placement.NUM_QUEUED} requests queued per worker) and of a scan is "
            "measured."
        ),
        budget_s=180,
        run=_run,
        draw=_draw,
    ),
)
