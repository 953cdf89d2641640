"""The command line: one thin module per verb, imported only when the verb is used, so that help pages come at once."""

from importlib import import_module

import click

from vertumnus.errors import ConfigError

__all__ = ["main"]

VERBS: dict[str, tuple[str, str]] = {
    "analyze": ("vertumnus.cli.analyze", "What the traffic of a trace is like: lengths, rates, reuse."),
    "synth": ("vertumnus.cli.synth", "Write a synthesised trace, seeded."),
    "simulate": ("vertumnus.cli.simulate", "Replay a trace through a simulated prefill pool."),
    "compare": ("vertumnus.cli.compare", "The same trace through several policies and rates, in one table."),
    "plan": ("vertumnus.cli.plan", "Composition, capacity and headroom for this traffic."),
    "profile": ("vertumnus.cli.profile", "Measure what a model costs here, or fit a log of measured times."),
    "reproduce": ("vertumnus.cli.reproduce", "The paper's evaluation and what goes past it, into one report."),
    "serve": ("vertumnus.cli.serve", "A model behind OpenAI's API; workers split and merge online."),
    "replay": ("vertumnus.cli.replay", "Send a trace to a live endpoint and say what its clients saw."),
    "validate": ("vertumnus.cli.validate", "One trace live and simulated, side by side."),
    "model": ("vertumnus.cli.model", "A small real model to try things on."),
    "bench": ("vertumnus.cli.bench", "Speed and memory of this program on this machine."),
    "live-demo": ("vertumnus.cli.live_demo", "A real pool on this machine, merging and splitting under traffic."),
    "demo": ("vertumnus.cli.demo", "What adapting the composition does for an hour of traffic."),
}
"""Each verb's module, whose `command` it is, and its one line in the list of verbs."""


class BadInput(click.ClickException):
    """What the user gave cannot be used: one sentence on standard error, exit status 2."""

    exit_code = 2


class VerbGroup(click.Group):
    """Knows its verbs by name; imports the module of a verb when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = import_module(VERBS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Runs the verb; bad input of any kind becomes one sentence and exit status 2."""
        try:
            return super().invoke(ctx)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise BadInput(error.format_message()) from None
        except ConfigError as error:
            raise BadInput(str(error)) from None
        except MemoryError:
            raise BadInput("the run takes more memory than there is; accepted: a smaller --limit or --repeat") from None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in VERBS and not args[0].startswith("-"):
            raise ConfigError(f"verb is {args[0]!r}; accepted: {', '.join(VERBS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vertumnus")
def main() -> None:
    """Adaptive context parallelism for the prefill stage of LLM inference: live pool, simulator, capacity planner.

    A TRACE is a file (Mooncake, Azure, Bailian, RTP-LLM or our own format, recognised by content; plain, gzip or
    zstd), - for standard input, or synth:KIND for a synthesised one (conversation, toolagent, production, agentic,
    phases). `vertumnus VERB --help` explains a verb.
    """
