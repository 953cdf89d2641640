"""A router in a process of its own, over ranks that only keep time: the live pool and its HTTP front end, no model.

`StubRouter` starts and asks it; `python -m vertumnus.bench.stub_router` is the process, with a `StubRouterSpec` as the
first line of standard input. Every further line is answered with its figures, until the input closes.
"""

import asyncio
import gc
import json
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from vertumnus.bench.held_up import HeldUp
from vertumnus.core.composition import Composition, Topology, lay_out
from vertumnus.core.control_plane import ControlPlane
from vertumnus.core.controller import Controller, PoolState, Proposal, Window, observing
from vertumnus.core.controllers import make_controller
from vertumnus.core.cost import Coefficients, CostModel
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.moves import MoveSettings
from vertumnus.core.policies import make_policy
from vertumnus.core.profile import load_profile
from vertumnus.core.pulls import PullSettings
from vertumnus.core.queueing import Discipline
from vertumnus.core.settings import ControlPlaneSettings
from vertumnus.core.slices import Slices, finish
from vertumnus.errors import VertumnusError
from vertumnus.serve.garbage import collect_rarely
from vertumnus.serve.http import HttpConfig, create_app, serve_http
from vertumnus.serve.live_backend import LiveBackend, Watch
from vertumnus.serve.live_pool import LivePool
from vertumnus.serve.live_settings import LiveSettings
from vertumnus.serve.stub_ranks import StubRanks, StubSpeed
from vertumnus.serve.stub_tokeniser import stub_tokeniser

VOCAB_SIZE = 32_000
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StubRouterSpec:
    """What runs. Durations in seconds.

    profile: whose E_C, `time_scale` times, the control plane predicts with, and prefill steps take if
    `has_service_time`; else they end at once. controller: None holds the composition; so does one that is not
    followed, though it is asked. step_tokens: None runs one whole prompt a step.
    """

    composition: str
    profile: str | None = None
    time_scale: float = 1.0
    has_service_time: bool = False
    num_decode_ranks: int = 1
    decode_step_s: float = 0.0
    max_decode_sequences: int = 256
    copy_s_per_block: float = 0.0
    switch_s: float = 0.0
    block_tokens: int = 32
    blocks_per_rank: int = 8192
    step_tokens: int | None = 8192
    queue: str = "shortest"
    controller: str | None = None
    is_followed: bool = True
    window_s: float = 20.0
    has_replication: bool = True
    has_pulls: bool = True
    has_moves: bool = True
    max_queued_requests: int = 8192


class RouterGone(VertumnusError):
    """The process ended before its time; it has said why on standard error."""


