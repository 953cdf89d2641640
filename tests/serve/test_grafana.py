"""The Grafana dashboard asks for what there is, and leaves nothing out."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vertumnus.serve import metric_families as families
from vertumnus.serve.metric_families import Kind
from vertumnus.serve.metrics import Metrics

BOARD = json.loads((Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "vertumnus.json").read_text())
UNUSED: set[str] = set()
"""Families that no panel shows, on purpose."""

PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
EXPRESSIONS += [each["expr"] for each in BOARD["annotations"]["list"]]
EXPRESSIONS += [each["query"] for each in BOARD["templating"]["list"]]


def sample_names(family):
    """What Prometheus stores of a family."""
    parts = ("_bucket", "_sum", "_count") if family.kind is Kind.HISTOGRAM else ("",)
    return {family.name + part for part in parts}


def used_names(expressions):
    return {name for expression in expressions for name in re.findall(r"\bvertumnus_\w+", expression)}


def test_every_metric_that_the_board_asks_for_is_exported():
    exported = {name for family in families.ALL for name in sample_names(family)}
    assert used_names(EXPRESSIONS) <= exported
    shown = {
        sample.name for family in text_string_to_metric_families(Metrics().text().decode()) for sample in family.samples
    }
    assert shown <= exported, "what is exported is what the families say"


def test_every_exported_family_is_on_the_board_or_left_out_on_purpose():
    used = used_names(EXPRESSIONS)
    missing = {family.name for family in families.ALL if used.isdisjoint(sample_names(family))}
    assert missing == UNUSED


@pytest.mark.parametrize("family", families.ALL, ids=lambda family: family.name)
def test_the_board_groups_by_labels_that_the_metric_has(family):
    """`sum by (...)` around it, and {{...}} in its legend."""
    for panel in PANELS:
        for target in panel["targets"]:
            if used_names([target["expr"]]) & sample_names(family):
                labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                for by in re.findall(r"by \(([^)]*)\)", target["expr"]):
                    labels |= {label.strip() for label in by.split(",")} - {"le"}
                assert labels <= set(family.labels), target["expr"]


def test_counters_are_rated_and_gauges_are_not():
    kinds = {name: family.kind for family in families.ALL for name in sample_names(family)}
    for expression in (target["expr"] for panel in PANELS for target in panel["targets"]):
        for rated in re.findall(r"(?:rate|increase)\((vertumnus_\w+)", expression):
            assert kinds[rated] is not Kind.GAUGE, expression
        for name in used_names([expression]):
            if kinds[name] is not Kind.GAUGE:
                assert re.search(rf"(?:rate|increase)\({name}\b", expression), expression


def test_panels_do_not_overlap():
    taken = {}
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies over {taken[x, y]}"
                taken[x, y] = panel["title"]
        assert place["x"] + place["w"] <= 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
