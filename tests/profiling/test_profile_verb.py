"""`vertumnus profile`: logs that are fitted, ranks that are measured, and what is refused."""

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.models import tiny_llama
from tests.serve.real import tiny_model

from vertumnus.cli import main
from vertumnus.cli.profile import ProfilingError
from vertumnus.core.fit import PrefillSample
from vertumnus.core.profile import Source, load_profile
from vertumnus.errors import ConfigError
from vertumnus.profiling.copies import CopyLine
from vertumnus.profiling.grid import BLOCK_TOKENS, StepCell, cells_of
from vertumnus.profiling.measure import EMPTY_LOG, MeasureSettings, Rounds
from vertumnus.profiling.one_device import OneDevice
from vertumnus.profiling.samples import (
    PackedStep,
    SampleLog,
    append_sample,
    begin_samples,
    read_samples,
    resume_samples,
)
from vertumnus.replay.blocks import scaled_lengths
from vertumnus.serve.calibration import CalibrationFailed
from vertumnus.validation import ramp
from vertumnus.validation.ramp import LiveRampSettings
from vertumnus.workload.synthesis import synthesise
from vertumnus.workload.writers import write_trace

LENGTHS = (512, 2048, 8192, 32768)


def run(*arguments):
    return CliRunner().invoke(main, ["profile", *map(str, arguments)])


def times():
    """(C, R, P, seconds) that the built-in profile would have."""
    model = load_profile().cost_model()
    cells = itertools.product((1, 2, 4), LENGTHS, (0, 16384))
    return [(degree, suffix, prefix, model.prefill_s(suffix, prefix, degree)) for degree, suffix, prefix in cells]


@pytest.fixture
def log(tmp_path):
    """These times as CSV with a column too many."""
    lines = ["degree,suffix_tokens,note,prefix_tokens,seconds"]
    lines += [f"{degree},{suffix},x,{prefix},{seconds}" for degree, suffix, prefix, seconds in times()]
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
        ('{"degree": 3, "suffix_tokens": 5, "prefix_tokens": 0, "seconds": 1}\n', ("line 1", "degree", "power of two")),
        ('{"degree": 1, "suffix_tokens": 5, "prefix_tokens": 0, "seconds": 1, "batch": 0}\n', ("line 1", "batch")),
        ('{"degree": 1, "suffix_tokens": 5, "prefix_tokens": 0, "seconds": 1, "batch": 2}\n', ("packed steps only",)),
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


@pytest.mark.parametrize("option", [("--ranks", 2), ("--device", "cuda"), ("--resume",)])
def test_what_only_a_measurement_could_heed_is_refused_with_a_log(log, tmp_path, option):
    told = run("--from-samples", log, "-o", tmp_path / "mine.toml", *option).stderr
    assert "with --from-samples; accepted: with MODEL only" in told
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
    samples = (PrefillSample(2, 64, 128, 0.5), PrefillSample(1, 64, 0, 0.25))
    packed = PackedStep(2, 4, 64, 128, 0.5)
    path = tmp_path / "log.jsonl"
    begin_samples(path, {"dtype": "float32"})
    for sample in (*samples, packed):
        append_sample(path, sample)
    log = read_samples(path)
    assert (log.samples, log.packed, log.setup) == (samples, (packed,), {"dtype": "float32"})


def test_half_a_line_of_a_run_that_was_killed_is_cut_off(tmp_path):
    path, setup = tmp_path / "log.jsonl", {"dtype": "float32"}
    begin_samples(path, setup)
    append_sample(path, PrefillSample(2, 64, 0, 0.5))
    whole = path.read_bytes()
    for cut in range(1, 60):
        path.write_bytes(whole + whole[-61:][:cut])
        log = resume_samples(path, setup)
        assert log.samples == (PrefillSample(2, 64, 0, 0.5),)
        assert path.read_bytes() == whole


def test_samples_of_another_setup_are_not_gone_on_with(tmp_path):
    path = tmp_path / "log.jsonl"
    begin_samples(path, {"model": "a", "dtype": "float32"})
    with pytest.raises(ConfigError, match=r"taken with dtype 'float32'; accepted .*'bfloat16'"):
        resume_samples(path, {"model": "a", "dtype": "bfloat16"})
    path.write_text('{"degree": 1, "suffix_tokens": 5, "prefix_tokens": 0, "seconds": 1}\n')
    with pytest.raises(ConfigError, match="no run has begun"):
        resume_samples(path, {})


