"""`vertumnus serve`: the live pool."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import click

from vertumnus.errors import ConfigError

NEEDED = (
    "fastapi",
    "uvicorn",
    "pydantic",
    "prometheus_client",
    "tokenizers",
    "jinja2",
    "msgpack",
    "torch",
    "safetensors",
)


class ServerError(click.ClickException):
    """The server could not start or go on: one sentence on standard error, exit status 1."""


def require_packages() -> None:
    """Raises ConfigError if the extras that serving needs are not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}; accepted: an installation of vertumnus[serve,engine]")


@click.command()
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--config", "file", type=click.Path(path_type=Path), help="A TOML file; flags go over it.")
@click.option("--ranks", type=int, help="Prefill ranks [default: 4].")
@click.option("--decode-ranks", type=int, help="Decode ranks [default: 1].")
@click.option("--composition", help="COUNTxDEGREE parts such as 2x1,1x2, or auto.")
@click.option("--profile", help="A profile's name or file, or auto: measured at start.")
@click.option("--policy", help="Placement policy [default: vertumnus].")
@click.option("--controller", help="lookahead, threshold or none.")
@click.option("--queue", help="fifo or shortest.")
@click.option("--step-tokens", type=int, help="Token budget of a prefill step.")
@click.option("--window", "window_s", type=float, help="The controller's window in seconds.")
@click.option("--dtype", help="float32, bfloat16 or float16 [default: the checkpoint's].")
@click.option("--block-tokens", type=int, help="Tokens of a KV block.")
@click.option("--kv-mib-per-rank", type=int, help="Memory for KV blocks per rank.")
@click.option("--threads-per-rank", type=int, help="Threads of one rank.")
@click.option("--slo", help="TTFT target, such as 1.0+0.0002L.")
@click.option("--name", help="What clients call the model [default: the folder's name].")
@click.option("--host", help="Address to listen on [default: 127.0.0.1].")
@click.option("--port", type=int, help="Port, 0 for any [default: 8000].")
@click.option("--print-launch", is_flag=True, help="Print the launch file for ranks under torchrun, and end.")
@click.option("--print-config", is_flag=True, help="Print what is in force, secrets left out, and end.")
def command(model: Path | None, file: Path | None, print_config: bool, print_launch: bool, **flags: Any) -> None:
    """Serve MODEL, a folder as Hugging Face writes it, with adaptive context parallelism.

    Starts the ranks, waits until they are ready, and answers OpenAI's API: /v1/completions, /v1/chat/completions,
    /v1/models. Operators find /metrics, /dashboard and /admin. SIGTERM drains.
    """
    require_packages()
    from vertumnus.serve.config import read_config
    from vertumnus.serve.rank_launch import launch_file
    from vertumnus.serve.supervisor import ServerFailed, Supervisor

    config = read_config(file, flags | {"model": model}, os.environ).checked()
    if print_config:
        click.echo(config.to_toml(), nl=False)
        return
    if print_launch:
        click.echo(launch_file(config), nl=False)
        return

    def say_ready(supervisor: Supervisor) -> None:
        host, port = supervisor.address
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        print(f"serving {config.model_name} at {url}/v1", file=sys.stderr)
        # One that somebody has configured is known to who should know it, and logs are kept.
        token = supervisor.control_token if config.control_token is None else "(the control token)"
        print(f"dashboard: {url}/dashboard?token={token}", file=sys.stderr, flush=True)

    try:
        Supervisor(config, say_ready).run()
    except ServerFailed as error:
        raise ServerError(str(error)) from None
