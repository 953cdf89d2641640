"""The TTFT target."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vertumnus.core.slo import Slo


@given(st.floats(0, 10), st.floats(0, 0.01), st.integers(0, 10**6))
def test_one_request_has_the_target_that_it_has_among_others(base_s, per_token_s, input_tokens):
    slo = Slo(base_s, per_token_s)
    assert slo.tau_s(float(input_tokens)) == slo.tau_s(np.array([float(input_tokens)]))[0]
    assert slo.tau_s(float(input_tokens)) == pytest.approx(base_s + per_token_s * input_tokens)
