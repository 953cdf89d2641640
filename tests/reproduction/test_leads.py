"""Leads: against the strongest other, at the highest rates that somebody sustains."""

import pytest

from vertumnus.reproduction.leads import leads, sustained_rates


def row(policy, rate_per_s, mean_s, attainment):
    return {
        "policy": policy,
        "rate_per_s": rate_per_s,
        "mean_ttft_s": mean_s,
        "slo_attainment_ratio": attainment,
    }


ROWS = [
    row("vertumnus", 10.0, 1.0, 1.0),
    row("slow", 10.0, 4.0, 0.7),
    row("fast", 10.0, 2.0, 0.6),
    row("vertumnus", 20.0, 1.0, 0.8),
    row("slow", 20.0, 9.0, 0.1),
    row("fast", 20.0, 8.0, 0.2),
]


def test_a_rate_counts_if_one_policy_sustains_it():
    assert sustained_rates(ROWS) == [10.0]


def test_where_nobody_sustains_anything_the_lowest_rate_counts():
    assert sustained_rates([row("a", 3.0, 1.0, 0.1), row("a", 2.0, 1.0, 0.2)]) == [2.0]


def test_lead_is_against_the_strongest_in_each_figure():
    (lead,) = leads(ROWS, "vertumnus")
    assert (lead.rival, lead.attainment_rival) == ("fast", "slow")
    assert lead.mean_ratio == pytest.approx(0.5)
    assert lead.attainment_points == pytest.approx(0.3)
