"""Every policy is tuned in the pool that it is played in, on the tuning half, and the paper's system is the paper's."""

from dataclasses import replace

import pytest

from vertumnus.core.composition import Composition
from vertumnus.core.profile import load_profile
from vertumnus.core.queueing import Discipline
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.configurations import ALL, steps
from vertumnus.reproduction.scale import TINY
from vertumnus.reproduction.traffic import settings, workload
from vertumnus.reproduction.tuning import GRIDS, THRESHOLDS, PaperChoice, tuned, tuned_paper
from vertumnus.sim.simulate import SimulationSettings, as_in_paper, simulate

COMPOSITION = Composition.parse("4x1,2x2,1x8")
PROFILE = load_profile()
PAPER = "vertumnus-paper"


def measuring(mean_of):
    """A bench that simulates nothing: rows with the mean that `mean_of(cell)` says. Returns it and the cells asked."""
    asked = []

    def measure(cells):
        asked.extend(cells)
        return [{"mean_ttft_s": mean_of(cell)} for cell in cells]

    return Bench(scale=TINY, measure=measure), asked


def test_the_paper_is_tuned_with_its_own_queue_controller_and_copies_on_the_other_half():
    best = GRIDS[PAPER][3]

    def mean_s(cell):
        policy, thresholds = cell.make_policy(), cell.settings.controller_settings
        off = abs(policy.beta - best["beta"]) + abs(policy.lambda_ - best["lambda_"])
        return 1.0 + off - 0.1 * (thresholds == THRESHOLDS[2])

    bench, asked = measuring(mean_s)
    traffic = workload(bench, "toolagent")
    choice = tuned_paper(bench, traffic, PROFILE, COMPOSITION)
    assert choice == PaperChoice(options=best, thresholds=THRESHOLDS[2])
    assert len(asked) == len(GRIDS[PAPER]) + len(THRESHOLDS) - 1
    for cell in asked:
        assert cell.trace is traffic.tuning
        assert not cell.settings.is_fixed
        assert cell.settings == replace(
            as_in_paper(cell.settings), controller_settings=cell.settings.controller_settings
        )
        assert cell.make_policy().name == PAPER


@pytest.mark.parametrize("discipline", Discipline)
def test_baselines_are_tuned_with_the_queues_that_they_are_played_with(discipline):
    bench, asked = measuring(lambda cell: 1.0)
    chosen = tuned(
        bench, workload(bench, "toolagent"), PROFILE, COMPOSITION, ["preble", "min-ttft"], discipline=discipline
    )
    assert chosen == {"preble": GRIDS["preble"][0], "min-ttft": {}}
    assert {cell.settings.discipline for cell in asked} == {discipline}
    assert all(cell.settings.is_fixed for cell in asked)


def test_all_improvements_off_is_the_papers_system_and_all_on_the_default():
    bench, _ = measuring(lambda cell: 1.0)
    trace = workload(bench, "toolagent").held_out
    base = replace(settings(bench), composition=COMPOSITION)
    choice = PaperChoice(options={"beta": 1.5, "lambda_": 0.1}, thresholds=THRESHOLDS[1])

    def ttft_s(policy, pool):
        return simulate(trace.rescaled(20.0), PROFILE, policy, pool).records.ttft_s

    named = steps()
    none = named[PAPER]
    assert none.settings(base, choice) == choice.pool(base)
    assert ttft_s(none.policy(choice)(), none.settings(base, choice)) == ttft_s(choice.maker(), base_with(choice, base))
    assert named["vertumnus"] == ALL
    assert ttft_s(ALL.policy(choice)(), ALL.settings(base, choice)) == ttft_s("vertumnus", base)


def base_with(choice: PaperChoice, base: SimulationSettings) -> SimulationSettings:
    """The default pool with the thresholds alone: the rest comes with the policy's name."""
    return replace(base, controller_settings=choice.thresholds)
