"""The report: one HTML page that needs nothing else, neither scripts nor other files."""

from collections.abc import Sequence
from html import escape
from typing import Any

from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.figures import png_uri
from vertumnus.reproduction.folder import Record
from vertumnus.reproduction.rows import Comparison, Label, Row

MAX_ROWS = 400
"""Rows of one table shown; the CSV has all."""

_HIDDEN = ("wall_s", "num_measured", "mean_wait_s", "p50_ttft_s", "num_requests", "num_replications", "num_pulls")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 3rem; border-top: 1px solid #ddd; padding-top: 1.5rem; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; } img { max-width: 100%; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #eee; text-align: left; vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } .scroll { overflow-x: auto; }
.label { color: #666; font-size: 12px; } figure { margin: 1rem 0; } figcaption { color: #666; font-size: 13px; }
details summary { cursor: pointer; }
@media (prefers-color-scheme: dark) { body { background: #1b1b1b; color: #ddd; } th, td { border-color: #333; }
  h2 { border-color: #333; } img { background: #fff; } }
"""


def report(finished: Sequence[tuple[Experiment, Record]]) -> str:
    """The page of these experiments, in this order."""
    contents = "".join(f'<li><a href="#{escape(each.name)}">{escape(each.title)}</a></li>' for each, _ in finished)
    summary = [(each.title, one) for each, record in finished for one in record.outcome.comparisons if one.published]
    published = "".join(
        f"<tr><td>{escape(title)}</td><td>{escape(one.what)}</td><td>{escape(one.published or '-')}</td>"
        f"<td>{escape(one.ours or '-')}</td><td>{escape(one.label)}</td></tr>"
        for title, one in summary
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Vertumnus: reproduction</title><style>{_STYLE}</style></head><body>\n"
        "<h1>Adaptive context parallelism: the evaluation, reproduced</h1>\n"
        f"<p>Every figure carries a label. {_labels()}</p>\n"
        f"<ol>{contents}</ol>\n<h2>Published figures beside ours</h2>\n"
        '<div class="scroll"><table><tr><th>where</th><th>what</th><th>published</th><th>ours</th>'
        f"<th>label of ours</th></tr>{published}</table></div>\n"
        + "\n".join(_section(each, record) for each, record in finished)
        + "\n</body></html>\n"
    )


def _labels() -> str:
    meaning = {
        Label.MEASURED: "on a machine, with this program",
        Label.PUBLISHED: "by the paper",
        Label.ESTIMATED: "derived or assumed (all costs of the GPU profiles)",
        Label.SYNTHESISED: "generated from published statistics (traffic)",
        Label.SIMULATED: "by the simulator, under estimated costs",
    }
    return "; ".join(f"<b>{label.value}</b>: {escape(text)}" for label, text in meaning.items()) + "."


def _section(experiment: Experiment, record: Record) -> str:
    outcome = record.outcome
    drawn = "".join(
        f'<figure><img alt="{escape(caption)}" src="{png_uri(figure)}">'
        f"<figcaption>{escape(caption)} ({_kinds(outcome.rows)})</figcaption></figure>\n"
        for caption, figure in experiment.draw(outcome.rows).items()
    )
    conditions = ", ".join(f"{name} {value}" for name, value in record.conditions.items())
    where = f"{record.environment.get('hardware')}, {record.environment.get('date')}, {record.wall_s:.0f} s"
    return (
        f'<h2 id="{escape(experiment.name)}">{escape(experiment.title)}</h2>\n'
        f"<p><b>The paper:</b> {escape(experiment.paper)}</p>\n<p><b>Here:</b> {escape(experiment.ours)}</p>\n"
        + "".join(f"<p>{escape(note)}.</p>\n" for note in outcome.notes)
        + drawn
        + _compared(outcome.comparisons)
        + f"<details><summary>All {len(outcome.rows)} rows</summary>{_table(outcome.rows)}</details>\n"
        + f'<p class="label">{escape(conditions)}; {escape(where)}. Tables: {escape(experiment.name)}*.csv</p>'
    )


def _kinds(rows: Sequence[Row]) -> str:
    labels = sorted({str(row["label"]) for row in rows})
    traffic = sorted({str(row["traffic"]) for row in rows if "traffic" in row})
    return ", ".join([*labels, *(f"traffic {each}" for each in traffic)])


def _compared(comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return ""
    body = "".join(
        f"<tr><td>{escape(each.what)}</td><td>{escape(each.published or '-')}</td><td>{escape(each.ours or '-')}</td>"
        f'<td class="label">{escape(each.label)}</td></tr>'
        for each in comparisons
    )
    return (
        '<div class="scroll"><table><tr><th></th><th>published</th><th>ours</th><th>label of ours</th></tr>'
        f"{body}</table></div>\n"
    )


def _table(rows: Sequence[Row]) -> str:
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if name not in _HIDDEN and not any(isinstance(row.get(name), list | dict) for row in rows)
    ]
    head = "".join(f"<th>{escape(name.removesuffix('_ttft_s').replace('_', ' '))}</th>" for name in names)
    body = "".join("<tr>" + "".join(_entry(row.get(name)) for name in names) + "</tr>" for row in rows[:MAX_ROWS])
    more = f"<p>{len(rows) - MAX_ROWS} more in the CSV.</p>" if len(rows) > MAX_ROWS else ""
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>{more}'


def _entry(value: Any) -> str:
    if value is None:
        return "<td>-</td>"
    if isinstance(value, float):
        return f'<td class="n">{value:.4g}</td>'
    return f'<td class="n">{value}</td>' if isinstance(value, int) else f"<td>{escape(str(value))}</td>"
