"""A server of our own for the time of a demonstration: started as a user would, and ended in order."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vertumnus.errors import VertumnusError

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0

_SERVING = re.compile(r"^serving (?P<model>.*) at (?P<url>\S+)/v1$")
_DASHBOARD = re.compile(r"^dashboard: \S+\?token=(?P<token>\S+)$")


class DemoFailed(VertumnusError):
    """The demonstration could not be given."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where it answers, and the control token of its operators' endpoints."""

    url: str
    model: str
    token: str


@contextlib.contextmanager
def running_server(arguments: Sequence[str], log: Path) -> Iterator[RunningServer]:
    """`vertumnus serve` with these arguments; what it says goes to `log`. Raises DemoFailed with its own words."""
    command = [sys.executable, "-c", "from vertumnus.cli import main; main()", "serve", *arguments]
    with log.open("w", encoding="utf-8") as lines:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        found: dict[str, str] = {}
        is_ready = threading.Event()

        def read() -> None:
            assert process.stderr is not None
            for line in process.stderr:
                lines.write(line)
                lines.flush()
                for pattern in (_SERVING, _DASHBOARD):
                    if matched := pattern.match(line.strip()):
                        found.update(matched.groupdict())
                if len(found) == 3:
                    is_ready.set()
            is_ready.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            is_ready.wait(START_TIMEOUT_S)
            if len(found) < 3:
                process.kill()
                process.wait()
                said = log.read_text(encoding="utf-8").strip().splitlines()
                raise DemoFailed(said[-1].removeprefix("Error: ") if said else "the server did not start in time")
            yield RunningServer(found["url"], found["model"], found["token"])
        finally:
            _end(process)
            reader.join(STOP_TIMEOUT_S)


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
