"""Comparisons: which cells are run, in what order, and what a mean over several traces is."""

import pytest

from vertumnus.core.composition import Composition
from vertumnus.core.policies import MinimumTTFT, RoundRobin
from vertumnus.core.profile import load_profile
from vertumnus.errors import ConfigError
from vertumnus.sim.compare import Cell, compare, policy_maker, run_cells
from vertumnus.sim.comparison_files import write_csv, write_plot
from vertumnus.sim.simulate import SimulationSettings, simulate
from vertumnus.workload.synthesis import synthesise

PROFILE = load_profile()
SETTINGS = SimulationSettings(num_gpus=8, composition=Composition.parse("4x2"), is_fixed=True, blocks_per_rank=200)


def traffic(seed=1):
    return synthesise("conversation", seed=seed, duration_s=20, rate_per_s=3)


def figures(entry):
    return {key: value for key, value in entry.items() if key not in ("wall_s", "runs")}


def test_a_cell_is_what_simulate_gives():
    (cell,) = compare(traffic(), PROFILE, ["preble"], SETTINGS, rates_per_s=[4.0])
    alone = simulate(traffic().rescaled(4.0), PROFILE, "preble", SETTINGS)
    assert figures(cell.to_json()) == figures(alone.to_json())


def test_cells_come_in_the_order_of_rates_then_settings_then_policies():
    other = SimulationSettings(num_gpus=8, composition=Composition.parse("2x4"), is_fixed=True)
    cells = compare(traffic(), PROFILE, ["preble", MinimumTTFT], [SETTINGS, other], rates_per_s=[2.0, 3.0])
    order = [
        (result.cell.rate_per_s, str(result.cell.settings.composition), result.results[0].policy) for result in cells
    ]
    assert order == [
        (rate, composition, policy)
        for rate in (2.0, 3.0)
        for composition in ("4x2", "2x4")
        for policy in ("preble", "min-ttft")
    ]


def test_every_cell_gets_a_fresh_policy():
    both = compare([traffic(), traffic()], PROFILE, [RoundRobin], SETTINGS)[0].results
    assert figures(both[0].to_json()) == figures(both[1].to_json())


def test_several_traces_give_the_mean_of_every_figure():
    entry = compare([traffic(1), traffic(2)], PROFILE, ["vertumnus"], SETTINGS)[0].to_json()
    for name in ("mean_ttft_s", "slo_attainment_ratio", "token_hit_ratio"):
        assert entry[name] == pytest.approx(sum(run[name] for run in entry["runs"]) / 2)
    assert entry["composition"] == "4x2"


def test_auto_is_resolved_once_for_all_policies():
    settings = SimulationSettings(num_gpus=8, is_fixed=True, blocks_per_rank=200)
    cells = compare(traffic(), PROFILE, ["vertumnus", "preble", "flexlb"], settings)
    assert len({cell.results[0].composition for cell in cells}) == 1


def test_progress_counts_runs():
    seen = []
    compare([traffic(1), traffic(2)], PROFILE, ["preble", "dynamo"], SETTINGS, on_progress=seen.append)
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(("beta", "lambda_"), [(0.5, None), (None, -1.0)])
def test_weights_out_of_range_are_refused_when_the_policy_is_named(beta, lambda_):
    with pytest.raises(ConfigError, match="accepted"):
        policy_maker("vertumnus", beta=beta, lambda_=lambda_)


def test_nothing_to_compare_is_refused():
    cell = Cell(make_policy=MinimumTTFT, settings=SETTINGS)
    with pytest.raises(ConfigError, match="cells is empty"):
        run_cells([], [traffic()], PROFILE)
    with pytest.raises(ConfigError, match="traces is empty"):
        run_cells([cell], [], PROFILE)


def test_csv_has_a_line_per_entry_and_no_nested_runs(tmp_path):
    entries = [cell.to_json() for cell in compare([traffic(1), traffic(2)], PROFILE, ["preble"], SETTINGS)]
    write_csv(entries, str(tmp_path / "table.csv"))
    heading, line = (tmp_path / "table.csv").read_text().splitlines()
    assert "runs" not in heading
    assert line.startswith("preble,")


@pytest.mark.parametrize("rates_per_s", [[3.0], [3.0, 4.0]])
def test_equal_comparisons_give_equal_plots_even_without_figures(tmp_path, rates_per_s):
    settings = SimulationSettings(
        num_gpus=8, composition=Composition.parse("4x2"), is_fixed=True, blocks_per_rank=200, warmup_s=1e6
    )
    measured = compare(traffic(), PROFILE, ["preble", "dynamo"], SETTINGS, rates_per_s=rates_per_s)
    empty = compare(traffic(), PROFILE, ["preble"], settings, rates_per_s=rates_per_s)
    for name, cells in (("measured", measured), ("empty", empty)):
        entries = [cell.to_json() for cell in cells]
        paths = [tmp_path / f"{name}-{number}.svg" for number in (1, 2)]
        for path in paths:
            write_plot(entries, "title", str(path))
        assert paths[0].read_bytes() == paths[1].read_bytes()
