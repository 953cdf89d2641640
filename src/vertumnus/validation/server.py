"""The process of a live pool under validation: `python -m vertumnus.validation.server`, with one JSON object on the
first line of standard input.

`pool` (a `PoolSpec`'s line) starts a pool over stub ranks, `config` (a `ServeConfig`) one of real ranks, as
`vertumnus serve` does. It says where it answers on standard output. SIGTERM ends it; what it saw is then in the file
`record`.
"""

import asyncio
import json
import logging
import os
import resource
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from vertumnus.errors import VertumnusError
from vertumnus.serve.config import config_from
from vertumnus.serve.garbage import collect_rarely
from vertumnus.serve.http import HttpConfig, create_app, serve_http, stop_on_signals
from vertumnus.serve.live_backend import LiveBackend, Watch
from vertumnus.serve.loop_lag import LoopLag
from vertumnus.serve.router import Router
from vertumnus.serve.router_spec import RouterReport, RouterSpec
from vertumnus.serve.stub_tokeniser import stub_tokeniser
from vertumnus.serve.telemetry import together
from vertumnus.validation.recorder import Recorder
from vertumnus.validation.side import timeline
from vertumnus.validation.spec import PoolSpec
from vertumnus.validation.stub_pool import VOCAB_SIZE, stub_pool

BACKLOG = 4096


async def _serve(asked: dict[str, Any]) -> None:
    recorder = Recorder(time.perf_counter)
    lag = LoopLag(recorder.seen.loop_lags_s.append)
    lag.start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    if "pool" in asked:
        await _serve_stubs(PoolSpec.from_line(asked["pool"]), recorder, listener)
    else:
        await _serve_model(asked["config"], recorder, listener)
    lag.close()
    seen = recorder.seen
    seen.compositions = list(timeline(recorder.first_layout, recorder.transitions, start_s=0.0))
    seen.cpu_s += time.process_time()
    Path(asked["record"]).write_text(json.dumps(seen.to_json()))


async def _serve_stubs(spec: PoolSpec, recorder: Recorder, listener: socket.socket) -> None:
    watch = Watch()
    pool = stub_pool(spec, together([watch.telemetry, recorder]))
    await pool.start()
    backend = LiveBackend(pool, watch)
    backend.start()
    tokeniser = stub_tokeniser(VOCAB_SIZE)
    config = HttpConfig(
        model_name="stub", max_context_tokens=pool.settings.max_tokens, vocab_size=VOCAB_SIZE, drain_timeout_s=1.0
    )
    started, stop = asyncio.Event(), asyncio.Event()
    with stop_on_signals(stop):
        serving = asyncio.ensure_future(
            serve_http(create_app(backend, tokeniser, config), [listener], config, stop, started=started)
        )
        watching = asyncio.ensure_future(_when_closed(stop))
        await started.wait()
        collect_rarely()
        _begin(listener, recorder)
        await serving
        watching.cancel()
    backend.close()
    await pool.close()
    tokeniser.close()


async def _when_closed(stop: asyncio.Event) -> None:
    """Whoever started this is gone when standard input closes."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    stop.set()


async def _serve_model(config: str, recorder: Recorder, listener: socket.socket) -> None:
    said, report_fd = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as pool_listener, open(said, "rb", buffering=0) as pipe:
        spec = RouterSpec(
            config=config_from(json.loads(config)),
            http_fd=listener.detach(),
            pool_fd=pool_listener.fileno(),
            report_fd=report_fd,
            hash_key=secrets.token_bytes(32),
            pool_token=secrets.token_hex(16),
            control_token=secrets.token_hex(16),
            is_first=True,
        )
        for fd in (spec.http_fd, spec.pool_fd, report_fd):
            os.set_inheritable(fd, False)
        address = socket.socket(fileno=os.dup(spec.http_fd))
        telling = asyncio.ensure_future(_tell_when_ready(pipe, address, recorder))
        await Router(spec, recorder).run()
        telling.cancel()


async def _tell_when_ready(pipe: Any, address: socket.socket, recorder: Recorder) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    while line := await reader.readline():
        if RouterReport.from_line(line).kind == "ready":
            _begin(address, recorder)
            address.close()


def _begin(listener: socket.socket, recorder: Recorder) -> None:
    """Says where requests can be sent to; what was before that is not looked at."""
    recorder.seen.loop_lags_s.clear()
    recorder.seen.cpu_s = -time.process_time()
    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)


def main() -> None:
    """The process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="%(message)s")
    asked = json.loads(sys.stdin.buffer.readline())
    try:
        uvloop.run(_serve(asked))
    except VertumnusError as error:
        print(f"the live pool ends: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
