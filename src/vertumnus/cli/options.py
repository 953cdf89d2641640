"""The options that verbs share, and the values they stand for. Nothing heavy is imported before it is needed."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from vertumnus.errors import ConfigError

if TYPE_CHECKING:
    from vertumnus.core.profile import Profile
    from vertumnus.sim.compare import PolicyMaker
    from vertumnus.sim.simulate import SimulationSettings
    from vertumnus.workload.trace import Trace

DEFAULT_PROFILE_NAME = "qwen3-30b-a3b-h20-3e"
DEFAULT_NUM_GPUS = 40
SYNTH_PREFIX = "synth:"
MAX_NUM_GPUS = 4096

MAX_KV_BLOCKS = 1 << 22
"""Per GPU: five times what the built-in profiles store in blocks of 16 tokens, and the slots of a pool are listed."""

Command = TypeVar("Command", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A number within bounds; `nan` and `inf`, which pass every comparison or the open bound, are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def asked_for(names: Iterable[str]) -> list[str]:
    """Those of the running command's options that its user has set, whatever to."""
    context = click.get_current_context()
    return [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]


def json_option(command: Command) -> Command:
    """--json: one object on standard output instead of a table."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")(command)


def seed_option(command: Command) -> Command:
    """--seed."""
    return click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all randomness.")(
        command
    )


def force_option(command: Command) -> Command:
    """--force."""
    return click.option("--force", is_flag=True, help="Replace output files that exist.")(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Which requests are played, and how fast. Field names are those of the options."""

    trace: str
    limit: int | None
    repeat: int
    no_spread: bool
    seed: int

    def read(self, num_seeds: int = 1) -> "list[Trace]":
        """The trace once per seed: coarse stamps spread anew, or the requests themselves synthesised anew."""
        from vertumnus.workload.readers import read_trace
        from vertumnus.workload.synthesis import synthesise

        seeds = range(self.seed, self.seed + num_seeds)
        if self.trace.startswith(SYNTH_PREFIX):
            kind = self.trace[len(SYNTH_PREFIX) :]
            traces = [synthesise(kind, seed=seed) for seed in seeds]
            if self.limit is not None:
                traces = [trace.limited(self.limit) for trace in traces]
        else:
            unspread = read_trace(self.trace, spread=False, limit=self.limit)
            traces = [unspread if self.no_spread else unspread.spread(seed) for seed in seeds]
        return traces if self.repeat == 1 else [trace.repeated(self.repeat) for trace in traces]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """The pool that plays them. Field names are those of the options."""

    gpus: int | None
    profile: str
    node_gpus: int
    fixed: bool
    no_replication: bool
    controller: str
    window: float
    pulls: str
    moves: str
    waits: str
    min_relief: float
    spare_last_copies: bool
    kv_blocks: int | None
    queue: str
    step_tokens: int | None
    warmup: float
    slo: str
    noise: float
    report_delay: float
    routers: int
    router_delay: float
    fail: tuple[str, ...]
    beta: float | None
    lambda_: float | None

    def load_profile(self) -> "Profile":
        from vertumnus.core.profile import load_profile

        return load_profile(self.profile)

    def settings(self, composition: str, seed: int) -> "SimulationSettings":
        """The settings of one run; ConfigError where they contradict each other."""
        from vertumnus.core.composition import Composition, Topology, lay_out
        from vertumnus.core.index.replication import ReplicationSettings
        from vertumnus.core.queueing import Discipline
        from vertumnus.core.slo import Slo
        from vertumnus.sim.several_routers import RouterSettings
        from vertumnus.sim.simulate import Pulls, SimulationSettings

        num_gpus = self.gpus or DEFAULT_NUM_GPUS
        chosen = None if composition == "auto" else Composition.parse(composition)
        if chosen is not None:
            lay_out(chosen, Topology(num_gpus, self.node_gpus))
        return SimulationSettings(
            num_gpus=num_gpus,
            node_gpus=self.node_gpus,
            composition=chosen,
            is_fixed=self.fixed,
            has_replication=not self.no_replication,
            controller=self.controller,
            window_s=self.window,
            pulls=None if self.pulls == "auto" else Pulls(self.pulls),
            has_moves=None if self.moves == "auto" else self.moves == "on",
            has_waits=None if self.waits == "auto" else self.waits == "on",
            replication=ReplicationSettings(min_relief_s=self.min_relief),
            spares_last_copies=self.spare_last_copies,
            discipline=Discipline(self.queue),
            step_tokens=self.step_tokens,
            blocks_per_rank=self.kv_blocks,
            warmup_s=self.warmup,
            slo=Slo.parse(self.slo),
            noise_ratio=self.noise,
            report_delay_s=self.report_delay,
            routers=RouterSettings(num_routers=self.routers, delay_s=self.router_delay),
            failures=tuple(parse_failure(text, num_gpus) for text in self.fail),
            seed=seed,
        )

    def policy(self, name: str) -> "PolicyMaker":
        """A maker of the named policy; ConfigError, listing the known ones, for an unknown."""
        from vertumnus.sim.compare import policy_maker

        return policy_maker(name, beta=self.beta, lambda_=self.lambda_)

    def check_paper(self, policies: Sequence[str]) -> None:
        """Refuses what was asked for and contradicts the one policy that settles it: it would change nothing."""
        from vertumnus.core.policies import PAPER_SETTINGS, PAPER_SYSTEM

        if list(policies) != [PAPER_SYSTEM]:
            return
        papers = PAPER_SETTINGS._asdict()
        for name in asked_for(papers):
            if name == "controller" and self.fixed:
                continue
            wanted = {True: "on", False: "off"}.get(papers[name], papers[name])
            given = getattr(self, name)
            if given not in ("auto", wanted):
                raise ConfigError(f"{name} is {given!r} with policy {PAPER_SYSTEM!r}; accepted: {wanted!r}")

    def check_weights(self, policies: Sequence[str]) -> None:
        """Refuses --beta and --lambda where no policy has them: they would change nothing, in silence."""
        from vertumnus.core.policies import PAPER_SYSTEM

        for option, value in (("beta", self.beta), ("lambda", self.lambda_)):
            if value is not None and not {"vertumnus", "paper", PAPER_SYSTEM}.intersection(policies):
                known = f"accepted: with vertumnus, paper or {PAPER_SYSTEM} only"
                raise ConfigError(f"{option} is {value} with {', '.join(policies)}; {known}")


