"""The whole reproduction at the size of a test: every experiment gives labelled rows and a picture, and only once."""

import csv
import json
import re

import pytest

from vertumnus.reproduction.catalogue import EXPERIMENTS
from vertumnus.reproduction.rows import Label

NAMES = [experiment.name for experiment in EXPERIMENTS]
LABELS = {label.value for label in Label} | {"recorded"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reproduction")


@pytest.fixture(scope="module")
def first(folder):
    """The result of a first call."""
    from click.testing import CliRunner

    from vertumnus.cli import main

    return CliRunner().invoke(main, ["reproduce", "-o", str(folder), "--scale", "tiny", "--jobs", "1", "--json"])


def test_every_experiment_yields_labelled_rows_and_a_table(first, folder):
    assert first.exit_code == 0, first.stderr
    assert json.loads(first.stdout)["experiments"] == NAMES
    for name in NAMES:
        outcome = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["outcome"]
        assert outcome["rows"]
        assert {row["label"] for row in outcome["rows"]} <= LABELS
        assert all(comparison["label"] for comparison in outcome["comparisons"])
        with (folder / f"{name}.csv").open(encoding="utf-8") as file:
            assert len(list(csv.DictReader(file))) == len(outcome["rows"])
        if outcome["comparisons"]:
            with (folder / f"{name}-published.csv").open(encoding="utf-8") as file:
                assert list(csv.DictReader(file)) == [
                    {key: value or "" for key, value in comparison.items()} for comparison in outcome["comparisons"]
                ]


@pytest.mark.usefixtures("first")
def test_time_series_are_tables_too(folder):
    rows = json.loads((folder / "fig13.json").read_text(encoding="utf-8"))["outcome"]["rows"]
    windows = [(row["pool"], window["start_s"]) for row in rows for window in row.get("series", ())]
    with (folder / "fig13-series.csv").open(encoding="utf-8") as file:
        assert [(row["pool"], float(row["start_s"])) for row in csv.DictReader(file)] == windows
    assert len(windows) > 8


def test_report_has_every_figure_in_one_file(first, folder):
    page = (folder / "report.html").read_text(encoding="utf-8")
    for experiment in EXPERIMENTS:
        section = page.partition(f'<h2 id="{experiment.name}">')[2].partition("<h2 ")[0]
        assert '<img alt="' in section, experiment.name
        assert "data:image/png;base64," in section
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "<script" not in page


@pytest.mark.usefixtures("first")
def test_second_call_runs_nothing_again(folder, run):
    before = {name: (folder / f"{name}.json").stat().st_mtime_ns for name in NAMES}
    result = run("reproduce", "-o", folder, "--scale", "tiny", "--jobs", 1)
    assert result.exit_code == 0
    assert "experiments" not in result.stderr
    assert {name: (folder / f"{name}.json").stat().st_mtime_ns for name in NAMES} == before


@pytest.mark.usefixtures("first")
def test_results_of_other_conditions_are_not_mixed_in(folder, run):
    result = run("reproduce", "-o", folder, "--scale", "tiny", "--seed", 1, "--only", "fig4")
    assert result.exit_code == 2
    assert "--force" in result.stderr


def test_unknown_experiment_is_refused(tmp_path, run):
    result = run("reproduce", "-o", tmp_path / "out", "--only", "fig7,fig99")
    assert result.exit_code == 2
    assert "fig99" in result.stderr
    assert not (tmp_path / "out").exists()
