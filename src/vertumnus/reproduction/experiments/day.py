"""A day in windows of ten minutes: what following the traffic is worth when there is time to follow it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from vertumnus.core.placement import VertumnusPolicy
from vertumnus.core.policies import PAPER_SYSTEM
from vertumnus.core.profile import load_profile
from vertumnus.reproduction import figures
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.cells import Cell
from vertumnus.reproduction.configurations import adaptive
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.rows import Comparison, Outcome, Row
from vertumnus.reproduction.traffic import NUM_WINDOWS, long_day, planned, settings
from vertumnus.reproduction.tuning import mean_ttft_s, options_text, tuned, tuned_paper
from vertumnus.sim.compare import PolicyMaker, policy_maker
from vertumnus.sim.simulate import SimulationSettings

LOADS = (0.5, 0.65, 0.8)
SERIES_S = 30.0
OURS = "vertumnus"


def _run(bench: Bench) -> Outcome:
    profile = load_profile()
    traffic = long_day(bench)
    composition = planned(bench, traffic, profile)
    capacity_per_s = traffic.capacity_per_s(profile, bench.scale.num_gpus)
    fixed = replace(settings(bench), composition=composition, is_fixed=True)
    ours = adaptive(fixed)
    parameters = tuned(bench, traffic, profile, composition, ["min-ttft"])
    papers = tuned_paper(bench, traffic, profile, composition)
    pools: list[tuple[str, PolicyMaker, SimulationSettings, str]] = [
        (OURS, VertumnusPolicy, ours, ""),
        (
            "vertumnus, thresholds",
            VertumnusPolicy,
            replace(ours, controller="threshold", controller_settings=papers.thresholds),
            "",
        ),
        ("vertumnus, fixed", VertumnusPolicy, fixed, ""),
        (PAPER_SYSTEM, papers.maker, papers.pool(ours), papers.text),
    ]
    for policy, options in parameters.items():
        pools.append((f"{policy}, fixed", policy_maker(policy, **options), fixed, options_text(options)))
    rows = bench.measure(
        [
            Cell(
                columns={"load": load, "policy": name, "parameters": text},
                trace=traffic.held_out,
                profile=profile,
                make_policy=maker,
                settings=each,
                rate_per_s=load * capacity_per_s,
                series_s=SERIES_S,
            )
            for load in LOADS
            for name, maker, each, text in pools
        ]
    )
    return Outcome(rows=rows, comparisons=_comparisons(rows), notes=_notes(rows))


def _comparisons(rows: Sequence[Row]) -> list[Comparison]:
    made = []
    for load in LOADS:
        means = {row["policy"]: mean_ttft_s(row) for row in rows if row["load"] == load}
        made += [
            Comparison(
                what=f"mean TTFT of {OURS} against {rival}, load {load}",
                published=None,
                ours=f"{means[OURS] / means[rival] - 1:+.1%}",
                label="simulated, traffic synthesised, costs estimated",
            )
            for rival in means
            if rival != OURS
        ]
    return made


def _notes(rows: Sequence[Row]) -> list[str]:
    minutes = [row["num_requests"] / row["rate_per_s"] / NUM_WINDOWS / 60 for row in rows]
    return [
        f"{rows[0]['num_requests']:,} requests in {NUM_WINDOWS} windows of {min(minutes):.1f} to {max(minutes):.1f} "
        "minutes each; between them the traffic jumps by four hours at once, which no real day does"
    ]


def _draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    figure, axes = figures.panels("a day in windows of ten minutes", 1, len(LOADS))
    for axis, load in zip(axes, LOADS, strict=True):
        series = [{"policy": row["policy"], **each} for row in rows if row["load"] == load for each in row["series"]]
        figures.lines(axis, series, "start_s", "mean_ttft_s", "policy")
        figures.cut_at_collapse(axis, [each["mean_ttft_s"] for each in series])
        figures.finish(axis, f"load {load}: mean TTFT by {SERIES_S:.0f} s of arrival", "s", "s")
    figures.legend(figure, axes[0])
    return {"A day": figure}


EXPERIMENTS = (
    Experiment(
        name="day",
        title="A day in windows of ten minutes: controllers and a fixed composition",
        paper=(
            "The paper's Production trace is a day, of which it plays windows of 20 minutes; it doesn't compare "
            "controllers."
        ),
        ours=(
            "Production traffic synthesised as elsewhere, with more requests, so that each of the six windows lasts "
            "some ten minutes instead of one to two. All pools begin with the composition that plan recommends; the "
            "parameters of vertumnus-paper and min-ttft are tuned on the other half."
        ),
        budget_s=180,
        run=_run,
        draw=_draw,
    ),
)
