"""What is written is read back the same, and nothing is lost or half-written."""

import io
import sys

import numpy as np
import pytest
from hypothesis import given
from tests.workload.trace_strategies import assert_same_requests, trace_of, traces

from vertumnus.errors import ConfigError
from vertumnus.workload.output import replacing
from vertumnus.workload.readers import read_trace
from vertumnus.workload.trace import Trace
from vertumnus.workload.writers import fits_mooncake, write_trace


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@given(trace=traces())
def test_own_schema_keeps_everything(tmp_path_factory, trace, suffix):
    path = tmp_path_factory.mktemp("own") / f"trace.jsonl{suffix}"
    write_trace(trace, path)
    again = read_trace(path, spread=False)
    assert_same_requests(again, trace)
    assert again.name == trace.name


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@given(trace=traces(block_tokens=512))
def test_mooncake_schema_keeps_everything_but_the_name(tmp_path_factory, trace, suffix):
    path = tmp_path_factory.mktemp("mooncake") / f"trace.jsonl{suffix}"
    write_trace(trace, path)
    again = read_trace(path, spread=False)
    assert_same_requests(again, trace)
    assert again.name == "trace"


def test_arrivals_keep_every_digit_in_the_own_schema(tmp_path):
    arrival_s = np.concatenate(([0.0], np.cumsum(np.random.default_rng(0).random(20))))
    trace = trace_of([[1]] * 21, arrival_s=arrival_s.tolist())
    write_trace(trace, tmp_path / "t", schema="vertumnus")
    assert read_trace(tmp_path / "t", spread=False).arrival_s.tolist() == arrival_s.tolist()


def test_a_trace_without_prefixes_is_kept_too(tmp_path):
    trace = Trace(
        name="plain",
        block_tokens=512,
        has_block_ids=False,
        arrival_s=np.array([0.0, 0.5]),
        input_tokens=np.array([700, 3]),
        output_tokens=np.array([0, 9]),
        block_ids=np.array([], dtype=np.int64),
        block_offsets=np.zeros(3),
    )
    assert not fits_mooncake(trace)
    write_trace(trace, tmp_path / "t")
    assert_same_requests(read_trace(tmp_path / "t"), trace)
    with pytest.raises(ConfigError, match=r"schema is 'mooncake', but .*; accepted: 'vertumnus'"):
        write_trace(trace, tmp_path / "other", schema="mooncake")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_equal_traces_give_equal_bytes(tmp_path):
    trace = trace_of([[1, 2], [1]], block_tokens=512)
    for suffix in ("", ".gz", ".zst"):
        write_trace(trace, tmp_path / f"one{suffix}")
        write_trace(trace, tmp_path / f"other{suffix}")
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"other{suffix}").read_bytes()


def test_an_existing_file_is_kept_unless_forced(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("precious")
    trace = trace_of([[1]])
    with pytest.raises(ConfigError, match=r"t\.jsonl' exists; accepted: a new path, or --force"):
        write_trace(trace, path)
    assert path.read_text() == "precious"
    write_trace(trace, path, force=True)
    assert read_trace(path).num_requests == 1


def test_a_failure_half_way_leaves_nothing_behind(tmp_path):
    def write_half(path):
        with replacing(path, force=True) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    kept = tmp_path / "kept"
    kept.write_text("precious")
    for path in (kept, tmp_path / "new"):
        with pytest.raises(RuntimeError):
            write_half(path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "precious")]


def test_places_that_cannot_be_written(tmp_path):
    for path in (tmp_path, tmp_path / "no" / "t"):
        with pytest.raises(ConfigError, match=r"output path .*accepted"):
            write_trace(trace_of([[1]]), path, force=True)


def test_standard_output(monkeypatch, tmp_path):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    trace = trace_of([[1, 2], [1]])
    write_trace(trace, "-")
    monkeypatch.undo()
    (tmp_path / "t").write_text(out.getvalue())
    assert_same_requests(read_trace(tmp_path / "t"), trace)
