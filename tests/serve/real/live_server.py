"""`vertumnus serve` as its operator runs it: in processes of its own, talked to over HTTP, and not spared."""

import asyncio
import contextlib
import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.engine.pools import is_alive
from tests.serve.real import tiny_model

WAIT_S = 60.0
"""More than anything here takes on a busy machine; nothing is expected to take a part of it."""
POLL_S = 0.005
CONTROL_TOKEN = "control-0123456789abcdef"
MARK = "VERTUMNUS_TEST_MARK"
"""An environment variable that all processes of one server inherit, so that none of them can hide."""
MODEL = "tiny"

DEFAULTS: dict[str, Any] = {
    "name": MODEL,
    "ranks": 4,
    "decode_ranks": 1,
    "composition": "2x1,1x2",
    "block_tokens": 8,
    "kv_mib_per_rank": 1,
    "step_tokens": 64,
    "controller": "none",
    "control_token": CONTROL_TOKEN,
    "drain_timeout_s": 20.0,
    "max_router_deaths": 1000,
}


class LiveServer:
    """Usable once `until_ready` has returned."""

    def __init__(self, model: Path | None = None, **config: Any) -> None:
        self._mark = uuid.uuid4().hex
        self.lines: list[str] = []
        """What it has written to standard error."""
        values = {**DEFAULTS, "port": 0, **config}
        if "profile" not in values:
            values["profile"] = str(tiny_model.profile_file())
        file = Path(tempfile.gettempdir()) / f"vertumnus-test-{self._mark}.toml"
        file.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()), encoding="utf-8")
        model = tiny_model.folder() if model is None else model
        command = [sys.executable, "-c", "from vertumnus.cli import main; main()", "serve", str(model)]
        try:
            self.process = subprocess.Popen(
                [*command, "--config", str(file)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env={**os.environ, MARK: self._mark},
                preexec_fn=_end_with_parent,
            )
        except BaseException:
            file.unlink()
            raise
        self._file = file
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = ""
        self._num_prompts = 0

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def until_ready(self) -> "LiveServer":
        until(lambda: self._find_url() or self.process.poll() is not None, "the server is ready")
        assert self.url, f"the server ended: {self.lines}"
        return self

    def _find_url(self) -> bool:
        for line in list(self.lines):
            if line.startswith("serving "):
                self.url = line.split(" at ")[1].removesuffix("/v1")
        return bool(self.url)

    # Talking to it

    def call(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """(status, JSON), with the control token unless another is given."""
        headers = {"authorization": f"Bearer {CONTROL_TOKEN}", "content-type": "application/json", **(headers or {})}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def state(self) -> dict[str, Any]:
        status, state = self.call("/admin/state")
        assert status == 200, state
        return state

    def held(self) -> dict[str, Any]:
        return dict(self.state()["held"])

    def compose(self, composition: str) -> None:
        status, answer = self.call("/admin/composition", {"composition": composition})
        assert status == 200, answer

    def until(self, is_true: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The state once something is true of it. Survives a router that dies in between."""
        found: dict[str, Any] = {}

        def look() -> bool:
            nonlocal found
            try:
                found = self.state()
            except (OSError, ValueError, http.client.HTTPException):
                return False
            return is_true(found)

        until(look, lambda: f"{what}: {found.get('held')}, {found}, {self.lines[-20:]}")
        return found

    def complete(self, tokens: tuple[int, ...], max_tokens: int = 4, **headers: str) -> dict[str, Any]:
        status, answer = self.call("/v1/completions", body(tokens, max_tokens), headers)
        assert status == 200, answer
        return answer

    def next_number(self) -> int:
        """Of a prompt that it was not asked before."""
        self._num_prompts += 1
        return 1000 + self._num_prompts

    # Its processes

    def pids(self) -> list[int]:
        """All that live."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and is_alive(int(entry.name)):
                with contextlib.suppress(OSError):
                    if f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return sorted(found)

    @property
    def router_pid(self) -> int:
        return int(self.held()["router_pid"])

    def rank_pid(self, rank: int) -> int:
        """Of a rank that is there; waits for it."""
        state = self.until(lambda state: str(rank) in state["held"]["rank_pids"], f"rank {rank} is there")
        return int(state["held"]["rank_pids"][str(rank)])

    def kill_rank(self, rank: int) -> None:
        kill(self.rank_pid(rank))

    def kill_router(self) -> int:
        """Its pid, once it is dead."""
        pid = self.router_pid
        kill(pid)
        until(lambda: not is_alive(pid), "the router is dead")
        return pid

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """The exit status, once all its processes have ended."""
        status = self.process.wait(WAIT_S)
        until(lambda: not self.pids(), lambda: f"left: {[_command(pid) for pid in self.pids()]}")
        self._reader.join(WAIT_S)
        return status

    def close(self) -> None:
        """Whatever it does."""
        self._file.unlink(missing_ok=True)
        for _ in range(3):  # one may be starting another
            for pid in self.pids():
                kill(pid)
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def serving(model: Path | None = None, **config: Any) -> Iterator[LiveServer]:
    """A server that is ready; in the end it drains, and has to leave nothing behind."""
    server = LiveServer(model, **config)
    try:
        yield server.until_ready()
        assert server.stop() == 0, server.lines
        assert not any("Traceback" in line for line in server.lines), server.lines
    finally:
        server.close()


def body(tokens: tuple[int, ...], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(tokens), "max_tokens": max_tokens, "temperature": 0, **more}


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def until(is_true: Callable[[], bool], what: str | Callable[[], str]) -> None:
    give_up_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < give_up_s, f"waited in vain until {what if isinstance(what, str) else what()}"
        time.sleep(POLL_S)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def run(test: Any, timeout_s: float = 240.0) -> Any:
    """Runs a coroutine within a bound."""
    return asyncio.run(asyncio.wait_for(test, timeout_s))


def _end_with_parent() -> None:
    """No server outlives tests that were killed."""
    _LIBC.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


_LIBC = ctypes.CDLL(None)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid}: {(Path('/proc') / str(pid) / 'cmdline').read_bytes().decode()}"
    return f"{pid}: gone"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)
