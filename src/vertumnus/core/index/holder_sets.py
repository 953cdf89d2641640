"""Interned sets of workers: every distinct set is kept once, however many blocks it holds.

Consecutive blocks of a path mostly have the same holders, so the trie stores a small set id per block. That keeps the
memory of a block independent of the number of workers, and lets a scan look replica counts up in a small table.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vertumnus.errors import InvariantError

EMPTY_SET = 0


def slots_of(mask: int) -> list[int]:
    """The slots of a mask, rising."""
    slots = []
    while mask:
        lowest = mask & -mask
        slots.append(lowest.bit_length() - 1)
        mask ^= lowest
    return slots


@lru_cache(maxsize=4096)
def slot_array(mask: int) -> NDArray[np.intp]:
    """The slots of a mask as an index for NumPy. Shared: read only."""
    return np.array(slots_of(mask), dtype=np.intp)


class HolderSets:
    """Reference-counted bit sets over worker slots; bit s of a mask is the worker in slot s.

    A set lives while a block refers to it; ids of dead sets are reused. Id 0 is the empty set and lives for ever.
    """

    def __init__(self, num_degrees: int) -> None:
        self.masks: list[int] = [0]
        self.degree_masks = [0] * num_degrees
        """Per degree index, the slots whose worker has that degree."""
        self.version = 0
        """Changes whenever `counts` does."""
        self._ids: dict[int, int] = {0: EMPTY_SET}
        self._num_references = [0]
        self._free: list[int] = []
        self._counts = np.zeros((num_degrees + 1, 64), dtype=np.int32)
        """Per degree index, and in all, the workers of every set."""

    @property
    def num_sets(self) -> int:
        """Distinct sets that some block refers to, the empty one aside."""
        return len(self._ids) - 1

    @property
    def counts(self) -> NDArray[np.int32]:
        """counts[d, set_id] = workers of degree index d in the set; the table of ReplicaCount. Read only."""
        return self._counts[:-1, : len(self.masks)]

    @property
    def totals(self) -> NDArray[np.int32]:
        """totals[set_id] = workers of any degree in the set. Read only."""
        return self._counts[-1, : len(self.masks)]

    def count(self, set_id: int, degree_index: int) -> int:
        """Workers of one degree in the set."""
        return (self.masks[set_id] & self.degree_masks[degree_index]).bit_count()

    def assign_slot(self, slot: int, degree_index: int) -> None:
        """A new worker takes a slot that no set contains."""
        self.degree_masks[degree_index] |= 1 << slot

    def vacate_slot(self, slot: int) -> None:
        """The worker of the slot is gone; no set contains it any more."""
        for degree_index, mask in enumerate(self.degree_masks):
            self.degree_masks[degree_index] = mask & ~(1 << slot)

    def intern(self, mask: int) -> int:
        """The id of this set. The caller refers to it (`move`) before anything else is interned and released."""
        set_id = self._ids.get(mask)
        return self._create(mask) if set_id is None else set_id

    def move(self, old_id: int, new_id: int, num_blocks: int) -> None:
        """So many blocks now refer to another set; the old one dies with its last reference."""
        references = self._num_references
        references[new_id] += num_blocks
        references[old_id] -= num_blocks
        if old_id != EMPTY_SET and not references[old_id]:
            del self._ids[self.masks[old_id]]
            self.masks[old_id] = 0
            self._counts[:, old_id] = 0
            self._free.append(old_id)
            self.version += 1

    def ids_with(self, slot: int) -> list[int]:
        """The ids of the sets that contain a slot, rising."""
        bit = 1 << slot
        return [set_id for set_id, mask in enumerate(self.masks) if mask & bit]

    def _create(self, mask: int) -> int:
        if self._free:
            set_id = self._free.pop()
            self.masks[set_id] = mask
        else:
            set_id = len(self.masks)
            self.masks.append(mask)
            self._num_references.append(0)
            if set_id == self._counts.shape[1]:
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)], axis=1)
        self._ids[mask] = set_id
        by_degree = [(mask & degree_mask).bit_count() for degree_mask in self.degree_masks]
        self._counts[:, set_id] = [*by_degree, mask.bit_count()]
        self.version += 1
        return set_id

    def check_invariants(self, num_references: Sequence[int]) -> None:
        """Compares the reference counts with those of the blocks (one per set id); raises InvariantError."""
        free = set(self._free)
        for set_id, mask in enumerate(self.masks):
            if set_id == EMPTY_SET:
                continue
            if set_id in free:
                if mask or self._num_references[set_id] or self._counts[:, set_id].any():
                    raise InvariantError(f"free holder set {set_id} is in use")
                continue
            if self._ids.get(mask) != set_id:
                raise InvariantError(f"holder set {set_id} is not interned under its mask")
            if not self._num_references[set_id] or self._num_references[set_id] != num_references[set_id]:
                raise InvariantError(f"holder set {set_id} has {self._num_references[set_id]} references")
            by_degree = [self.count(set_id, d) for d in range(len(self.degree_masks))]
            if [*by_degree, mask.bit_count()] != self._counts[:, set_id].tolist():
                raise InvariantError(f"holder set {set_id} has wrong replica counts")
        if len(self._ids) != len(self.masks) - len(free):
            raise InvariantError("holder sets leak")
