"""Every bfloat16 and float16 pattern through every format, rounding mode and overflow policy, against other libraries.

Floats are compared with ml_dtypes (nearest even) and gfloat (all seven modes), integers and codebooks with one line of
float64. Where a library differs, a rule predicts both codes, and the number of patterns under each rule is asserted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from reference.formats.encode import encode
from reference.formats.formats import FORMATS, Format
from tests.support import oracles
from tests.support.oracles import CODEBOOKS, FLOATS, INTEGERS, MODES, SIXTEEN_BIT, Array, encode_with

# NaN patterns among the 65,536 of each type.
NAN_COUNT = {"bfloat16": 254, "float16": 2046}
WORDS = oracles.words(1 << 16)


# -- ml_dtypes ---------------------------------------------------------------------------------------------------------

# (format, overflow): rule -> patterns of (bfloat16, float16) in which ml_dtypes writes another code than `encode`.
# NaN: ml_dtypes keeps its sign (e4m3fn, bfloat16, float16), its payload (float16), writes 7E instead of 7F (e5m2), and where
# there is no NaN it writes -0 for positive ones (we write 0 for all). Overflow: Python's ml_dtypes has no saturation.
ML_DTYPES: dict[tuple[str, str], dict[str, tuple[int, int]]] = {
    ("float8_e4m3fn", "saturate"): {"NaN": (127, 1023), "overflow": (30512, 14720)},
    ("float8_e4m3fn", "nonfinite"): {"NaN": (127, 1023)},
    ("float8_e5m2", "saturate"): {"NaN": (254, 2046), "overflow": (28706, 258)},
    ("float8_e5m2", "nonfinite"): {"NaN": (254, 2046)},
    ("float8_e4m3fnuz", "saturate"): {"overflow": (30738, 16514)},
    ("float8_e4m3fnuz", "nonfinite"): {},
    ("float8_e5m2fnuz", "saturate"): {"overflow": (28706, 258)},
    ("float8_e5m2fnuz", "nonfinite"): {},
    ("float6_e2m3fn", "saturate"): {"NaN": (127, 1023)},
    ("float6_e3m2fn", "saturate"): {"NaN": (127, 1023)},
    ("float4_e2m1fn", "saturate"): {"NaN": (127, 1023)},
    # Overflow: 64 numbers from 1.5 * 2**127 on and infinity. Tiny: ml_dtypes rounds the 31 numbers between 2**-127 and
    # 1.5 * 2**-127 up to 2**-126, although 2**-127 is nearer.
    ("float8_e8m0fnu", "saturate"): {"zero": (2, 2), "tiny": (31, 0), "overflow": (65, 1)},
    ("float8_e8m0fnu", "nonfinite"): {"tiny": (31, 0)},
    ("bfloat16", "saturate"): {"NaN": (127, 1023), "overflow": (2, 2)},
    ("bfloat16", "nonfinite"): {"NaN": (127, 1023)},
    ("float16", "saturate"): {"NaN": (253, 2045), "overflow": (28674, 2)},
    ("float16", "nonfinite"): {"NaN": (253, 2045)},
}  # fmt: skip


def ml_dtypes_rules(x: Array, fmt: Format, theirs: Array) -> list[tuple[str, Array, Any, Any]]:
    """Where ml_dtypes may differ and what both sides write there."""
    wide = x.astype(np.float32)
    nan, negative = np.isnan(wide), np.signbit(wide)
    no_nan = fmt.specials == "none"
    their_nan = np.where(no_nan, theirs == fmt.sign_mask, np.isnan(fmt.values[theirs]))
    their_overflow = ~np.isfinite(fmt.values[theirs]) & ~nan & (wide != 0)
    largest = np.where(negative, fmt.max_code | fmt.sign_mask, fmt.max_code)
    tiny = (wide > 2.0**-127) & (wide < 1.5 * 2.0**-127)
    return [
        ("NaN", nan & their_nan, fmt.nan_code or 0, theirs),
        ("overflow", their_overflow, largest, theirs),
        ("zero", wide == 0, 0, 0xFF),
        ("tiny", tiny, 0, 1),
    ]


@pytest.mark.parametrize("source", SIXTEEN_BIT)
@pytest.mark.parametrize(("name", "overflow"), ML_DTYPES)
def test_every_16_bit_pattern_against_ml_dtypes(name: str, overflow: str, source: str) -> None:
    """All patterns, nearest even: equal but for the exact counts of ML_DTYPES."""
    x = oracles.every_pattern(source)
    theirs = oracles.ml_codes(x, name)
    found = oracles.differences(
        encode(x, name, overflow=overflow), theirs, ml_dtypes_rules(x, FORMATS[name], theirs)
    )
    expected = {rule: counts[SIXTEEN_BIT.index(source)] for rule, counts in ML_DTYPES[name, overflow].items()}
    assert found == {rule: count for rule, count in expected.items() if count}


def test_all_policies_of_all_float_formats_are_compared() -> None:
    """Of each format of the table; one that was added needs no line here."""
    names = {name for name, _ in ML_DTYPES}
    assert set(ML_DTYPES) == {(name, policy) for name in names for policy in oracles.policies(FORMATS[name])}
    assert len(names) == 10


# Formats that ml_dtypes has and FORMATS has not: a record made of other field values is all it takes.
VARIANTS = {
    "float8_e4m3": (replace(FORMATS["float8_e4m3fn"], name="float8_e4m3", specials="ieee"), 254),
    "float8_e3m4": (replace(FORMATS["float8_e5m2"], name="float8_e3m4", exponent_bits=3, mantissa_bits=4, bias=3), 254),
    "float8_e4m3b11fnuz": (replace(FORMATS["float8_e4m3fnuz"], name="float8_e4m3b11fnuz", bias=11), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_a_record_with_other_fields_is_another_format(name: str) -> None:
    """Variants by `dataclasses.replace` against ml_dtypes' own types on every bfloat16: only the code of NaN differs."""
    fmt, nans = VARIANTS[name]
    x = oracles.every_pattern("bfloat16")
    theirs = oracles.ml_codes(x, name)
    ours = encode(x, fmt, overflow="nonfinite")
    found = oracles.differences(ours, theirs, ml_dtypes_rules(x, fmt, theirs))
    assert found == ({"NaN": nans} if nans else {})


