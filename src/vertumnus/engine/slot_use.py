"""Who uses which slots of a rank just now (the step that runs, leases of copies out, copies in) and what they hold."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from vertumnus.errors import InvariantError


class SlotUse:
    """Many may read a slot at the same time; who writes to it is alone. All methods may be called from any thread.

    A tag says what a slot holds, to whoever chose it. It goes when somebody begins to write to the slot, so that no tag
    ever names what is not there. now_s: the clock that leases expire by.
    """

    def __init__(self, num_slots: int, now_s: Callable[[], float]) -> None:
        self.num_slots = num_slots
        self._now_s = now_s
        self._lock = threading.Lock()
        self._readers: Counter[int] = Counter()
        self._written: set[int] = set()
        self._leases: dict[int, tuple[frozenset[int], float]] = {}
        self._num_leases = 0
        self._tags: dict[int, bytes] = {}
        """By slot, least recently used first."""

    def out_of_range(self, slots: Iterable[int]) -> int | None:
        """The first slot that does not exist."""
        return next((slot for slot in slots if not 0 <= slot < self.num_slots), None)

    def begin(self, *, read: Collection[int] = (), written: Collection[int] = ()) -> str | None:
        """Takes the slots, or says why not and takes none. `end` gives them back."""
        with self._lock:
            self._expire()
            for slot in read:
                if slot in self._written:
                    return f"slot {slot} is being written"
            for slot in written:
                if slot in self._written:
                    return f"slot {slot} is being written"
                if self._readers[slot]:
                    return f"slot {slot} is under lease or being read"
            self._readers.update(set(read))
            self._written.update(written)
            for slot in written:
                self._tags.pop(slot, None)
            return None

    def end(
        self,
        *,
        read: Collection[int] = (),
        written: Collection[int] = (),
        tags: Mapping[int, bytes] | None = None,
    ) -> None:
        """`tags`: of those of `written` that hold something now. They count as used in their order, and then those
        that were read in theirs."""
        with self._lock:
            self._stop_reading(read)
            self._written.difference_update(written)
            self._tags.update(tags or {})
            self._touch(read)

    def lease(self, slots: Sequence[int], lease_s: float) -> int | str:
        """The number of a new lease, or why there is none: until it is released or expires nobody writes the slots."""
        refusal = self.begin(read=slots)
        if refusal is not None:
            return refusal
        with self._lock:
            self._touch(slots)
            self._num_leases += 1
            self._leases[self._num_leases] = frozenset(slots), self._now_s() + lease_s
            return self._num_leases

    def release(self, lease_id: int) -> None:
        """A lease that is unknown has expired."""
        with self._lock:
            slots, _ = self._leases.pop(lease_id, (frozenset(), 0.0))
            self._stop_reading(slots)

    def leased(self, lease_id: int) -> frozenset[int]:
        """The slots of a lease; none if it has expired."""
        with self._lock:
            self._expire()
            return self._leases.get(lease_id, (frozenset[int](), 0.0))[0]

    def release_all(self) -> None:
        """Ends every lease."""
        with self._lock:
            for slots, _ in self._leases.values():
                self._stop_reading(slots)
            self._leases.clear()

    def tags_of(self, slots: Iterable[int]) -> tuple[bytes, ...]:
        """One for each slot, empty where it has none."""
        with self._lock:
            return tuple(self._tags.get(slot, b"") for slot in slots)

    @property
    def tags(self) -> dict[int, bytes]:
        """By slot, least recently used first."""
        with self._lock:
            return dict(self._tags)

    @property
    def num_leases(self) -> int:
        with self._lock:
            self._expire()
            return len(self._leases)

    def check_invariants(self) -> None:
        """Raises InvariantError if a slot is read and written at once, tagged while written, or counted by nobody."""
        with self._lock:
            both = self._written & set(self._readers)
            if both:
                raise InvariantError(f"slots {sorted(both)} are read and written at once")
            tagged = self._written & set(self._tags)
            if tagged:
                raise InvariantError(f"slots {sorted(tagged)} are tagged while they are written")
            leased = Counter(slot for slots, _ in self._leases.values() for slot in slots)
            if any(count < leased[slot] for slot, count in self._readers.items()) or set(leased) - set(self._readers):
                raise InvariantError("a slot has more leases than readers")

    def _expire(self) -> None:
        now_s = self._now_s()
        for lease_id in [each for each, (_, deadline_s) in self._leases.items() if deadline_s <= now_s]:
            slots, _ = self._leases.pop(lease_id)
            self._stop_reading(slots)

    def _touch(self, slots: Iterable[int]) -> None:
        for slot in slots:
            tag = self._tags.pop(slot, None)
            if tag is not None:
                self._tags[slot] = tag

    def _stop_reading(self, slots: Iterable[int]) -> None:
        for slot in set(slots):
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]
