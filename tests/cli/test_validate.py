"""`vertumnus validate`, as its users run it."""

import pytest
from tests.cli.test_bad_input import refused, trace_of

ROW = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}
VIRTUAL = ("--virtual", "--ranks", 4, "--limit", 60)


@pytest.mark.parametrize("way", ["--adaptive", "--fixed"])
def test_one_object_with_both_sides(run_json, trace_path, way):
    document = run_json("validate", trace_path, *VIRTUAL, "--composition", "2x1,1x2", way, "--seed", 3)
    assert (document["command"], document["mode"], document["ranks"]) == ("validate", "virtual", "stub")
    assert document["settings"]["composition"] == "2x1,1x2"
    assert document["settings"]["controller"] == (None if way == "--fixed" else "lookahead")
    (entry,) = document["results"]
    assert entry["num_measured"] == 60
    assert entry["within_target"]
    assert entry["overheads"] is entry["lags"] is None
    assert entry["compositions"]["live"][0] == {"s": 0.0, "composition": "2x1,1x2"}


def test_equal_runs_print_equal_tables(run, trace_path):
    first, second = (run("validate", trace_path, *VIRTUAL, "--fixed") for _ in range(2))
    assert first.exit_code == 0, first.stderr
    assert first.stdout == second.stdout
    for word in ("mean TTFT", "P90", "token hit", "live", "simulated", "correlation"):
        assert word in first.stdout


def test_the_plot_is_written_whole_and_never_over_another(run, trace_path, tmp_path):
    path = tmp_path / "out.svg"
    assert run("validate", trace_path, *VIRTUAL, "--adaptive", "--window", 2, "--plot", path).exit_code == 0
    assert path.read_text().count("<svg") == 1
    refused(run("validate", trace_path, *VIRTUAL, "--plot", path), "out.svg", "accepted", "--force")
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_seconds_only(run_json, trace_path):
    (entry,) = run_json("validate", trace_path, "--virtual", "--ranks", 4, "--duration", 20, "--warmup", 5)["results"]
    assert entry["duration_s"] <= 20
    assert 0 < entry["num_measured"] < entry["num_requests"]


BAD_OPTIONS = {
    "no ranks": (("--ranks", 0), ("--ranks", "0")),
    "composition that is none": (("--composition", "banana"), ("composition", "banana", "accepted")),
    "composition of other ranks": (("--composition", "2x1"), ("composition", "2x1", "accepted", "4")),
    "composition too large": (("--composition", "3x4"), ("composition", "3x4", "accepted")),
    "degree beyond the profile": (
        ("--ranks", 16, "--composition", "1x16"),
        ("composition", "1x16", "accepted"),
    ),
    "unknown profile": (("--profile", "nothing"), ("profile", "nothing", "accepted")),
    "rate": (("--rate", "0"), ("rate", "0", "accepted")),
    "rate no number": (("--rate", "fast"), ("--rate", "fast")),
    "window": (("--window", "0"), ("--window", "0")),
    "endless window": (("--window", "inf"), ("--window", "inf")),
    "duration": (("--duration", "-1"), ("--duration", "-1")),
    "warm-up of all": (("--duration", "10", "--warmup", "10"), ("warmup", "10", "accepted")),
    "lengths": (("--scale-lengths", "0"), ("scale-lengths", "0", "accepted")),
    "step below a block": (("--step-tokens", "100"), ("step-tokens", "100", "accepted")),
    "dtype of nothing": (("--dtype", "float32"), ("dtype", "float32", "accepted", "--model")),
    "real ranks on a virtual clock": (("--model", "folder"), ("virtual", "folder", "accepted")),
    "plot suffix": (("--plot", "plot.doc"), ("plot.doc", "accepted", ".png")),
    "prompts beyond the pool": (
        ("--scale-lengths", "100", "--composition", "4x1"),
        ("prompt", "accepted", "--scale-lengths"),
    ),
}


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_option_is_refused_by_name(run, trace_path, options, words):
    refused(run("validate", trace_path, "--virtual", "--ranks", 4, *options), *words)


def test_bad_trace_and_model_are_refused(run, trace_path, tmp_path):
    path = trace_of(tmp_path / "bad.jsonl", ROW, "{not json")
    refused(run("validate", path, "--virtual"), "bad.jsonl", "line 2", "accepted")
    refused(run("validate", trace_path, "--model", tmp_path / "nothing"), "model", "nothing", "accepted")
