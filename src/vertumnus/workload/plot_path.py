"""Paths of plots, checked before the work that leads to them and without matplotlib."""

import os

from vertumnus.errors import ConfigError
from vertumnus.workload.output import check_writable

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot_path(path: str | os.PathLike[str], *, force: bool) -> None:
    """Raises ConfigError unless a plot can be written there."""
    if not str(path).lower().endswith(SUFFIXES):
        raise ConfigError(f"plot path is {str(path)!r}; accepted: a name that ends in {', '.join(SUFFIXES)}")
    check_writable(path, force=force)
