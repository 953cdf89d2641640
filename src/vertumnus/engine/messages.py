"""All that pool, launcher and ranks say to each other, as frozen dataclasses, and how they become plain values.

A message travels as [call_id, name, {field: value}]; an answer has the call_id of what it answers, 0 answers nothing.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

import msgpack  # type: ignore[import-untyped]

from vertumnus.engine.codec import packer, shown, unpacker
from vertumnus.engine.errors import WireError
from vertumnus.engine.geometry import GroupKey
from vertumnus.engine.step import Step, StepOutput

# What ranks tell about themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHandle:
    """Where another process of the same host finds a rank's KV memory: descriptor `fd` of process `pid`.

    inode: of the memory, so that a later process with the same pid is not taken for it.
    """

    host_id: str
    pid: int
    fd: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """Where a rank's blocks can be read: its copy server, and its memory if it can be mapped."""

    host: str
    port: int
    memory: MemoryHandle | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A rank's first message on every connection. The pool closes the connection unless `token` is its own; otherwise
    it answers Welcome, or Dismiss where it has no use for the rank.

    epoch, group: as in RankStatus.
    """

    token: str
    rank: int
    incarnation: int
    pid: int
    num_slots: int
    block_bytes: int
    block_tokens: int
    epoch: int = 0
    group: GroupKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """Instead of Hello: why the rank cannot start."""

    token: str
    rank: int
    reason: str


# What the pool tells whoever comes


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The pool has taken the process in: questions follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dismiss:
    """The process is to end: the pool closes, or another one has its place."""


# What the pool asks


@dataclass(frozen=True, slots=True, kw_only=True)
class FormGroups:
    """(Re)forms the groups that the rank is a member of, under a new generation; others stay. Answer: Done."""

    generation: int
    groups: tuple[GroupKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activate:
    """Takes up the group under a new epoch, between two steps. Answer: Activated, or Refusal by all members."""

    epoch: int
    first_rank: int
    degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Answer: Stepped, or Refusal by all members."""

    step: Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Gives up the groups at once, whatever is under way on them. Answer: Done."""

    groups: tuple[GroupKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeLease:
    """Keeps the slots from being written until the lease is released or `lease_s` have gone. Answer: Leased."""

    slots: tuple[int, ...]
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The source's promise that its `slots` stay as they are; `checksums` of their bytes, in the same order."""

    lease_id: int
    rank: int
    slots: tuple[int, ...]
    checksums: tuple[bytes, ...]
    tags: tuple[bytes, ...]
    """Label and parent of each slot as in Labels; empty where it has none."""
    block_bytes: int
    source: CopySource


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Copies the lease's blocks into `slots` of the rank asked, in the lease's order. Answer: Pulled or Refusal.

    is_tcp: over the network even where the source's memory could be mapped.
    """

    lease: Lease
    slots: tuple[int, ...]
    is_tcp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseLease:
    """Answer: Done, also where the lease has expired."""

    lease_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStatus:
    """Answer: RankStatus, at once, whatever the rank is doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """Gives up all groups, and waits until nothing is under way that was asked over an earlier connection. Answer:
    RankStatus; what it says only changes by what is asked from then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLabels:
    """Answer: Labels."""


# What ranks answer


class RefusalReason(Enum):
    """Why nothing was done. Nothing has changed, and the rank is ready for the next message."""

    STALE_EPOCH = "stale-epoch"
    """The epoch is not the rank's own, or an activation's is not above it."""
    NOT_A_MEMBER = "not-a-member"
    """The rank is not in the group named, or has another one active."""
    INVALID = "invalid"
    """What is asked makes no sense: slots out of range or owned twice, no tokens, too many positions."""
    SLOT_IN_USE = "slot-in-use"
    """A slot to be written is under lease or being read, or one to be read is being written."""
    PEER = "peer"
    """Another member refused, or was asked something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An expected outcome: the rank, or all members of a group, did not do what they were asked."""

    rank: int
    reason: RefusalReason
    detail: str

    @property
    def is_echo(self) -> bool:
        """Whether it only follows from another member's refusal."""
        return self.reason is RefusalReason.PEER


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Nothing more to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activated:
    """All members have the epoch; the group can step."""

    rank: int
    epoch: int
    first_rank: int
    degree: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One member's share of the result."""

    output: StepOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """For each block whether its checksum was right after installation; where not, its slot holds nothing of use."""

    is_installed: tuple[bool, ...]
    is_tcp: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """`group` is the active one, None before the first activation; `groups` those that can be used."""

    rank: int
    epoch: int
    group: GroupKey | None
    groups: tuple[GroupKey, ...]
    generation: int
    num_steps: int
    num_leases: int
    num_wire_errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What the rank's slots hold, least recently used first: `tags` has LABEL_BYTES of label and as many of parent for
    each of `slots`."""

    slots: tuple[int, ...]
    tags: bytes


class FailureKind(Enum):
    """What broke."""

    WIRE = "wire"
    """The message could not be understood; the rank goes on."""
    GROUP_BROKEN = "group-broken"
    """A member of the group is gone or the group was given up."""
    COPY = "copy"
    """The source of a copy is gone or does not know the lease."""
    INTERNAL = "internal"
    """An error that nobody expected; the rank goes on, the group that it happened in is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What was asked was begun, or could not be understood, and did not end well."""

    kind: FailureKind
    detail: str


# Between ranks: the copy server


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBlocks:
    """Asks a copy server for the bytes of leased slots: Granted and then block after block, or Refusal."""

    token: str
    lease_id: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    num_bytes: int


# Between pool and launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What the launcher loads, and what every rank that it forks is given, besides its number. The launcher reads it
    from its standard input."""

    source: str
    """module:function that returns a `StepperSource`; called with `options`."""
    options: str
    """JSON."""
    pool_host: str
    pool_port: int
    token: str
    num_ranks: int
    num_slots: int
    num_threads: int
    interface_host: str
    connect_timeout_s: float
    step_timeout_s: float
    orphan_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """A rank that the launcher has forked: its last incarnation. pid: None where that one has ended."""

    rank: int
    incarnation: int
    pid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherHello:
    """The launcher's first message on every connection; answered like a rank's.

    launch: what it was started with, the token included. load_s: how long loading took; None while it loads.
    """

    launch: Launch
    pid: int
    load_s: float | None
    ranks: tuple[LaunchedRank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Unasked: the launcher can fork ranks."""

    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Starts rank number `rank`. Answer: Forked."""

    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Unasked: a rank's process is gone. exit_code: negative for a signal."""

    rank: int
    incarnation: int
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFailed:
    """Unasked, instead of Loaded."""

    reason: str


Message = (
    Hello
    | Unfit
    | Welcome
    | Dismiss
    | FormGroups
    | Activate
    | RunStep
    | Abort
    | TakeLease
    | Pull
    | ReleaseLease
    | AskStatus
    | Settle
    | AskLabels
    | Refusal
    | Done
    | Activated
    | Stepped
    | Leased
    | Pulled
    | RankStatus
    | Labels
    | Failure
    | ReadBlocks
    | Granted
    | Launch
    | LauncherHello
    | Loaded
    | Fork
    | Forked
    | Ended
    | LaunchFailed
)

_BY_NAME: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


def encode(call_id: int, message: Message) -> bytes:
    """The bytes of a message. Raises WireError if a value does not fit the wire (an integer beyond its range)."""
    kind: Any = type(message)
    try:
        return bytes(msgpack.packb([call_id, kind.__name__, packer(kind)(message)]))
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise WireError(f"{kind.__name__} cannot be sent: {error}") from error


def decode(body: bytes) -> tuple[int, Message]:
    """(call_id, message). Raises WireError, with what is wrong, on anything that `encode` cannot have made."""
    call_id, name, fields = _envelope(body)
    kind = _BY_NAME.get(name)
    if kind is None:
        raise WireError(f"message type {shown(name)} is unknown")
    try:
        message: Message = unpacker(kind)(fields, name)
    except (ValueError, RecursionError) as error:  # what the dataclass itself does not accept
        raise WireError(f"{name}: {error}") from error
    return call_id, message


def call_id_of(body: bytes) -> int:
    """The call_id of a frame that may be damaged otherwise; 0 if it has none."""
    try:
        return _envelope(body)[0]
    except WireError:
        return 0


def _envelope(body: bytes) -> tuple[int, str, Any]:
    try:
        value = msgpack.unpackb(body, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError(f"a frame is not msgpack: {type(error).__name__}") from error
    match value:
        case [int() as call_id, str() as name, fields] if type(call_id) is int and 0 <= call_id < 2**63:
            return call_id, name, fields
    raise WireError("a frame is not [call_id, name, fields]")
