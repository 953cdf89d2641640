"""Telemetry that goes to several."""

from vertumnus.serve.telemetry import Telemetry, together


class Ranks(Telemetry):
    def __init__(self, told):
        self.told = told

    def rank_gone(self, now_s, rank, reason):
        self.told.append((self, now_s, rank, reason))


class Handoffs(Telemetry):
    def __init__(self):
        self.told = []

    def handoff_ended(self, now_s, *, started_s, num_blocks, is_ok):
        self.told.append((now_s, started_s, num_blocks, is_ok))


def test_everybody_who_listens_is_told_in_order():
    told = []
    first, second, other = Ranks(told), Ranks(told), Handoffs()
    both = together([first, other, second])
    both.rank_gone(1.0, 3, "killed")
    both.handoff_ended(2.0, started_s=1.5, num_blocks=4, is_ok=True)
    both.rank_back(3.0, 3)
    assert told == [(first, 1.0, 3, "killed"), (second, 1.0, 3, "killed")]
    assert other.told == [(2.0, 1.5, 4, True)]


def test_one_that_tells_others_can_be_told_by_another():
    told = []
    first, second, other = Ranks(told), Ranks(told), Handoffs()
    both = together([together([first, other]), second])
    both.rank_gone(1.0, 3, "killed")
    both.handoff_ended(2.0, started_s=1.5, num_blocks=4, is_ok=True)
    both.rank_back(3.0, 3)
    assert told == [(first, 1.0, 3, "killed"), (second, 1.0, 3, "killed")]
    assert other.told == [(2.0, 1.5, 4, True)]
