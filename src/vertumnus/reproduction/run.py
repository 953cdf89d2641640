"""A reproduction: the experiments that are not finished yet, one after the other, then the report."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vertumnus.bench.environment import environment
from vertumnus.errors import ConfigError
from vertumnus.reproduction.bench import Bench
from vertumnus.reproduction.cells import cores
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.folder import Folder, Record
from vertumnus.reproduction.report import report
from vertumnus.reproduction.scale import Scale
from vertumnus.workload.trace import Trace

Say = Callable[[str], None]


def reproduce(
    experiments: Sequence[Experiment],
    path: Path,
    *,
    scale: Scale,
    conversation: Trace | None = None,
    others: Mapping[str, Trace] | None = None,
    records: Mapping[str, Any] | None = None,
    seed: int = 0,
    jobs: int = 1,
    force: bool = False,
    command: str = "vertumnus reproduce",
    say: Say = lambda text: None,
    on_cells: Callable[[int, int], None] | None = None,
) -> Path:
    """Runs what is missing in the folder and writes the report of all that was asked for; returns its path.

    Raises ConfigError where the folder holds results of other conditions and `force` is not given.
    """
    folder = Folder(path)
    folder.create()
    conditions = {
        "scale": scale.name,
        "seed": seed,
        "conversation": "synthesised" if conversation is None else conversation.name,
        "others": ", ".join(others or {}) or "none",
    }
    finished: dict[str, Record] = {}
    for experiment in experiments:
        known = None if force else folder.record(experiment.name)
        if known is not None and known.conditions != conditions:
            raise ConfigError(
                f"{folder.path / experiment.name}.json was made with {known.conditions}, not {conditions}; accepted: "
                "the same options, another folder, or --force"
            )
        if known is not None:
            finished[experiment.name] = known
    missing = [experiment for experiment in experiments if experiment.name not in finished]
    if missing:
        budget_s = sum(experiment.budget_s for experiment in missing)
        say(f"{len(missing)} experiments; about {budget_s / 60:.0f} minutes on two quiet cores at the default scale")
        with cores(jobs, on_cells) as measure:
            bench = Bench(
                scale=scale,
                measure=measure,
                conversation=conversation,
                others=others or {},
                records=records or {},
                seed=seed,
            )
            for number, experiment in enumerate(missing, 1):
                say(f"[{number}/{len(missing)}] {experiment.title}")
                started_s = time.perf_counter()
                outcome = experiment.run(bench)
                record = Record(outcome, conditions, environment(command), time.perf_counter() - started_s)
                folder.write(experiment.name, record)
                finished[experiment.name] = record
    return folder.write_report(report([(experiment, finished[experiment.name]) for experiment in experiments]))
