"""`vertumnus live-demo`: a real pool on a real model, on this machine."""

import os
import tempfile
from pathlib import Path

import click

from vertumnus.cli.output import note
from vertumnus.errors import ConfigError


class DemoError(click.ClickException):
    """The demonstration could not be given: one sentence on standard error, exit status 1."""


@click.command()
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--ranks", type=click.IntRange(2), default=4, show_default=True, help="Prefill ranks.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write a picture to FILE (.png, .svg or .pdf).")
@click.option("--force", is_flag=True, help="Replace the picture if it exists.")
def command(model: Path | None, ranks: int, plot: Path | None, force: bool) -> None:
    """Start a pool of CPU ranks on MODEL, send it traffic that changes, and watch workers merge and split.

    Without MODEL, SmolLM2-135M is unpacked once (half a minute). Takes some two minutes and ends by itself; exit status
    1 if an answer was lost or changed with the pool.
    """
    import asyncio

    from vertumnus.cli.serve import require_packages
    from vertumnus.demo.live import LiveDemo
    from vertumnus.demo.plot import plot_story
    from vertumnus.demo.server import DemoFailed, running_server
    from vertumnus.workload.plot_path import check_plot_path

    require_packages()
    if plot is not None:
        check_plot_path(plot, force=force)
    if model is None:
        model = _cache_folder() / "smollm2-float32"
        if not (model / "config.json").exists():
            _unpack(model)
    elif not model.is_dir():
        raise ConfigError(f"model is {str(model)!r}, which is no folder; accepted: a model's folder, or none")
    note(f"starting {ranks} prefill ranks and a decode rank on {model.name}; their speed is measured first")
    arguments = [str(model), "--ranks", str(ranks), "--composition", f"{ranks}x1", "--port", "0", "--window", "5"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            with running_server([*arguments, "--dtype", "float32"], Path(folder) / "server.log") as server:
                note(f"dashboard, while this runs: {server.url}/dashboard?token={server.token}")
                story = asyncio.run(LiveDemo(server, note, num_ranks=ranks).play())
        except DemoFailed as error:
            raise DemoError(str(error)) from None
    if plot is not None:
        plot_story(story, plot, force=force)
        note(f"picture: {plot}")
    probes, long_answers = story.of("probe"), story.of("long answer")
    differing = story.differing("probe") + story.differing("long answer")
    note(
        f"{len(story.asked)} requests, {len(story.failed)} failed; the pool changed {story.num_changes} times; one "
        f"prompt was asked {len(probes)} times and one long answer {len(long_answers)} times: "
        f"{len(differing) or 'none'} of the answers differ"
    )
    if story.failed or differing:
        raise DemoError("answers were lost or changed; that should not be")


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vertumnus"


def _unpack(model: Path) -> None:
    from vertumnus.engine.model_config import Dtype
    from vertumnus.engine.smollm2 import convert, find_gguf

    source = find_gguf()
    note(f"unpacking {source.name}, once; about half a minute")
    model.parent.mkdir(parents=True, exist_ok=True)
    convert(str(model), dtype=Dtype.FLOAT32, force=False)
