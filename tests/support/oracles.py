"""What the tests of `encode` and `decode` compare with: two libraries that others wrote, and a definition in exact fractions.

* `ml_codes`, `gfloat_codes`: codes from ml_dtypes and gfloat, for the formats that they define.
* `exact_value`, `exact_code`: value of a code and code of a value, one at a time, in Python integers and
  `fractions.Fraction`. They share nothing with `reference` but the fields of the `Format` record: a value is placed between
  its two neighbours in the sorted list of all values, and the mode chooses one of them.
* `differences`: every disagreement sorted under the rule that explains it, to be compared with exact counts.

Hypothesis strategies for float bit patterns near what matters to a format: its values, ties and limits.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Any

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from reference.formats.encode import encode
from reference.formats.formats import FORMATS, Format

Array = np.ndarray[Any, Any]
Exact = Fraction | float  # a float only for infinities and NaN

FLOATS = tuple(name for name, fmt in FORMATS.items() if fmt.kind in ("float", "scale"))
INTEGERS = tuple(name for name, fmt in FORMATS.items() if fmt.kind == "int")
CODEBOOKS = tuple(name for name, fmt in FORMATS.items() if fmt.kind == "codebook")
MODES = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd", "stochastic")
POLICIES = ("saturate", "nonfinite")
SIXTEEN_BIT = ("bfloat16", "float16")


def policies(fmt: Format) -> tuple[str, ...]:
    """The overflow policies that a format can express."""
    return POLICIES if fmt.nan_code is not None and fmt.kind != "int" else POLICIES[:1]


def modes(fmt: Format) -> tuple[str, ...]:
    """The rounding modes that a format has."""
    return MODES[:1] if fmt.kind == "codebook" else MODES


def has_dtype(name: str) -> bool:
    """Whether ml_dtypes or NumPy has a format, as the oracle of its values."""
    return hasattr(ml_dtypes, name) or name == "float16"


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy or ml_dtypes dtype of a name."""
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def every_pattern(name: str) -> Array:
    """All 65,536 bfloat16 or float16 numbers in the order of their bit patterns."""
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype_of(name))


