"""The process of one rank: its threads, its memory and its connection to the pool.

    main thread      receives; answers what is quick (status, abort, labels) itself
    step thread      steps and activations, in the order in which they came
    forming thread   forms groups, beside the steps of others
    copy threads     leases and pulls
    copy server      gives leased blocks to ranks that cannot map this one's memory

It outlives the pool that it serves, if another one takes its place in time (`pool_door`); otherwise it ends. A launcher
forks it (`run_rank`); under torchrun, or any supervisor that sets the same variables, it starts by itself:

    VERTUMNUS_POOL_TOKEN=... torchrun --nproc-per-node 2 -m vertumnus.engine.rank_process LAUNCH.json
"""

import contextlib
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # re-exported without saying so

from vertumnus.engine.codec import from_plain
from vertumnus.engine.collectives import GroupBroken
from vertumnus.engine.copies import Copies, CopyServer
from vertumnus.engine.errors import CopyFailed, PoolError, WireError
from vertumnus.engine.groups import Forming, Groups
from vertumnus.engine.kv_memory import KvMemory
from vertumnus.engine.messages import (
    Abort,
    Activate,
    AskLabels,
    AskStatus,
    Dismiss,
    Done,
    Failure,
    FailureKind,
    FormGroups,
    Hello,
    Labels,
    Launch,
    Lease,
    Leased,
    Message,
    Pull,
    RankStatus,
    Refusal,
    ReleaseLease,
    RunStep,
    Settle,
    Stepped,
    TakeLease,
    call_id_of,
    decode,
)
from vertumnus.engine.pool_door import enter, say_unfit
from vertumnus.engine.rank import Rank, Stepper
from vertumnus.engine.slot_use import SlotUse
from vertumnus.engine.wire import Connection
from vertumnus.errors import ConfigError, VertumnusError

NUM_COPY_THREADS = 2


