"""Figure 2: prefill speed-up by degree and length."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from vertumnus.core.profile import load_profile
from vertumnus.reproduction import figures
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.rows import Comparison, Label, Outcome, Row

PROFILES = ("qwen3-30b-a3b-h20-3e", "qwen3-30b-a3b-h100", "deepseek-v4-flash-h20-3e")
LENGTHS = tuple(1024 << power for power in range(8))
RECORDS = ("bench-engine.json", "bench-engine-large.json")
PUBLISHED = {4: 2.71, 8: 3.91}


def _run(bench: Bench) -> Outcome:
    rows = [*_modelled(), *_measured(bench)]
    at_64k = {row["degree"]: row["speedup"] for row in rows if row["tokens"] == 65536 and row["system"] == PROFILES[0]}
    comparisons = [
        Comparison(
            what=f"Qwen3-30B-A3B on H20-3e, 64K tokens, degree {degree}",
            published=f"{published}x",
            ours=f"{at_64k[degree]:.2f}x",
            label="estimated; the profile's serial share was taken from these two figures",
        )
        for degree, published in PUBLISHED.items()
    ]
    notes = [] if len(rows) > len(_modelled()) else ["no record of an engine benchmark was found: nothing is measured"]
    return Outcome(rows=rows, comparisons=comparisons, notes=notes)


def _modelled() -> list[Row]:
    rows = []
    for name in PROFILES:
        profile = load_profile(name)
        costs = profile.cost_model()
        smallest = profile.degrees[0]
        for tokens in LENGTHS:
            base_s = float(costs.prefill_s(tokens, 0, smallest))
            for degree in profile.degrees:
                seconds = float(costs.prefill_s(tokens, 0, degree))
                rows.append(
                    {
                        "system": name,
                        "tokens": tokens,
                        "degree": degree,
                        "over_degree": smallest,
                        "prefill_s": seconds,
                        "speedup": base_s / seconds,
                        "label": Label.ESTIMATED.value,
                    }
                )
    return rows


def _measured(bench: Bench) -> list[Row]:
    """Cold prefills of the engine on CPU ranks, from the records of its benchmark."""
    return [
        {
            "system": f"CPU ranks, {entry['model']}, {entry['dtype']}",
            "tokens": entry["prompt_tokens"],
            "degree": entry["degree"],
            "over_degree": 1,
            "prefill_s": entry["p50_s"],
            "speedup": entry["speedup"],
            "label": Label.MEASURED.value,
        }
        for name in RECORDS
        for entry in (bench.records.get(name) or {}).get("results", ())
        if entry.get("speedup") is not None and entry.get("prefix_tokens") == 0 and entry.get("path") == "auto"
    ]


def _draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    systems = list(dict.fromkeys(row["system"] for row in rows))
    num_columns = min(3, len(systems))
    figure, axes = figures.panels("Figure 2: prefill speed-up", -(-len(systems) // num_columns), num_columns)
    for axis in axes[len(systems) :]:
        axis.set_axis_off()
    for axis, system in zip(axes, systems, strict=False):
        shown = [row | {"line": f"degree {row['degree']}"} for row in rows if row["system"] == system]
        figures.lines(axis, shown, "tokens", "speedup", "line")
        if system == PROFILES[0]:
            axis.scatter([65536] * len(PUBLISHED), list(PUBLISHED.values()), marker="x", color="black", zorder=4)
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=7, frameon=False)
        figures.finish(axis, f"{system} ({shown[0]['label']})", "tokens", f"over degree {shown[0]['over_degree']}")
    return {"Figure 2: speed-up by degree and length; crosses: published": figure}


EXPERIMENTS = (
    Experiment(
        name="fig2",
        title="Figure 2: speed-up by degree and length",
        paper="Little or no speed-up for short prompts; at 64K tokens 2.71x with four ranks and 3.91x with eight.",
        ours=(
            "The profiles' cost models (eq. 2), which cannot express that short prompts get slower with more "
            "ranks; and the engine on CPU ranks where its benchmark's record is at hand."
        ),
        budget_s=1,
        run=_run,
        draw=_draw,
    ),
)
