"""Every verb on a small trace: what it prints, where, and under which names."""

import csv
import json
from functools import partial
from importlib import import_module

import pytest

from vertumnus.bench import placement
from vertumnus.cli import VERBS
from vertumnus.core.policies import POLICIES
from vertumnus.workload.synthesis import KINDS

POOL = ("--gpus", 8, "--kv-blocks", 200)

RESULT_NAMES = {
    "policy",
    "composition",
    "rate_per_s",
    "num_requests",
    "num_completed",
    "num_rejected",
    "mean_ttft_s",
    "p50_ttft_s",
    "p90_ttft_s",
    "p99_ttft_s",
    "slo_attainment_ratio",
    "token_hit_ratio",
    "num_splits",
    "num_merges",
    "num_replications",
    "wall_s",
}


def without_wall(document):
    return {
        **document,
        "results": [{key: value for key, value in entry.items() if key != "wall_s"} for entry in document["results"]],
    }


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_page(run, verb):
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_list_of_verbs_names_each_with_one_line(run):
    shown = run("--help").stdout
    for verb, (module, line) in VERBS.items():
        assert f"{verb} " in shown
        assert line in shown
        assert import_module(module).command.help


def test_simulate_prints_one_object_with_the_agreed_names(run_json, trace_path):
    document = run_json("simulate", trace_path, *POOL, "--rate", 4)
    (entry,) = document["results"]
    assert entry.keys() >= RESULT_NAMES
    assert entry["num_completed"] + entry["num_rejected"] == entry["num_requests"] == 180
    assert entry["rate_per_s"] == pytest.approx(4)


def test_equal_input_and_seed_give_equal_output_but_for_the_wall_time(run_json, trace_path):
    arguments = ("simulate", trace_path, *POOL, "--rate", 4, "--seed", 3, "--noise", 0.1)
    first, second = (without_wall(run_json(*arguments)) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


def test_figures_are_null_where_nothing_was_measured(run_json, trace_path):
    (entry,) = run_json("simulate", trace_path, *POOL, "--warmup", 1e6)["results"]
    assert entry["mean_ttft_s"] is None
    assert entry["slo_attainment_ratio"] is None


def test_limit_repeat_and_fixed_composition_are_obeyed(run_json, trace_path):
    arguments = ("--limit", 20, "--repeat", 3, "--composition", "2x2,1x4", "--fixed", "--queue", "fifo")
    document = run_json("simulate", trace_path, *POOL, *arguments)
    (entry,) = document["results"]
    assert entry["num_requests"] == 60
    assert entry["composition"] == entry["final_composition"] == "2x2,1x4"
    assert document["settings"]["discipline"] == "fifo"


def test_rank_failures_are_played(run_json, trace_path):
    document = run_json("simulate", trace_path, *POOL, "--fail", "3@5:20", "--fail", "1@7")
    assert document["settings"]["failures"] == [
        {"rank": 3, "at_s": 5.0, "recovers_s": 20.0},
        {"rank": 1, "at_s": 7.0, "recovers_s": None},
    ]


def test_the_papers_system_and_what_is_off_by_default_are_switched_by_options(run_json, trace_path):
    papers = run_json("simulate", trace_path, *POOL, "--policy", "vertumnus-paper", "--beta", 1.5)
    assert papers["results"][0]["policy"] == "vertumnus-paper"
    assert [papers["settings"][key] for key in ("discipline", "controller", "pulls")] == ["fifo", "threshold", "none"]
    document = run_json("simulate", trace_path, *POOL, "--min-relief", 0.1, "--spare-last-copies")
    assert document["settings"]["replication"]["min_relief_s"] == 0.1
    assert document["settings"]["spares_last_copies"] is True
    arguments = ("--policies", "vertumnus,vertumnus-paper", "-j", 1, "--limit", 40)
    compared = run_json("compare", trace_path, *POOL, *arguments)
    assert [entry["policy"] for entry in compared["results"]] == ["vertumnus", "vertumnus-paper"]
    assert compared["settings"]["discipline"] == "shortest"
    assert compared["settings"]["by_policy"]["vertumnus-paper"] == {
        "discipline": "fifo",
        "controller": "threshold",
        "pulls": "none",
        "has_moves": False,
        "has_waits": False,
    }


@pytest.mark.parametrize(
    ("verb", "option", "contradicting", "agreeing"),
    [
        ("simulate", "queue", "shortest", "fifo"),
        ("simulate", "moves", "on", "off"),
        ("compare", "controller", "lookahead", "threshold"),
        ("compare", "pulls", "any", "auto"),
    ],
)
def test_what_contradicts_the_papers_system_is_refused_where_it_is_played_alone(
    run, trace_path, verb, option, contradicting, agreeing
):
    named = {"simulate": "--policy", "compare": "--policies"}[verb]
    alone = (verb, trace_path, *POOL, "--limit", 20, named, "vertumnus-paper")
    refused = run(*alone, f"--{option}", contradicting)
    assert refused.exit_code != 0
    assert f"{option} is '{contradicting}' with policy 'vertumnus-paper'; accepted: " in refused.stderr
    assert run(*alone, f"--{option}", agreeing).exit_code == 0


def test_weights_of_j_reach_the_policy(run_json, trace_path):
    crowded = (trace_path, *POOL, "--fixed", "--composition", "4x1,1x4", "--rate", 6, "--policy", "paper")
    plain, priced = (
        run_json("simulate", *crowded, "--beta", 1, "--lambda", price)["results"][0]["mean_ttft_s"] for price in (0, 5)
    )
    assert plain != priced


def test_table_goes_to_standard_output_and_warnings_to_standard_error(run, tmp_path):
    path = tmp_path / "unsorted.jsonl"
    rows = ({"timestamp": stamp, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]} for stamp in (900, 0, 90))
    path.write_text("\n".join(map(json.dumps, rows)))
    result = run("simulate", path, *POOL)
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: ")
    assert "vertumnus" in result.stdout
    assert "warning" not in result.stdout


