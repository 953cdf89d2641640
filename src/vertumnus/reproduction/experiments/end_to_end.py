"""Figures 7 to 12: TTFT and attainment against the request rate, for one workload and one model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from vertumnus.core.composition import Composition, Topology
from vertumnus.core.policies import PAPER_SYSTEM
from vertumnus.core.profile import Profile, load_profile
from vertumnus.reproduction import figures
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.cells import Cell
from vertumnus.reproduction.configurations import adaptive
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.leads import leads
from vertumnus.reproduction.rows import Comparison, Outcome, Row
from vertumnus.reproduction.traffic import NODE_GPUS, TUNING_LOAD, Workload, planned, settings, workload
from vertumnus.reproduction.tuning import (
    BASELINES,
    STRONG_BASELINES,
    Options,
    PaperChoice,
    mean_ttft_s,
    options_text,
    tuned,
    tuned_paper,
)
from vertumnus.sim.auto import auto_composition, by_rollout, candidates, history
from vertumnus.sim.compare import policy_maker

ONE_COMPOSITION, IN_HINDSIGHT = "one composition", "in hindsight"
"""Every policy on the composition that `plan` recommends; every baseline on its best composition at each rate."""


def _run(bench: Bench, *, workload_name: str, profile_name: str) -> Outcome:
    profile = load_profile(profile_name)
    traffic = workload(bench, workload_name)
    capacity_per_s = traffic.capacity_per_s(profile, bench.scale.num_gpus)
    rates = {load: load * capacity_per_s for load in bench.scale.loads}
    composition = planned(bench, traffic, profile)
    parameters = tuned(bench, traffic, profile, composition, BASELINES)
    papers = tuned_paper(bench, traffic, profile, composition)
    one = _one_composition(bench, traffic, profile, composition, parameters, papers, rates)
    rows = bench.measure(one)
    rows += _in_hindsight(bench, traffic, profile, composition, parameters, rates, rows)
    notes = [
        f"plan recommends {composition} (from the tuning half, at load 0.75)",
        f"load 1 is {capacity_per_s:.1f} requests/s; parameters chosen at load {TUNING_LOAD}",
    ]
    if not bench.scale.has_full_grids:
        notes.append(
            f"in hindsight: {', '.join(STRONG_BASELINES)} only; the others are far behind in the first setting"
        )
    return Outcome(rows=rows, comparisons=_comparisons(workload_name, profile_name, rows), notes=notes)


def _one_composition(
    bench: Bench,
    traffic: Workload,
    profile: Profile,
    composition: Composition,
    parameters: Mapping[str, Options],
    papers: PaperChoice,
    rates: Mapping[float, float],
) -> list[Cell]:
    fixed = replace(settings(bench), composition=composition, is_fixed=True)
    ours = policy_maker("vertumnus")
    pools = [("vertumnus, fixed", ours, fixed, ""), ("vertumnus", ours, adaptive(fixed), "")]
    pools += [(PAPER_SYSTEM, papers.maker, papers.pool(adaptive(fixed)), papers.text)]
    pools += [
        (policy, policy_maker(policy, **options), fixed, options_text(options))
        for policy, options in parameters.items()
    ]
    return [
        Cell(
            columns={
                "setting": ONE_COMPOSITION,
                "workload": traffic.name,
                "profile": profile.name,
                "load": load,
                "policy": name,
                "parameters": text,
            },
            trace=traffic.held_out,
            profile=profile,
            make_policy=maker,
            settings=each,
            rate_per_s=rate_per_s,
        )
        for load, rate_per_s in rates.items()
        for name, maker, each, text in pools
    ]


def _in_hindsight(
    bench: Bench,
    traffic: Workload,
    profile: Profile,
    composition: Composition,
    parameters: Mapping[str, Options],
    rates: Mapping[float, float],
    on_recommended: Sequence[Row],
) -> list[Row]:
    """The rows of the baselines on their best compositions, and of ours, adaptive from what history suggests.

    Short runs rank the compositions, the best few are run in full; and `on_recommended`, the rows of the first setting,
    count as tried.
    """
    policies = BASELINES if bench.scale.has_full_grids else STRONG_BASELINES
    # Production, which has a day in it, gets twice as many requests here too.
    excerpt = traffic.excerpt(bench.scale.search_requests * (2 if traffic.num_windows > 1 else 1))
    search = []
    for load, rate_per_s in rates.items():
        for choice in _choices(bench, traffic, profile, composition, rate_per_s):
            for policy in policies:
                cell = Cell(
                    columns={"setting": IN_HINDSIGHT, "workload": traffic.name, "profile": profile.name, "load": load}
                    | {"policy": policy, "parameters": options_text(parameters[policy])},
                    trace=excerpt,
                    rate_per_s=rate_per_s,
                    profile=profile,
                    make_policy=policy_maker(policy, **parameters[policy]),
                    settings=replace(settings(bench), composition=choice, is_fixed=True),
                )
                search.append(cell)
    ranked: dict[tuple[float, str], list[tuple[float, int]]] = {}
    for index, (cell, row) in enumerate(zip(search, bench.measure(search), strict=True)):
        key = (cell.columns["load"], cell.columns["policy"])
        ranked.setdefault(key, []).append((mean_ttft_s(row), index))
    finals = [
        replace(search[index], trace=traffic.held_out)
        for tried in ranked.values()
        for _, index in sorted(tried)[: bench.scale.num_finalists]
        if search[index].settings.composition != composition  # which has run in full in the first setting
    ]
    known = [{**row, "setting": IN_HINDSIGHT} for row in on_recommended if row["policy"] in policies]
    best: dict[tuple[float, str], Row] = {}
    for row in [*known, *bench.measure(finals)]:
        key = (row["load"], row["policy"])
        if key not in best or mean_ttft_s(row) < mean_ttft_s(best[key]):
            best[key] = row
    ours = bench.measure([_ours(bench, traffic, profile, load, rate) for load, rate in rates.items()])
    return [*ours, *best.values()]


def _choices(
    bench: Bench, traffic: Workload, profile: Profile, recommended: Composition, rate_per_s: float
) -> list[Composition]:
    """Compositions worth trying at this rate: the likeliest by rollouts of this traffic, and those of one degree."""
    trace = traffic.held_out.rescaled(rate_per_s)
    arrivals = history(trace, profile.kv_capacity_blocks(trace.block_tokens), NODE_GPUS)
    base = settings(bench)
    known = candidates(Topology(base.num_gpus, NODE_GPUS), profile, arrivals, base.slo)
    uniform = [each for each in known if len(each.degrees) == 1]
    num_ranked = max(1, bench.scale.max_compositions - len(uniform) - 1)
    ranked = [each for each, _ in by_rollout(known, arrivals, profile, num_best=num_ranked)]
    return list(dict.fromkeys([recommended, *ranked, *uniform]))[: bench.scale.max_compositions]


def _ours(bench: Bench, traffic: Workload, profile: Profile, load: float, rate_per_s: float) -> Cell:
    base = settings(bench)
    trace = traffic.tuning.rescaled(rate_per_s)
    start = auto_composition(
        trace,
        profile,
        Topology(base.num_gpus, NODE_GPUS),
        slo=base.slo,
        blocks_per_rank=profile.kv_capacity_blocks(trace.block_tokens),
    )
    return Cell(
        columns={"setting": IN_HINDSIGHT, "workload": traffic.name, "profile": profile.name, "load": load}
        | {"policy": "vertumnus", "parameters": ""},
        trace=traffic.held_out,
        profile=profile,
        make_policy=policy_maker("vertumnus"),
        settings=replace(base, composition=start),
        rate_per_s=rate_per_s,
    )


_PUBLISHED = {
    ("production", "mean"): "-28.1% (highest load; the paper does not say for which model)",
    ("toolagent", "attainment"): "+13.3 points (the paper does not say at which rate)",
}


def _comparisons(workload_name: str, profile_name: str, rows: Sequence[Row]) -> list[Comparison]:
    made = []
    for setting in (ONE_COMPOSITION, IN_HINDSIGHT):
        of_setting = [row for row in rows if row["setting"] == setting]
        for lead in leads(of_setting, "vertumnus"):
            where = f"{setting}, {lead.rate_per_s:.1f} requests/s, against {lead.rival}"
            label = f"simulated, traffic {of_setting[0]['traffic']}, costs estimated"
            is_first = setting == ONE_COMPOSITION and lead.is_highest
            made.append(
                Comparison(
                    what=f"mean TTFT against the strongest baseline: {where}",
                    published=_PUBLISHED.get((workload_name, "mean")) if is_first else None,
                    ours=f"{-lead.mean_ratio:+.1%}",
                    label=label,
                )
            )
            made.append(
                Comparison(
                    what=f"attainment against {lead.attainment_rival}: {setting}, {lead.rate_per_s:.1f} requests/s",
                    published=_PUBLISHED.get((workload_name, "attainment")) if is_first else None,
                    ours=f"{100 * lead.attainment_points:+.1f} points",
                    label=label,
                )
            )
    return made


def _draw(rows: Sequence[Row], *, title: str) -> Mapping[str, Figure]:
    columns = (("mean_ttft_s", "mean TTFT", 1.0), ("p90_ttft_s", "P90 TTFT", 1.0), ("slo_attainment_ratio", "", 100.0))
    figure, axes = figures.panels(title, 2, 3)
    for row, setting in enumerate((ONE_COMPOSITION, IN_HINDSIGHT)):
        shown = [each for each in rows if each["setting"] == setting]
        for column, (name, text, scale) in enumerate(columns):
            axis = axes[3 * row + column]
            figures.lines(axis, shown, "rate_per_s", name, "policy", scale=scale)
            figures.finish(axis, f"{text or 'attainment by tokens'}, {setting}", "requests/s", "s" if text else "%")
            if text:
                figures.cut_at_collapse(axis, [each[name] for each in shown])
    figures.legend(figure, axes[0])
    return {title: figure}


def _experiment(number: int, workload_name: str, profile_name: str, model: str) -> Experiment:
    title = f"Figure {number}: {model} on H20-3e, {workload_name}"
    return Experiment(
        name=f"fig{number}",
        title=title,
        paper=(
            "Mean and P90 TTFT and SLO attainment against the request rate. Vertumnus has the lowest or a "
            "comparable TTFT and the highest or near-highest attainment; its lead grows with the load. (Figures "
            "7-12 cover two models and three workloads; which number shows which is assumed here.)"
        ),
        ours=(
            "The same sweep in the simulator, from idle to beyond saturation. First every policy on the "
            "composition that plan recommends for the whole workload, baselines with shortest-first queues and "
            "parameters searched on the tuning half (vertumnus-paper with FIFO and its own controller). Then, "
            "harder, every baseline on the composition that is best for it at each rate, known in hindsight, "
            "against ours adapting from what the tuning half suggests."
        ),
        budget_s=150,
        run=partial(_run, workload_name=workload_name, profile_name=profile_name),
        draw=partial(_draw, title=title),
    )


MODELS = (("qwen3-30b-a3b-h20-3e", "Qwen3-30B-A3B"), ("deepseek-v4-flash-h20-3e", "DeepSeek-V4-Flash"))
EXPERIMENTS = tuple(
    _experiment(7 + 3 * row + column, workload_name, profile_name, model)
    for row, (profile_name, model) in enumerate(MODELS)
    for column, workload_name in enumerate(("conversation", "toolagent", "production"))
)
