"""Ranks that stop where a test wants them to, in the middle of a copy or of a switch, until a gate opens."""

import time
from collections.abc import Iterator
from pathlib import Path

from tests.engine.pools import ToldSource, ToldStepper
from tests.engine.routers import begun

from vertumnus.engine import copies
from vertumnus.engine.kv_memory import KvMemory
from vertumnus.engine.rank import Rank


class HeldSource(ToldSource):
    """copy_rank: takes or gives one block of a copy and holds before the next. is_switching: every rank holds before
    it agrees to an activation."""

    def __init__(self, gate: str, copy_rank: int | None, is_switching: bool) -> None:
        super().__init__(gate)
        self._copy_rank = copy_rank
        self._is_switching = is_switching

    def stepper(self, rank: int, memory: KvMemory) -> ToldStepper:
        if rank == self._copy_rank and not Path(self._gate).exists():
            _hold_copies(self._gate)
        if self._is_switching:
            _hold_switches(self._gate, rank)
        return super().stepper(rank, memory)


def load(gate: str, copy_rank: int | None = None, is_switching: bool = False) -> HeldSource:
    return HeldSource(gate, copy_rank, is_switching)


def _hold(gate: str, mark: Path) -> None:
    mark.touch()
    while not Path(gate).exists():
        time.sleep(0.005)


def _hold_copies(gate: str) -> None:
    parts, num_blocks = copies.parts, 0

    def held(num_bytes: int) -> Iterator[tuple[int, int]]:
        nonlocal num_blocks
        num_blocks += 1
        if num_blocks == 2:
            _hold(gate, begun(gate))
        return parts(num_bytes)

    copies.parts = held


def _hold_switches(gate: str, rank: int) -> None:
    agree = Rank._agree

    def held(self, link, step_id, epoch, own):
        if step_id == 0 and link.degree > 1:
            mark = begun(f"{gate}.{rank}")
            if rank == 0:  # the others are in the exchange and wait for it
                _hold(gate, mark)
            else:
                mark.touch()
        return agree(self, link, step_id, epoch, own)

    Rank._agree = held