@pytest.mark.parametrize("max_tokens", [256, 1000, 4096, 131072])
def test_the_grid_stays_within_the_longest_prompt_and_settles_every_coefficient(max_tokens):
    cells = cells_of((1, 2), max_tokens)
    assert len(set(cells)) == len(cells)
    assert all(cell.num_tokens <= max_tokens and cell.prefix_tokens % BLOCK_TOKENS == 0 for cell in cells)
    assert {cell.degree for cell in cells} == {1, 2}
    single = [cell for cell in cells if cell.num_requests == 1]
    assert len({cell.suffix_tokens for cell in single if not cell.prefix_tokens}) >= 3
    assert any(cell.prefix_tokens for cell in single)
    assert any(cell.num_requests > 1 for cell in cells)
    assert [cell.work for cell in cells] == sorted(cell.work for cell in cells)


class Machine:
    """Steps that take what a cost model says, on a clock of their own."""

    def __init__(self, s_per_work):
        self.now_s = 0.0
        self.ran = []
        self._s_per_work = s_per_work

    async def step_s(self, cell):
        seconds = cell.work * self._s_per_work
        self.now_s += seconds
        self.ran.append(cell)
        return seconds

    def rounds(self, cells, known=EMPTY_LOG, path=None, **settings):
        return Rounds(
            cells, MeasureSettings(folder=None, **settings), known, self.step_s, path, clock=lambda: self.now_s
        )


CELLS = cells_of((1, 2), 4096)


@given(st.floats(-9, -3), st.floats(1, 1000))
def test_a_run_ends_within_its_time_and_leaves_out_the_longest_only(magnitude, budget_s):
    machine = Machine(10.0**magnitude)
    rounds = machine.rounds(CELLS, budget_s=budget_s, num_rounds=3)
    asyncio.run(rounds.run())
    # Of each degree the first step is run whatever it takes.
    first_s = max(cell.work for cell in CELLS[:2]) * 10.0**magnitude
    assert machine.now_s <= budget_s + 2 * first_s
    for degree in (1, 2):
        of_degree = [cell for cell in CELLS if cell.degree == degree]
        num_timed = len({cell for cell in machine.ran if cell.degree == degree})
        assert {cell for cell in machine.ran if cell.degree == degree} <= set(of_degree[: num_timed + 1])
    assert rounds.num_left_out == len(CELLS) - len(set(machine.ran))


def test_with_time_enough_every_cell_is_timed_once_a_round_and_rounds_differ_in_order():
    machine = Machine(1e-9)
    rounds = machine.rounds(CELLS, num_rounds=4)
    asyncio.run(rounds.run())
    by_round = [machine.ran[start : start + len(CELLS)] for start in range(0, 4 * len(CELLS), len(CELLS))]
    assert all(sorted(each) == sorted(CELLS) for each in by_round)
    assert len({tuple(each) for each in by_round}) == 4
    assert by_round[0] == CELLS
    assert len(rounds.samples) + len(rounds.packed) == len(machine.ran)


@given(st.integers(0, 3 * len(CELLS)))
def test_a_run_that_broke_anywhere_goes_on_with_what_is_missing(num_before):
    whole, broken, again = Machine(1e-9), Machine(1e-9), Machine(1e-9)
    asyncio.run(whole.rounds(CELLS, num_rounds=3).run())

    class Killed(Exception):
        pass

    async def step_s(cell):
        if len(broken.ran) == num_before:
            raise Killed
        return await broken.step_s(cell)

    first = Rounds(CELLS, MeasureSettings(folder=None, num_rounds=3), EMPTY_LOG, step_s, clock=lambda: 0.0)
    with contextlib.suppress(Killed):
        asyncio.run(first.run())
    known = SampleLog(tuple(first.samples), tuple(first.packed))
    asyncio.run(again.rounds(CELLS, known, num_rounds=3).run())
    assert Counter(broken.ran + again.ran) == Counter(whole.ran)


@given(st.floats(0, 0.1), st.floats(1e-6, 0.1))
def test_a_copy_line_comes_back_from_its_points(latency_s, s_per_block):
    line = CopyLine.through({count: latency_s + count * s_per_block for count in (1, 4, 16, 64)})
    assert line.latency_s == pytest.approx(latency_s, abs=1e-6 * (latency_s + s_per_block))
    assert line.s_per_block == pytest.approx(s_per_block, rel=1e-5)


