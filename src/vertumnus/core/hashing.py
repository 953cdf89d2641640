"""Chained block hashes: equal hash means equal prefix.

A prompt is cut into blocks of `block_tokens`; a last, partial block has no hash. With the pool's key k,

    h[0]   = BLAKE3_k(root || block 0)        root: from the tenant's salt and the extra keys, by a key derived from k
    h[i+1] = BLAKE3_k(h[i] || block i+1)      hashes of 16 bytes, blocks as uint32 little-endian

so two prompts share h[i] just if they share the first i+1 blocks and everything the root stands for. The key keeps
outsiders from making collisions or guessing prompts from hashes. Every process with the key computes the same hashes.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
from blake3 import blake3

from vertumnus.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

HASH_BYTES = 16
KEY_BYTES = 32

_TOKEN_BYTES = 4
_ROOT_CONTEXT = "vertumnus block hashes v1: root of a chain"
_RUN_BLOCKS = 8  # hashed ahead of what was asked for: takes the loop's overhead off each block, wastes little on a miss


class HashChain(Sequence[bytes]):
    """The block hashes of one prompt, computed as far as they were asked for and remembered.

    Iteration starts at the first block whatever was hashed before; several iterations may be under way at once. The
    token buffer is not copied: it must not change until the chain is finished or dropped.
    """

    __slots__ = ("_block_bytes", "_hashes", "_keyed", "_parent", "_tokens", "num_blocks")

    def __init__(self, keyed: blake3, tokens: memoryview, block_bytes: int, parent: bytes) -> None:
        self._keyed = keyed
        self._tokens = tokens
        self._block_bytes = block_bytes
        self._parent = parent
        self._hashes: list[bytes] = []
        self.num_blocks = len(tokens) // block_bytes

    def __len__(self) -> int:
        """Full blocks of the prompt, hashed or not."""
        return self.num_blocks

    def __iter__(self) -> Iterator[bytes]:
        hashes = self._hashes
        index = 0
        while index < self.num_blocks:
            if index == len(hashes):
                self._hash_until(min(index + _RUN_BLOCKS, self.num_blocks))
            run = hashes[index:]
            yield from run
            index += len(run)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        """Hashes by position, hashing as far as needed."""
        if isinstance(index, slice):
            self._hash_until(max(index.indices(self.num_blocks)[:2]))
            return self._hashes[index]
        if not -self.num_blocks <= index < self.num_blocks:
            raise IndexError(index)
        self._hash_until(index % self.num_blocks + 1)
        return self._hashes[index % self.num_blocks]

    @property
    def num_hashed(self) -> int:
        """Blocks hashed so far."""
        return len(self._hashes)

    def finish(self) -> list[bytes]:
        """All hashes of the prompt, hashing what is left."""
        self._hash_until(self.num_blocks)
        return self._hashes.copy()

    def _hash_until(self, end_block: int) -> None:
        if end_block <= len(self._hashes):
            return
        # One keyed hasher, reset for every block: constructing one costs more than hashing 64 tokens.
        reset, update, digest = self._keyed.reset, self._keyed.update, self._keyed.digest
        tokens, block_bytes, hashes = self._tokens, self._block_bytes, self._hashes
        parent = hashes[-1] if hashes else self._parent
        for start in range(len(hashes) * block_bytes, end_block * block_bytes, block_bytes):
            reset()
            update(parent + tokens[start : start + block_bytes])
            parent = digest(HASH_BYTES)
            hashes.append(parent)


class BlockHasher:
    """Hashes prompts into chains for one key, block size and tenant.

    `extra_keys` are whatever else makes equal tokens unequal, in a fixed order (an adapter's name, say). The chains of
    one hasher share its state: one hasher per thread.
    """

    __slots__ = ("_keyed", "_root", "block_tokens")

    def __init__(
        self, key: bytes, block_tokens: int, tenant_salt: bytes = b"", extra_keys: Sequence[bytes] = ()
    ) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigError(f"key has {len(key)} bytes; accepted: {KEY_BYTES}")
        if block_tokens < 1:
            raise ConfigError(f"block_tokens is {block_tokens}; accepted: 1 or more")
        self.block_tokens = block_tokens
        self._keyed = blake3(key=key)
        self._root = _root(key, (tenant_salt, *extra_keys))

    def chain(self, tokens: "ReadableBuffer", parent: bytes | None = None) -> HashChain:
        """The chain of the full blocks of `tokens`, a flat buffer of uint32; lazy, nothing is hashed yet.

        With `parent`, the hash of the block before `tokens`, it goes on from there. Raises ConfigError for another kind
        of buffer or a parent that is no block hash.
        """
        if parent is not None and len(parent) != HASH_BYTES:
            raise ConfigError(f"parent has {len(parent)} bytes; accepted: {HASH_BYTES}")
        block_bytes = self.block_tokens * _TOKEN_BYTES
        return HashChain(
            self._keyed, _little_endian_bytes(tokens), block_bytes, self._root if parent is None else parent
        )


def _root(key: bytes, parts: Sequence[bytes]) -> bytes:
    """What the first block chains from. Lengths are hashed too, so that no two lists of parts run together."""
    root_key = blake3(key, derive_key_context=_ROOT_CONTEXT).digest()
    encoded = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake3(encoded, key=root_key).digest(HASH_BYTES)


def _little_endian_bytes(tokens: "ReadableBuffer") -> memoryview:
    view = memoryview(tokens)
    if view.ndim != 1 or view.itemsize != _TOKEN_BYTES or view.format not in ("I", "L") or not view.c_contiguous:
        found = f"format {view.format!r} in {view.ndim} dimensions"
        raise ConfigError(f"tokens have {found}; accepted: a flat, contiguous buffer of uint32")
    if not view:
        return memoryview(b"")
    if sys.byteorder == "big":
        return memoryview(np.asarray(view).byteswap().tobytes())
    return view.cast("B")
