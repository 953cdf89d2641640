"""`vertumnus profile`: logs that are fitted, ranks that are measured, and what is refused."""

import json

import pytest
from click.testing import CliRunner
from tests.engine.models import tiny_llama

from vertumnus.cli import main
from vertumnus.core.fit import PrefillSample
from vertumnus.core.profile import Source, load_profile
from vertumnus.profiling.measure import BLOCK_TOKENS, cells_of
from vertumnus.profiling.samples import append_sample, read_samples

LENGTHS = (512, 2048, 8192, 32768)


def run(*arguments):
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


@pytest.fixture
def log(tmp_path):
    """Times that the built-in profile would have, as CSV with a column too many."""
    model = load_profile().cost_model()
    lines = ["degree,suffix_tokens,note,prefix_tokens,seconds"]
    for degree in (1, 2, 4):
        for suffix in LENGTHS:
            for prefix in (0, 16384):
                lines.append(f"{degree},{suffix},x,{prefix},{model.prefill_s(suffix, prefix, degree)}")
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_log_becomes_a_profile_that_can_be_simulated_with(log, tmp_path):
    output = tmp_path / "mine.toml"
    plot = tmp_path / "fit.png"
    result = run("--from-samples", log, "-o", output, "--plot", plot, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["num_samples"] == 24
    assert document["mean_error_ratio"] < 1e-6
    profile = load_profile(output)
    assert profile.degrees == (1, 2, 4)
    assert profile.coefficients[4].alpha == pytest.approx(load_profile().coefficients[4].alpha)
    assert profile.provenance["coefficients.d_s"].source is Source.MEASURED
    assert profile.provenance["switch_s"] == load_profile().provenance["switch_s"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    simulated = CliRunner().invoke(
        main, ["simulate", "synth:conversation", "--limit", "50", "--gpus", "8", "--profile", str(output), "--json"]
    )
    assert simulated.exit_code == 0, simulated.stderr


def test_a_log_is_fitted_without_torch(log, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert run("--from-samples", log, "-o", tmp_path / "mine.toml").exit_code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("empty", "accepted")),
        ("degree,suffix_tokens,seconds\n1,2,3\n", ("prefix_tokens", "accepted")),
        ('{"degree": 1, "suffix_tokens": 5, "prefix_tokens": 0, "seconds": "soon"}\n', ("line 1", "seconds", "soon")),
        ('{"degree": 1, "suffix_tokens": 5.5, "prefix_tokens": 0, "seconds": 1}\n', ("line 1", "suffix_tokens", "5.5")),
        ('{"degree": 1, "suffix_tokens": 5, "prefix_tokens": 0, "seconds": -1}\n', ("line 1", "seconds", "-1")),
        ("{nonsense\n", ("line 1", "no JSON object")),
        ('{"degree": 1, "suffix_tokens": 5, "prefix_tokens": 0, "seconds": 1}\n', ("do not settle", "needed")),
    ],
)
def test_a_bad_log_is_refused_in_one_sentence_and_nothing_is_written(tmp_path, text, words):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    result = run("--from-samples", path, "-o", tmp_path / "mine.toml")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert all(word in line for word in words), line
    assert not (tmp_path / "mine.toml").exists()


def test_what_exists_is_replaced_by_force_only_and_one_source_is_asked_for(log, tmp_path):
    output = tmp_path / "mine.toml"
    output.write_text("precious")
    assert "exists" in run("--from-samples", log, "-o", output).stderr
    assert output.read_text() == "precious"
    assert run("--from-samples", log, "-o", output, "--force").exit_code == 0
    assert "one of them" in run("-o", tmp_path / "other.toml").stderr
    assert run(tmp_path / "nowhere", "-o", tmp_path / "other.toml").exit_code == 2


def test_samples_come_back_from_their_file(tmp_path):
    samples = [PrefillSample(2, 64, 128, 0.5), PrefillSample(1, 64, 0, 0.25)]
    for sample in samples:
        append_sample(tmp_path / "log.jsonl", sample)
    assert read_samples(tmp_path / "log.jsonl") == samples


@pytest.mark.parametrize("max_tokens", [256, 1000, 4096, 131072])
def test_the_grid_stays_within_the_longest_prompt_and_settles_every_coefficient(max_tokens):
    cells = cells_of((1, 2), max_tokens)
    assert len(set(cells)) == len(cells)
    assert all(suffix + prefix <= max_tokens and prefix % BLOCK_TOKENS == 0 for _, suffix, prefix in cells)
    assert {degree for degree, *_ in cells} == {1, 2}
    assert len({suffix for _, suffix, prefix in cells if not prefix}) >= 3
    assert any(prefix for _, _, prefix in cells)


def test_ranks_are_measured_and_a_broken_run_goes_on_where_it_was(tmp_path):
    folder = tiny_llama().folder
    output, samples = tmp_path / "tiny.toml", tmp_path / "tiny.samples.jsonl"
    arguments = (folder, "-o", output, "--max-tokens", 256, "--rounds", 2, "--json")
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    taken = samples.read_text().splitlines()
    assert len(taken) == 2 * len(cells_of((1, 2), 256))
    profile = load_profile(output)
    assert profile.degrees == (1, 2)
    assert profile.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert profile.provenance["switch_s"].source is Source.MEASURED
    assert profile.provenance["inter_node_bytes_per_s"].source is Source.ESTIMATED
    assert all(str(tmp_path) not in each.note for each in profile.provenance.values())
    document = json.loads(result.stdout)
    assert len(document["cells"]) == len(cells_of((1, 2), 256))
    assert document["packed"]
    samples.write_text("\n".join(taken[:-3]) + "\n")
    assert run(*arguments, "--resume", "--force").exit_code == 0
    again = samples.read_text().splitlines()
    assert again[: len(taken) - 3] == taken[:-3]
    assert len(again) == len(taken)
