"""Block hashes: equal hash just if equal prefix, whoever computes it and in whatever order."""

import struct
import subprocess
import sys
from array import array

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from vertumnus.core.hashing import BlockHasher
from vertumnus.errors import ConfigError

KEY = bytes(range(32))
BLOCK_TOKENS = 4

# Two token values only, so that random lists often share prefixes.
token_lists = st.lists(st.integers(0, 1), max_size=30)


def buffer(tokens):
    return np.array(tokens, dtype=np.uint32)


def hashes(tokens, *, block_tokens=BLOCK_TOKENS, parent=None, **hasher):
    return BlockHasher(KEY, block_tokens, **hasher).chain(buffer(tokens), parent).finish()


@given(token_lists, token_lists)
def test_hashes_are_equal_just_where_prefixes_are(left, right):
    for index, (a, b) in enumerate(zip(hashes(left), hashes(right), strict=False)):
        end = (index + 1) * BLOCK_TOKENS
        assert (a == b) == (left[:end] == right[:end])


@given(token_lists, st.integers(0, 7))
def test_chain_from_a_parent_goes_on_as_from_the_root(tokens, cut_blocks):
    whole = hashes(tokens)
    cut_blocks = min(cut_blocks, len(whole))
    parent = whole[cut_blocks - 1] if cut_blocks else None
    assert whole[:cut_blocks] + hashes(tokens[cut_blocks * BLOCK_TOKENS :], parent=parent) == whole


@given(token_lists)
def test_partial_block_has_no_hash(tokens):
    whole = len(tokens) // BLOCK_TOKENS
    assert hashes(tokens) == hashes(tokens[: whole * BLOCK_TOKENS])
    assert len(hashes(tokens)) == whole


parts = st.tuples(st.binary(max_size=3), st.lists(st.binary(max_size=3), max_size=3).map(tuple))


@given(parts, parts)
def test_salt_and_extra_keys_separate_tenants(left, right):
    tokens = [1] * BLOCK_TOKENS
    (a,) = hashes(tokens, tenant_salt=left[0], extra_keys=left[1])
    (b,) = hashes(tokens, tenant_salt=right[0], extra_keys=right[1])
    assert (a == b) == (left == right)


def test_key_and_block_size_separate_pools():
    tokens = buffer([1] * 8)
    chains = [BlockHasher(key, size).chain(tokens).finish() for key in (KEY, bytes(32)) for size in (2, 4)]
    seen = [digest for chain in chains for digest in chain]
    assert len(seen) == len(set(seen))


@given(st.integers(0, 40), st.lists(st.integers(1, 40), max_size=5))
def test_lazy_iteration_gives_the_same_hashes_however_it_is_interrupted(num_blocks, stops):
    tokens = buffer(range(num_blocks * BLOCK_TOKENS))
    expected = BlockHasher(KEY, BLOCK_TOKENS).chain(tokens).finish()
    chain = BlockHasher(KEY, BLOCK_TOKENS).chain(tokens)
    started = [(iter(chain), stop) for stop in stops]
    taken = [[digest for digest, _ in zip(iterator, range(stop), strict=False)] for iterator, stop in started]
    assert taken == [expected[:stop] for stop in stops]
    assert list(chain) == chain.finish() == expected
    assert len(chain) == chain.num_hashed == num_blocks


def test_interleaved_chains_of_one_hasher_do_not_mix():
    hasher = BlockHasher(KEY, BLOCK_TOKENS)
    a, b = buffer(range(80)), buffer(range(100, 180))
    pairs = list(zip(hasher.chain(a), hasher.chain(b), strict=True))
    assert [x for x, _ in pairs] == hasher.chain(a).finish()
    assert [y for _, y in pairs] == hasher.chain(b).finish()


def test_hashing_stops_soon_after_the_last_block_asked_for():
    chain = BlockHasher(KEY, BLOCK_TOKENS).chain(buffer(range(4000)))
    assert chain.num_hashed == 0
    next(iter(chain))
    assert chain.num_hashed <= 8


def test_hash_is_keyed_blake3_of_parent_and_little_endian_tokens():
    parent = b"p" * 16
    expected = blake3(parent + struct.pack("<4I", 1, 2, 3, 2**32 - 1), key=KEY).digest(16)
    assert hashes([1, 2, 3, 2**32 - 1], parent=parent) == [expected]


VECTORS = [  # frozen: other processes and later versions must compute these very hashes
    (b"", (), ["883741f35f653413d406c3d0b63ad47e", "8cea27b3f726af228cf15b2c22db400d"]),
    (b"tenant", (b"adapter",), ["4e4ba091c558dec39c26e72437f04044", "b7857ff60e25d38da335b7901850fbf8"]),
]


@pytest.mark.parametrize(("salt", "extra", "expected"), VECTORS)
def test_frozen_vectors(salt, extra, expected):
    assert [h.hex() for h in hashes(range(1, 9), tenant_salt=salt, extra_keys=extra)] == expected


def test_another_process_computes_the_same_hashes():
    code = (
        "from array import array; from vertumnus.core.hashing import BlockHasher;"
        "print(BlockHasher(bytes(range(32)), 4).chain(array('I', range(1, 9))).finish()[-1].hex())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == VECTORS[0][2][-1]


def test_any_uint32_buffer_will_do():
    tokens = buffer([5, 6, 7, 8])
    hasher = BlockHasher(KEY, BLOCK_TOKENS)
    chains = [hasher.chain(form).finish() for form in (tokens, array("I", [5, 6, 7, 8]), memoryview(tokens))]
    assert chains == [chains[0]] * 3


@pytest.mark.parametrize(
    "tokens",
    [
        b"12345678",
        np.zeros(8, np.int32),
        np.zeros(8, np.int64),
        np.zeros(8, ">u4"),
        np.zeros((2, 4), np.uint32),
        np.zeros(8, np.uint32)[::2],
    ],
)
def test_other_buffers_are_refused(tokens):
    with pytest.raises(ConfigError, match="accepted: a flat, contiguous buffer of uint32"):
        BlockHasher(KEY, BLOCK_TOKENS).chain(tokens)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BlockHasher(b"short", 4), "key has 5 bytes; accepted: 32"),
        (lambda: BlockHasher(KEY, 0), "block_tokens is 0; accepted: 1 or more"),
        (lambda: hashes([1], parent=b"short"), "parent has 5 bytes; accepted: 16"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
