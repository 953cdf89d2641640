"""The candidate lists of Algorithm 2, by its own criterion, for a range of rows at a time.

Thresholds are divided by the scale of the demand columns (see `Trie.decay`) instead of scaling the columns.
"""

import numpy as np
from numpy.typing import NDArray

from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.index.trie import Trie

Rows = NDArray[np.int32]


def inter_candidates(trie: Trie, theta_inter_s: float, degree_index: int, start: int, end: int) -> Rows:
    """Rows in [start, end) without a replica at the degree whose missed benefit is above the threshold."""
    missed = trie.nodes.missed[degree_index].values[start:end]
    rows = np.flatnonzero(missed > theta_inter_s / trie.missed_scale[degree_index])
    replicas = trie.sets.counts[degree_index][trie.nodes.holder_set.values[start:end][rows]]
    found: Rows = rows[replicas == 0].astype(np.int32) + np.int32(start)
    return found


def intra_candidates(trie: Trie, theta_intra: float, degree_index: int, start: int, end: int) -> Rows:
    """Rows in [start, end) with replicas at the degree whose uses per replica are above the threshold."""
    access = trie.nodes.access[degree_index].values[start:end]
    threshold = theta_intra / trie.access_scale[degree_index]
    rows = np.flatnonzero(access > threshold)
    replicas = trie.sets.counts[degree_index][trie.nodes.holder_set.values[start:end][rows]]
    found: Rows = rows[(replicas > 0) & (access[rows] > replicas * threshold)].astype(np.int32) + np.int32(start)
    return found


def reclaim_limits(trie: Trie, theta_reclaim: float, degree_index: int, slots: int) -> NDArray[np.float32]:
    """Per holder set, the uses below which a row with that set is a candidate; 0 if none of `slots` is in the set.

    Costs a pass over all distinct sets, in Python unless all slots of the degree are asked for.
    """
    sets = trie.sets
    at_degree = slots & sets.degree_masks[degree_index]
    limits = sets.counts[degree_index] * (theta_reclaim / trie.access_scale[degree_index])
    if at_degree != sets.degree_masks[degree_index]:
        limits[[not mask & at_degree for mask in sets.masks]] = 0.0
    rounded: NDArray[np.float32] = limits.astype(np.float32)
    return rounded


def reclaim_candidates(trie: Trie, limits: NDArray[np.float32], degree_index: int, start: int, end: int) -> Rows:
    """Rows in [start, end) with replicas at the degree whose uses per replica are below the threshold."""
    access = trie.nodes.access[degree_index].values[start:end]
    below = access < limits[trie.nodes.holder_set.values[start:end]]
    found: Rows = np.flatnonzero(below).astype(np.int32) + np.int32(start)
    return found


def paper_candidates(trie: Trie, settings: ReplicationSettings) -> dict[str, set[tuple[bytes, int]]]:
    """The three lists of Algorithm 2 as sets of (block, degree), without any practical restriction."""
    end = trie.nodes.end
    lists: dict[str, set[tuple[bytes, int]]] = {"inter": set(), "intra": set(), "reclaim": set()}
    for d, degree in enumerate(trie.degrees):
        limits = reclaim_limits(trie, settings.theta_reclaim, d, -1)
        rows = {
            "inter": inter_candidates(trie, settings.theta_inter_s, d, 1, end),
            "intra": intra_candidates(trie, settings.theta_intra, d, 1, end),
            "reclaim": reclaim_candidates(trie, limits, d, 1, end),
        }
        for name, found in rows.items():
            lists[name] |= {(trie.nodes.hash_of(row), degree) for row in found.tolist()}
    return lists
