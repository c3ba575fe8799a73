"""Floats of a thread's registers: patterns to Python's floats and back, each rounded once.

Sums and products of two float32 are exact in float64 or so near that rounding them to float32 is the only rounding.
"""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from typing import Any

import ml_dtypes
import numpy as np

WORD, SINGLE = struct.Struct("<I"), struct.Struct("<f")
SHORT, HALF = struct.Struct("<H"), struct.Struct("<e")
KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}


def real(value: int) -> float:
    """A float32 of its pattern."""
    made: float = SINGLE.unpack(WORD.pack(value))[0]
    return made


def pattern(value: Any) -> int:
    """The pattern of a number rounded to float32; of all NaN the one that the device's arithmetic gives."""
    if value != value:
        return 0x7FFFFFFF
    try:
        made: int = WORD.unpack(SINGLE.pack(value))[0]
    except OverflowError:
        return 0x7F800000 if value > 0 else 0xFF800000
    return made


def to_bfloat16(value: int) -> int:
    """bfloat16 of a float32's pattern; of all NaN the one that the device's conversions give."""
    if value & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return value + 0x7FFF + (value >> 16 & 1) >> 16


def to_float16(value: int) -> int:
    """float16 of a float32's pattern."""
    return float16_of(real(value))


def to_e4m3(value: float) -> int:
    """float8_e4m3fn of a float32, the largest finite one beyond it."""
    return int(np.array(np.clip(value, -448, 448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def bfloat16_of(value: float) -> int:
    """bfloat16 of a float64, by way of float32 as ml_dtypes has it."""
    return to_bfloat16(pattern(value))


def float16_of(value: float) -> int:
    """float16 of a float64."""
    if value != value:
        return 0x7FFF
    try:
        made: int = SHORT.unpack(HALF.pack(value))[0]
    except OverflowError:
        return 0x7C00 if value > 0 else 0xFC00
    return made


ROUNDED = {ml_dtypes.bfloat16: bfloat16_of, np.float16: float16_of}


@cache
def values_of(kind: Any) -> list[float]:
    """All numbers of 16 bits."""
    with np.errstate(invalid="ignore"):
        made: list[float] = np.arange(1 << 16, dtype=np.uint16).view(kind).astype(np.float64).tolist()
    return made


@cache
def patterns_of_halves() -> list[int]:
    """float32 patterns of all float16."""
    return [pattern(value) for value in values_of(np.float16)]


@cache
def halves_of_bytes() -> list[int]:
    """float16 patterns of all e4m3."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return [float16_of(value) for value in values.tolist()]


def pair_of(make: Any, kind: Any) -> Any:
    """A function of pairs of 16-bit floats, as words."""
    values, rounded = values_of(kind), ROUNDED[kind]

    @lru_cache(maxsize=1 << 15)  # codes are few, and so are their products with a scale
    def step(*words: int) -> int:
        low = make(*(values[word & 0xFFFF] for word in words))
        high = make(*(values[word >> 16 & 0xFFFF] for word in words))
        return rounded(low) | rounded(high) << 16

    return step


__all__ = [
    "KINDS", "ROUNDED", "bfloat16_of", "float16_of", "halves_of_bytes", "pair_of", "pattern", "patterns_of_halves", "real",
    "to_bfloat16", "to_float16", "values_of",
]  # fmt: skip
