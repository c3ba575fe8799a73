"""Philox against the published test vectors, and the layout of words in a tensor."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import random_bits
from reference.formats.random_bits import MULTIPLIER, WEYL, philox

# Known answers of Philox4x32-10 from the authors' Random123 library: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def scalar(counter, key):
    """One block in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(MULTIPLIER[0] * c[0], 1 << 32)
        high1, low1 = divmod(MULTIPLIER[1] * c[2], 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(word + step) % (1 << 32) for word, step in zip(k, WEYL, strict=True)]
    return tuple(c)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    result = philox(key[0] | key[1] << 32, tuple(np.array([word], np.uint64) for word in counter))
    assert tuple(int(word[0]) for word in result) == words == scalar(counter, key)


@given(seed=st.integers(0, 2**64 - 1), stream=st.integers(0, 2**32 - 1), count=st.integers(0, 30))
def test_word_i_is_output_i_mod_4_of_block_i_div_4(seed, stream, count):
    words = random_bits(count, seed=seed, stream=stream)
    key = (seed & 0xFFFFFFFF, seed >> 32)
    expected = [scalar((i // 4, 0, stream, 0), key)[i % 4] for i in range(count)]
    assert words.dtype == np.uint32
    assert words.tolist() == expected


def test_shape_is_filled_in_c_order():
    assert np.array_equal(random_bits((3, 5), seed=1).reshape(-1), random_bits(15, seed=1))


@pytest.mark.parametrize(("seed", "stream"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_out_of_range_is_refused(seed, stream):
    with pytest.raises(ValueError, match="integer from 0"):
        random_bits(4, seed=seed, stream=stream)
