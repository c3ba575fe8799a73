"""`encode` and `decode` against a definition in exact fractions (`tests.support.oracles`), on float32 and float64 bit patterns.

What other libraries say about every 16-bit pattern is in `test_encode_exhaustive`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.arrays.namespace import namespace_of
from reference.formats.encode import decode, encode
from reference.formats.encode_bits import encode_bits
from reference.formats.formats import FORMATS, Format
from tests.support import oracles
from tests.support.oracles import CODEBOOKS, FLOATS, MODES, Array, encode_with, exact_code
from tests.support.record_samples import sampled

WORDS = oracles.words(1 << 16)
# Integers of other widths are the same rule with another limit; their values, ties and limits are all tested below.
WIDTHS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 3, 5, 6, 7)}
DRAWN = sampled(set(FORMATS) - WIDTHS, FORMATS)


# -- The exact definition ----------------------------------------------------------------------------------------------


def assert_exact(x: Array, fmt: Format, mode: str, overflow: str, random_words: Array) -> None:
    """`encode` of a float32 or float64 array equals the definition in fractions, element by element."""
    ours = encode_with(x, fmt, mode, overflow, random_words)
    stochastic = mode == "stochastic"
    # Random bits meet the 24-bit significand: a float64 is rounded to odd first, as the module says.
    numbers = [oracles.odd_float32(float(v)) if stochastic else float(v) for v in x]
    truth = np.array(
        [exact_code(v, fmt, mode, overflow, int(w)) for v, w in zip(numbers, random_words, strict=True)],
        ours.dtype,
    )
    assert (ours == truth).all(), f"{fmt.name} {mode} {overflow}: {oracles.first_mismatches(ours, truth, x)}"


def neighbours(fmt: Format, dtype: str) -> Array:
    """Every value, tie and limit of the format, one unit of `dtype` below and above, both signs, and the specials."""
    with np.errstate(over="ignore"):
        marks = np.array(oracles.landmarks(fmt), dtype)
    up, down = np.array(np.inf, dtype), np.array(-np.inf, dtype)
    with np.errstate(over="ignore", under="ignore"):
        near = np.concatenate(
            [marks, np.nextafter(marks, up), np.nextafter(marks, down), [np.inf, np.nan, 1e30]]
        )
    return np.concatenate([near, -near]).astype(dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_neighbours_of_every_value_and_tie_are_exact(name: str) -> None:
    """float32 and float64 numbers next to every value and tie, all modes and policies, against exact fractions."""
    fmt = FORMATS[name]
    for dtype in ("float32", "float64"):
        x = neighbours(fmt, dtype)
        for mode in oracles.modes(fmt):
            for overflow in oracles.policies(fmt):
                assert_exact(x, fmt, mode, overflow, oracles.words(len(x), 7))


@pytest.mark.parametrize("name", DRAWN)
@settings(max_examples=40)
@given(data=st.data())
def test_float32_bit_patterns_are_exact(name: str, data: st.DataObject) -> None:
    """Random float32 bit patterns, ties, subnormals and limits against exact fractions."""
    _check_random_patterns(FORMATS[name], data, oracles.float32_patterns(FORMATS[name]), "float32")


@pytest.mark.parametrize("name", DRAWN)
@settings(max_examples=40)
@given(data=st.data())
def test_float64_bit_patterns_are_rounded_once(name: str, data: st.DataObject) -> None:
    """Random float64 bit patterns, and values that float32 would move onto or across a tie, against exact fractions."""
    _check_random_patterns(FORMATS[name], data, oracles.float64_patterns(FORMATS[name]), "float64")


def _check_random_patterns(fmt: Format, data: st.DataObject, one: st.SearchStrategy[int], dtype: str) -> None:
    width = 8 if dtype == "float32" else 16
    patterns = data.draw(st.lists(one, min_size=1, max_size=16), "bit patterns")
    drawn = data.draw(st.lists(st.integers(0, 0xFFFFFFFF), min_size=len(patterns), max_size=len(patterns)))
    mode = data.draw(st.sampled_from(oracles.modes(fmt)), "rounding")
    overflow = data.draw(st.sampled_from(oracles.policies(fmt)), "overflow")
    x = np.array(patterns, f"uint{4 * width}").view(dtype)
    try:
        assert_exact(x, fmt, mode, overflow, np.array(drawn, np.uint32))
    except AssertionError as error:
        error.add_note(
            f"{dtype} {oracles.hexadecimal(patterns, width)}, words {oracles.hexadecimal(drawn, 8)}"
        )
        raise


# -- Tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in FORMATS if FORMATS[n].bits <= 8 and n not in CODEBOOKS])
def test_table_and_rule_agree(name: str) -> None:
    """`encode` of NumPy arrays, which may use a table, equals the rule `encode_bits` on random and sticky bit patterns."""
    drawn = np.random.default_rng(3).integers(0, 1 << 32, 1 << 15, dtype=np.uint32)
    tops = np.arange(1 << 16, dtype=np.uint32) << 16
    # One low bit, the lowest or the highest, decides between a tie and its neighbour.
    bits = np.concatenate([drawn, tops | 1, tops | 0x8000, tops])
    fmt, ns = FORMATS[name], namespace_of(bits)
    for mode in MODES[:-1]:
        for overflow in oracles.policies(fmt):
            rule = encode_bits(ns, bits.view(np.int32), fmt, mode, overflow)
            ours = encode(bits.view(np.float32), fmt, rounding=mode, overflow=overflow)
            assert (ours == rule).all(), f"{mode} {overflow}: {oracles.first_mismatches(ours, rule, bits)}"


# -- decode ------------------------------------------------------------------------------------------------------------


def all_codes(fmt: Format) -> Array:
    """Every code of a format."""
    return np.arange(1 << fmt.bits).astype(np.uint8 if fmt.bits <= 8 else np.uint16)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_has_its_exact_value(name: str) -> None:
    """`decode` of every code against sign, exponent and mantissa in fractions, bit for bit with the sign of zero."""
    fmt = FORMATS[name]
    codes = all_codes(fmt)
    truth = np.array(
        [oracles.float32_pattern(*oracles.exact_value(fmt, int(code))) for code in codes], np.uint32
    )
    ours = decode(codes, name).view(np.uint32)
    assert (ours == truth).all(), oracles.first_mismatches(ours, truth, codes)


@pytest.mark.parametrize(
    "name", [n for n in FORMATS if hasattr(ml_dtypes, n) or n in ("float16", "int8", "uint8")]
)
def test_every_code_decodes_as_in_ml_dtypes(name: str) -> None:
    """`decode` of every code against ml_dtypes' (or NumPy's) view of the same byte; NaN against NaN."""
    codes = all_codes(FORMATS[name])
    dtype = oracles.dtype_of(name)
    with np.errstate(invalid="ignore"):
        theirs = codes.view(dtype).astype(np.float32)
    ours = decode(codes, name)
    nan = np.isnan(ours)
    assert (nan == np.isnan(theirs)).all()
    assert (ours.view(np.uint32) == theirs.view(np.uint32))[~nan].all()


@pytest.mark.parametrize("name", FORMATS)
def test_encode_of_decode_is_the_identity(name: str) -> None:
    """encode(decode(c)) == c for every code that is not NaN, in every mode and policy.

    -0 keeps its code where the format has one; the lowest integer of int8_nan and 0xFF of e8m0 are NaN and go to
    `nan_code`; every other code that is ever written (-2 of ternary is not), infinities included, comes back. In `saturate` an
    infinity becomes the largest value.
    """
    fmt = FORMATS[name]
    codes = all_codes(fmt)
    values = decode(codes, name)
    for mode in oracles.modes(fmt):
        for overflow in oracles.policies(fmt):
            infinite = np.isinf(values)
            kept = (infinite & (overflow != "saturate")) | (~infinite & (values >= fmt.min))
            back = encode_with(values, fmt, mode, overflow, WORDS[: len(values)])
            assert (back == codes)[kept].all(), oracles.first_mismatches(back[kept], codes[kept], codes[kept])
            assert (back[np.isnan(values)] == fmt.nan_code).all()


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float4_e2m1fn", "int4", "uint2", "nf4"])
def test_decode_ignores_bits_above_the_format(name: str) -> None:
    fmt = FORMATS[name]
    codes = np.arange(256).astype(np.uint8)
    low = codes & np.uint8((1 << fmt.bits) - 1)
    assert (decode(codes, name).view(np.uint32) == decode(low, name).view(np.uint32)).all()


@pytest.mark.parametrize("name", FLOATS)
def test_nan_payloads_and_signs_are_dropped(name: str) -> None:
    """Every kind of float32 and float64 NaN, signalling ones too, becomes the one NaN of the format, or 0."""
    single = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    double = np.array([0x7FF8000000000000, 0xFFF8000000000001, 0xFFFFFFFFFFFFFFFF], np.uint64)
    for x in (single.view(np.float32), double.view(np.float64)):
        for mode in MODES:
            for overflow in oracles.policies(FORMATS[name]):
                codes = encode_with(x, name, mode, overflow, WORDS[: len(x)])
                assert set(codes.tolist()) == {FORMATS[name].nan_code or 0}
