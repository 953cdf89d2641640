"""The command line run in this process."""

import pytest
from click.testing import CliRunner

from vertumnus.cli import main


@pytest.fixture
def run():
    """Runs a command line; returns click's result, with standard output and standard error apart."""
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])
