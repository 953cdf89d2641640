"""What a supervisor does at the moments that no operator can aim at."""

import signal
import subprocess
import sys

import pytest
from tests.serve.real import tiny_model

from vertumnus.serve import supervisor
from vertumnus.serve.config import config_from
from vertumnus.serve.router_spec import RouterReport
from vertumnus.serve.supervisor import ServerFailed, Supervisor

WAITING = "import sys; sys.stdin.read()"
"""A router that says nothing, and ends by a signal or with its supervisor."""
DYING = f"import os, sys; os.write(int(sys.argv[1]), {RouterReport(kind='ready').to_line()!r}); os._exit(7)"
"""One that has served."""


@pytest.fixture
def config():
    return config_from({"model": str(tiny_model.folder()), "port": 0, "drain_timeout_s": 0.0})


def start_routers(monkeypatch, program, then=lambda router: None):
    """Has the supervisor start this instead of a router; `then` is called before it knows of it."""
    started = []
    real = subprocess.Popen

    def start(command, *, stdin, bufsize, pass_fds, **_):
        command = [sys.executable, "-c", program, str(pass_fds[-1])]
        router = real(command, stdin=stdin, bufsize=bufsize, pass_fds=pass_fds)
        started.append(router)
        then(router)
        return router

    monkeypatch.setattr(supervisor.subprocess, "Popen", start)
    return started


def test_sigterm_while_a_router_is_being_started_reaches_it(monkeypatch, config):
    started = start_routers(monkeypatch, WAITING, lambda _: signal.raise_signal(signal.SIGTERM))
    Supervisor(config, lambda _: None).run()
    assert [each.returncode for each in started] == [-signal.SIGTERM], "told to end, not killed for not ending"


def test_sigterm_between_two_routers_starts_no_other(monkeypatch, config):
    started = start_routers(monkeypatch, DYING)
    stopped = Supervisor(config, lambda _: None)
    monkeypatch.setattr(stopped, "_note_restart", lambda: signal.raise_signal(signal.SIGTERM))
    stopped.run()
    assert [each.returncode for each in started] == [7]


def test_a_router_that_died_before_it_was_told_anything_is_one_that_could_not_start(monkeypatch, config):
    start_routers(monkeypatch, "import os; os._exit(7)", lambda router: router.wait())
    with pytest.raises(ServerFailed, match="could not start: the router ended with exit status 7"):
        Supervisor(config, lambda _: None).run()