# -- gfloat ------------------------------------------------------------------------------------------------------------

# gfloat writes NaN as all ones with the sign, whatever the sign was; formats with one NaN agree.
GFLOAT_NAN = {
    name: (1 << FORMATS[name].bits) - 1 for name in FLOATS if FORMATS[name].specials in ("ieee", "nan_ones")
}
# Positive numbers beyond e4m3fn in nonfinite: NaN is 7F here and FF in gfloat; (bfloat16, float16).
GFLOAT_OVERFLOW = {
    "nearest_even": (15256, 7360),
    "nearest_away": (15257, 7361),  # 464 is a tie
    "toward_zero": (1, 1),  # only infinity
    "up": (15264, 7424),
    "down": (1, 1),
    "to_odd": (1, 1),
    "stochastic": (15255, 7360),
}
# float8_e8m0fnu, both policies. `negative`: not given to gfloat, as its codes there exceed 8 bits. `tie`: to the even code in
# gfloat, up here (module `reference.encode`); the tie 1.5 * 2**127 goes up to NaN here, or saturates as in gfloat. `below`:
# gfloat's exponent wraps around under 2**-127; these are the codes that do not happen to be our 00.
GFLOAT_E8M0_NEGATIVE = (32640, 31744)
GFLOAT_E8M0 = {
    "nearest_even": {"tie": (127, 20), "below": (47, 0)},
    "nearest_away": {"below": (47, 0)},
    "toward_zero": {"below": (63, 0)},
    "up": {"below": (32, 0)},
    "down": {"below": (63, 0)},
    "to_odd": {"below": (63, 0)},
    "stochastic": {"below": (50, 0)},
}
TIE_AT_THE_TOP = ("nearest_even", "nonfinite", "bfloat16")


def gfloat_expected(name: str, mode: str, overflow: str, source: str) -> dict[str, int]:
    """Rule -> patterns in which gfloat writes another code."""
    which = SIXTEEN_BIT.index(source)
    expected = {"NaN": NAN_COUNT[source] if name in GFLOAT_NAN else 0}
    if (name, overflow) == ("float8_e4m3fn", "nonfinite"):
        expected["overflow"] = GFLOAT_OVERFLOW[mode][which]
    if name == "float8_e8m0fnu":
        expected["negative"] = GFLOAT_E8M0_NEGATIVE[which]
        expected["zero"] = 2 if overflow == "nonfinite" else 0
        expected |= {rule: counts[which] for rule, counts in GFLOAT_E8M0[mode].items()}
        expected["tie"] = expected.get("tie", 0) + ((mode, overflow, source) == TIE_AT_THE_TOP)
    return {rule: count for rule, count in expected.items() if count}


