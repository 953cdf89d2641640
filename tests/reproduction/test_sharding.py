"""Sharding: by a hash that never moves, or by what was sent before, within a bound."""

import numpy as np
import pytest

from vertumnus.reproduction.sharding import BOUND, by_first_block, by_longest_prefix
from vertumnus.workload.synthesis import synthesise

TRACE = synthesise("toolagent", seed=3, duration_s=60, rate_per_s=30)
FIRST = TRACE.block_ids[TRACE.block_offsets[:-1]]


@pytest.mark.parametrize("num_routers", [2, 8])
def test_prompts_with_one_beginning_go_to_one_router(num_routers):
    shares = by_first_block(TRACE, num_routers)
    assert set(shares.tolist()) == set(range(num_routers))
    for block in np.unique(FIRST):
        assert len(set(shares[block == FIRST].tolist())) == 1


@pytest.mark.parametrize("num_routers", [2, 8])
def test_no_router_gets_much_more_than_its_share(num_routers):
    def most(shares):
        tokens = np.bincount(shares, TRACE.input_tokens, minlength=num_routers)
        return tokens.max() / tokens.mean()

    assert most(by_longest_prefix(TRACE, num_routers)) < BOUND + 0.1 < most(by_first_block(TRACE, num_routers))


def test_most_of_what_was_sent_before_is_sent_there_again():
    def found_ratio(shares):
        sent = [set() for _ in range(8)]
        found = known = 0
        for row, router in enumerate(shares.tolist()):
            blocks = TRACE.block_ids[TRACE.block_offsets[row] : TRACE.block_offsets[row + 1]].tolist()
            found += sum(block in sent[router] for block in blocks)
            known += sum(any(block in each for each in sent) for block in blocks)
            sent[router].update(blocks)
        return found / known

    in_turn = np.arange(TRACE.num_requests) % 8
    assert found_ratio(by_longest_prefix(TRACE, 8)) > 0.9 > found_ratio(in_turn)