class StubRouter:
    """The process, from the side that started it."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self._process = process
        self.url = url

    def figures(self) -> dict[str, Any]:
        """What has happened since the last call: see `_Figures.take`."""
        assert self._process.stdin is not None
        self._process.stdin.write("figures\n")
        self._process.stdin.flush()
        return _read(self._process)


@contextmanager
def stub_router(spec: StubRouterSpec) -> Iterator[StubRouter]:
    """Runs within the block. Raises RouterGone where it does not come up."""
    command = [sys.executable, "-m", "vertumnus.bench.stub_router"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(asdict(spec)) + "\n")
        process.stdin.flush()
        yield StubRouter(process, _read(process)["url"])
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _read(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RouterGone("the router's process has ended")
    figures: dict[str, Any] = json.loads(line)
    return figures


# In the process


class _TimedController:
    """Another controller, and the longest that it took at once: CPU seconds."""

    def __init__(self, controller: Controller, is_followed: bool) -> None:
        self._controller, self._is_followed = controller, is_followed
        self.longest_s = 0.0

    def observe(self, window: Window, state: PoolState) -> Proposal | None:
        return finish(self.observing(window, state))

    def observing(self, window: Window, state: PoolState) -> Slices[Proposal | None]:
        slices = observing(self._controller, window, state)
        while True:
            begin_s = time.thread_time()
            try:
                next(slices)
            except StopIteration as finished:
                return finished.value if self._is_followed else None
            finally:
                self.longest_s = max(self.longest_s, time.thread_time() - begin_s)
            yield


class _Figures:
    def __init__(self, pool: LivePool, watch: Watch, controller: _TimedController | None) -> None:
        self._pool, self._watch, self._controller = pool, watch, controller
        self._held_up = HeldUp()
        self._longest_collection_s = self._collection_begin_s = 0.0
        gc.callbacks.append(self._collection)
        self._begin()

    def _begin(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._num_collections = _num_full_collections()
        self._longest_collection_s = 0.0
        self._held_up.begin()
        if self._controller is not None:
            self._controller.longest_s = 0.0

    def _collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collection_begin_s = time.thread_time()
        else:
            self._longest_collection_s = max(self._longest_collection_s, time.thread_time() - self._collection_begin_s)

    def take(self) -> dict[str, Any]:
        """Of the time since the last call. `held_up`: how late the event loop came, by the clock and by the CPU time
        of what it was at. `now_s` and the transitions' instants are the monotonic clock's."""
        plane = self._pool.control_plane
        figures = {
            "now_s": time.perf_counter(),
            "wall_s": time.perf_counter() - self._wall_s,
            "cpu_s": time.process_time() - self._cpu_s,
            "rss_bytes": _rss_bytes(),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "longest_collection_cpu_s": self._longest_collection_s,
            "num_full_collections": _num_full_collections() - self._num_collections,
            "longest_controller_cpu_s": self._controller.longest_s if self._controller is not None else None,
            **self._held_up.figures(),
            "num_open": self._pool.num_open,
            "composition": str(plane.composition),
            "transitions": [
                {
                    "committed_s": each.committed_s,
                    "kind": each.operation.kind.value,
                    "drain_s": each.drain_s,
                    "switch_s": each.switch_s,
                    "ranks": [list(group.ranks) for group in each.operation.results],
                }
                for each in plane.transitions
            ],
            "proposals": [each for each in self._watch.decisions.newest(1000) if each["kind"] == "proposal"],
        }
        self._begin()
        return figures


def _num_full_collections() -> int:
    return int(gc.get_stats()[-1]["collections"])


def _rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def stub_pool(spec: StubRouterSpec, watch: Watch) -> tuple[LivePool, _TimedController | None]:
    """The live pool alone, within a running loop; and its controller."""
    composition = Composition.parse(spec.composition)
    num_ranks = composition.num_gpus
    topology = Topology(num_ranks)
    profile = load_profile() if spec.profile is None else load_profile(spec.profile)
    cost_model = _scaled(profile.cost_model(), spec.time_scale)
    controller = None
    if spec.controller is not None:
        controller = _TimedController(make_controller(spec.controller, cost_model, profile.kappa), spec.is_followed)
    ranks = StubRanks(
        num_ranks + spec.num_decode_ranks,
        StubSpeed(
            prefill=cost_model if spec.has_service_time else None,
            decode_ranks=range(num_ranks, num_ranks + spec.num_decode_ranks),
            decode_step_s=spec.decode_step_s,
            copy_s_per_block=spec.copy_s_per_block,
            switch_s=spec.switch_s,
        ),
        vocab_size=VOCAB_SIZE,
    )
    pool = LivePool(
        ranks=ranks,
        control_plane=ControlPlane(
            layout=lay_out(composition, topology),
            topology=topology,
            cost_model=cost_model,
            policy=make_policy("vertumnus"),
            settings=ControlPlaneSettings(
                block_tokens=spec.block_tokens,
                blocks_per_rank=spec.blocks_per_rank,
                discipline=Discipline(spec.queue),
                step_tokens=spec.step_tokens,
                window_s=spec.window_s,
                replication=ReplicationSettings() if spec.has_replication else None,
                pull=PullSettings(
                    s_per_token=spec.copy_s_per_block / spec.block_tokens, latency_s=1e-4, from_any_worker=True
                )
                if spec.has_pulls
                else None,
                moves=MoveSettings() if spec.has_moves else None,
            ),
            controller=controller,
            epoch=1,
        ),
        settings=LiveSettings(
            num_prefill_ranks=num_ranks,
            num_decode_ranks=spec.num_decode_ranks,
            block_tokens=spec.block_tokens,
            blocks_per_rank=spec.blocks_per_rank,
            max_sequence_tokens=spec.blocks_per_rank * spec.block_tokens,
            vocab_size=VOCAB_SIZE,
            max_queued_requests=spec.max_queued_requests,
            max_decode_sequences=spec.max_decode_sequences,
        ),
        hash_key=bytes(range(32)),
        telemetry=watch.telemetry,
    )
    return pool, controller


def _scaled(cost_model: CostModel, factor: float) -> CostModel:
    return CostModel(
        {
            degree: Coefficients(**{name: factor * getattr(each, name) for name in Coefficients.__slots__})
            for degree, each in cost_model.coefficients.items()
        }
    )


async def _serve(spec: StubRouterSpec) -> None:
    watch = Watch(num_decisions=20_000)
    pool, controller = stub_pool(spec, watch)
    await pool.start()
    backend = LiveBackend(pool, watch)
    config = HttpConfig(
        model_name="stub", max_context_tokens=pool.settings.max_tokens, vocab_size=VOCAB_SIZE, drain_timeout_s=1.0
    )
    tokeniser = stub_tokeniser(VOCAB_SIZE)
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    stop, started = asyncio.Event(), asyncio.Event()
    backend.start()
    serving = asyncio.ensure_future(
        serve_http(create_app(backend, tokeniser, config), [listener], config, stop, started=started)
    )
    await started.wait()
    collect_rarely()
    figures = _Figures(pool, watch, controller)
    _say({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"})
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        _say(figures.take())
    stop.set()
    await serving
    backend.close()
    await pool.close()
    tokeniser.close()


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    """The process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="%(message)s")
    uvloop.run(_serve(StubRouterSpec(**json.loads(sys.stdin.buffer.readline()))))


if __name__ == "__main__":
    main()
