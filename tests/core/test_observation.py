"""Windows: what they sum up, and what counts as long in them."""

import pytest

from vertumnus.core.long_threshold import LongThreshold
from vertumnus.core.observation import WindowTracker


def tracker(**threshold):
    return WindowTracker(20.0, LongThreshold(**threshold))


def test_a_window_sums_up_its_arrivals_and_the_next_starts_empty():
    windows = tracker()
    windows.record(1.0, 40_000, 8_192, 3.0)
    windows.record(5.0, 1_000, 0, 1.0)
    window = windows.close(backlog_s=7.0)
    assert (window.start_s, window.end_s, window.num_requests, window.num_long) == (0.0, 20.0, 2, 1)
    assert window.demand_s_per_s == pytest.approx(4.0 / 20.0)
    assert (window.input_tokens, window.suffix_tokens, window.backlog_s) == (41_000, 32_808, 7.0)
    assert window.arrivals.arrival_s.tolist() == [1.0, 5.0]
    empty = windows.close(backlog_s=0.0)
    assert (empty.start_s, empty.num_requests, empty.demand_s_per_s) == (20.0, 0, 0.0)


def test_waiting_is_counted_in_the_windows_in_which_it_was_done():
    windows = tracker()
    windows.record_start(arrival_s=3.0, now_s=4.5)
    assert windows.close(0.0, waiting=[12.0, 20.0]).waited_s == pytest.approx(1.5 + 8.0)
    windows.record_start(arrival_s=12.0, now_s=26.0)
    assert windows.close(0.0, waiting=[20.0]).waited_s == pytest.approx(6.0 + 20.0)


def test_what_is_long_can_follow_the_traffic():
    windows = tracker(quantile_ratio=0.9)
    for number in range(400):
        windows.record(0.01 * number, 100_000 if number % 20 == 0 else 60_000, 0, 1.0)
    assert windows.close(0.0).num_long == 400  # until enough was seen, the fixed threshold holds
    for number in range(400):
        windows.record(20 + 0.01 * number, 100_000 if number % 20 == 0 else 60_000, 0, 1.0)
    assert windows.close(0.0).num_long == 20
