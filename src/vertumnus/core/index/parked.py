"""Blocks that a worker reported before anybody reported their parent.

They wait here, outside the trie, and move into it as soon as the parent is known. Their number is bounded.
"""

from collections.abc import Iterator

from vertumnus.errors import InvariantError


class ParkedBlocks:
    """A small forest of blocks whose roots hang below unknown parents; bit s of a mask is the worker in slot s."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._parent: dict[bytes, bytes] = {}
        """Block -> its parent, oldest first. Roots are the blocks whose parent is no key here."""
        self._masks: dict[bytes, int] = {}
        self._children: dict[bytes, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._parent)

    def __contains__(self, block: bytes) -> bool:
        return block in self._parent

    def blocks(self) -> tuple[bytes, ...]:
        """All parked blocks, oldest first."""
        return tuple(self._parent)

    def parent_of(self, block: bytes) -> bytes | None:
        """The parent of a parked block; None if it is not parked."""
        return self._parent.get(block)

    def mask_of(self, block: bytes) -> int:
        """The slots where a parked block is resident."""
        return self._masks.get(block, 0)

    def add(self, slot: int, parent: bytes, block: bytes) -> bool | None:
        """Parks one block; True if it is new to the slot, None (refused) if it contradicts what is parked already."""
        known = self._parent.get(block)
        if known is None:
            if block == parent or (block in self._children and self._has_ancestor(parent, block)):
                return None
            self._parent[block] = parent
            self._masks[block] = 0
            self._children.setdefault(parent, []).append(block)
        elif known != parent:
            return None
        is_new = not self._masks[block] >> slot & 1
        self._masks[block] |= 1 << slot
        return is_new

    def release(self, parent: bytes) -> Iterator[tuple[bytes, bytes, int]]:
        """Hands over, as (parent, block, mask) from the top down, all that waits below a block that is now known."""
        stack = [(parent, block) for block in reversed(self._children.pop(parent, []))]
        while stack:
            parent, block = stack.pop()
            stack += [(block, child) for child in reversed(self._children.pop(block, []))]
            del self._parent[block]
            yield parent, block, self._masks.pop(block)

    def drop(self, slot: int, block: bytes) -> bool:
        """The slot no longer has this block; false if it did not have it."""
        mask = self._masks.get(block, 0)
        if not mask >> slot & 1:
            return False
        self._masks[block] = mask ^ 1 << slot
        self._bury(block)
        return True

    def blocks_of(self, slot: int) -> list[bytes]:
        """The parked blocks that are resident at a slot, oldest first."""
        return [block for block in self._parent if self._masks[block] >> slot & 1]

    def clear(self, slot: int) -> None:
        """The slot has nothing parked any more."""
        for block in self.blocks_of(slot):
            self.drop(slot, block)

    def trim(self) -> tuple[dict[bytes, int], int]:
        """Drops the oldest trees until the bound is met: ({block dropped: its mask}, union of the masks)."""
        dropped: dict[bytes, int] = {}
        union = 0
        while len(self._parent) > self.max_blocks:
            root = next(iter(self._parent))
            while self._parent[root] in self._parent:
                root = self._parent[root]
            stack = [root]
            self._detach(root)
            while stack:
                block = stack.pop()
                stack += self._children.pop(block, ())
                dropped[block] = self._masks.pop(block)
                union |= dropped[block]
                del self._parent[block]
        return dropped, union

    def _has_ancestor(self, block: bytes, ancestor: bytes) -> bool:
        """Whether `ancestor` is on the way up from `block`, itself included: parking it below would close a cycle."""
        above: bytes | None = block
        while above is not None:
            if above == ancestor:
                return True
            above = self._parent.get(above)
        return False

    def _bury(self, block: bytes) -> None:
        while block in self._parent and not self._masks[block] and block not in self._children:
            parent = self._parent[block]
            self._detach(block)
            del self._parent[block], self._masks[block]
            block = parent

    def _detach(self, block: bytes) -> None:
        siblings = self._children[self._parent[block]]
        siblings.remove(block)
        if not siblings:
            del self._children[self._parent[block]]

    def check_invariants(self) -> None:
        """Raises InvariantError unless the forest is consistent, within its bound, and without dead blocks."""
        if len(self._parent) > self.max_blocks:
            raise InvariantError(f"{len(self._parent)} blocks are parked, at most {self.max_blocks} may be")
        if self._masks.keys() != self._parent.keys():
            raise InvariantError("parked blocks and their masks differ")
        hanging = sorted((block, parent) for parent, blocks in self._children.items() for block in blocks)
        if hanging != sorted(self._parent.items()) or not all(self._children.values()):
            raise InvariantError("parked blocks and their children differ")
        for block, mask in self._masks.items():
            if not mask and block not in self._children:
                raise InvariantError("a parked block is kept alive by nothing")
