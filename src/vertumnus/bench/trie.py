"""Speed and memory of the prefix index, on branching conversations whose hot prefixes are held by many workers."""

import gc
import resource
import time
from collections.abc import Callable
from hashlib import shake_128
from pathlib import Path
from typing import Any

import numpy as np

from vertumnus.core.index import PoolLoad, PrefixIndex, Removed, ReplicationSettings, ScanResult, Stored, WorkerLoad

DEGREES = (1, 2, 4, 8)
CHAIN_BLOCKS = 128
_SYSTEM_PROMPTS = 64
_SYSTEM_BLOCKS = 16
_LONG_CHAIN_BLOCKS = 2048


def run(
    num_blocks: int = 1_000_000, num_workers: int = 64, seed: int = 0, num_samples: int = 2000
) -> list[dict[str, Any]]:
    """Builds an index of about `num_blocks`, then times matches, scans and removals on it.

    Times are per operation: one report of up to 128 blocks, one match, one whole scan (and its longest slice).
    `bytes_per_block` is what the resident set of the process grew by; `column_bytes_per_block` what the columns take.
    """
    rng = np.random.default_rng(seed)
    index = PrefixIndex(degrees=DEGREES, block_tokens=64)
    sequences = [0] * num_workers
    for worker_id in range(num_workers):
        index.add_worker(worker_id, DEGREES[worker_id % len(DEGREES)])
    context = {"num_workers": num_workers, "seed": seed}

    rss_before = _rss_bytes()
    num_conversations, insert_s, stored_blocks = _fill(index, num_blocks, sequences, rng)
    grown = _rss_bytes() - rss_before
    memory = {
        "bytes_per_block": grown / index.num_blocks,
        "column_bytes_per_block": index.num_bytes / index.num_blocks,
    }
    results = [
        _entry("insert", index.num_blocks, insert_s, stored_blocks, context) | memory | {"batch_blocks": CHAIN_BLOCKS}
    ]

    long_chain = _hashes(f"long {seed}", _LONG_CHAIN_BLOCKS)
    _report(index, sequences, 0, Stored, parent=None, blocks=long_chain)
    conversations = [_conversation(int(c)) for c in rng.integers(num_conversations, size=min(num_samples, 2000))]
    matched = [
        ("match", 20, [chain[:20] for chain in conversations]),
        ("match", CHAIN_BLOCKS, conversations),
        ("match", _LONG_CHAIN_BLOCKS, [long_chain] * 200),
    ]
    for operation, size, chains in matched:
        times = [_timed(lambda chain=chain: index.match(iter(chain))) for chain in chains]  # type: ignore[misc]
        blocks = sum(index.match(chain).num_blocks for chain in chains)
        results.append(_entry(operation, index.num_blocks, times, blocks, context) | {"chain_blocks": size})
    # Else a search for reference cycles, some ten milliseconds, falls into one slice or another.
    gc.collect()
    gc.freeze()
    results += [_scan_entry(index, conversations, num_workers, is_full, context) for is_full in (False, True)]
    gc.unfreeze()

    removals = _removals(index, sequences, num_conversations, num_blocks // 4, rng)
    removed = _entry("remove", index.num_blocks, removals[0], removals[1], context) | {"batch_blocks": CHAIN_BLOCKS}
    results.append(removed)
    times = [_timed(lambda worker_id=w: index.remove_worker(worker_id)) for w in range(min(8, num_workers))]  # type: ignore[misc]
    results.append(_entry("remove worker", index.num_blocks, times, 0, context))
    return results


def _hashes(name: str, num_blocks: int) -> tuple[bytes, ...]:
    digest = shake_128(name.encode()).digest(16 * num_blocks)
    return tuple(digest[k : k + 16] for k in range(0, len(digest), 16))


def _conversation(number: int) -> tuple[bytes, ...]:
    """A chain of 128 blocks: a system prompt, half of a topic shared by eight conversations, and a part of its own."""
    system = _hashes(f"system {number % _SYSTEM_PROMPTS}", _SYSTEM_BLOCKS)
    topic = _hashes(f"topic {number % _SYSTEM_PROMPTS} {number // (8 * _SYSTEM_PROMPTS)}", 48)
    return system + topic + _hashes(f"own {number}", CHAIN_BLOCKS - len(system) - len(topic))


def _fill(
    index: PrefixIndex, num_blocks: int, sequences: list[int], rng: np.random.Generator
) -> tuple[int, list[float], int]:
    """Stores conversations, every fourth at a second worker too: (how many, seconds per report, blocks reported)."""
    times: list[float] = []
    stored_blocks = number = 0
    while index.num_blocks < num_blocks:
        chain = _conversation(number)
        for worker_id in rng.choice(len(sequences), size=1 + (number % 4 == 0), replace=False).tolist():
            times.append(_timed(lambda w=worker_id: _report(index, sequences, w, Stored, parent=None, blocks=chain)))  # type: ignore[misc] # noqa: B023
            stored_blocks += len(chain)
        number += 1
    return number, times, stored_blocks


def _removals(
    index: PrefixIndex, sequences: list[int], num_conversations: int, num_blocks: int, rng: np.random.Generator
) -> tuple[list[float], int]:
    """Evicts ends of conversations, deepest block first, in reports of 128: (seconds per report, blocks)."""
    times: list[float] = []
    removed = 0
    waiting: dict[int, list[bytes]] = {}
    for number in rng.permutation(num_conversations).tolist():
        end = _conversation(number)[_SYSTEM_BLOCKS + 48 :][::-1]
        for worker_id in index.holders(end[0]):
            batch = waiting.setdefault(worker_id, [])
            batch += end
            if len(batch) >= CHAIN_BLOCKS:
                blocks = tuple(batch)
                times.append(_timed(lambda w=worker_id: _report(index, sequences, w, Removed, blocks=blocks)))  # type: ignore[misc] # noqa: B023
                removed += len(blocks)
                batch.clear()
        if removed >= num_blocks:
            break
    return times, removed


def _add_demand(index: PrefixIndex, conversations: list[tuple[bytes, ...]]) -> None:
    """One request per conversation: used at one degree, missed at the next."""
    for number, chain in enumerate(conversations):
        degree, preferred = DEGREES[number % len(DEGREES)], DEGREES[(number + 1) % len(DEGREES)]
        index.record_access(chain, degree)
        index.record_missed(index.match(chain), preferred, lambda start, end: np.full(end - start, 0.05))


def _scan_entry(
    index: PrefixIndex, conversations: list[tuple[bytes, ...]], num_workers: int, is_full: bool, context: dict[str, Any]
) -> dict[str, Any]:
    """Scans with every store full (so that reclaiming is looked at everywhere) or with room in all."""
    capacity = max(index.resident_blocks(w) for w in range(num_workers))
    loads = {
        w: WorkerLoad(queue_s=float(w % 7), capacity_blocks=index.resident_blocks(w) if is_full else 2 * capacity)
        for w in range(num_workers)
    }
    settings = ReplicationSettings(theta_inter_s=0.2, theta_intra=2.0, grace_s=0.0)
    times: list[float] = []
    slices: list[float] = []
    result: ScanResult | None = None
    for _ in range(20):
        _add_demand(index, conversations)
        scan = index.scan(settings, PoolLoad(loads), now_s=100.0)
        of_scan: list[float] = []
        result = None
        while result is None:
            start_s = time.perf_counter()
            try:
                next(scan)
            except StopIteration as end:
                result = end.value
            of_scan.append(time.perf_counter() - start_s)
        times.append(sum(of_scan))
        slices += of_scan
    assert result is not None
    entry = _entry("scan", index.num_blocks, times, 20 * index.num_blocks, context)
    return entry | {
        "max_slice_s": max(slices),
        "p99_slice_s": float(np.quantile(slices, 0.99)),
        "stores_full": is_full,
        "num_plans": len(result.replications) + len(result.reclaims),
        "num_degrees": len(DEGREES),
    }


def _report(index: PrefixIndex, sequences: list[int], worker_id: int, kind: Callable[..., Any], **fields: Any) -> None:
    index.apply(kind(worker_id=worker_id, epoch=0, sequence=sequences[worker_id], **fields), 0.0)
    sequences[worker_id] += 1


def _entry(operation: str, num_blocks: int, times: list[float], blocks: int, context: dict[str, Any]) -> dict[str, Any]:
    return {
        "operation": operation,
        "num_blocks": num_blocks,
        "p50_s": float(np.quantile(times, 0.5)),
        "p99_s": float(np.quantile(times, 0.99)),
        "blocks_per_s": blocks / sum(times),
        "num_samples": len(times),
        **context,
    }


def _timed(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s


def _rss_bytes() -> int:
    """Resident set of this process: now where the system tells, else at its highest."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
