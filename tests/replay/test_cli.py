"""`vertumnus replay` as a program: what it prints and writes, what it refuses, and how it is stopped."""

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.replay.endpoint_double import EndpointDouble, serving
from tests.workload.trace_strategies import trace_of

from vertumnus.cli import main
from vertumnus.workload.writers import write_trace

PROGRAM = Path(sys.executable).with_name("vertumnus")

AGREED_NAMES = {
    *("num_requests", "num_completed", "rate_per_s", "wall_s"),
    *("mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "p99_ttft_s", "slo_attainment_ratio", "token_hit_ratio"),
}


@pytest.fixture
def trace_path(tmp_path):
    path = tmp_path / "small.jsonl"
    prompts = [[0, 0, 0, 0, n, n] for n in range(6)]
    write_trace(trace_of(prompts, arrival_s=[n / 100 for n in range(6)], name="small"), path)
    return path


@pytest.fixture
def run():
    def run(*arguments, env=None):
        return CliRunner().invoke(main, ["replay", *map(str, arguments)], env=env)

    return run


def refused(result, *words):
    """The one sentence of a refusal; it has these words."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    for word in (*words, "accepted"):
        assert str(word) in line


def test_json_is_one_object_with_the_names_of_simulate(run, endpoint, trace_path):
    double = endpoint(cache_block_tokens=4)
    result = run(trace_path, "--url", double.url, "--rate", 80, "--output-tokens", 2, "--seed", 3, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["command"], document["trace"], document["model"]) == ("replay", "small", "tiny")
    assert document["url"] == double.url
    assert document["settings"]["seed"] == 3
    (entry,) = document["results"]
    assert entry.keys() >= AGREED_NAMES
    assert entry["num_completed"] == entry["num_requests"] == 6
    assert entry["rate_per_s"] == pytest.approx(80)
    assert entry["token_hit_ratio"] == pytest.approx(20 / 36)


def test_the_same_seed_sends_the_same_prompts_and_repeats_send_others(run, endpoint, trace_path):
    sent = []
    for seed in (1, 1, 2):
        double = endpoint()
        assert run(trace_path, "--url", f"{double.url}/v1/", "--seed", seed, "--repeat", 2).exit_code == 0
        sent.append(sorted(body["prompt"] for body in double.bodies))
    assert sent[0] == sent[1] != sent[2]
    assert len({tuple(prompt) for prompt in sent[0]}) == 12


def test_table_plot_and_lines_are_written(run, endpoint, trace_path, tmp_path):
    double = endpoint(statuses={2: 500})
    files = ("--plot", tmp_path / "ttft.png", "--csv", tmp_path / "ttft.csv")
    result = run(trace_path, "--url", double.url, "--limit", 5, *files)
    assert result.exit_code == 0, result.stderr
    assert "tiny" in result.stdout
    assert "1 failed with http_500: as told" in result.stderr
    with (tmp_path / "ttft.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["index"]) for row in rows] == [0, 1, 2, 3, 4]
    assert sorted(row["error"] for row in rows) == ["", "", "", "", "http_500"]
    assert all((row["ttft_s"] == "") == (row["error"] != "") for row in rows)
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("behaviour", [{"statuses": dict.fromkeys(range(6), 500)}, {}], ids=["all fail", "all answer"])
def test_plots_are_drawn_whatever_came(run, endpoint, trace_path, tmp_path, behaviour):
    path = tmp_path / "ttft.svg"
    assert run(trace_path, "--url", endpoint(**behaviour).url, "--warmup", 0.02, "--plot", path).exit_code == 0
    assert path.stat().st_size > 0


BAD_OPTIONS = {
    "no address": (("--url", "nonsense"), ("url", "nonsense", "http://")),
    "other scheme": (("--url", "ftp://localhost"), ("url", "ftp://localhost")),
    "bad port": (("--url", "http://localhost:99999"), ("url", "99999")),
    "nobody there": (("--url", "http://127.0.0.1:9"), ("url", "http://127.0.0.1:9")),
    "no such host": (("--url", "http://nowhere.invalid"), ("url", "nowhere.invalid")),
    "rate of nothing": (("--rate", 0), ("rate", "0")),
    "infinite rate": (("--rate", "inf"), ("rate", "inf")),
    "rate no number": (("--rate", "nan"), ("rate", "nan")),
    "absurd rate": (("--rate", 1e12), ("rate", "1e+12", "100,000")),
    "weeks": (("--rate", 1e-7), ("trace lasts", "a week")),
    "no lengths": (("--scale-lengths", 0), ("scale-lengths", "0")),
    "absurd lengths": (("--scale-lengths", 1e9), ("scale-lengths", "1e+09")),
    "vocabulary": (("--vocab", 3), ("vocab", "3")),
    "outputs": (("--output-tokens", "many"), ("output-tokens", "many", "trace")),
    "no output": (("--output-tokens", 0), ("output-tokens", "0")),
    "slo": (("--slo", "soon"), ("slo", "soon")),
    "timeout": (("--timeout", 0), ("timeout", "0")),
    "no key": (("--api-key-env", "NO_SUCH_VARIABLE"), ("api-key-env", "NO_SUCH_VARIABLE")),
    "plot suffix": (("--plot", "plot.doc"), ("plot.doc", ".png")),
    "folder": (("--csv", "nowhere/at/all.csv"), ("nowhere/at/all.csv",)),
    "one file for two": (("--csv", "x.png", "--plot", "x.png"), ("x.png", "different")),
}


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_option_is_refused_by_name(run, trace_path, options, words):
    url = () if "--url" in options else ("--url", "http://127.0.0.1:9")
    refused(run(trace_path, *url, *options), *words)


BAD_ENDPOINTS = {
    "no list of models": ({"models_status": 404}, (), ("lists no models", "--model")),
    "list that is none": ({"models": {"hello": "world"}}, (), ("no list of models", "OpenAI")),
    "several models": ({"models": ["a", "b"]}, (), ("model is not given", "a, b")),
    "no model": ({"models": []}, (), ("model is not given", "no model")),
    "unknown model": ({}, ("--model", "huge"), ("model", "huge", "tiny")),
    "key missing": ({"key": "sesame"}, (), ("401", "wrong key", "--api-key-env")),
    "no completions": ({"probe_status": 404}, (), ("404", "/v1/completions")),
    "redirect": ({"probe_status": 307}, (), ("redirects", "307")),
    "small vocabulary": ({"vocab": 512}, (), ("400", "out of vocabulary", "--vocab")),
    "no stream": ({"streams": False}, (), ("does not stream",)),
}


@pytest.mark.parametrize(("behaviour", "options", "words"), BAD_ENDPOINTS.values(), ids=BAD_ENDPOINTS.keys())
def test_unfitting_endpoint_is_refused_before_anything_is_sent(run, endpoint, trace_path, behaviour, options, words):
    double = endpoint(**behaviour)
    refused(run(trace_path, "--url", double.url, *options), *words)
    assert double.bodies == []


def test_small_vocabulary_is_played_when_told(run, endpoint, trace_path):
    double = endpoint(vocab=512)
    assert run(trace_path, "--url", double.url, "--vocab", 512).exit_code == 0
    assert max(max(body["prompt"]) for body in double.bodies) < 512


def test_existing_files_are_kept_unless_forced(run, endpoint, trace_path, tmp_path):
    path = tmp_path / "kept.csv"
    path.write_text("precious")
    double = endpoint()
    refused(run(trace_path, "--url", double.url, "--csv", path), "kept.csv", "--force")
    assert path.read_text() == "precious"
    assert double.bodies == []
    assert run(trace_path, "--url", double.url, "--csv", path, "--force").exit_code == 0
    assert path.read_text().startswith("index,")


def test_key_comes_from_the_environment(run, endpoint, trace_path):
    double = endpoint(key="sesame")
    result = run(trace_path, "--url", double.url, "--api-key-env", "MY_KEY", "--json", env={"MY_KEY": "sesame"})
    assert json.loads(result.stdout)["results"][0]["num_completed"] == 6
    assert "sesame" not in result.stdout + result.stderr


def test_interrupt_ends_it_with_the_results_so_far(trace_path):
    """The installed program, stopped by Ctrl-C while two answers are outstanding and the rest is far away."""
    with serving(EndpointDouble(silent_from=2)) as double:
        arguments = (trace_path, "--url", double.url, "--rate", "5", "--json")
        slow_start = subprocess.Popen(
            [PROGRAM, "replay", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with slow_start as process:
            deadline_s = time.monotonic() + 60
            while len(double.bodies) < 3 and time.monotonic() < deadline_s and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    (entry,) = json.loads(stdout)["results"]
    assert entry["interrupted"] is True
    assert (entry["num_completed"], entry["num_failed"]) == (2, 0)
    assert entry["num_unfinished"] >= 1
    assert entry["num_unfinished"] + entry["num_unsent"] == 4


def test_program_answers_with_one_sentence_and_status_2(trace_path):
    done = subprocess.run(
        [PROGRAM, "replay", str(trace_path), "--url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
