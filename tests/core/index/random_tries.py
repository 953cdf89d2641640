"""Strategies for small tries with demand, and for the pools around them."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from tests.core.index.naive_index import NaiveIndex, block_at, chain

from vertumnus.core.index import PoolLoad, PrefixIndex, Removed, Stored, WorkerLoad

DEGREES = (1, 2, 4)
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


@dataclass
class Pool:
    """An index and its oracle that have seen the same reports and requests."""

    index: PrefixIndex
    naive: NaiveIndex
    loads: dict[int, WorkerLoad]
    sequence: dict[int, int] = field(default_factory=dict)

    def store(self, worker_id: int, path: tuple[int, ...], start: int = 0, now_s: float = 0.0) -> None:
        parent = block_at(path[:start]) if start else None
        header = self.header(worker_id)
        self.report(Stored(**header, parent=parent, blocks=chain(path, start)), now_s)

    def evict(self, worker_id: int, *paths: tuple[int, ...]) -> None:
        self.report(Removed(**self.header(worker_id), blocks=tuple(map(block_at, paths))), 0.0)

    def report(self, report: Stored | Removed, now_s: float) -> None:
        self.index.apply(report, now_s)
        self.naive.apply(report)

    def header(self, worker_id: int) -> dict[str, int]:
        sequence = self.sequence.get(worker_id, 0)
        self.sequence[worker_id] = sequence + 1
        return {"worker_id": worker_id, "epoch": 0, "sequence": sequence}

    def use(self, path: tuple[int, ...], degree: int, times: int = 1) -> None:
        """Requests that really reuse a path at a degree."""
        for _ in range(times):
            self.index.record_access(chain(path), degree)
            self.naive.record_access(chain(path), degree)

    def miss(self, path: tuple[int, ...], degree: int, benefit_s: float = 1.0) -> None:
        """A request that would have liked a path at a degree; every block is worth `benefit_s`."""
        hashes = chain(path)
        match = self.index.match(hashes)
        self.index.record_missed(match, degree, lambda start, end: np.full(end - start, benefit_s))
        self.naive.record_missed(hashes, degree, [benefit_s] * len(hashes))

    @property
    def load(self) -> PoolLoad:
        return PoolLoad(self.loads)


def pool_of(*degrees: int, capacity_blocks: int = 1000) -> Pool:
    """Empty workers 0, 1, ... of these degrees, all idle."""
    pool = Pool(PrefixIndex(degrees=DEGREES, block_tokens=16), NaiveIndex(), {})
    for worker_id, degree in enumerate(degrees):
        pool.index.add_worker(worker_id, degree)
        pool.naive.add_worker(worker_id, degree, 0)
        pool.loads[worker_id] = WorkerLoad(queue_s=0.0, capacity_blocks=capacity_blocks)
    return pool


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """Up to six workers that stored and evicted some paths, and requests that used and missed some."""
    pool = pool_of(*draw(st.lists(st.sampled_from(DEGREES), min_size=1, max_size=6)))
    workers = st.sampled_from(sorted(pool.loads))
    for worker_id, path in draw(st.lists(st.tuples(workers, PATHS), min_size=1, max_size=12)):
        pool.store(worker_id, path, now_s=float(draw(st.integers(0, 3))))
    for worker_id, path in draw(st.lists(st.tuples(workers, PATHS), max_size=3)):
        pool.evict(worker_id, path)
    degrees = st.sampled_from(DEGREES)
    for path, degree, times in draw(st.lists(st.tuples(PATHS, degrees, st.integers(1, 6)), max_size=8)):
        pool.use(path, degree, times)
    for path, degree, eighths in draw(st.lists(st.tuples(PATHS, degrees, st.integers(1, 40)), max_size=8)):
        pool.miss(path, degree, eighths / 8)
    for worker_id, worker in pool.naive.workers.items():
        pool.loads[worker_id] = WorkerLoad(
            queue_s=draw(st.integers(0, 3)) / 2,
            capacity_blocks=len(worker.resident) + draw(st.sampled_from([0, 1, 4, 50])),
            can_receive=draw(st.sampled_from([True, True, True, False])),
        )
    return pool
