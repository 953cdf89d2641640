"""Figure 3: what the traffic is like over the day."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from vertumnus.reproduction import figures
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.rows import Comparison, Label, Outcome, Row
from vertumnus.reproduction.traffic import whole
from vertumnus.workload.analysis import analyze

TRAFFIC = ("production", "conversation", "toolagent")
COLUMNS = (
    ("long_request_ratio", "requests above 32K"),
    ("long_token_ratio", "their share of input tokens"),
    ("rate_per_s", "requests/s"),
    ("ideal_token_hit_ratio", "token hit, unlimited cache"),
)


def _run(bench: Bench) -> Outcome:
    rows: list[Row] = []
    for name in TRAFFIC:
        trace = whole(bench, name)
        # An hour has enough requests for a share of long ones; a window cut short by the end says little.
        window_s = 3600.0 if trace.duration_s > 7200 else 300.0
        for window in analyze(trace, window_s=window_s).windows:
            if window.num_requests and window.length_s >= window_s / 2:
                rows.append(
                    {
                        "trace": name,
                        "start_s": window.start_s,
                        **{column: getattr(window, column) for column, _ in COLUMNS},
                        "label": Label.SYNTHESISED.value if trace.synthesised else "recorded",
                    }
                )
    return Outcome(rows=rows, comparisons=_comparisons(rows))


def _comparisons(rows: Sequence[Row]) -> list[Comparison]:
    day = [row for row in rows if row["trace"] == "production"]

    def span(column: str) -> tuple[float, float]:
        values = [row[column] for row in day if row[column] is not None]
        return min(values), max(values)

    rates = span("rate_per_s")
    texts = {
        "share of requests above 32K, over the day": ("4-8%", "{:.1%}-{:.1%}".format(*span("long_request_ratio"))),
        "their share of input tokens": ("32-54%", "{:.0%}-{:.0%}".format(*span("long_token_ratio"))),
        "highest over lowest arrival rate": ("more than 3", f"{rates[1] / rates[0]:.1f}"),
        "token hit (ours: unlimited cache)": ("35-55%", "{:.0%}-{:.0%}".format(*span("ideal_token_hit_ratio"))),
    }
    return [
        Comparison(what=what, published=published, ours=ours, label="synthesised to match these figures")
        for what, (published, ours) in texts.items()
    ]


def _draw(rows: Sequence[Row]) -> Mapping[str, Figure]:
    drawn = {}
    for name in dict.fromkeys(row["trace"] for row in rows):
        shown = [row for row in rows if row["trace"] == name]
        figure, axes = figures.panels(f"{name} ({shown[0]['label']})", 1, len(COLUMNS))
        for axis, (column, text) in zip(axes, COLUMNS, strict=True):
            figures.lines(axis, shown, "start_s", column, "trace")
            figures.finish(axis, text, "s", "")
        drawn[f"Figure 3: {name}"] = figure
    return drawn


EXPERIMENTS = (
    Experiment(
        name="fig3",
        title="Figure 3: three observations on the traffic",
        paper=(
            "A day of production traffic: few requests are long but hold much of the tokens, the rate varies more "
            "than threefold, and the prefix-cache hit rate lies between 35% and 55%."
        ),
        ours=(
            "The synthesised day was made from these figures, so that agreeing shows only that it was made right; "
            "the conversation trace is the recorded one where it is given."
        ),
        budget_s=25,
        run=_run,
        draw=_draw,
    ),
)
