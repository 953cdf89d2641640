"""Over-fitting: nothing but the first half of one trace was tuned on; what becomes of the lead elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from vertumnus.core.policies import PAPER_SYSTEM
from vertumnus.core.profile import load_profile
from vertumnus.core.queueing import Discipline
from vertumnus.reproduction import figures
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.cells import Cell
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.rows import Comparison, Outcome, Row
from vertumnus.reproduction.traffic import Workload, halves, planned, settings, whole, workload
from vertumnus.reproduction.tuning import STRONGEST_BASELINES, Options, PaperChoice, mean_ttft_s, tuned, tuned_paper
from vertumnus.sim.compare import policy_maker

LOADS = (0.5, 0.8)
TUNED_ON = "conversation"
TUNED_HALF = "conversation, tuned half"


def _run(bench: Bench) -> Outcome:
    profile = load_profile()
    source = workload(bench, TUNED_ON)
    composition = planned(bench, source, profile)
    papers = tuned_paper(bench, source, profile, composition)
    options = {
        discipline: tuned(bench, source, profile, composition, STRONGEST_BASELINES, discipline=discipline)
        for discipline in Discipline
    }
    size, tuning = bench.scale.cell_requests, bench.scale.tuning_requests
    traffic = [source, replace(source, name=TUNED_HALF, held_out=source.tuning)]
    traffic += [halves(name, trace, tuning, size) for name, trace in bench.others.items()]
    traffic.append(halves("agentic", whole(bench, "agentic"), tuning, size))
    traffic.append(workload(bench, "toolagent"))
    cells = []
    for each in traffic:
        cells += _cells(bench, each, papers, options)
    rows = bench.measure(cells)
    notes = [f"parameters of every policy were chosen on the first half of {TUNED_ON} alone"]
    if not bench.others:
        notes.append("no further recorded trace was given (--other): only synthesised traffic is new here")
    return Outcome(rows=rows, comparisons=_comparisons(rows), notes=notes)


def _cells(
    bench: Bench, traffic: Workload, papers: PaperChoice, options: Mapping[Discipline, Mapping[str, Options]]
) -> list[Cell]:
    profile = load_profile()
    base = replace(settings(bench), composition=planned(bench, traffic, profile))
    fixed = replace(base, is_fixed=True)
    capacity_per_s = traffic.capacity_per_s(profile, bench.scale.num_gpus)
    pools = [("vertumnus", policy_maker("vertumnus"), base)]
    pools += [(PAPER_SYSTEM, papers.maker, papers.pool(base))]
    pools += [
        (
            f"{policy}, {discipline.value}",
            policy_maker(policy, **options[discipline][policy]),
            replace(fixed, discipline=discipline),
        )
        for policy in STRONGEST_BASELINES
        for discipline in Discipline
    ]
    return [
        Cell(
            columns={"workload": traffic.name, "load": load, "policy": name},
            trace=traffic.held_out,
            profile=profile,
            make_policy=maker,
            settings=each,
            rate_per_s=load * capacity_per_s,
        )
        for load in LOADS
        for name, maker, each in pools
    ]


def _against(rows: Sequence[Row], workload_name: str, load: float) -> dict[str, tuple[str, float]]:
    """The strongest rival and the change of ours against it, by kind of rival."""
    here = [row for row in rows if (row["workload"], row["load"]) == (workload_name, load)]
    own = next(row for row in here if row["policy"] == "vertumnus")
    kinds = {
        "vertumnus-paper": [row for row in here if row["policy"] == "vertumnus-paper"],
        "fifo": [row for row in here if row["policy"].endswith(", fifo")],
        "shortest": [row for row in here if row["policy"].endswith(", shortest")],
    }
    best = {kind: min(rivals, key=mean_ttft_s) for kind, rivals in kinds.items()}
    return {kind: (row["policy"], mean_ttft_s(own) / mean_ttft_s(row) - 1) for kind, row in best.items()}


def _comparisons(rows: Sequence[Row]) -> list[Comparison]:
    return [
        Comparison(
            what=f"{name}, load {load}: mean TTFT against vertumnus-paper; the strongest baseline with FIFO; with "
            "shortest-first",
            published=None,
            ours="; ".join(
                f"{change:+.1%}" + (f" ({policy.split(',')[0]})" if kind != "vertumnus-paper" else "")
                for kind, (policy, change) in _against(rows, name, load).items()
            ),
            label="simulated, costs estimated",
        )
        for name in dict.fromkeys(row["workload"] for row in rows)
        for load in LOADS
    ]


def _draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    values: dict[str, float | None] = {}
    for name in dict.fromkeys(row["workload"] for row in rows):
        for kind, (_, change) in _against(rows, name, LOADS[-1]).items():
            values[f"{name}: against {kind}"] = -100 * change
    return {"Held out": figures.bars(f"mean TTFT saved at load {LOADS[-1]}, %", values, "%", reference=0.0)}


EXPERIMENTS = (
    Experiment(
        name="held-out",
        title="Held out: traffic that nothing was tuned on",
        paper="None.",
        ours=(
            "Weights and thresholds of all policies from the first half of the conversation trace; reported on "
            "that half, on the second, and on traffic of other origin, among it agentic traffic (synthesised). "
            "The composition is planned from the first half of each."
        ),
        budget_s=120,
        run=_run,
        draw=_draw,
    ),
)
