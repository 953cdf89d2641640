"""The live side: a pool with its HTTP front end in a process of its own, and the load of `vertumnus replay` on it."""

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vertumnus.core.slo import Slo
from vertumnus.errors import VertumnusError
from vertumnus.replay.load import Progress
from vertumnus.replay.report import LAG_BOUND_S, Report, lateness
from vertumnus.replay.run import ReplaySettings, replay
from vertumnus.serve.config import ServeConfig
from vertumnus.validation.recorder import Record, Seen
from vertumnus.validation.side import Side
from vertumnus.validation.spec import PoolSpec
from vertumnus.workload.trace import Trace

STOP_TIMEOUT_S = 60.0
_NUMBER = re.compile(r"replay-[0-9a-f]+-(\d+)")


class LiveSideFailed(VertumnusError):
    """The live pool did not come up, or has not told what it saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """What the clients saw and what the pool saw of one trace."""

    report: Report
    record: Record

    def seen(self) -> dict[int, Seen]:
        """By row of the trace."""
        numbered = ((_NUMBER.fullmatch(name), seen) for name, seen in self.record.requests.items())
        return {int(matched[1]): seen for matched, seen in numbered if matched is not None}

    @property
    def lead_s(self) -> float:
        """For how long the pool stood idle before the trace began."""
        return self.report.played.started_s - self.record.started_s

    def side(self) -> Side:
        num_requests = self.report.trace.num_requests
        ttft_s, cached_tokens = np.full((2, num_requests), np.nan)
        for outcome in self.report.outcomes:
            if outcome.is_completed and outcome.ttft_s is not None:
                ttft_s[outcome.index] = outcome.ttft_s
                cached_tokens[outcome.index] = outcome.cached_tokens or 0
        seen = self.seen()
        began_s = self.report.played.started_s
        return Side(
            ttft_s=ttft_s,
            cached_tokens=cached_tokens,
            groups=tuple(seen[row].group if row in seen else None for row in range(num_requests)),
            compositions=tuple(
                (0.0 if number == 0 else at_s - began_s, text)
                for number, (at_s, text) in enumerate(self.record.compositions)
            ),
        )

    def lags(self) -> dict[str, Any]:
        """How far the machine kept up: lateness of the load generator, of its event loop, of the pool's event loop, and
        of the ends of steps against E_C."""
        played = self.report.played
        excess_s = np.array([step.seconds - step.predicted_s for step in self.record.steps])
        found = {
            **lateness("generator_lag_s", np.array([outcome.lag_s for outcome in played.outcomes])),
            **lateness("generator_stall_s", played.stalls_s),
            **lateness("loop_lag_s", np.array(self.record.loop_lags_s)),
            **lateness("step_excess_s", excess_s),
            "mean_step_excess_s": float(excess_s.mean()) if len(excess_s) else None,
            "pool_cpu_ratio": self.record.cpu_s / self.report.wall_s if self.report.wall_s else None,
        }
        late_s = [found[f"p99_{name}_s"] for name in ("generator_lag", "generator_stall", "loop_lag")]
        return found | {"machine_was_slow": any(each is not None and each > LAG_BOUND_S for each in late_s)}


def play_live(
    trace: Trace,
    pool: PoolSpec | ServeConfig,
    *,
    seed: int,
    vocab: int,
    slo: Slo | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> LiveRun:
    """A stub pool, or one of real ranks, started for this trace and ended after it. Raises LiveSideFailed."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        asked = {"record": str(record)}
        if isinstance(pool, PoolSpec):
            asked["pool"] = pool.to_line()
        else:
            asked["config"] = pool.model_dump_json()
        process = subprocess.Popen(
            [sys.executable, "-m", "vertumnus.validation.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt at the terminal ends the load first
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asked) + "\n")
                process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise LiveSideFailed("the live pool did not come up; it has said why on standard error")
            settings = ReplaySettings(url=json.loads(line)["url"], seed=seed, vocab=vocab, slo=slo or Slo())
            report = replay(trace, settings, on_progress=on_progress)
        finally:
            _end(process)
        if report.played.is_interrupted:
            raise KeyboardInterrupt
        if not record.exists():
            raise LiveSideFailed("the live pool ended without telling what it saw")
        return LiveRun(report=report, record=Record.from_json(json.loads(record.read_text())))


def _end(process: "subprocess.Popen[str]") -> None:
    """In order, which writes the record; with its standard input closed nothing of it is left."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
