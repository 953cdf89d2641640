"""Figure 13: a workload in phases, an adaptive pool against two fixed ones; and what a reconfiguration takes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from matplotlib.figure import Figure

from vertumnus.core.composition import Composition
from vertumnus.core.policies import PAPER_SYSTEM
from vertumnus.core.profile import Profile, load_profile
from vertumnus.reproduction import figures
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.cells import Cell
from vertumnus.reproduction.configurations import adaptive
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.rows import Comparison, Label, Outcome, Row
from vertumnus.reproduction.traffic import settings
from vertumnus.sim.compare import policy_maker
from vertumnus.workload.synthesis import synthesise
from vertumnus.workload.trace import Trace

NUM_PHASES = 4
SHORT_TOKENS, LONG_TOKENS = 3000.0, 40000.0
SHORT_LOAD, LONG_LOAD = 0.85, 0.4
"""Of what the smallest degree could do if nothing were cached."""
WINDOW_S = 20.0
TRANSIENT_S = 120.0
"""Beginning of a phase in which a controller cannot know yet, left out of the settled means; a quarter at most."""
FEW_LARGE, MANY_LARGE = "6x4,2x8", "4x4,3x8"
ADAPTIVE = "vertumnus"


def _phased(bench: Bench, profile: Profile) -> Trace:
    degree = profile.degrees[0]
    workers = bench.scale.num_gpus / degree
    costs = profile.cost_model()
    rates = [
        load * workers / costs.prefill_s(tokens, 0, degree)
        for load, tokens in ((SHORT_LOAD, SHORT_TOKENS), (LONG_LOAD, LONG_TOKENS))
    ]
    return synthesise(
        "phases",
        seed=bench.seed,
        duration_s=NUM_PHASES * bench.scale.phase_s,
        phase_s=bench.scale.phase_s,
        short_rate_per_s=float(rates[0]),
        long_rate_per_s=float(rates[1]),
        short_tokens=SHORT_TOKENS,
        long_tokens=LONG_TOKENS,
    )


def _fixed(num_gpus: int) -> tuple[Composition, Composition]:
    """The paper's two compositions of 40 GPUs, or a few and many large workers of another pool."""
    if num_gpus == 40:
        return Composition.parse(MANY_LARGE), Composition.parse(FEW_LARGE)
    half = num_gpus // 16
    return Composition.of({4: num_gpus // 4 - 2 * half, 8: half}), Composition.of({4: num_gpus // 4})


def _run(bench: Bench) -> Outcome:
    profile = load_profile("deepseek-v4-flash-h20-3e")
    trace = _phased(bench, profile)
    many, few = _fixed(bench.scale.num_gpus)
    base = replace(settings(bench), is_fixed=True)
    pools = [
        (ADAPTIVE, "vertumnus", adaptive(replace(base, composition=few))),
        (PAPER_SYSTEM, PAPER_SYSTEM, adaptive(replace(base, composition=few))),
        (f"fixed {many}", "vertumnus", replace(base, composition=many)),
        (f"fixed {few}", "vertumnus", replace(base, composition=few)),
    ]
    cells = [
        Cell(
            columns={"kind": "pool", "pool": name, "profile": profile.name, "phase": "all"},
            trace=trace,
            profile=profile,
            make_policy=policy_maker(policy),
            settings=each,
            series_s=WINDOW_S,
        )
        for name, policy, each in pools
    ]
    pool_rows = bench.measure(cells)
    phase_rows = [_phase_row(row, phase, bench.scale.phase_s) for row, phase in product(pool_rows, range(NUM_PHASES))]
    rows = [*pool_rows, *phase_rows, *_breakdown(bench, pool_rows)]
    return Outcome(rows=rows, comparisons=_comparisons(rows, f"fixed {many}", f"fixed {few}"), notes=_notes(trace))


def _phase_row(row: Row, phase: int, phase_s: float) -> Row:
    start_s, end_s = phase * phase_s, (phase + 1) * phase_s
    windows = [each for each in row["series"] if start_s <= each["start_s"] < end_s]
    settled_s = start_s + min(TRANSIENT_S, phase_s / 4)
    return {
        "kind": "phase",
        "pool": row["pool"],
        "profile": row["profile"],
        "phase": f"{phase + 1}, {'long' if phase % 2 else 'short'}",
        "mean_ttft_s": _mean_s(windows),
        "settled_mean_ttft_s": _mean_s([each for each in windows if each["start_s"] >= settled_s]),
        "num_requests": sum(each["num_requests"] for each in windows),
        "label": row["label"],
        "traffic": row["traffic"],
    }


def _mean_s(windows: Sequence[Row]) -> float | None:
    num_requests = sum(each["num_requests"] for each in windows)
    total_s = sum(each["num_requests"] * each["mean_ttft_s"] for each in windows)
    return float(total_s / num_requests) if num_requests else None


def _breakdown(bench: Bench, pools: Sequence[Row]) -> list[Row]:
    """Drain and switch of every reconfiguration: simulated, and of the live pool where there is a record."""
    rows = [
        {
            **each,
            "operation": each["kind"],
            "kind": "reconfiguration",
            "pool": row["pool"],
            "label": Label.SIMULATED.value,
        }
        for row in pools
        for each in row["transitions"]
    ]
    for record in (bench.records.get("adaptation-live.json") or {}).get("results", ()):
        rows += [
            {
                "kind": "reconfiguration",
                "pool": f"live, {record['label']}",
                **{key: each.get(key) for key in ("committed_s", "drain_s", "switch_s")},
                "label": Label.MEASURED.value,
            }
            for each in record.get("transitions", ())
        ]
    rows += [
        {
            "kind": "reconfiguration",
            "pool": f"CPU ranks, {each['from']} to {each['to']}",
            "drain_s": each["drain_s"],
            "switch_s": each["switch_s"],
            "label": Label.MEASURED.value,
        }
        for each in (bench.records.get("bench-switch.json") or {}).get("results", ())
        if each.get("kind") == "switch"
    ]
    return rows


def _comparisons(rows: Sequence[Row], many: str, few: str) -> list[Comparison]:
    by_phase = [row for row in rows if row["kind"] == "phase"]
    mean = {(row["pool"], row["phase"]): row["mean_ttft_s"] for row in by_phase}
    settled = {(row["pool"], row["phase"]): row["settled_mean_ttft_s"] for row in by_phase}
    label = "simulated, traffic synthesised, costs estimated"

    def change(
        mean: Mapping[tuple[str, str], float | None], pool: str, rival: str, phases: Sequence[int]
    ) -> str | None:
        names = [f"{phase + 1}, {'long' if phase % 2 else 'short'}" for phase in phases]
        pairs = [(mean[pool, name], mean[rival, name]) for name in names]
        return ", ".join(f"{own / other - 1:+.1%}" for own, other in pairs if own and other) or None

    made = []
    for pool in (ADAPTIVE, "vertumnus-paper"):
        for what, rival, phases, published in (
            ("high rate, short requests", many, (0, 2), "-19.6%"),
            ("high rate, short requests", few, (0, 2), None),
            ("low rate, long requests", many, (1, 3), "-5.5%"),
            ("low rate, long requests", few, (1, 3), "-14.5%"),
        ):
            made.append(
                Comparison(
                    what=f"{pool} against {rival}, mean TTFT, {what} (each such phase; without its first "
                    f"{TRANSIENT_S:.0f} s)",
                    published=published,
                    ours=f"{change(mean, pool, rival, phases)}; {change(settled, pool, rival, phases)}",
                    label=label,
                )
            )
    for origin in (Label.SIMULATED, Label.MEASURED):
        found = [row for row in rows if row["kind"] == "reconfiguration" and row["label"] == origin.value]
        if found:
            drains, switches = ([float(row[key] or 0.0) for row in found] for key in ("drain_s", "switch_s"))
            made.append(
                Comparison(
                    what=f"drain; switch of {len(found)} reconfigurations, s"
                    + (
                        " (live router with ranks that sleep, other traffic; CPU ranks of the switch benchmark)"
                        if origin is Label.MEASURED
                        else ""
                    ),
                    published="0.5-4.2; < 1",
                    ours=f"{min(drains):.2f}-{max(drains):.2f}; {min(switches):.2f}-{max(switches):.2f}",
                    label=f"{origin.value}" + (", the switch time is the profile's" * (origin is Label.SIMULATED)),
                )
            )
    return made


def _notes(trace: Trace) -> list[str]:
    return [
        f"{trace.num_requests:,} synthesised requests; phases of short ones at load {SHORT_LOAD} and of long ones at "
        f"{LONG_LOAD} of what degree 4 could do uncached (the paper's workload is not published)"
    ]


def _draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    pools = [row for row in rows if row["kind"] == "pool"]
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    series = [{"pool": row["pool"], **each} for row in pools for each in row["series"]]
    figures.lines(top, series, "start_s", "mean_ttft_s", "pool")
    figures.cut_at_collapse(top, [each["mean_ttft_s"] for each in series])
    figures.finish(top, "mean TTFT by 20 s of arrival", "", "s")
    top.legend(fontsize=8, frameon=False)
    for row, color in zip(pools[:2], figures.OURS[::2], strict=True):
        # This model has two degrees: every merge makes a worker of degree 8, every split takes one.
        num_large = Composition.parse(row["composition"]).count(8)
        changes = [1 if each["kind"] == "merge" else -1 for each in row["transitions"]]
        committed = [each["committed_s"] for each in row["transitions"]]
        counts = np.cumsum([num_large, *changes])
        bottom.step([0, *committed], counts, where="post", label=row["pool"], color=color)
    bottom.legend(fontsize=8, frameon=False)
    figures.finish(bottom, "workers of degree 8", "s", "")
    stages = [row for row in rows if row["kind"] == "reconfiguration" and not row["pool"].startswith("CPU")]
    drawn = {"Figure 13: phases, adaptive against fixed": figure}
    if stages:
        breakdown, (axis,) = figures.panels("drain and switch", 1, 1)
        axis.bar(range(len(stages)), [row["drain_s"] or 0.0 for row in stages], label="drain")
        axis.bar(
            range(len(stages)),
            [row["switch_s"] or 0.0 for row in stages],
            bottom=[row["drain_s"] or 0.0 for row in stages],
            label="switch",
        )
        axis.legend(fontsize=8, frameon=False)
        figures.finish(axis, "each reconfiguration", "", "s")
        drawn["Drain and switch"] = breakdown
    return drawn


EXPERIMENTS = (
    Experiment(
        name="fig13",
        title="Figure 13: a phased workload, adaptive and fixed compositions",
        paper=(
            "DeepSeek-V4-Flash on 40 GPUs, Tool-Agent traffic in phases: no fixed composition is best throughout. "
            "Adapting lowers the mean TTFT by 19.6% against 4x4,3x8 while short requests come at a high rate, by "
            "5.5% and 14.5% against 4x4,3x8 and 6x4,2x8 while long ones come at a low rate. Reconfigurations take "
            "1.1-5.1 s."
        ),
        ours=(
            "A synthesised workload of two such phases in turn, the same compositions, the same placement "
            "everywhere; the adaptive pools begin with 6x4,2x8. Drain is simulated, switch is the profile's "
            "figure; the live pool's own reconfigurations on CPU ranks stand beside them where there is a record."
        ),
        budget_s=60,
        run=_run,
        draw=_draw,
    ),
)