def test_packed_steps_of_a_log_are_compared_and_not_fitted(log, tmp_path):
    model = load_profile().cost_model()
    packed_s = model.step_s([(512, 0)] * 8, 2)
    with_packed = tmp_path / "packed.jsonl"
    rows = [dict(zip(("degree", "suffix_tokens", "prefix_tokens", "seconds"), each, strict=True)) for each in times()]
    rows.append({"degree": 2, "suffix_tokens": 512, "prefix_tokens": 0, "seconds": packed_s, "batch": 8})
    with_packed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("--from-samples", with_packed, "-o", tmp_path / "mine.toml", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["mean_error_ratio"] < 1e-6
    (packed,) = document["packed"]
    assert packed["num_requests"] == 8
    assert packed["predicted_s"] == pytest.approx(packed_s)
    assert packed["one_by_one_s"] > packed_s


def test_traffic_is_read_before_anything_is_measured_and_gives_kappa(log, tmp_path):
    output = tmp_path / "mine.toml"
    result = run("--from-samples", log, "-o", output, "--traffic", "nowhere.jsonl")
    assert result.exit_code == 2
    assert not output.exists()
    result = run("--from-samples", log, "-o", output, "--traffic", "synth:banana")
    assert result.exit_code == 2
    assert "banana" in result.stderr
    assert run("--from-samples", log, "-o", output, "--slo", "soon").exit_code == 2


def test_without_a_load_that_meets_the_target_there_is_a_profile_without_kappa(log, tmp_path):
    output, trace = tmp_path / "mine.toml", tmp_path / "trace.jsonl"
    write_trace(synthesise("conversation", seed=1, duration_s=60, rate_per_s=3), trace)
    result = run("--from-samples", log, "-o", output, "--traffic", trace, "--slo", "0.001")
    assert result.exit_code == 0, result.stderr
    assert "no kappa" in result.stderr
    assert load_profile(output).kappa is None


def test_ranks_are_measured_and_a_broken_run_goes_on_where_it_was(tmp_path):
    folder = tiny_llama().folder
    output, samples = tmp_path / "tiny.toml", tmp_path / "tiny.samples.jsonl"
    arguments = (folder, "-o", output, "--max-tokens", 256, "--rounds", 2, "--json")
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    taken = samples.read_text().splitlines()
    assert len(taken) == 1 + 2 * len(cells_of((1, 2), 256))
    profile = load_profile(output)
    assert profile.degrees == (1, 2)
    assert profile.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert profile.provenance["switch_s"].source is Source.MEASURED
    assert profile.provenance["inter_node_bytes_per_s"].source is Source.ESTIMATED
    assert all(str(tmp_path) not in each.note for each in profile.provenance.values())
    document = json.loads(result.stdout)
    cells = cells_of((1, 2), 256)
    assert len(document["cells"]) == sum(cell.num_requests == 1 for cell in cells)
    assert len(document["packed"]) == sum(cell.num_requests > 1 for cell in cells)
    assert set(document["copies"]) == {"inside the host", "over TCP", "to decode"}
    refused = run(*arguments, "--resume", "--force", "--dtype", "bfloat16")
    assert refused.exit_code == 2
    assert "taken with dtype 'float32'" in refused.stderr
    samples.write_text("\n".join(taken[:-3]) + "\n")
    assert run(*arguments, "--resume", "--force").exit_code == 0
    again = samples.read_text().splitlines()
    assert again[: len(taken) - 3] == taken[:-3]
    assert len(again) == len(taken)


def test_a_live_ramp_measures_kappa_on_the_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(ramp, "LiveRampSettings", partial(LiveRampSettings, probe_s=1.0, num_probes=1))
    output, trace = tmp_path / "tiny.toml", tmp_path / "trace.jsonl"
    write_trace(scaled_lengths(synthesise("conversation", seed=1, duration_s=60, rate_per_s=3), 0.02), trace)
    arguments = ("--max-tokens", 256, "--rounds", 1, "--minutes", 0.2, "--ranks", 1, "--traffic", trace)
    result = run(tiny_model.folder(), "-o", output, *arguments, "--ramp", "live", "--slo", "5")
    assert result.exit_code == 0, result.stderr
    assert "attainment 100%" in result.stderr
    profile = load_profile(output)
    assert 0 < profile.kappa[1] <= 1
    assert profile.provenance["kappa.1"].source is Source.MEASURED
    assert "live load ramp of one worker" in profile.provenance["kappa.1"].note


def test_a_live_ramp_needs_ranks_and_traffic(log, tmp_path):
    for missing in (("--from-samples", log, "--traffic", "synth:conversation"), (tmp_path,)):
        result = run("-o", tmp_path / "mine.toml", "--ramp", "live", *missing)
        assert result.exit_code == 2
        assert "accepted: simulated, or live with MODEL and --traffic" in result.stderr


# One device alone


def test_one_device_is_measured_in_this_process_at_degree_1_and_links_are_those_of_a_base(tmp_path, monkeypatch):
    """What a GPU is profiled by, here on the processor."""
    monkeypatch.setattr("vertumnus.cli.profile._device", lambda wanted: "cpu")
    output = tmp_path / "mine.toml"
    arguments = (tiny_model.folder(), "-o", output, "--max-tokens", 512, "--rounds", 2, "--json")
    result = run(*arguments, "--base", "qwen3-30b-a3b-h100")
    assert result.exit_code == 0, result.stderr
    assert "one cpu: degree 1" in result.stderr
    profile, base = load_profile(output), load_profile("qwen3-30b-a3b-h100")
    assert profile.degrees == (1,)
    assert profile.hardware == "cpu"
    assert profile.switch_s == base.switch_s
    assert profile.provenance["switch_s"].note.startswith("qwen3-30b-a3b-h100: ")
    coefficients = [each for key, each in profile.provenance.items() if key.startswith("coefficients")]
    assert {each.source for each in coefficients} == {Source.MEASURED}
    samples = read_samples(tmp_path / "mine.samples.jsonl")
    assert {sample.degree for sample in samples.samples} == {1}
    header = json.loads((tmp_path / "mine.samples.jsonl").read_text().splitlines()[0])
    assert (header["setup"]["hardware"], header["setup"]["device"]) == ("cpu", "cpu")
    assert {sample.prefix_tokens > 0 for sample in samples.samples} == {True, False}
    assert samples.packed


def test_a_device_that_is_not_there_and_a_ramp_on_it_are_refused(tmp_path, monkeypatch):
    arguments = (tiny_model.folder(), "-o", tmp_path / "mine.toml")
    if not torch.cuda.is_available():
        assert "does not find" in run(*arguments, "--device", "cuda").stderr
    monkeypatch.setattr("vertumnus.cli.profile._device", lambda wanted: "cuda")
    assert "cannot be served" in run(*arguments, "--traffic", "synth:toolagent", "--ramp", "live").stderr


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ((), "cuda"),
        (("--device", "cuda"), "cuda"),
        (("--device", "cpu"), None),
        (("--ranks", 2), None),
        (("--threads", 1), None),
    ],
)
def test_a_gpu_is_taken_where_there_is_one_unless_ranks_are_spoken_of(tmp_path, monkeypatch, options, device):
    chosen = []

    def measuring(settings, *others):
        chosen.append(settings.device)
        raise ProfilingError("far enough")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("vertumnus.cli.profile._measured", measuring)
    run(tiny_model.folder(), "-o", tmp_path / "mine.toml", *options)
    assert chosen == [device]


