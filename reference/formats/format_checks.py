"""What makes a `Format` one: its fields fit its kind, and every value is exact in float32; ValueError or TypeError where
not.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

import numpy as np

from reference.arrays.errors import choice

KINDS = ("float", "int", "codebook", "scale")
#: What the patterns of `Format.specials` may be, by kind.
SPECIALS = {
    "float": ("ieee", "nan_ones", "nan_negative_zero", "none"),
    "int": ("none", "nan_minimum", "unused_minimum"),
    "codebook": ("none",),
    "scale": ("nan_all_ones",),
}
#: Fields that a kind does not have, at their defaults.
ABSENT = {
    "float": ("fraction_bits", "table", "reach"),
    "int": ("exponent_bits", "mantissa_bits", "bias", "table"),
    "codebook": ("exponent_bits", "mantissa_bits", "bias", "fraction_bits"),
    "scale": ("mantissa_bits", "fraction_bits", "table", "reach"),
}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
#: Names that mean a dtype where formats are named too.
RESERVED = ("float32", "float64")
#: Widest code of each kind: of integers magnitudes up to 2**14 are told apart (`reference.formats.encode_bits`).
WIDEST = {"float": 16, "int": 14, "codebook": 8, "scale": 8}
#: Exponents of float32, subnormals included.
LEAST_EXPONENT, LARGEST_EXPONENT = -149, 127


def check_format(record: Any) -> None:
    """Raise for a field that means nothing, or fields that contradict each other."""
    _check_name(record.name)
    kind = choice(record.kind, KINDS, "the kind of a format")
    for field in ("bits", "exponent_bits", "mantissa_bits", "bias", "fraction_bits"):
        if type(getattr(record, field)) is not int:
            raise TypeError(f"{field} of format {record.name} is an integer, got {getattr(record, field)!r}")
    if not 1 <= record.bits <= WIDEST[kind]:
        raise ValueError(f"bits of a format of kind {kind} are 1 to {WIDEST[kind]}, got {record.bits}")
    choice(record.specials, SPECIALS[kind], f"specials of a format of kind {kind}")
    for field in ABSENT[kind]:
        if getattr(record, field):
            raise ValueError(
                f"a format of kind {kind} has no {field}, got {getattr(record, field)!r}; leave it out"
            )
    {"float": _check_float, "int": _check_int, "codebook": _check_codebook, "scale": _check_scale}[kind](
        record
    )


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"the name of a format is letters, digits and _, a letter first, got {name!r}")
    if name in RESERVED:
        raise ValueError(f"{name} names a dtype, not a format; use another name")


def _check_float(record: Any) -> None:
    exponent, mantissa = record.exponent_bits, record.mantissa_bits
    if not record.signed or exponent < 1 or mantissa < 0 or record.bits != 1 + exponent + mantissa:
        raise ValueError(
            f"a float has a sign, exponent_bits >= 1 and mantissa_bits >= 0 in bits = 1 + exponent_bits + mantissa_bits, got "
            f"bits {record.bits}, exponent_bits {exponent}, mantissa_bits {mantissa}, signed {record.signed}"
        )
    if record.specials == "ieee" and (mantissa < 1 or exponent < 2):
        raise ValueError(
            "specials 'ieee' need exponent_bits >= 2 for finite values and mantissa_bits >= 1 for NaN beside infinity; use "
            "'nan_ones' or 'none'"
        )
    if record.specials == "nan_ones" and mantissa + exponent < 2:
        raise ValueError("specials 'nan_ones' leave no finite value but zero here; use 'none'")
    top = (
        (1 << exponent) - 1 - (record.specials == "ieee" or (record.specials == "nan_ones" and mantissa == 0))
    )
    _check_exponents(record, 1 - record.bias - mantissa, top - record.bias)
    if 1 - record.bias < -126:
        raise ValueError(
            f"the smallest normal exponent is -126 or more, got {1 - record.bias}; lower the bias"
        )


def _check_int(record: Any) -> None:
    if record.signed and record.bits < 2:
        raise ValueError("a signed integer has 2 bits or more; use signed=False")
    if not record.signed and (record.specials != "none" or record.bits >= WIDEST["int"]):
        raise ValueError(
            f"an unsigned integer has up to {WIDEST['int'] - 1} bits and no special lowest value, got bits {record.bits}, "
            f"specials {record.specials!r}"
        )
    if not -64 <= record.fraction_bits <= 64:
        raise ValueError(f"fraction_bits are -64 to 64, got {record.fraction_bits}")
    _check_reach(record, float(record.max))


def _check_codebook(record: Any) -> None:
    table = record.table
    if not isinstance(table, tuple) or len(table) != 1 << record.bits:
        size = len(table) if isinstance(table, tuple) else type(table).__name__
        raise ValueError(
            f"a codebook of {record.bits} bits has a tuple of {1 << record.bits} values, one a code, got {size}; repeat none, "
            f"choose bits that fit"
        )
    with np.errstate(over="ignore"):
        values = np.asarray(table, np.float64).astype(np.float32)
    if not np.isfinite(values).all() or not (values[1:] > values[:-1]).all():
        raise ValueError(f"the values of a codebook are finite and ascend strictly in float32, got {table}")
    _check_reach(record, float(values[-1]))


def _check_scale(record: Any) -> None:
    if record.signed or record.exponent_bits != record.bits or record.bits < 2:
        raise ValueError("a scale is exponent bits alone: signed=False and exponent_bits = bits, 2 or more")
    _check_exponents(record, -record.bias, (1 << record.bits) - 2 - record.bias)


def _check_exponents(record: Any, least: int, largest: int) -> None:
    if least < LEAST_EXPONENT or largest > LARGEST_EXPONENT:
        raise ValueError(
            f"every value of a format is exact in float32, whose exponents are {LEAST_EXPONENT} to {LARGEST_EXPONENT}; "
            f"{record.name} has {least} to {largest}: change the bias ({record.bias})"
        )


def _check_reach(record: Any, largest: float) -> None:
    reach = record.reach
    if reach and not (isfinite(reach) and reach >= largest):
        raise ValueError(f"reach is 0, or at least the largest value {largest}, got {reach!r}")


__all__ = ["check_format"]
