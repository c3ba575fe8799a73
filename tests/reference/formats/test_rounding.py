"""`round_shift`, the one rounding rule, against its definition in fractions, and the properties that follow from it; random
bits; casts of float32 bit patterns."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reference import random_bits
from reference.arrays.namespace import namespace_of
from reference.formats.encode import (
    LARGEST_SHIFT,
    MODES,
    MULTIPLIER,
    STOCHASTIC_BITS,
    WEYL,
    check_mode,
    philox,
    round_shift,
    to_dtype_bits,
)
from reference.formats.formats import FORMATS
from tests.support import oracles
from tests.support.oracles import SIXTEEN_BIT, Array
from tests.support.refusals import refused

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
    refused(ValueError, "integer from 0", random_bits, 4, seed=seed, stream=stream)


NS = namespace_of(np.zeros(1))


def defined(significand: int, shift: int, negative: bool, mode: str, word: int) -> int:
    """The table of the module's docstring, in fractions."""
    t = Fraction(significand, 1 << shift)
    if mode == "stochastic":
        # At most 24 bits of the word and of what is lost.
        used = min(shift, STOCHASTIC_BITS)
        return floor(Fraction(floor(t * (1 << used)), 1 << used) + Fraction(word >> (32 - used), 1 << used))
    upward = ceil(t) if (mode == "down") == negative else floor(t)
    return {
        "nearest_even": round(t),
        "nearest_away": floor(t + Fraction(1, 2)),
        "toward_zero": floor(t),
        "up": upward,
        "down": upward,
        "to_odd": floor(t) | (t != floor(t)),
    }[mode]


def rounded(significand: Array, shift: Array, negative: Array, mode: str, word: Array) -> Array:
    bits = word if mode == "stochastic" else None
    return round_shift(NS, significand.astype(np.int32), shift.astype(np.int32), negative, mode, bits)


@pytest.mark.parametrize("mode", MODES)
def test_small_significands_are_exhausted(mode: str) -> None:
    """Every significand below 2**7, every shift to 9, both signs, eight random words."""
    grid = np.meshgrid(np.arange(1 << 7), np.arange(1, 10), [False, True], np.arange(8), indexing="ij")
    significand, shift, negative, which = (axis.reshape(-1) for axis in grid)
    random_words = np.array(
        [0, 1 << 22, 1 << 23, 3 << 23, 1 << 31, 0xBFFFFFFF, 0xFE000000, 0xFFFFFFFF], np.uint32
    )[which]
    ours = rounded(significand, shift, negative, mode, random_words)
    zipped = zip(significand, shift, negative, random_words, strict=True)
    truth = [defined(int(s), int(n), bool(sign), mode, int(w)) for s, n, sign, w in zipped]
    assert ours.dtype == np.int32
    assert (ours == truth).all()


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=150)
@given(
    significand=st.integers(0, (1 << 24) - 1),
    shift=st.integers(1, 300),
    negative=st.booleans(),
    word=st.integers(0, 0xFFFFFFFF),
)
@example(significand=1 << 23, shift=24, negative=False, word=0)  # exactly one half, even
@example(significand=(1 << 24) - 1, shift=25, negative=False, word=0)  # just below one half
@example(significand=1 << 23, shift=25, negative=True, word=0xFFFFFFFF)
@example(significand=(1 << 24) - 1, shift=48, negative=False, word=0xFFFFFF00)
@example(significand=0, shift=300, negative=True, word=0xFFFFFFFF)
def test_any_significand_and_shift(
    mode: str, significand: int, shift: int, negative: bool, word: int
) -> None:
    """Random 24-bit significands, any shift: equal to the definition; beyond 25 bits nothing is left but stickiness."""
    columns = (
        np.array([significand]),
        np.array([shift]),
        np.array([negative]),
        mode,
        np.array([word], np.uint32),
    )
    truth = defined(significand, shift, negative, mode, word)
    assert rounded(*columns) == truth, f"significand {significand:#x}, shift {shift}, word {word:#010x}"


def test_shifts_beyond_the_largest_change_nothing() -> None:
    """The clamp at LARGEST_SHIFT is invisible: a 24-bit significand is below one half from there on."""
    significand = np.array([0, 1, 1 << 23, (1 << 24) - 1])
    for mode in set(MODES) - {"stochastic"}:
        for negative in (False, True):
            sign = np.full(4, negative)
            near, far = (
                rounded(significand, np.full(4, s), sign, mode, significand) for s in (LARGEST_SHIFT, 2000)
            )
            assert (near == far).all()
            assert set(near.tolist()) <= {0, 1}


