"""The installed program itself, as a process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("vertumnus")
HEAVY = ("numpy", "scipy", "matplotlib", "rich", "blake3", "zstandard")


def run(*arguments, stdin=None):
    return subprocess.run(
        [PROGRAM, *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("arguments", [("--help",), ("simulate", "--help"), ("bench", "sim", "--help")])
def test_help_pages_import_nothing_heavy(arguments):
    code = (
        "import sys; from vertumnus.cli import main; "
        f"main({list(arguments)!r}, standalone_mode=False); "
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "Usage:" in done.stdout
    assert done.stderr.strip() == "[]"


def test_trace_comes_from_standard_input_and_json_goes_to_standard_output(trace_path):
    done = run("simulate", "-", "--gpus", 8, "--json", stdin=Path(trace_path).read_text())
    assert done.returncode == 0
    assert json.loads(done.stdout)["results"][0]["num_requests"] == 180
    assert done.stderr == ""


def test_refusal_is_one_sentence_and_status_2(trace_path):
    done = run("simulate", trace_path, "--gpus", 8, "--policy", "magic")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "accepted: vertumnus" in done.stderr


def test_compare_over_processes_equals_compare_in_one(trace_path):
    arguments = ("compare", trace_path, "--gpus", 8, "--policies", "vertumnus,flexlb", "--limit", 40, "--json", "-j")
    entries = []
    for jobs in (1, 2):
        done = run(*arguments, jobs)
        assert done.returncode == 0, done.stderr
        entries.append(json.loads(done.stdout)["results"])
    for one, other in zip(*entries, strict=True):
        assert {**one, "wall_s": 0} == {**other, "wall_s": 0}
