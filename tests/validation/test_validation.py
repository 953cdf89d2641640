"""The simulator against the live pool: the same trace, the same profile, the same decisions."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from vertumnus import Composition, SimulationSettings, load_profile, synthesise
from vertumnus.cli import main
from vertumnus.validation.comparison import Comparison
from vertumnus.validation.sides import Side, as_stubs_behave, live_virtually, simulated, spec_of

DEFAULT = "qwen3-30b-a3b-h20-3e"


def run(*arguments):
    return CliRunner().invoke(main, ["validate", *map(str, arguments)])


def side(name, ttft_s, **columns):
    ttft_s = np.array(ttft_s)
    figures = {key: np.full(len(ttft_s), value) for key, value in columns.items()}
    ones = dict.fromkeys(("arrival_s", "reused_tokens", "input_tokens", "degree"), np.ones(len(ttft_s)))
    return Side(name=name, ttft_s=ttft_s, num_transitions=0, lags={}, **{**ones, **figures})


@pytest.mark.parametrize(
    ("composition", "is_fixed", "rate_per_s", "step_tokens"),
    [("2x2,3x4", True, 5.0, None), ("4x4", False, 8.0, None), ("4x4", False, 8.0, 8192)],
    ids=["fixed", "adaptive", "adaptive, chunks"],
)
def test_the_simulator_says_of_a_pool_what_the_live_pool_does(composition, is_fixed, rate_per_s, step_tokens):
    trace = synthesise("conversation", seed=3, duration_s=120, rate_per_s=rate_per_s)
    profile = as_stubs_behave(load_profile())
    settings = SimulationSettings(
        num_gpus=16,
        composition=Composition.parse(composition),
        is_fixed=is_fixed,
        blocks_per_rank=2800,
        step_tokens=step_tokens,
        window_s=10.0,
    )
    live = live_virtually(trace, spec_of(DEFAULT, profile, settings, trace.block_tokens), seed=0)
    document = Comparison(live, simulated(trace, profile, settings)).to_json()
    assert document["num_compared"] == trace.num_requests
    assert document["is_within_target"], document
    assert document["rank_correlation"] > 0.95
    assert document["other_degree_ratio"] < 0.1
    if not is_fixed:
        assert document["live"]["num_transitions"] > 0
        assert document["simulated"]["num_transitions"] > 0


def test_a_simulator_that_is_wrong_is_found_out():
    """With ranks twice as slow as the live ones, or caches that hold nothing."""
    trace = synthesise("conversation", seed=3, duration_s=60, rate_per_s=5.0)
    profile = as_stubs_behave(load_profile())
    settings = SimulationSettings(
        num_gpus=16, composition=Composition.parse("8x2"), is_fixed=True, blocks_per_rank=1400
    )
    live = live_virtually(trace, spec_of(DEFAULT, profile, settings, trace.block_tokens), seed=0)
    slow = replace(
        profile,
        coefficients={
            degree: replace(each, d=2 * each.d, a=2 * each.a, c=2 * each.c, alpha=2 * each.alpha)
            for degree, each in profile.coefficients.items()
        },
    )
    assert not Comparison(live, simulated(trace, slow, settings)).to_json()["is_within_target"]
    forgetful = replace(settings, blocks_per_rank=260)
    assert not Comparison(live, simulated(trace, profile, forgetful)).to_json()["is_within_target"]


def test_the_figures_of_a_comparison_by_hand():
    live = side("live", [1.0, 2.0, np.nan, 4.0], reused_tokens=[1, 0, 1, 0], input_tokens=2, degree=[1, 2, 1, 4])
    sim = side("simulated", [1.0, 3.0, 9.0, 4.0], reused_tokens=[1, 1, 1, 0], input_tokens=2, degree=[1, 2, 1, 8])
    document = Comparison(live, sim).to_json()
    assert document["num_compared"] == 3
    assert document["live"]["num_unanswered"] == 1
    assert document["mean_over_live_ratio"] == pytest.approx(8 / 7)
    assert document["hit_difference"] == pytest.approx(2 / 6 - 1 / 6)
    assert document["rank_correlation"] == pytest.approx(1.0)
    assert document["other_degree_ratio"] == pytest.approx(1 / 3)
    assert not document["is_within_target"]


def test_the_verb_prints_both_sides_and_draws_them(tmp_path):
    plot = tmp_path / "both.png"
    arguments = ("synth:conversation", "--gpus", 8, "--rate", 2, "--limit", 60, "--virtual", "--composition", "4x2")
    result = run(*arguments, "--plot", plot, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["num_compared"] == 60
    assert document["live"]["mean_ttft_s"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = run(*arguments)
    assert table.exit_code == 0
    assert "simulated over live" in table.stdout


def test_stub_ranks_behind_the_real_front_end_are_asked_in_real_time():
    result = run("synth:conversation", "--gpus", 8, "--rate", 10, "--limit", 30, "--composition", "4x2", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["num_compared"] == 30
    assert "p99_lag_s" in document["live"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", 128), ("gpus is 128", "accepted")),
        (("--gpus", 8, "--noise", 0.1), ("--noise", "accepted")),
        (("--gpus", 8, "--composition", "3x2"), ("composition", "accepted")),
        (("--gpus", 8, "--plot", "both.txt"), ("plot path", "accepted")),
        (("--gpus", 2, "--model", "nowhere"), ("nowhere",)),
    ],
)
def test_bad_input_is_one_sentence(arguments, words):
    result = run("synth:conversation", "--limit", 10, *arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert all(word in line for word in words), line
