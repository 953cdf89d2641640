"""One worker of degree 2, two of degree 1, and adapting between them: a real model on the two cores of one machine.

    python benchmarks/adaptation_real.py MODEL [--dtype DTYPE] [--lengths RATIO] [--plot FILE]

`vertumnus serve` with two prefill ranks and a decode rank, driven by the machinery of `vertumnus replay`: phases of
many short prompts and phases of few long ones, in turn. One pool at a time, since each takes both cores. All three use
one profile, measured by the first at its start. The traffic is for ranks of some 1,350 tokens a second; --lengths 0.2
makes its prompts a fifth as long, for ranks a fifth as fast, and --dtype float32 is quicker where processors have no
products of bfloat16. Writes benchmarks/results/adaptation-real.json.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from vertumnus import Trace, synthesise
from vertumnus.bench.environment import environment
from vertumnus.demo.server import running_server
from vertumnus.replay.run import ReplaySettings, replay

RESULT = Path(__file__).parent / "results" / "adaptation-real.json"
VARIANTS = (("adaptive", "2x1", True), ("2x1", "2x1", False), ("1x2", "1x2", False))
PHASE_S = 60.0
NUM_PHASES = 4
TRANSIENT_S = 15.0
RATES = {"short_rate_per_s": 1.6, "long_rate_per_s": 0.16}
TOKENS = {"short_tokens": 384.0, "long_tokens": 2048.0}
WINDOW_S = 5.0
MAX_PROMPT_TOKENS = 8000
VOCAB = 49_000


def settings_of_traffic(lengths_ratio: float) -> dict[str, float]:
    tokens = {name: round(lengths_ratio * value) for name, value in TOKENS.items()}
    return {"duration_s": NUM_PHASES * PHASE_S, "phase_s": PHASE_S, **RATES, **tokens}


def run_one(
    model: Path, dtype: str, composition: str, is_adaptive: bool, trace: Trace, seed: int, log: Path
) -> dict[str, object]:
    arguments = [str(model), "--ranks", "2", "--decode-ranks", "1", "--composition", composition, "--port", "0"]
    arguments += ["--dtype", dtype, "--threads-per-rank", "1", "--window", str(WINDOW_S)]
    arguments += ["--controller", "lookahead" if is_adaptive else "none", "--step-tokens", "1024"]
    with running_server(arguments, log) as server:
        settings = ReplaySettings(url=server.url, vocab=VOCAB, output_tokens=2, seed=seed)
        report = replay(trace, settings)
    measured = report.measured
    arrival_s = np.array([outcome.scheduled_s for outcome in measured])
    ttft_s = np.array([outcome.ttft_s for outcome in measured])
    phase = np.minimum((arrival_s // PHASE_S).astype(int), NUM_PHASES - 1)
    is_steady = arrival_s - phase * PHASE_S >= TRANSIENT_S
    found = report.to_json()
    return {
        "num_measured": len(measured),
        "num_failed": found["num_failed"],
        "mean_ttft_s": float(ttft_s.mean()),
        "p90_ttft_s": float(np.quantile(ttft_s, 0.9)),
        "mean_ttft_s_by_phase": [float(ttft_s[phase == each].mean()) for each in range(NUM_PHASES)],
        "mean_ttft_s_by_phase_without_transients": [
            float(ttft_s[(phase == each) & is_steady].mean()) for each in range(NUM_PHASES)
        ],
        "num_by_phase": [int((phase == each).sum()) for each in range(NUM_PHASES)],
        "token_hit_ratio": found["token_hit_ratio"],
        "p99_lag_s": found["p99_lag_s"],
        "arrival_s": arrival_s.round(2).tolist(),
        "ttft_s": ttft_s.round(4).tolist(),
        "log": [line for line in log.read_text().splitlines() if "split" in line or "merge" in line][:40],
    }


def draw(document: dict[str, object], path: str) -> None:
    """TTFT of every request over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 4.0), dpi=110)
    colours = {"adaptive": "#0b6e4f", "2x1": "#c05621", "1x2": "#2b6cb0"}
    for row in document["results"]:  # type: ignore[attr-defined]
        label = f"{row['label']}: mean {row['mean_ttft_s']:.2f} s"
        axes.plot(row["arrival_s"], row["ttft_s"], ".", color=colours[row["label"]], label=label, markersize=4)
    for number in range(1, NUM_PHASES, 2):
        axes.axvspan(number * PHASE_S, (number + 1) * PHASE_S, color="#00000010", zorder=0)
    axes.set_yscale("log")
    axes.set_xlabel("s of traffic (shaded: few long prompts)")
    axes.set_ylabel("TTFT, s")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--lengths", type=float, default=1.0, metavar="RATIO", help="of prompts, for slower processors")
    parser.add_argument("--plot", help="write a plot to FILE")
    options = parser.parse_args()
    parts = settings_of_traffic(options.lengths)
    trace = synthesise("phases", seed=options.seed, **parts)
    if int(trace.input_tokens.max()) > MAX_PROMPT_TOKENS:
        parser.error(f"a prompt has {trace.input_tokens.max()} tokens; accepted: at most {MAX_PROMPT_TOKENS}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for label, composition, is_adaptive in VARIANTS:
            log = Path(folder) / f"{label}.log"
            row = run_one(options.model, options.dtype, composition, is_adaptive, trace, options.seed, log)
            rows.append({"label": label, **row})
            print({key: value for key, value in rows[-1].items() if key not in ("arrival_s", "ttft_s")}, flush=True)
    document = {
        "experiment": "adaptation-real",
        "traffic": {"kind": "phases", "num_phases": NUM_PHASES, "seed": options.seed, **parts},
        "window_s": WINDOW_S,
        "transient_s": TRANSIENT_S,
        "environment": environment(
            f"python benchmarks/adaptation_real.py smollm2 --seed {options.seed} "
            f"--dtype {options.dtype} --lengths {options.lengths:g}"
        ),
        "results": rows,
    }
    RESULT.write_text(json.dumps(document) + "\n")
    if options.plot:
        draw(document, options.plot)


if __name__ == "__main__":
    main()