def words(count: int, seed: int = 0) -> Array:
    """Random words for stochastic rounding, the smallest and the largest among them."""
    drawn = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    drawn[: count // 16] = 0
    drawn[count // 16 : count // 8] = 0xFFFFFFFF
    return np.random.default_rng(seed + 1).permutation(drawn)


def encode_with(x: Array, fmt: str | Format, mode: str, overflow: str, random_words: Array) -> Array:
    """`encode`, with random bits where the mode needs them."""
    bits = random_words if mode == "stochastic" else None
    return encode(x, fmt, rounding=mode, overflow=overflow, random_bits=bits)


# -- Other people's libraries ------------------------------------------------------------------------------------------


def ml_codes(x: Array, name: str) -> Array:
    """ml_dtypes' codes of x: nearest even, beyond the range what the format has, the largest value where it has nothing."""
    dtype = dtype_of(name)
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(dtype).view(f"uint{8 * dtype.itemsize}")


GFLOAT_NAMES = {
    "float8_e4m3fn": "ocp_e4m3",
    "float8_e5m2": "ocp_e5m2",
    "float6_e2m3fn": "ocp_e2m3",
    "float6_e3m2fn": "ocp_e3m2",
    "float4_e2m1fn": "ocp_e2m1",
    "float8_e8m0fnu": "ocp_e8m0",
    "bfloat16": "bfloat16",
    "float16": "binary16",
}
GFLOAT_MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "up": gfloat.RoundMode.TowardPositive,
    "down": gfloat.RoundMode.TowardNegative,
    # gfloat has no rounding to odd; `gfloat_codes` makes it from truncation.
    "to_odd": gfloat.RoundMode.TowardZero,
    "stochastic": gfloat.RoundMode.StochasticFastest,
}


def gfloat_format(name: str) -> gfloat.FormatInfo:
    """gfloat's own description of a format; those that it does not name from their definition."""
    if name in GFLOAT_NAMES:
        return getattr(gfloat.formats, f"format_info_{GFLOAT_NAMES[name]}")
    fmt = FORMATS[name]
    ieee = fmt.specials == "ieee"
    nans = (1 << fmt.mantissa_bits) - 1 if ieee else int(fmt.specials == "nan_ones")
    return gfloat.FormatInfo(
        name, fmt.bits, fmt.mantissa_bits + 1, bias=fmt.bias, is_signed=True,
        domain=gfloat.Domain.Extended if ieee else gfloat.Domain.Finite, has_nz=fmt.has_negative_zero,
        num_high_nans=nans, has_subnormals=True, is_twos_complement=False,
    )  # fmt: skip


def gfloat_codes(x: Array, name: str, mode: str, saturate: bool, random_words: Array | None = None) -> Array:
    """gfloat's codes of x, computed in float64. Stochastic rounding uses the top 24 bits of each word.

    Rounding to odd is truncation with the last bit set where truncation lost something short of the largest finite value.
    What gfloat refuses, NaN for a format without NaN and negative numbers for one without sign, is given as 0.
    """
    info = gfloat_format(name)
    with np.errstate(invalid="ignore"):
        x = x.astype(np.float64)
    x = np.where(np.isnan(x) & (info.num_nans == 0) | (x < 0) & (not info.is_signed), 0.0, x)
    bits = (random_words >> 8).astype(np.int64) if mode == "stochastic" and random_words is not None else None
    # A format without NaN and infinity saturates whatever the flag says; gfloat raises instead.
    saturate = saturate or info.num_nans == 0
    rounded = gfloat.round_ndarray(info, x, GFLOAT_MODES[mode], saturate, bits, 24 if bits is not None else 0)
    codes = gfloat.encode_ndarray(info, rounded)
    if mode == "to_odd" and name != "float8_e8m0fnu":
        lost = np.isfinite(rounded) & (rounded != x) & (abs(rounded) < info.max)
        # A format without -0 drops the sign of what gfloat truncates to 0.
        sign = (x < 0).astype(np.uint64) << (info.k - 1)
        codes = np.where(lost, codes | sign | 1, codes)
    return (codes & ((1 << info.k) - 1)).astype(np.uint8 if info.k <= 8 else np.uint16)


def differences(ours: Array, theirs: Array, rules: Iterable[tuple[str, Array, Any, Any]]) -> dict[str, int]:
    """Count the disagreements by the first rule (name, where, our codes, their codes) that predicts both sides.

    A disagreement that no rule predicts is counted as ``unexplained``; rules that explain nothing do not appear.
    """
    open_, counts = ours != theirs, Counter[str]()
    for name, where, our_codes, their_codes in rules:
        hit = open_ & where & (ours == our_codes) & (theirs == their_codes)
        counts[name] += int(hit.sum())
        open_ &= ~hit
    counts["unexplained"] = int(open_.sum())
    return {name: count for name, count in counts.items() if count}


# -- The definition in exact fractions ---------------------------------------------------------------------------------


def exact_value(fmt: Format, code: int) -> tuple[Exact, bool]:
    """(value, whether the sign is negative) of a code, read from the fields of the record."""
    if fmt.kind == "codebook":
        return Fraction(float(np.float32(fmt.table[code]))), fmt.table[code] < 0
    if fmt.kind == "int":
        lowest = 1 << (fmt.bits - 1)
        integer = code - 2 * lowest if fmt.signed and code >= lowest else code
        if fmt.specials == "nan_minimum" and integer == -lowest:
            return float("nan"), False
        return Fraction(integer, 1 << fmt.fraction_bits), integer < 0
    if fmt.kind == "scale":
        return (
            (float("nan"), False)
            if code == (1 << fmt.bits) - 1
            else (Fraction(2) ** (code - fmt.bias), False)
        )
    return _exact_float_value(fmt, code)


def _exact_float_value(fmt: Format, code: int) -> tuple[Exact, bool]:
    negative = bool(code >> (fmt.bits - 1))
    exponent = (code >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    mantissa = code & ((1 << fmt.mantissa_bits) - 1)
    top_exponent, top_mantissa = (1 << fmt.exponent_bits) - 1, (1 << fmt.mantissa_bits) - 1
    if fmt.specials == "ieee" and exponent == top_exponent:
        return (float("nan") if mantissa else float("-inf" if negative else "inf")), negative
    if fmt.specials == "nan_ones" and (exponent, mantissa) == (top_exponent, top_mantissa):
        return float("nan"), negative
    if fmt.specials == "nan_negative_zero" and code == 1 << (fmt.bits - 1):
        return float("nan"), negative
    hidden = 1 if exponent > 0 else 0
    value = (hidden + Fraction(mantissa, 1 << fmt.mantissa_bits)) * Fraction(2) ** (
        max(exponent, 1) - fmt.bias
    )
    return (-value if negative else value), negative


def float32_pattern(value: Exact, negative: bool) -> int:
    """Bit pattern of an exactly representable value; the quiet NaN without sign for NaN."""
    if value != value:
        return 0x7FC00000
    number = float(value)
    assert not isinstance(value, Fraction) or Fraction(number) == value
    packed: int = struct.unpack("<I", struct.pack("<f", number))[0]
    assert struct.unpack("<f", struct.pack("<I", packed))[0] == number
    return packed | (0x80000000 if negative else 0)


@lru_cache(maxsize=64)
def magnitudes(fmt: Format) -> tuple[Fraction, ...]:
    """Finite magnitudes in ascending order, then the next one if the range went on: index = code without sign.

    The integers' list reaches far beyond any format, so that clamping is a step of its own.
    """
    if fmt.kind == "int":
        return tuple(Fraction(i, 1 << fmt.fraction_bits) for i in range(1 << (fmt.bits + 2)))
    finite = []
    for code in range(1 << (fmt.bits - 1 if fmt.sign_mask else fmt.bits)):
        value, _ = exact_value(fmt, code)
        if isinstance(value, float):
            break
        finite.append(value)
    step = finite[-1] if fmt.kind == "scale" else finite[-1] - finite[-2]
    return (*finite, finite[-1] + step)


def exact_code(
    x: float, fmt: Format, mode: str = "nearest_even", overflow: str = "saturate", word: int = 0
) -> int:
    """The code of a Python float by the documented rules. `word` is the element's random word."""
    if x != x:
        return _exact_nan(fmt)
    negative = struct.pack(">d", x)[0] >= 0x80
    if fmt.kind == "codebook":
        return _exact_codebook(x, fmt)
    if fmt.kind == "int":
        return _exact_integer(x, negative, fmt, mode, word)
    if fmt.kind == "scale" and ((negative and x != 0) or (x == 0 and overflow != "saturate")):
        return 0xFF
    grid = magnitudes(fmt)
    index = len(grid) - 1 if abs(x) == float("inf") else _choose(abs(x), fmt, mode, negative, word)
    if index < len(grid) - 1:
        return index | (fmt.sign_mask if negative and (index or fmt.has_negative_zero) else 0)
    return _exact_overflow(x, negative, fmt, mode, overflow)


@lru_cache(maxsize=1 << 15)
def _place(x: float, fmt: Format) -> tuple[int, Fraction]:
    """Index of the largest magnitude of at most x >= 0 (-1: none), and which part of the way to the next x has gone."""
    grid, exact = magnitudes(fmt), Fraction(x)
    low = bisect_right(grid, exact) - 1
    if low < 0 or low == len(grid) - 1:
        return low, Fraction(0)
    return low, (exact - grid[low]) / (grid[low + 1] - grid[low])


def _choose(x: float, fmt: Format, mode: str, negative: bool, word: int) -> int:
    """Index of the neighbour of x that the mode chooses; the last index for everything beyond the grid."""
    low, part = _place(x, fmt)
    if low < 0 or part == 0:
        return max(low, 0)
    # A power of two has the significand 1, which is odd, and the next one is 10 in the same units.
    odd = low % 2 == 1 or fmt.kind == "scale"
    grows = {
        "nearest_even": part > Fraction(1, 2) or (part == Fraction(1, 2) and odd),
        "nearest_away": part >= Fraction(1, 2),
        "toward_zero": False,
        "up": not negative,
        "down": negative,
        "to_odd": not odd,
        "stochastic": part + Fraction(word >> 8, 1 << 24) >= 1,
    }
    return low + grows[mode]


def _exact_overflow(x: float, negative: bool, fmt: Format, mode: str, overflow: str) -> int:
    inward = (
        mode in ("toward_zero", "to_odd") or (mode == "up" and negative) or (mode == "down" and not negative)
    )
    if overflow == "saturate" or (inward and abs(x) != float("inf")):
        code = fmt.max_code
    elif fmt.specials == "ieee" and overflow != "nan":
        code = fmt.max_code + 1
    else:
        code = _exact_nan(fmt)
    return code | (fmt.sign_mask if negative else 0)


def _exact_nan(fmt: Format) -> int:
    """The one NaN that encode writes; 0 where there is none; the codebook's zero."""
    if fmt.kind == "codebook":
        return min(range(len(fmt.table)), key=lambda code: abs(fmt.table[code]))
    if fmt.specials == "ieee" and fmt.bits == 16:
        return {"bfloat16": 0x7FC0, "float16": 0x7E00}[fmt.name]
    if fmt.name == "e8m3":
        return 0x7FF
    return {"none": 0, "ieee": 0x7F, "nan_ones": 0x7F, "nan_negative_zero": 0x80, "nan_all_ones": 0xFF,
            "nan_minimum": 0x80, "unused_minimum": 0}[fmt.specials]  # fmt: skip


def _exact_integer(x: float, negative: bool, fmt: Format, mode: str, word: int) -> int:
    grid = magnitudes(fmt)
    index = len(grid) - 1 if abs(x) == float("inf") else _choose(abs(x), fmt, mode, negative, word)
    narrow = fmt.specials in ("nan_minimum", "unused_minimum")
    lowest = -(1 << (fmt.bits - 1)) + narrow if fmt.signed else 0
    highest = (1 << (fmt.bits - fmt.signed)) - 1
    return max(lowest, min(highest, -index if negative else index)) % (1 << fmt.bits)


def _exact_codebook(x: float, fmt: Format) -> int:
    if abs(x) == float("inf"):
        return len(fmt.table) - 1 if x > 0 else 0
    values = [Fraction(float(np.float32(value))) for value in fmt.table]
    return min(range(len(values)), key=lambda code: (abs(values[code] - Fraction(x)), code))


def odd_float32(x: float) -> float:
    """A float64 rounded to odd in float32: truncated, the last bit set if anything was lost. Infinities stay."""
    if x != x or abs(x) == float("inf") or x == 0:
        return x
    with np.errstate(all="ignore"):
        near = np.float32(x)
    truncated = np.nextafter(near, np.float32(0)) if abs(float(near)) > abs(x) else near
    if float(truncated) == x:
        return x
    bits = int(np.abs(truncated).view(np.uint32)) | 1
    return float(np.copysign(np.uint32(bits).view(np.float32), np.float32(np.copysign(1, x))))


# -- Messages ----------------------------------------------------------------------------------------------------------


def hexadecimal(patterns: Iterable[int], width: int) -> str:
    """Bit patterns as text for a failure's message."""
    return " ".join(f"0x{int(pattern):0{width}x}" for pattern in patterns)


def first_mismatches(ours: Array, truth: Array, patterns: Array) -> str:
    """How many codes differ, and the first eight, hexadecimal: pattern, our code, the other one."""
    ours, truth, raw = (np.asarray(array).reshape(-1) for array in (ours, truth, patterns))
    raw = raw.view(f"uint{8 * raw.dtype.itemsize}")
    wrong = np.flatnonzero(ours != truth)
    rows = [f"{raw[i]:#x}: {int(ours[i]):#x} against {int(truth[i]):#x}" for i in wrong[:8]]
    return f"{len(wrong)} of {len(raw)} differ: " + "; ".join(rows)


@lru_cache(maxsize=64)
def landmarks(fmt: Format) -> tuple[float, ...]:
    """Values, midpoints of neighbours and the first number out of range, all exact in float64."""
    if fmt.kind == "codebook":
        grid = [Fraction(float(np.float32(value))) for value in fmt.table]
    else:
        grid = list(magnitudes(fmt))[: 1 << fmt.bits]
        # The 16-bit formats have too many values: both ends and every 397th.
        grid = grid if len(grid) < 1000 else [*grid[:40], *grid[40:-40:397], *grid[-40:]]
    middles = [(a + b) / 2 for a, b in pairwise(grid)]
    return tuple(float(value) for value in (*grid, *middles))


def _float32_near(fmt: Format) -> st.SearchStrategy[int]:
    def move(value: float, ulps: int, negative: bool) -> int:
        with np.errstate(all="ignore"):
            near = int(np.float32(value).view(np.uint32))
        return min(max((near & 0x7FFFFFFF) + ulps, 0), 0x7FFFFFFF) | (negative << 31)

    return st.builds(move, st.sampled_from(landmarks(fmt)), st.integers(-2, 2), st.booleans())


def float32_patterns(fmt: Format) -> st.SearchStrategy[int]:
    """float32 bit patterns: any, subnormal, special, and within two units of a value or a tie of the format."""
    special = st.sampled_from(
        [0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001]
    )
    signed = st.builds(lambda bits, negative: bits | negative << 31, special, st.booleans())
    subnormal = st.builds(
        lambda bits, negative: bits | negative << 31, st.integers(0, 0x800000), st.booleans()
    )
    return st.one_of(_float32_near(fmt), st.integers(0, 0xFFFFFFFF), signed, subnormal)


def float64_patterns(fmt: Format) -> st.SearchStrategy[int]:
    """float64 bit patterns: around values and ties by units of float64, any float32 with a long tail, and any at all."""

    def move(value: float, units: int, negative: bool) -> int:
        near = int(np.float64(value).view(np.uint64))
        return min(max((near & 0x7FFFFFFFFFFFFFFF) + units, 0), 0x7FFFFFFFFFFFFFFF) | (negative << 63)

    units = st.one_of(
        st.integers(-2, 2), st.sampled_from([1 << 28, -(1 << 28), (1 << 29) + 1, -(1 << 29) - 1])
    )
    near = st.builds(move, st.sampled_from(landmarks(fmt)), units, st.booleans())
    tail = st.builds(_widened, st.integers(0, 0xFFFFFFFF), st.integers(0, (1 << 29) - 1))
    return st.one_of(
        near, tail, st.integers(0, 0xFFFFFFFFFFFFFFFF), st.floats(allow_nan=True).map(_pattern64)
    )


def _widened(bits: int, tail: int) -> int:
    wide = float(np.uint32(bits).view(np.float32))
    return _pattern64(wide) | (tail if abs(wide) < float("inf") else 0)


def _pattern64(value: float) -> int:
    packed: int = struct.unpack("<Q", struct.pack("<d", value))[0]
    return packed
