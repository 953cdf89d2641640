"""The process of one rank: its threads, its memory and its connection to the pool.

    main thread      receives; answers what is quick (status, abort) itself
    step thread      steps and activations, in the order in which they came
    forming thread   forms groups, beside the steps of others
    copy threads     leases and pulls
    copy server      gives leased blocks to ranks that cannot map this one's memory

It ends when the pool closes the connection. A launcher forks it (`run_rank`); under torchrun, or any supervisor that
sets the same variables, it starts by itself:

    VERTUMNUS_TOKEN=... torchrun --nproc-per-node 2 -m vertumnus.engine.rank_process LAUNCH.json
"""

import contextlib
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # re-exported without saying so

from vertumnus.engine.codec import from_plain
from vertumnus.engine.collectives import GroupBroken
from vertumnus.engine.copies import Copies, CopyServer
from vertumnus.engine.errors import CopyFailed, WireError
from vertumnus.engine.groups import Groups
from vertumnus.engine.kv_memory import KvMemory
from vertumnus.engine.messages import (
    Abort,
    Activate,
    AskStatus,
    Done,
    Failure,
    FailureKind,
    FormGroups,
    Hello,
    Launch,
    Lease,
    Leased,
    Message,
    Pull,
    RankStatus,
    Refusal,
    ReleaseLease,
    RunStep,
    Stepped,
    TakeLease,
    Unfit,
    call_id_of,
    decode,
)
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
    """Answers what comes over one connection, until it ends."""

    def __init__(
        self,
        connection: Connection,
        *,
        rank: Rank,
        groups: Groups,
        copies: Copies,
        slot_use: SlotUse,
        num_threads: int = 1,
    ) -> None:
        self._connection = connection
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

    def serve(self) -> None:
        """Returns when the other end closes the connection."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._serve_one()
        self._groups.abort(self._groups.usable)
        for threads in (self._step_thread, self._forming_thread, self._copy_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _serve_one(self) -> None:
        body = b""
        try:
            body = self._connection.receive_frame()
            call_id, message = decode(body)
        except WireError as error:
            self._num_wire_errors += 1
            self._connection.send(call_id_of(body), Failure(kind=FailureKind.WIRE, detail=str(error)))
            return
        match message:
            case FormGroups():
                self._forming_thread.submit(self._answer, call_id, lambda: self._form(message))
            case RunStep() | Activate():
                self._step_thread.submit(self._answer, call_id, lambda: self._in_step_thread(message))
            case TakeLease() | Pull():
                self._copy_threads.submit(self._answer, call_id, lambda: self._in_copy_thread(message))
            case _:
                self._answer(call_id, lambda: self._at_once(message))

    def _form(self, message: FormGroups) -> Message:
        self._groups.form(message.generation, message.groups)
        return Done()

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
        self._num_wire_errors += 1
        return Failure(kind=FailureKind.WIRE, detail=f"{type(message).__name__} is nothing that a rank is asked")

    def _answer(self, call_id: int, work: Callable[[], Message]) -> None:
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
                self._connection.send(call_id, answer)
            except WireError as error:
                self._connection.send(call_id, Failure(kind=FailureKind.INTERNAL, detail=str(error)))


def run_rank(launch: Launch, rank: int, incarnation: int, source: StepperSource, store: Store) -> None:
    """Runs a rank until the pool closes its connection. An error before it is ready is told to the pool and raised."""
    torch.set_num_threads(launch.num_threads)
    with contextlib.suppress(RuntimeError):  # once in a process is enough
        torch.set_num_interop_threads(1)
    sock = socket.create_connection((launch.pool_host, launch.pool_port), launch.connect_timeout_s)
    sock.settimeout(None)
    connection = Connection(sock)
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
        connection.send(0, Unfit(token=launch.token, rank=rank, reason=reason))
        raise
    connection.send(
        0,
        Hello(
            token=launch.token,
            rank=rank,
            incarnation=incarnation,
            pid=os.getpid(),
            num_slots=launch.num_slots,
            block_bytes=source.block_bytes,
            block_tokens=source.block_tokens,
        ),
    )
    block_tokens = source.block_tokens
    RankServer(
        connection,
        rank=Rank(rank, launch.num_ranks, groups=groups, stepper=stepper, slot_use=slot_use, block_tokens=block_tokens),
        groups=groups,
        copies=Copies(rank, memory, slot_use, server, launch.connect_timeout_s),
        slot_use=slot_use,
        num_threads=launch.num_threads,
    ).serve()


def main() -> None:
    """Reads the launch from a JSON file and the rest from the variables that torchrun sets."""
    environment = os.environ
    try:
        plain = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        launch = from_plain(Launch, {"token": environment["VERTUMNUS_TOKEN"], **plain}, "launch")
        rank, incarnation = int(environment["RANK"]), int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (IndexError, KeyError, OSError, ValueError, TypeError, WireError) as error:
        raise SystemExit(
            f"{type(error).__name__}: {error}; accepted: a JSON file with the launch as argument, and VERTUMNUS_TOKEN, "
            "RANK, MASTER_ADDR and MASTER_PORT in the environment"
        ) from None
    torch.set_num_threads(launch.num_threads)
    is_hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(host, port, is_master=rank == 0 and not is_hosted, wait_for_workers=False)
    run_rank(launch, rank, incarnation, load_source(launch), store)
    sys.stdout.flush()
    os._exit(0)  # without waiting for a step thread that nobody will answer any more


if __name__ == "__main__":
    main()