_TRACE_OPTIONS = (
    click.argument("trace"),
    click.option("--limit", type=click.IntRange(1), help="Play the first N requests only.", metavar="N"),
    click.option(
        "--repeat",
        type=click.IntRange(1),
        default=1,
        help="Play the trace N times, block ids renamed each time.",
        metavar="N",
    ),
    click.option("--no-spread", is_flag=True, help="Keep coarse arrival stamps as they are."),
    seed_option,
)

_POOL_OPTIONS = (
    click.option("--gpus", type=click.IntRange(1, MAX_NUM_GPUS), help=f"GPUs in all (default {DEFAULT_NUM_GPUS})."),
    click.option(
        "--profile",
        default=DEFAULT_PROFILE_NAME,
        show_default=True,
        help="Built-in profile or TOML file.",
    ),
    click.option(
        "--node-gpus",
        type=click.IntRange(1, 64),
        default=8,
        show_default=True,
        help="GPUs per node; workers fit in one.",
    ),
    click.option("--fixed", is_flag=True, help="No controller: the composition stays."),
    click.option("--no-replication", is_flag=True, help="No copies of hot prefixes between workers."),
    click.option(
        "--controller",
        type=click.Choice(["lookahead", "threshold"]),
        default="lookahead",
        show_default=True,
        help="What adapts the composition: ours, or the paper's.",
    ),
    click.option(
        "--window",
        type=FiniteRange(0.1),
        default=20.0,
        show_default=True,
        help="Seconds that the controller observes at a time.",
        metavar="S",
    ),
    click.option(
        "--pulls",
        type=click.Choice(["auto", "none", "pending", "any"]),
        default="auto",
        show_default=True,
        help="Blocks that a request may have copied in: none, what a split took away, any worker's; auto: any for "
        "our policies unless --no-replication.",
    ),
    click.option(
        "--moves",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Whether queued work moves to workers that run dry; auto: with policy vertumnus.",
    ),
    click.option(
        "--waits",
        type=click.Choice(["auto", "on", "off"]),
        default="auto",
        show_default=True,
        help="Whether a request may wait for a prefix that another is computing; auto: with policy vertumnus.",
    ),
    click.option(
        "--min-relief",
        type=FiniteRange(0),
        default=0.0,
        help="Further replicas of a prefix go only where the queue is shorter than every holder's by S seconds.",
        metavar="S",
    ),
    click.option(
        "--spare-last-copies", is_flag=True, help="Evict what other workers hold too before what nobody else does."
    ),
    click.option(
        "--kv-blocks",
        type=click.IntRange(1, MAX_KV_BLOCKS),
        help="KV blocks per GPU (default: the profile's capacity).",
        metavar="N",
    ),
    click.option(
        "--queue",
        type=click.Choice(["fifo", "shortest"]),
        default="shortest",
        show_default=True,
        help="Order of service at a worker.",
    ),
    click.option("--step-tokens", type=click.IntRange(1), help="Token budget of a step (default: whole requests)."),
    click.option(
        "--warmup",
        type=FiniteRange(0),
        default=0.0,
        help="Leave the first S seconds out of the figures.",
        metavar="S",
    ),
    click.option(
        "--slo", default="1.0+0.0002L", show_default=True, help="TTFT target: seconds plus seconds per input token."
    ),
    click.option("--noise", type=FiniteRange(0, 1), default=0.0, help="Relative noise of service times (0 to 1)."),
    click.option(
        "--report-delay",
        type=FiniteRange(0),
        default=0.0,
        help="Seconds until a cache report arrives.",
        metavar="S",
    ),
    click.option(
        "--routers",
        type=click.IntRange(1),
        default=1,
        help="Routers that share the workers, each with an N-th of the requests.",
        metavar="N",
    ),
    click.option(
        "--router-delay",
        type=FiniteRange(0),
        default=0.0,
        help="Seconds until a router knows what another has placed.",
        metavar="S",
    ),
    click.option(
        "--fail",
        multiple=True,
        help="Lose a rank at T seconds, back at T2: RANK@T[:T2]. Repeatable.",
        metavar="RANK@T[:T2]",
    ),
    click.option("--beta", type=float, help="Weight of a request's own service in vertumnus' cost (>= 1)."),
    click.option("--lambda", "lambda_", type=float, help="Price of GPU time in vertumnus' cost (>= 0)."),
)


