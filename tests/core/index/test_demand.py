"""Algorithm 1, the paper's criteria of Algorithm 2, and decay, against direct transcriptions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.index.naive_index import block_at, chain
from tests.core.index.random_tries import DEGREES, Pool, pool_of, pools

from vertumnus.core.index import ReplicationSettings
from vertumnus.errors import ConfigError

THRESHOLDS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])


def finish_scan(pool: Pool, settings: ReplicationSettings) -> None:
    for _ in pool.index.scan(settings, pool.load, 0.0):
        pass
    pool.naive.decay(settings.decay)


def assert_same_demand(pool: Pool) -> None:
    for block in pool.naive.known():
        for degree in DEGREES:
            access = pool.naive.access.get((block, degree), 0.0)
            missed_s = pool.naive.missed.get((block, degree), 0.0)
            assert pool.index.access(block, degree) == pytest.approx(access, rel=1e-5, abs=1e-11)
            assert pool.index.missed_s(block, degree) == pytest.approx(missed_s, rel=1e-5, abs=1e-11)


@given(pools())
def test_demand_is_algorithm_1_transcribed(pool: Pool) -> None:
    assert_same_demand(pool)


@given(pools(), THRESHOLDS, THRESHOLDS, THRESHOLDS)
def test_candidates_are_those_of_algorithm_2(pool: Pool, inter: float, intra: float, reclaim: float) -> None:
    settings = ReplicationSettings(theta_inter_s=inter, theta_intra=reclaim + 0.5 + intra, theta_reclaim=reclaim)
    assert pool.index.candidates(settings) == pool.naive.candidates(settings, DEGREES)


@given(pools(), st.lists(st.sampled_from([0.5, 0.001, 0.9]), min_size=1, max_size=12), st.integers(0, 2))
def test_scans_decay_demand_as_if_every_value_were_multiplied(pool: Pool, decays: list[float], child: int) -> None:
    for decay in decays:
        finish_scan(pool, ReplicationSettings(decay=decay))
        pool.use((child, 0, 1), 2)
        pool.miss((child, 1, 2), 4, 0.25)
        assert_same_demand(pool)


def test_a_block_that_dies_takes_its_demand_along() -> None:
    pool = pool_of(1)
    pool.store(0, (0, 1))
    pool.use((0, 1), 1, times=5)
    pool.evict(0, (0, 1))
    pool.store(0, (0, 1))
    assert pool.index.access(block_at((0, 1)), 1) == 0.0
    assert pool.index.access(block_at((0,)), 1) == 5.0


def test_missed_is_charged_only_where_the_degree_has_no_replica() -> None:
    pool = pool_of(1, 2)
    pool.store(0, (0, 1, 2, 0))
    pool.store(1, (0, 1))
    asked: list[tuple[int, int]] = []

    def benefit_s(start_block: int, end_block: int) -> np.ndarray:
        asked.append((start_block, end_block))
        return np.ones(end_block - start_block)

    match = pool.index.match(chain((0, 1, 2, 0)))
    pool.index.record_missed(match, 2, benefit_s)
    pool.index.record_missed(match, 1, benefit_s)
    assert asked == [(2, 4)]
    assert [pool.index.missed_s(block, 2) for block in chain((0, 1, 2, 0))] == [0.0, 0.0, 1.0, 1.0]


def test_a_match_is_refused_once_the_index_has_changed() -> None:
    pool = pool_of(1)
    pool.store(0, (0, 1))
    match = pool.index.match(chain((0, 1)))
    pool.evict(0, (0, 1))
    with pytest.raises(ConfigError, match="accepted: a fresh one"):
        pool.index.missing_blocks(0, match)