def gfloat_rules(x: Array, fmt: Format, theirs: Array) -> list[tuple[str, Array, Any, Any]]:
    """Where gfloat may differ and what both sides write there."""
    wide = x.astype(np.float32)
    scale = fmt.kind == "scale"
    fraction, exponent = np.frexp(np.where(np.isfinite(wide), wide, 1).astype(np.float64))
    upper = exponent + fmt.bias
    return [
        ("NaN", np.isnan(wide), fmt.nan_code, GFLOAT_NAN.get(fmt.name, -1)),
        ("overflow", wide > fmt.max, fmt.nan_code, 0xFF),
        ("negative", (wide < 0) & scale, 0xFF, 0),
        ("zero", (wide == 0) & scale, 0xFF, 0),
        ("below", (wide > 0) & (wide < 2.0**-127) & scale, 0, theirs),
        ("tie", (fraction == 0.75) & scale, upper, upper - 1),
    ]


@pytest.mark.parametrize("source", SIXTEEN_BIT)
@pytest.mark.parametrize("name", FLOATS)
def test_every_16_bit_pattern_against_gfloat(name: str, source: str) -> None:
    """All patterns, all seven rounding modes, both policies: equal but for exact counts."""
    x, fmt = oracles.every_pattern(source), FORMATS[name]
    found, expected = {}, {}
    for overflow in oracles.policies(fmt):
        for mode in MODES:
            theirs = oracles.gfloat_codes(x, name, mode, overflow == "saturate", WORDS)
            ours = encode_with(x, name, mode, overflow, WORDS)
            found[mode, overflow] = oracles.differences(ours, theirs, gfloat_rules(x, fmt, theirs))
            expected[mode, overflow] = gfloat_expected(name, mode, overflow, source)
            if fmt.specials == "nan_ones" and name != "float8_e4m3fn":
                # How many there are is written down of e4m3fn alone.
                found[mode, overflow].pop("overflow", None)
    assert found == expected


# -- Integers and codebooks: the definition in one line of float64 ----------------------------------------------------


def integer_codes(x: Array, fmt: Format, mode: str) -> Array:
    """Integer codes in float64, in which every 16-bit number times 2**6 and its rounding are exact."""
    with np.errstate(invalid="ignore"):
        t = np.ldexp(x.astype(np.float64), fmt.fraction_bits)
    size = np.abs(t)
    fraction = (WORDS >> 8) * 2.0**-24
    rounded = {
        "nearest_even": np.rint(t),
        "nearest_away": np.copysign(np.floor(size + 0.5), t),
        "toward_zero": np.trunc(t),
        "up": np.ceil(t),
        "down": np.floor(t),
        "to_odd": np.where(size == np.floor(size), t, np.copysign(2 * np.floor(size / 2) + 1, t)),
        "stochastic": np.copysign(np.floor(size) + (size % 1 + fraction >= 1), t),
    }[mode]
    narrow = fmt.name in ("int8_nan", "ternary")
    low = -(2 ** (fmt.bits - 1)) + narrow if fmt.signed else 0
    high = 2 ** (fmt.bits - fmt.signed) - 1
    nan = 0x80 if fmt.name == "int8_nan" else 0
    codes = np.where(np.isnan(t), nan, np.clip(np.where(np.isnan(t), 0, rounded), low, high))
    return (codes.astype(np.int64) & (2**fmt.bits - 1)).astype(np.uint8)


@pytest.mark.parametrize("source", SIXTEEN_BIT)
@pytest.mark.parametrize("name", INTEGERS)
def test_every_16_bit_pattern_to_integers(name: str, source: str) -> None:
    """All patterns and modes against NumPy's rint, floor, ceil and trunc: no difference."""
    x, fmt = oracles.every_pattern(source), FORMATS[name]
    for mode in MODES:
        with np.errstate(invalid="ignore"):
            truth = integer_codes(x, fmt, mode)
        ours = encode_with(x, name, mode, "saturate", WORDS)
        assert (ours == truth).all(), f"{mode}: {oracles.first_mismatches(ours, truth, x)}"


@pytest.mark.parametrize("source", SIXTEEN_BIT)
@pytest.mark.parametrize("name", CODEBOOKS)
def test_every_16_bit_pattern_to_codebooks(name: str, source: str) -> None:
    """All patterns against the smallest distance in float64 (exact here), ties to the lower index."""
    x, table = oracles.every_pattern(source), np.array(FORMATS[name].table, np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        wide = np.clip(x.astype(np.float64), -2, 2)
        # Zero may be a midpoint: what lies beside it stays beside it where float64 takes distances.
        wide = np.where(wide == 0, 0, np.copysign(np.maximum(np.abs(wide), 2.0**-40), wide))
    truth = np.argmin(np.abs(np.where(np.isnan(wide), 0, wide)[:, None] - table), axis=1)
    ours = encode(x, name)
    assert (ours == truth).all(), oracles.first_mismatches(ours, truth, x)
