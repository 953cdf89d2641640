"""Every figure of a run, computed by hand on a few records and by NumPy on random ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vertumnus.core.slo import Slo
from vertumnus.errors import ConfigError
from vertumnus.sim.metrics import RequestRecords, summarise


def records_of(*rows: tuple[float, float, float, int, int]) -> RequestRecords:
    """Records from (arrival_s, start_s, ttft_s, input_tokens, reused_tokens) rows."""
    records = RequestRecords()
    for request_id, (arrival_s, start_s, ttft_s, input_tokens, reused_tokens) in enumerate(rows):
        records.request_id.append(request_id)
        records.arrival_s.append(arrival_s)
        records.start_s.append(start_s)
        records.ttft_s.append(ttft_s)
        records.input_tokens.append(input_tokens)
        records.reused_tokens.append(reused_tokens)
        records.degree.append(1)
    return records


SLO = Slo(1.0, 0.01)
# tau: 2 s, 3 s, 5 s
THREE = records_of((0.0, 0.5, 2.0, 100, 50), (1.0, 1.0, 3.1, 200, 0), (2.0, 5.0, 4.0, 400, 300))


def test_the_figures_of_three_requests():
    summary = summarise(THREE, 0, SLO, 0.0)
    assert summary.num_measured == 3
    assert summary.mean_ttft_s == pytest.approx(9.1 / 3)
    assert summary.p50_ttft_s == pytest.approx(3.1)
    assert summary.mean_wait_s == pytest.approx((0.5 + 0.0 + 3.0) / 3)
    assert summary.slo_attainment_ratio == pytest.approx((100 + 400) / 700), "weighted by tokens; tau itself counts"
    assert summary.token_hit_ratio == pytest.approx(350 / 700)


def test_requests_that_arrived_before_the_warm_up_ended_are_left_out():
    summary = summarise(THREE, 0, SLO, 1.0)
    assert summary.num_measured == 2
    assert summary.mean_ttft_s == pytest.approx(7.1 / 2)
    assert summary.slo_attainment_ratio == pytest.approx(400 / 600)
    assert summary.token_hit_ratio == pytest.approx(300 / 600)


def test_a_rejected_request_did_not_meet_its_target():
    assert summarise(THREE, 300, SLO, 0.0).slo_attainment_ratio == pytest.approx(500 / 1000)


def test_where_every_request_was_rejected_no_target_was_met():
    summary = summarise(RequestRecords(), 300, SLO, 0.0)
    assert summary.slo_attainment_ratio == 0.0
    assert summary.mean_ttft_s is None


@pytest.mark.parametrize("records", [RequestRecords(), THREE])
def test_without_a_measured_request_there_are_no_figures(records):
    summary = summarise(records, 0, SLO, 10.0)
    assert summary.num_measured == 0
    assert summary.mean_ttft_s is summary.p99_ttft_s is summary.slo_attainment_ratio is summary.token_hit_ratio is None


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 9), st.floats(0.01, 50), st.integers(1, 10**6), st.floats(0, 1)),
        min_size=1,
        max_size=30,
    ),
    st.floats(0, 100),
)
def test_the_figures_agree_with_numpy(rows, warmup_s):
    rows = [(arrival, arrival + wait, ttft, length, int(length * hit)) for arrival, wait, ttft, length, hit in rows]
    summary = summarise(records_of(*rows), 0, SLO, warmup_s)
    measured = [row for row in rows if row[0] >= warmup_s]
    assert summary.num_measured == len(measured)
    if measured:
        arrival_s, start_s, ttft_s, tokens, reused = map(np.array, zip(*measured, strict=True))
        assert summary.mean_ttft_s == pytest.approx(np.mean(ttft_s))
        assert summary.p50_ttft_s == pytest.approx(np.quantile(ttft_s, 0.5))
        assert summary.p90_ttft_s == pytest.approx(np.quantile(ttft_s, 0.9))
        assert summary.p99_ttft_s == pytest.approx(np.quantile(ttft_s, 0.99))
        assert summary.mean_wait_s == pytest.approx(np.mean(start_s - arrival_s), abs=1e-9)
        assert summary.slo_attainment_ratio == pytest.approx(np.average(ttft_s <= 1 + 0.01 * tokens, weights=tokens))
        assert summary.token_hit_ratio == pytest.approx(reused.sum() / tokens.sum())


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("1.0+0.0002L", Slo(1.0, 0.0002)),
        ("2.5", Slo(2.5, 0.0)),
        (" 1 + 2e-4L ", Slo(1.0, 0.0002)),
        ("0+1L", Slo(0.0, 1.0)),
        ("3.", Slo(3.0, 0.0)),
    ],
)
def test_an_slo_is_read(text, slo):
    assert Slo.parse(text) == slo


@pytest.mark.parametrize(
    "text", ["", "L", "1+L", "-1", "1+-2L", "1.0+0.0002", "0.0002L+1", "nan", "inf", "1,5", "1+2l"]
)
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"slo is .*accepted: .*1\.0\+0\.0002L"):
        Slo.parse(text)


@given(st.floats(0, 1e3), st.floats(0, 1))
def test_an_slo_is_written_as_it_is_read(base_s, per_token_s):
    written = str(Slo(base_s, per_token_s))
    assert str(Slo.parse(written)) == written


def test_the_default_target_is_one_second_and_a_fifth_of_a_millisecond_a_token():
    np.testing.assert_allclose(Slo().tau_s(np.array([0.0, 10_000.0])), [1.0, 3.0])