def test_compare_writes_entries_for_every_policy_and_rate_with_plot_and_csv(run_json, trace_path, tmp_path):
    plot, table = tmp_path / "ttft.png", tmp_path / "ttft.csv"
    arguments = ("--policies", "vertumnus,preble", "--rates", "3,5", "--seeds", 2, "-j", 1, "--fixed")
    document = run_json("compare", trace_path, *POOL, *arguments, "--plot", plot, "--csv", table)
    cells = [(entry["policy"], round(entry["rate_per_s"], 6)) for entry in document["results"]]
    assert cells == [("vertumnus", 3), ("preble", 3), ("vertumnus", 5), ("preble", 5)]
    for entry in document["results"]:
        assert entry.keys() >= RESULT_NAMES
        assert entry["mean_ttft_s"] == pytest.approx(sum(run["mean_ttft_s"] for run in entry["runs"]) / 2)
    with table.open(newline="") as file:
        assert [row["policy"] for row in csv.DictReader(file)] == ["vertumnus", "preble"] * 2
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_compare_of_all_policies_shows_each(run, trace_path):
    result = run("compare", trace_path, *POOL, "--limit", 30, "--policies", "all", "-j", 1)
    assert result.exit_code == 0
    for policy in POLICIES:
        assert policy in result.stdout


def test_plan_recommends_a_composition_with_headroom_over_time(run_json, trace_path, tmp_path):
    plot = tmp_path / "plan.svg"
    document = run_json("plan", trace_path, "--gpus", 16, "--kv-blocks", 200, "--rate", 4, "-j", 1, "--plot", plot)
    roles = [entry["role"] for entry in document["results"]]
    assert roles == ["recommended", "recommended, adaptive", "one node fewer"]
    assert [entry["num_gpus"] for entry in document["results"]] == [16, 16, 8]
    assert document["results"][0]["composition"] == document["composition"]
    assert all(window["headroom_ratio"] <= 1 for window in document["windows"])
    assert "<svg" in plot.read_text()


def test_analyze_prints_the_figures_and_writes_the_page(run_json, run, trace_path, tmp_path):
    plot = tmp_path / "traffic.png"
    document = run_json("analyze", trace_path, "--plot", plot)
    assert document["num_requests"] == 180
    assert plot.exists()
    assert "arrival rate" in run("analyze", trace_path).stdout


def test_synth_writes_the_same_bytes_for_the_same_seed(run, tmp_path):
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, seed in zip(paths, (7, 7, 8), strict=True):
        result = run("synth", "conversation", "-o", path, "--duration", 60, "--seed", seed)
        assert result.exit_code == 0
        assert result.stdout == ""
    first, same, other = (path.read_bytes() for path in paths)
    assert first == same != other


def test_synth_help_names_every_kind(run):
    shown = run("synth", "--help").stdout
    assert all(kind in shown for kind in KINDS)


def test_synth_phases_takes_its_own_options(run_json, tmp_path):
    arguments = ("--duration", 120, "--phase", 30, "--short-rate", 4, "--long-rate", 1)
    document = run_json("synth", "phases", "-o", tmp_path / "phases.jsonl.gz", *arguments)
    assert document["mean_rate_per_s"] == pytest.approx(2.5, rel=0.1)


def test_trace_without_block_ids_is_simulated_and_planned_for(run_json, tmp_path):
    path = tmp_path / "lengths.csv"
    rows = (f"2023-11-16 18:17:{second:02}.5,{1000 + second},10" for second in range(60))
    path.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    (entry,) = run_json("simulate", path, *POOL)["results"]
    assert (entry["num_completed"], entry["token_hit_ratio"]) == (60, 0)
    assert run_json("plan", path, *POOL, "-j", 1)["composition"]


def test_synthesised_trace_can_be_named_instead_of_a_file(run_json):
    document = run_json("simulate", "synth:toolagent", *POOL, "--limit", 20)
    assert "synthesised" in document["trace"]


def test_bench_trie_records_environment_command_and_figures(run_json, monkeypatch):
    entry = {"operation": "insert", "num_blocks": 2000, "p50_s": 1e-4, "bytes_per_block": 120.0}
    monkeypatch.setattr("vertumnus.bench.trie.run", lambda blocks, workers, seed: [entry | {"num_blocks": blocks}])
    document = run_json("bench", "trie", "--blocks", 2000, "--workers", 8)
    assert document["bench"] == "trie"
    assert document["environment"].keys() >= {"hardware", "cores", "python", "numpy", "commit", "command"}
    assert document["environment"]["command"] == "vertumnus bench trie --blocks 2000 --workers 8 --seed 0"
    assert document["results"] == [entry]


def test_bench_placement_times_every_size(run_json, monkeypatch):
    one_size = partial(placement.run, num_workers=(64,), prompt_tokens=(8192,))
    monkeypatch.setattr("vertumnus.bench.placement.run", one_size)
    document = run_json("bench", "placement", "--samples", 10)
    cases = [(0, 0.5), (0, 0.95), (2, 0.5), (2, 0.95)]
    for entry, case in zip(document["results"], cases, strict=True):
        assert (entry["num_workers"], entry["block_tokens"], entry["prompt_tokens"]) == (64, 64, 8192)
        assert (entry["num_queued"], entry["cached_ratio"]) == case
        assert 0 < entry["p50_s"] <= entry["p99_s"]
