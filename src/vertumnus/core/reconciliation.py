"""Blocks that a worker answers for but does not hold: what a split took from it.

After a split the KV stays where it lies, so each child holds fragments of most prefixes. Every retained prefix is
assigned to one child; the blocks it lacks there are *pending*: not reusable, but copied on first reuse from any worker
that holds them. A merge loses nothing: the union holds whatever either source held.
"""

from collections.abc import Callable, Iterable, Sequence

from vertumnus.core.index.reports import Chain


class PendingBlocks:
    """Per worker, the blocks that are pending."""

    def __init__(self) -> None:
        self._by_worker: dict[int, set[bytes]] = {}

    def workers(self) -> Iterable[int]:
        """Workers that have pending blocks."""
        return self._by_worker.keys()

    def of(self, worker_id: int) -> frozenset[bytes] | set[bytes]:
        return self._by_worker.get(worker_id, frozenset())

    def add(self, worker_id: int, blocks: Iterable[bytes]) -> None:
        pending = set(blocks)
        if pending:
            self._by_worker.setdefault(worker_id, set()).update(pending)

    def settle(self, worker_id: int, blocks: Iterable[bytes]) -> None:
        """These blocks are no longer pending: they have arrived, or nobody holds them any more."""
        pending = self._by_worker.get(worker_id)
        if pending is not None:
            pending.difference_update(blocks)
            if not pending:
                del self._by_worker[worker_id]

    def forget_worker(self, worker_id: int) -> None:
        self._by_worker.pop(worker_id, None)


def assign_prefixes(held: Sequence[Sequence[Chain]], demand: Callable[[bytes], float]) -> list[set[bytes]]:
    """What each child of a split must fetch: the blocks that its assigned prefixes have and it lacks.

    `held[k]` are the chains that child k holds (its snapshot). Each prefix, named by its leaf, goes to one child: in
    order of falling demand to the child with less demand so far, and where there is no demand, or a tie, to the one
    that holds more of the prefix's last run. Prefixes with a gap in the union are left out. Linear in the blocks.
    """
    own = [{block for _, blocks in chains for block in blocks} for chains in held]
    parent_of: dict[bytes, bytes | None] = {}
    for chains in held:
        for above, blocks in chains:
            for block in blocks:
                parent_of[block] = above
                above = block
    inner = set(parent_of.values())
    leaves = sorted((block for block in parent_of if block not in inner), key=lambda leaf: (-demand(leaf), leaf))
    load = [0.0] * len(held)
    # Per child, the blocks on the way to its leaves, each seen once; what lies below a gap is nobody's.
    needed: list[set[bytes]] = [set() for _ in held]
    broken: set[bytes] = set()
    for leaf in leaves:
        weight = demand(leaf)
        tail = [leaf]
        while len(tail) < 16 and (above := parent_of[tail[-1]]) is not None and above in parent_of:
            tail.append(above)
        held_blocks = [sum(block in blocks for block in tail) for blocks in own]
        child = min(range(len(held)), key=lambda k: (load[k] if weight else 0.0, -held_blocks[k], k))
        path = []
        above = leaf
        while above is not None and above in parent_of and above not in needed[child] and above not in broken:
            path.append(above)
            above = parent_of[above]
        if above is not None and (above not in parent_of or above in broken):
            broken.update(path)
            continue
        load[child] += weight
        needed[child].update(path)
    return [need - blocks for need, blocks in zip(needed, own, strict=True)]
