"""What the shadows have shown: how much of it is kept, and what it says."""

import numpy as np
import pytest

from vertumnus.core.evidence import Evidence
from vertumnus.core.rollout import Replayed


def window(number: int) -> Replayed:
    """Ten arrivals in two shadows, of which the second serves each a little slower, by more in some."""
    draw = np.random.default_rng(number)
    service_s = 1.0 + draw.random((10, 1)) + np.array([0.0, 0.1]) * (1.0 + draw.random((10, 1)))
    return Replayed(np.zeros((10, 2)), service_s)


@pytest.mark.parametrize(("fine_windows", "half_life_windows"), [(6, 30.0), (6, 0.5), (6, 0.4), (1, 0.05)])
def test_memory_is_bounded_and_there_are_always_errors(fine_windows, half_life_windows):
    evidence = Evidence(fine_windows, half_life_windows)
    for number in range(400):
        evidence.add(window(number))
        errors_s = evidence.standard_errors_s(0, 1.0)
        assert errors_s.shape == (2,)
        assert errors_s[0] == 0.0
        assert len(evidence._fine) in (0, len(evidence.counts))
    assert len(evidence.counts) <= max(12 * half_life_windows, 1)


def test_the_first_windows_are_weighed_arrival_by_arrival_and_later_ones_in_sums():
    evidence = Evidence(2, 30.0)
    arrivals = []
    for number in range(2):
        evidence.add(window(number))
        arrivals.append(window(number).service_s)
        differences = np.concatenate(arrivals) @ np.array([-1.0, 1.0])
        independent_s = differences.std() / np.sqrt(len(differences))
        assert evidence.standard_errors_s(0, 1.0)[1] >= independent_s * (1 - 1e-9)
    assert evidence._fine
    evidence.add(window(2))
    assert not evidence._fine
    assert evidence.mean_ttft_s(1.0)[1] > evidence.mean_ttft_s(1.0)[0]