class StepperSource(Protocol):
    """What is loaded once on a host, before ranks exist, and gives each of them its stepper."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def block_tokens(self) -> int: ...

    def stepper(self, rank: int, memory: KvMemory) -> Stepper: ...


def load_source(launch: Launch) -> StepperSource:
    """Calls the function that the launch names. Raises ConfigError where there is none, or it does not like its
    options."""
    module, _, function = launch.source.partition(":")
    try:
        load = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"source is {launch.source!r}; accepted: module:function ({error})") from error
    source: StepperSource = load(**json.loads(launch.options))
    return source


class RankServer:
    """Answers what comes over a connection; of several, over one after the other."""

    def __init__(
        self,
        *,
        rank: Rank,
        groups: Groups,
        copies: Copies,
        slot_use: SlotUse,
        num_threads: int = 1,
    ) -> None:
        self._rank = rank
        self._groups = groups
        self._copies = copies
        self._slot_use = slot_use
        self._num_wire_errors = 0
        self._step_thread = ThreadPoolExecutor(
            1, thread_name_prefix="step", initializer=torch.set_num_threads, initargs=(num_threads,)
        )
        self._forming_thread = ThreadPoolExecutor(1, thread_name_prefix="forming")
        self._copy_threads = ThreadPoolExecutor(NUM_COPY_THREADS, thread_name_prefix="copy")
        self._under_way: set[Future[None]] = set()
        """What was asked over the connection and is not done."""
        self._left_over: set[Future[None]] = set()
        """What was under way when an earlier connection ended."""

    def serve(self, connection: Connection) -> bool:
        """Returns when the connection ends; whether the pool has dismissed the rank. What was begun goes on, and its
        answer is dropped; what was not is dropped, and so are the leases."""
        is_dismissed = False
        with contextlib.suppress(EOFError, OSError):
            while not is_dismissed:
                is_dismissed = self._serve_one(connection)
        connection.close()
        self._left_over = {work for work in self._left_over | self._under_way if not work.cancel() and not work.done()}
        self._under_way = set()
        self._slot_use.release_all()
        return is_dismissed

    def _serve_one(self, connection: Connection) -> bool:
        body = b""
        try:
            body = connection.receive_frame()
            call_id, message = decode(body)
        except WireError as error:
            self._num_wire_errors += 1
            connection.send(call_id_of(body), Failure(kind=FailureKind.WIRE, detail=str(error)))
            return False

        def submit(threads: Executor, work: Callable[[], Message]) -> None:
            future = threads.submit(self._answer, connection, call_id, work)
            self._under_way.add(future)
            future.add_done_callback(self._under_way.discard)

        match message:
            case Dismiss():
                return True
            case FormGroups():
                forming = self._groups.prepare(message.generation, message.groups)
                submit(self._forming_thread, lambda: self._form(forming))
            case Settle():
                self._groups.abort_all()
                submit(self._forming_thread, self._settle)
            case RunStep() | Activate():
                submit(self._step_thread, lambda: self._in_step_thread(message))
            case TakeLease() | Pull():
                submit(self._copy_threads, lambda: self._in_copy_thread(message))
            case _:
                self._answer(connection, call_id, lambda: self._at_once(message))
        return False

    def _form(self, forming: Forming) -> Message:
        self._groups.form(forming)
        return Done()

    def _settle(self) -> Message:
        wait(self._left_over)
        return self._status()

    def _in_step_thread(self, message: RunStep | Activate) -> Message:
        if isinstance(message, Activate):
            return self._rank.activate(message)
        output = self._rank.run_step(message.step)
        return output if isinstance(output, Refusal) else Stepped(output=output)

    def _in_copy_thread(self, message: TakeLease | Pull) -> Message:
        if isinstance(message, Pull):
            return self._copies.pull(message)
        lease = self._copies.lease(message.slots, message.lease_s)
        return Leased(lease=lease) if isinstance(lease, Lease) else lease

    def _at_once(self, message: Message) -> Message:
        match message:
            case Abort(groups=groups):
                self._groups.abort(groups)
                return Done()
            case ReleaseLease(lease_id=lease_id):
                self._slot_use.release(lease_id)
                return Done()
            case AskStatus():
                return self._status()
            case AskLabels():
                tags = self._slot_use.tags
                return Labels(slots=tuple(tags), tags=b"".join(tags.values()))
        self._num_wire_errors += 1
        return Failure(kind=FailureKind.WIRE, detail=f"{type(message).__name__} is nothing that a rank is asked")

    def _status(self) -> RankStatus:
        return RankStatus(
            rank=self._rank.rank,
            epoch=self._rank.epoch,
            group=self._rank.group,
            groups=self._groups.usable,
            generation=self._groups.generation,
            num_steps=self._rank.num_steps,
            num_leases=self._slot_use.num_leases,
            num_wire_errors=self._num_wire_errors,
        )

    def _answer(self, connection: Connection, call_id: int, work: Callable[[], Message]) -> None:
        try:
            answer = work()
        except GroupBroken as error:
            answer = Failure(kind=FailureKind.GROUP_BROKEN, detail=str(error))
        except CopyFailed as error:
            answer = Failure(kind=FailureKind.COPY, detail=str(error))
        except Exception as error:  # whatever it was, the rank lives on and whoever asked is told
            answer = Failure(kind=FailureKind.INTERNAL, detail=f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):  # the pool is gone: the main thread sees that too
            try:
                connection.send(call_id, answer)
            except WireError as error:
                connection.send(call_id, Failure(kind=FailureKind.INTERNAL, detail=str(error)))


def run_rank(
    launch: Launch, rank: int, incarnation: int, source: StepperSource, store: Store, *, is_patient: bool = False
) -> None:
    """Runs a rank until the pool dismisses it, or is gone and no other comes (is_patient: see `enter`). An error before
    it is ready is told to the pool and raised."""
    torch.set_num_threads(launch.num_threads)
    with contextlib.suppress(RuntimeError):  # once in a process is enough
        torch.set_num_interop_threads(1)
    try:
        memory = KvMemory(launch.num_slots, source.block_bytes)
        slot_use = SlotUse(launch.num_slots, time.monotonic)
        server = CopyServer(rank, memory, slot_use, launch.token, launch.interface_host, launch.connect_timeout_s)
        groups = Groups(
            rank,
            store,
            launch.interface_host,
            connect_timeout_s=launch.connect_timeout_s,
            exchange_timeout_s=launch.step_timeout_s,
        )
        stepper = source.stepper(rank, memory)
    except Exception as error:
        reason = str(error) if isinstance(error, VertumnusError) else f"{type(error).__name__}: {error}"
        say_unfit(launch, rank, reason)
        raise
    block_tokens = source.block_tokens
    ready = Rank(rank, launch.num_ranks, groups=groups, stepper=stepper, slot_use=slot_use, block_tokens=block_tokens)

    def hello() -> Hello:
        return Hello(
            token=launch.token,
            rank=rank,
            incarnation=incarnation,
            pid=os.getpid(),
            num_slots=launch.num_slots,
            block_bytes=source.block_bytes,
            block_tokens=block_tokens,
            epoch=ready.epoch,
            group=ready.group,
        )

    rank_server = RankServer(
        rank=ready,
        groups=groups,
        copies=Copies(rank, memory, slot_use, server, launch.connect_timeout_s),
        slot_use=slot_use,
        num_threads=launch.num_threads,
    )
    connection = enter(launch, hello, is_patient=is_patient)
    if connection is None:
        raise PoolError(f"no pool has taken rank {rank} in at {launch.pool_host}, port {launch.pool_port}")
    while connection is not None:
        if rank_server.serve(connection):
            return
        connection = enter(launch, hello, is_patient=is_patient)


def read_launch(plain: Mapping[str, Any], token: str) -> Launch:
    """What a launch file says. It may leave out `interface_host`, where a rank's peers reach it: then that is the
    address that faces the pool. Raises WireError for fields that are no launch's, ConfigError for a host that is none.
    """
    told = {"token": token, "interface_host": None, **plain}
    if told["interface_host"] is None:
        told["interface_host"] = _address_facing(told.get("pool_host"), told.get("pool_port"))
    return from_plain(Launch, told, "launch")


def _address_facing(host: Any, port: Any) -> str:
    """This machine's address on the way to another. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, OverflowError, TypeError, UnicodeError) as error:
        raise ConfigError(
            f"pool_host is {host!r}, pool_port {port!r}: {error}; accepted: where the server waits for ranks"
        ) from error


def main() -> None:
    """Reads the launch from a JSON file and the rest from the variables that torchrun sets."""
    environment = os.environ
    try:
        plain = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        launch = read_launch(plain, environment["VERTUMNUS_POOL_TOKEN"])
        rank, incarnation = int(environment["RANK"]), int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (IndexError, KeyError, OSError, ValueError, TypeError, WireError) as error:
        raise SystemExit(
            f"{type(error).__name__}: {error}; accepted: a JSON file with the launch as argument, and "
            "VERTUMNUS_POOL_TOKEN, RANK, MASTER_ADDR and MASTER_PORT in the environment"
        ) from None
    torch.set_num_threads(launch.num_threads)
    is_hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(host, port, is_master=rank == 0 and not is_hosted, wait_for_workers=False)
    run_rank(launch, rank, incarnation, load_source(launch), store, is_patient=True)
    sys.stdout.flush()
    os._exit(0)  # without waiting for a step thread that nobody will answer any more


if __name__ == "__main__":
    main()
