"""A small trace in a file, and the command line run in this process."""

import json

import pytest
from click.testing import CliRunner

from vertumnus.cli import main
from vertumnus.workload.synthesis import synthesise
from vertumnus.workload.writers import write_trace


@pytest.fixture(scope="session")
def trace_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    write_trace(synthesise("conversation", seed=1, duration_s=60, rate_per_s=3), path)
    return str(path)


@pytest.fixture
def run():
    """Runs a command line; returns click's result, with standard output and standard error apart."""

    def run(*arguments):
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def run_json(run):
    """Runs a command line with --json; returns the one object on its standard output."""

    def run_json(*arguments):
        result = run(*arguments, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return run_json