@pytest.mark.parametrize("shift", [1, 2, 5, 11])
def test_stochastic_rounding_is_unbiased(shift: int) -> None:
    """Over all values of the bits that are used, exactly the lost fraction of them rounds up."""
    significand = np.arange(1 << (shift + 1))
    random_words = (np.arange(1 << shift, dtype=np.uint64) << (32 - shift)).astype(np.uint32)
    grid = np.meshgrid(significand, random_words, indexing="ij")
    flat = (grid[0].reshape(-1), np.full(grid[0].size, shift), np.zeros(grid[0].size, bool))
    ours = rounded(*flat, "stochastic", grid[1].reshape(-1)).reshape(grid[0].shape)
    assert (ours.sum(axis=1) == significand).all()


def test_stochastic_rounding_uses_the_upper_bits() -> None:
    """The 8 low bits of a word never matter, and with `shift` lost bits only the top `shift` do."""
    rng = np.random.default_rng(0)
    random_words = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    significand = rng.integers(0, 1 << 24, 4096)
    negative = np.zeros(4096, bool)
    for shift in (1, 8, 23, 24, 40):
        unused = np.uint32((1 << (32 - min(shift, 24))) - 1)
        ours = rounded(significand, np.full(4096, shift), negative, "stochastic", random_words)
        for changed in (random_words | unused, random_words & ~unused):
            again = rounded(significand, np.full(4096, shift), negative, "stochastic", changed)
            assert (again == ours).all()


def test_modes_are_ordered() -> None:
    """toward_zero <= every mode <= toward_zero + 1, exact values stay, and up and down are mirror images."""
    rng = np.random.default_rng(1)
    significand, shift = rng.integers(0, 1 << 24, 1 << 14), rng.integers(1, 30, 1 << 14)
    negative, random_words = rng.random(1 << 14) < 0.5, rng.integers(0, 1 << 32, 1 << 14, dtype=np.uint32)
    low = rounded(significand, shift, negative, "toward_zero", random_words)
    exact = (low.astype(np.int64) << np.minimum(shift, 30)) == significand
    for mode in MODES:
        ours = rounded(significand, shift, negative, mode, random_words)
        assert ((ours - low == 0) | (ours - low == 1)).all(), mode
        assert (ours == low)[exact].all(), mode
    up = rounded(significand, shift, negative, "up", random_words)
    assert (up == rounded(significand, shift, ~negative, "down", random_words)).all()


def test_check_mode() -> None:
    """Unknown modes, and random bits where they are not used or missing."""
    assert [check_mode(mode, None) for mode in MODES[:-1]] == list(MODES[:-1])
    assert check_mode("stochastic", np.zeros(1, np.uint32)) == "stochastic"
    with pytest.raises(ValueError, match=r"rounding is one of nearest_even, .*stochastic; got 'floor'"):
        check_mode("floor", None)
    refused(ValueError, "needs random_bits", check_mode, "stochastic", None)
    refused(ValueError, "takes no random_bits", check_mode, "up", np.zeros(1, np.uint32))


# float32 bit patterns become an array of a float dtype with one rounding, against NumPy's and ml_dtypes' casts.

NUMPY = namespace_of(np.zeros(1))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("name", ["float32", "float64", *SIXTEEN_BIT])
def test_float32_bits_become_a_dtype(name: str, saturate: bool) -> None:
    """`to_dtype_bits` against NumPy's and ml_dtypes' casts; saturated, only what was infinite is."""
    rng = np.random.default_rng(4)
    bits = np.concatenate(
        [rng.integers(0, 1 << 32, 1 << 15, dtype=np.uint32), np.arange(1 << 16, dtype=np.uint32) << 16]
    )
    x = bits.view(np.float32)
    ours = to_dtype_bits(NUMPY, bits.view(np.int32), name, saturate=saturate)
    assert ours.dtype == oracles.dtype_of(name)
    with np.errstate(all="ignore"):
        truth = x.astype(oracles.dtype_of(name)).astype(np.float64)
        wide = ours.astype(np.float64)
    if saturate and name in FORMATS:
        limit = FORMATS[name].max
        truth = np.where(np.isinf(x), truth, np.clip(truth, -limit, limit))
    nan = np.isnan(x)
    assert (wide.view(np.uint64) == truth.view(np.uint64))[~nan].all()
    assert np.isnan(wide[nan]).all()