def trace_options(command: Command) -> Command:
    """Adds the trace's options, packed into one argument `source` of type TraceOptions."""
    return _packed(command, "source", TraceOptions, _TRACE_OPTIONS)


def pool_options(command: Command) -> Command:
    """Adds the pool's options, packed into one argument `pool` of type PoolOptions."""
    return _packed(command, "pool", PoolOptions, _POOL_OPTIONS)


def _packed(command: Command, argument: str, kind: type[Any], options: tuple[Callable[..., Any], ...]) -> Command:
    names = [field.name for field in fields(kind)]

    @functools.wraps(command)
    def packing(**values: Any) -> Any:
        return command(**{argument: kind(**{name: values.pop(name) for name in names})}, **values)

    decorated: Any = packing
    for option in reversed(options):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def parse_failure(text: str, num_gpus: int) -> Any:
    """Reads RANK@T[:T2]."""
    from vertumnus.sim.pool import Failure

    number = r"\d+(?:\.\d*)?"
    matched = re.fullmatch(rf"(\d+)@({number})(?::({number}))?", text)
    accepted = f"RANK@T or RANK@T:T2, a rank from 0 to {num_gpus - 1} and seconds with T2 after T"
    if matched is None or int(matched[1]) >= num_gpus:
        raise ConfigError(f"fail is {text!r}; accepted: {accepted}")
    failure = Failure(int(matched[1]), float(matched[2]), None if matched[3] is None else float(matched[3]))
    if failure.recovers_s is not None and failure.recovers_s <= failure.at_s:
        raise ConfigError(f"fail is {text!r}; accepted: {accepted}")
    return failure


def parse_numbers(field: str, text: str) -> list[float]:
    """Reads `x,y,z`, all above 0, each once."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or len(set(numbers)) < len(numbers) or not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(f"{field} is {text!r}; accepted: numbers above 0, each once, separated by commas")
    return numbers