def test_ranks_and_one_gpu_contradict_each_other(tmp_path):
    told = run(tiny_model.folder(), "-o", tmp_path / "mine.toml", "--device", "cuda", "--ranks", 2).stderr
    assert "ranks is 2 with one GPU at degree 1; accepted: --device cpu, or none of them" in told


@pytest.mark.parametrize(("suffix", "prefix"), [(64, 0), (130, 128)])
def test_a_step_of_one_device_is_run_by_the_engine_with_the_work_asked_for(suffix, prefix):
    device = OneDevice(tiny_model.folder(), None, torch.device("cpu"), num_slots=8)
    run, seen = device._stepper.run, []

    def running(step, link):
        seen.append((step.requests[0], link.degree, run(step, link)))

    device._stepper.run = running
    assert asyncio.run(device.step(StepCell(1, suffix, prefix))) > 0
    ((request, degree, output),) = seen
    assert (len(request.token_ids), request.num_prefix_tokens, degree) == (suffix, prefix, 1)
    assert output.timings
    with pytest.raises(CalibrationFailed, match="positions"):
        asyncio.run(device.step(StepCell(1, 10**6, 0)))


def test_a_step_that_does_not_fit_the_device_says_so():
    device = OneDevice(tiny_model.folder(), None, torch.device("cpu"), num_slots=8)

    def running(step, link):
        raise torch.OutOfMemoryError

    device._stepper.run = running
    with pytest.raises(CalibrationFailed, match="memory"):
        asyncio.run(device.step(StepCell(1, 64, 0)))
