"""All experiments, in the order of the report."""

from vertumnus.errors import ConfigError
from vertumnus.reproduction.experiment import Experiment
from vertumnus.reproduction.experiments import (
    ablations,
    cache_manager,
    day,
    end_to_end,
    fitting,
    held_out,
    observations,
    past_the_paper,
    phases,
    scale_out,
    speed_up,
)

EXPERIMENTS: tuple[Experiment, ...] = (
    *speed_up.EXPERIMENTS,
    *observations.EXPERIMENTS,
    *fitting.EXPERIMENTS,
    *end_to_end.EXPERIMENTS,
    *phases.EXPERIMENTS,
    *cache_manager.EXPERIMENTS,
    *past_the_paper.EXPERIMENTS,
    *day.EXPERIMENTS,
    *held_out.EXPERIMENTS,
    *ablations.EXPERIMENTS,
    *scale_out.EXPERIMENTS,
)


def chosen(names: str | None) -> tuple[Experiment, ...]:
    """The experiments of a list `a,b,c`, in the report's order; None: all. Raises ConfigError for unknown names."""
    if names is None:
        return EXPERIMENTS
    wanted = [name.strip() for name in names.split(",")]
    known = [experiment.name for experiment in EXPERIMENTS]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"only has {name!r}; accepted: {', '.join(known)}")
    return tuple(experiment for experiment in EXPERIMENTS if experiment.name in wanted)
