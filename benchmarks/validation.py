"""Does the simulator tell the truth: `vertumnus validate` as docs/results.md quotes it, each run recorded.

    python benchmarks/validation.py mooncake_conversation.jsonl.gz [--only NAME] [--model DIR]

Writes benchmarks/results/validate-NAME.json and, beside the docs, a plot of each. Runs over stub ranks take four
minutes each; those of real weights (--model, only on a machine with nothing else to do) three.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from vertumnus.bench.environment import environment

RESULTS = Path(__file__).parent / "results"
STUBS = {
    "stub-adaptive-4": ("--composition", "16x1", "--window", "5", "--rate", "4", "--duration", "240"),
    "stub-adaptive-10": ("--composition", "16x1", "--window", "5", "--rate", "10", "--duration", "240"),
    "stub-fixed-4": ("--composition", "8x2", "--fixed", "--rate", "4", "--duration", "240"),
    "stub-fixed-10": ("--composition", "8x2", "--fixed", "--rate", "10", "--duration", "240"),
}
REAL = ("--dtype", "float32", "--scale-lengths", "0.03", "--rate", "0.25", "--duration", "180", "--fixed")
MODELS = {
    "real-1x2": ("--ranks", "2", "--composition", "1x2", *REAL),
    "real-2x1": ("--ranks", "2", "--composition", "2x1", *REAL),
}


def record(name: str, trace: Path, options: tuple[str, ...], shown: tuple[str, ...], plots: Path | None) -> None:
    command = [sys.executable, "-c", "from vertumnus.cli import main; main()", "validate", str(trace), *options]
    if plots is not None:
        command += ["--plot", str(plots / f"validate-{name}.png"), "--force"]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    words = ["vertumnus", "validate", trace.name, *shown, "--json"]
    document = {"environment": environment(" ".join(words)), **json.loads(done.stdout)}
    (RESULTS / f"validate-{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (entry,) = document["results"]
    print(name, entry["difference"], "machine was slow:", (entry["lags"] or {}).get("machine_was_slow"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--only", action="append", help="run of this name; repeatable", metavar="NAME")
    parser.add_argument("--model", type=Path, help="also the runs of real weights", metavar="DIR")
    parser.add_argument("--plots", type=Path, help="folder for a plot of each run", metavar="DIR")
    options = parser.parse_args()
    runs = {name: (words, words) for name, words in STUBS.items()}
    if options.model is not None:
        for name, words in MODELS.items():
            runs[name] = (("--model", str(options.model), *words), ("--model", options.model.name, *words))
    for name, (words, shown) in runs.items():
        if not options.only or name in options.only:
            record(name, options.trace, words, shown, options.plots)


if __name__ == "__main__":
    main()
