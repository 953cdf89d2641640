"""Figure 4: how well eq. 2 fits."""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
from matplotlib.figure import Figure

from vertumnus.core.fit import PrefillSample, fit_per_degree, fit_uniform
from vertumnus.core.profile import load_profile
from vertumnus.reproduction import figures
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.rows import Comparison, Label, Outcome, Row

SAMPLES = "profile-smollm2.samples.jsonl"
"""Record of measured prefills, SmolLM2 on CPU ranks: degree, suffix_tokens, prefix_tokens and seconds of each."""
LENGTHS = (1024, 4096, 16384, 65536)
HIT_RATIOS = (0.0, 0.5, 0.9)
NUM_REPEATS = 5
NOISE_RATIO = 0.03
UPTURN_S = 0.004
"""Seconds that each doubling of the degree adds to a step: what eq. 2 cannot express and reality has."""


def _run(bench: Bench) -> Outcome:
    measured = bench.records.get(SAMPLES)
    samples = _synthesised(bench.seed) if measured is None else measured
    label = (Label.SYNTHESISED if measured is None else Label.MEASURED).value
    rows: list[Row] = []
    errors = {}
    for form, fit in (("eq. 2", fit_uniform(samples)), ("d, a, b by degree", fit_per_degree(samples))):
        errors[form] = (fit.mean_error_ratio, fit.max_error_ratio)
        rows += [
            {
                "form": form,
                "degree": cell.degree,
                "suffix_tokens": cell.suffix_tokens,
                "prefix_tokens": cell.prefix_tokens,
                "prefill_s": cell.measured_s,
                "predicted_s": cell.predicted_s,
                "error_ratio": cell.error_ratio,
                "label": label,
            }
            for cell in fit.cells
        ]
    comparisons = [
        Comparison(
            what=f"error of {form} over the cells: mean; worst",
            published="small (a picture, no figures)",
            ours=f"{mean:.1%}; {worst:.1%}",
            label=label,
        )
        for form, (mean, worst) in errors.items()
    ]
    notes = []
    if measured is None:
        notes.append(
            f"no measured samples were found: times of the estimated profile, {NOISE_RATIO:.0%} noise and {UPTURN_S} s "
            "more for each doubling of the degree; this shows that the fit works, not that the model is right"
        )
    return Outcome(rows=rows, comparisons=comparisons, notes=notes)


def _synthesised(seed: int) -> list[PrefillSample]:
    profile = load_profile()
    costs = profile.cost_model()
    rng = np.random.default_rng((seed, 4))
    samples = []
    for degree, tokens, hit in product(profile.degrees, LENGTHS, HIT_RATIOS):
        prefix = int(hit * tokens)
        true_s = float(costs.prefill_s(tokens - prefix, prefix, degree)) + UPTURN_S * np.log2(degree)
        samples += [
            PrefillSample(degree, tokens - prefix, prefix, true_s * float(rng.lognormal(0.0, NOISE_RATIO)))
            for _ in range(NUM_REPEATS)
        ]
    return samples


def _draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    forms = list(dict.fromkeys(row["form"] for row in rows))
    figure, axes = figures.panels(f"Figure 4: fit ({rows[0]['label']})", 1, len(forms))
    for axis, form in zip(axes, forms, strict=True):
        for index, degree in enumerate(sorted({row["degree"] for row in rows})):
            shown = [row for row in rows if (row["form"], row["degree"]) == (form, degree)]
            axis.scatter(
                [row["prefill_s"] for row in shown],
                [100 * row["error_ratio"] for row in shown],
                s=14,
                color=figures.OTHERS[index],
                label=f"degree {degree}",
            )
        axis.set_xscale("log")
        axis.legend(fontsize=7, frameon=False)
        figures.finish(axis, form, "prefill, s", "error, %")
    return {"Figure 4: fitting error by cell": figure}


EXPERIMENTS = (
    Experiment(
        name="fig4",
        title="Figure 4: fitting error of the cost model",
        paper="Small errors over degrees, lengths and hit ratios for Qwen3-30B-A3B.",
        ours="Eq. 2, and the form with d, a and b by degree, fitted to measured samples where a record has them.",
        budget_s=2,
        run=_run,
        draw=_draw,
    ),
)
