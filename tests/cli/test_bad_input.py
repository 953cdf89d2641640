"""Bad input: one sentence that names field, value and what is accepted, exit status 2, nothing half-written."""

import json

import pytest

POOL = ("--gpus", 8)
ROW = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}


def refused(result, *words):
    """The one sentence of a refusal; it has these words."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    assert "Traceback" not in lines[0]
    for word in words:
        assert str(word) in lines[0]


def trace_of(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


BAD_TRACES = {
    "malformed line": ((ROW, "{not json"), ("line 2", "not json", "accepted")),
    "negative length": ((ROW, ROW | {"input_length": -5}), ("line 2", "input_length", "-5", "accepted")),
    "absurd length": ((ROW | {"input_length": 10**12},), ("line 1", "input_length", 10**12, "accepted")),
    "short hash list": ((ROW | {"hash_ids": [0]},), ("line 1", "hash_ids", "accepted")),
    "empty": ((), ("accepted",)),
    "unknown format": (({"a": 1},), ("accepted",)),
}


@pytest.mark.parametrize(("rows", "words"), BAD_TRACES.values(), ids=BAD_TRACES.keys())
@pytest.mark.parametrize("verb", ["simulate", "analyze"])
def test_bad_trace_is_refused_with_file_and_line(run, tmp_path, rows, words, verb):
    path = trace_of(tmp_path / "bad.jsonl", *rows)
    refused(run(verb, path), "bad.jsonl", *words)


BAD_OPTIONS = {
    "no GPUs": (("--gpus", 0), ("--gpus", "0")),
    "composition that is none": (("--composition", "banana"), ("composition", "banana", "accepted")),
    "composition too large": (("--composition", "3x4"), ("composition", "3x4", "12 GPUs", "accepted")),
    "composition too small": (("--composition", "1x4"), ("composition", "1x4", "accepted")),
    "degree beyond the nodes": (
        ("--composition", "1x8", "--node-gpus", 4),
        ("composition", "degree 8", "accepted: degrees up to 4"),
    ),
    "degree beyond the profile": (
        ("--composition", "1x16", "--node-gpus", 16, "--gpus", 16),
        ("composition", "1x16", "accepted"),
    ),
    "unknown policy": (("--policy", "magic"), ("policy", "magic", "round-robin", "vertumnus")),
    "unknown profile": (("--profile", "nothing"), ("profile", "nothing", "accepted")),
    "queue": (("--queue", "lifo"), ("--queue", "lifo", "fifo")),
    "rate": (("--rate", "0"), ("rate", "0", "accepted")),
    "rate no number": (("--rate", "fast"), ("--rate", "fast")),
    "infinite rate": (("--rate", "inf"), ("rate", "inf", "accepted")),
    "slo": (("--slo", "soon"), ("slo", "soon", "accepted")),
    "beta": (("--beta", "0.5"), ("beta", "0.5", "accepted")),
    "lambda": (("--lambda", "-1"), ("lambda", "-1", "accepted")),
    "weight without use": (("--policy", "preble", "--beta", "2"), ("beta", "2.0", "preble", "accepted", "vertumnus")),
    "failed rank": (("--fail", "8@1"), ("fail", "8@1", "accepted")),
    "failure backwards": (("--fail", "1@9:3"), ("fail", "1@9:3", "accepted")),
    "limit": (("--limit", "0"), ("--limit", "0")),
    "warm-up": (("--warmup", "-1"), ("--warmup", "-1")),
    "warm-up no number": (("--warmup", "nan"), ("--warmup", "nan")),
    "noise no number": (("--noise", "nan"), ("--noise", "nan")),
    "reports that never come": (("--report-delay", "inf"), ("--report-delay", "inf")),
    "no router": (("--routers", "0"), ("--routers", "0")),
    "late to oneself": (("--router-delay", "0.5"), ("router", "delay", "0.5", "one router", "accepted")),
    "routers and chunks": (("--routers", 2, "--step-tokens", 8192), ("step_tokens", "8192", "accepted", "routers")),
    "absurd KV memory": (("--kv-blocks", 10**20), ("--kv-blocks", 10**20)),
    "run of more than a year": (("--rate", "1e-9"), ("trace lasts", "accepted", "year")),
    "every GPU lost": (
        ("--gpus", 1, "--node-gpus", 1, "--fail", "0@1"),
        ("failures", "requests open", "accepted"),
    ),
    "unknown option": (("--colour", "red"), ("--colour",)),
    "step below a block": (("--step-tokens", "100"), ("step_tokens", "100", "accepted")),
}


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_option_is_refused_by_name(run, trace_path, options, words):
    refused(run("simulate", trace_path, *POOL, *options), *words)


BAD_COMPARISONS = {
    "policies": (("--policies", "preble,magic"), ("policy", "magic", "accepted")),
    "policy twice": (("--policies", "preble,preble"), ("policies", "preble,preble", "accepted")),
    "rates": (("--rates", "1,x"), ("rates", "1,x", "accepted")),
    "rate and rates": (("--rates", "1,2", "--rate", "3"), ("rate", "3", "accepted")),
    "no policy": (("--policies", ","), ("policy", "''", "accepted", "preble")),
    "composition twice": (("--composition", "8x1", "--composition", "8x1"), ("composition", "8x1", "accepted")),
    "plot and table in one file": (("--plot", "x.png", "--csv", "x.png"), ("x.png", "accepted", "different")),
    "plot suffix": (("--plot", "plot.doc"), ("plot.doc", "accepted", ".png")),
    "folder": (("--csv", "nowhere/at/all.csv"), ("nowhere/at/all.csv", "accepted")),
}


@pytest.mark.parametrize(("options", "words"), BAD_COMPARISONS.values(), ids=BAD_COMPARISONS.keys())
def test_bad_comparison_is_refused_before_it_runs(run, trace_path, options, words):
    refused(run("compare", trace_path, *POOL, *options), *words)


def test_unknown_verb_and_kind_are_refused_with_the_list(run, tmp_path):
    refused(run("fly"), "verb", "fly", "simulate", "compare")
    refused(run("synth", "poems", "-o", tmp_path / "x.jsonl"), "kind", "poems", "conversation")
    refused(run("simulate", "synth:poems"), "kind", "poems", "conversation")


def test_unknown_key_in_a_profile_is_refused(run, trace_path, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('colour = "red"\n')
    refused(run("simulate", trace_path, "--profile", path), "mine.toml", "colour", "accepted")


def test_missing_file_is_refused(run, tmp_path):
    refused(run("simulate", tmp_path / "missing.jsonl"), "missing.jsonl", "accepted")


@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "TRACE", *POOL, "--plot"),
        ("compare", "TRACE", *POOL, "--csv"),
        ("plan", "TRACE", *POOL, "--plot"),
        ("analyze", "TRACE", "--plot"),
        ("synth", "conversation", "--duration", 30, "-o"),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-1]}",
)
def test_existing_output_is_kept_unless_forced(run, trace_path, tmp_path, arguments):
    path = tmp_path / "out.png"
    path.write_text("precious")
    given = [trace_path if argument == "TRACE" else argument for argument in arguments]
    refused(run(*given, path), "out.png", "accepted", "--force")
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]


def test_forced_output_replaces_the_file(run, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    assert run("synth", "conversation", "--duration", 30, "-o", path, "--force").exit_code == 0
    assert path.read_text().startswith("{")
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_written_when_the_run_fails(run, trace_path, tmp_path):
    table = tmp_path / "table.csv"
    refused(run("compare", trace_path, *POOL, "--csv", table, "--rate", "inf"), "rate", "accepted")
    assert list(tmp_path.iterdir()) == []
