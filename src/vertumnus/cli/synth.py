"""`vertumnus synth`: a synthesised trace."""

import click

from vertumnus.cli.options import force_option, json_option, seed_option
from vertumnus.cli.output import note, print_json
from vertumnus.errors import ConfigError

PHASE_OPTIONS = (
    ("phase_s", "Seconds of a phase."),
    ("short_rate_per_s", "Requests/s of the short phases."),
    ("short_tokens", "Mean input tokens of the short phases."),
    ("long_rate_per_s", "Requests/s of the long phases."),
    ("long_tokens", "Mean input tokens of the long phases."),
)


def phase_options(command: click.decorators.FC) -> click.decorators.FC:
    """The options that only `phases` has."""
    for name, text in reversed(PHASE_OPTIONS):
        flag = "--" + name.replace("_per_s", "").removesuffix("_s").replace("_", "-")
        command = click.option(flag, name, type=float, help=f"phases only: {text}")(command)
    return command


@click.command()
@click.argument("kind")
@click.option("-o", "--output", required=True, help="File to write (.gz or .zst compresses), or - for standard output.")
@click.option(
    "--duration", "duration_s", type=float, help="Seconds (default: an hour; production: a day).", metavar="S"
)
@click.option("--rate", "rate_per_s", type=float, help="Mean requests/s (default: as published).", metavar="R")
@phase_options
@seed_option
@force_option
@json_option
def command(
    kind: str,
    output: str,
    duration_s: float | None,
    rate_per_s: float | None,
    seed: int,
    force: bool,
    as_json: bool,
    **phase: float | None,
) -> None:
    """Write a synthesised trace of a KIND: conversation, toolagent, production, agentic or phases.

    The trace is in the Mooncake schema, and the same seed gives the same bytes.

    \b
    vertumnus synth conversation -o conversation.jsonl.gz
    vertumnus synth phases -o phases.jsonl --phase 300 --short-rate 40
    """
    from vertumnus.workload.output import check_writable
    from vertumnus.workload.synthesis import synthesise
    from vertumnus.workload.writers import write_trace

    if output == "-":
        if as_json:
            raise ConfigError("output is '-' beside --json; accepted: a file, as standard output takes the JSON object")
    else:
        check_writable(output, force=force)
    given = {name: value for name, value in phase.items() if value is not None}
    trace = synthesise(kind, seed=seed, duration_s=duration_s, rate_per_s=rate_per_s, **given)
    write_trace(trace, output, force=force)
    if as_json:
        figures = {
            "trace": trace.name,
            "kind": kind,
            "seed": seed,
            "num_requests": trace.num_requests,
            "duration_s": trace.duration_s,
            "mean_rate_per_s": trace.mean_rate_per_s,
            "input_tokens": int(trace.input_tokens.sum()),
        }
        print_json(figures)
    else:
        note(f"{output}: {trace.num_requests:,} requests in {trace.duration_s:,.0f} s, {trace.name}")
