"""What the docs show is what the code does: their examples run as doctests, and the example scripts run."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.models import smollm2_folder

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["cp-step.md", "placement.md", "prefix-index.md"]


@pytest.mark.parametrize("page", PAGES)
def test_examples_on_the_page_are_true(page):
    outcome = doctest.testfile(
        str(ROOT / "docs" / page), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert outcome.attempted > 5
    assert outcome.failed == 0


def test_own_policy_example_runs():
    script = ROOT / "examples" / "own_policy.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=300)
    assert "greenest" in result.stdout


def test_switch_example_gives_the_same_answer_at_both_degrees():
    command = [sys.executable, str(ROOT / "examples" / "switch_degree.py"), str(smollm2_folder())]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "Rome" in result.stdout
    assert result.stdout.endswith("identical\n")
