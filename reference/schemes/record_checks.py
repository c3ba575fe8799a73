"""What a record must satisfy before anything is computed with it: each rule, and what to do instead, in the message."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from reference.arrays.errors import choice
from reference.formats.formats import FORMATS, Format, format_of
from reference.formats.rounding import MODES, OVERFLOWS

if TYPE_CHECKING:
    from reference.schemes.schemes import Scale, Scheme

STATISTICS = ("absmax", "minmax", "minmax_with_zero", "minmax_split", "absmax_elements")
POWER_RULES = ("floor", "ceil", "rceil", "rceil_log2", "even")
RULES = ("ratio", "ratio_pow2", "ratio_pow2_log2", *POWER_RULES)
FLOORS = ("statistic", "scale", "stored", "zero")
POWER_STORAGE = "float8_e8m0fnu"
# What the text of a block of the flattened tensor begins with; its size follows.
FLAT = "flat:"
# How zero points of each rule are kept.
ZERO_STORAGE = {"code": ("int8",), "value": ("float32", "bfloat16", "float16")}
# Targets outside would let the ratio of two float32 numbers overflow or vanish.
LEAST_TARGET, LARGEST_TARGET = 2.0**-20, 2.0**20


def check_scale(record: Scale) -> None:
    """ValueError for a field that means nothing, or fields that contradict each other."""
    choice(record.statistic, STATISTICS, "statistic")
    choice(record.rule, RULES, "rule")
    choice(record.compute, ("float32", "float64", "input"), "compute")
    choice(record.stored, ("decode", "encode"), "stored")
    choice(record.center, ("none", "mean"), "center")
    _check_block(record.block)
    if not LEAST_TARGET <= record.target <= LARGEST_TARGET:
        raise ValueError(
            f"target lies between 2**-20 and 2**20, got {record.target!r}; use the element's largest value"
        )
    fmt = None if record.storage == "float32" else format_of(record.storage)
    if record.rule in POWER_RULES and record.storage != POWER_STORAGE:
        raise ValueError(
            f"rule {record.rule!r} makes powers of two, stored as {POWER_STORAGE}; got storage {record.storage!r}. "
            f"For powers of two in another storage use rule 'ratio_pow2'"
        )
    bits = record.even_bits
    if bits is not None and (record.rule != "even" or type(bits) is not int or not 0 <= bits <= 7):
        raise ValueError(f"even_bits is 0 to 7 beside rule 'even', and None beside others; got {bits!r}")
    if record.floor is not None:
        _check_floor(record.floor, fmt)


def _check_block(block: object) -> None:
    if isinstance(block, str):
        size = block.removeprefix(FLAT)
        good = block == "tensor" or (size != block and size.isdecimal() and int(size) > 0)
    else:
        sizes = block if isinstance(block, tuple) else (block,)
        whole = block == -1 and type(block) is int
        good = whole or (len(sizes) in (1, 2) and all(type(size) is int and size > 0 for size in sizes))
        good = good and (not isinstance(block, tuple) or len(block) == 2)
    if not good:
        raise ValueError(f"block is n > 0, -1, (rows, columns), 'tensor' or 'flat:n'; got {block!r}")


def _check_floor(floor: tuple[str, float | str], fmt: Format | None) -> None:
    kind, value = floor
    choice(kind, FLOORS, "floor")
    if isinstance(value, str):
        choice(value, ("tiny", "eps"), "the floor's value, if it is a name,")
        if kind == "stored" and fmt is not None:
            raise ValueError(
                f"a floor on the stored scale is a value of its storage {fmt.name}; {value!r} is a name"
            )
        return
    if not (isfinite(value) and value > 0):
        raise ValueError(f"a floor is a positive number, got {value!r}")
    # Integer storage holds scales relative to an outer one, so its floor is on the number before that.
    absolute = fmt is not None and fmt.kind in ("float", "scale")
    if kind in ("stored", "zero") and fmt is not None and absolute and not bool((fmt.values == value).any()):
        raise ValueError(
            f"a floor on the stored scale is a value of its storage {fmt.name}; {value!r} is none"
        )


def check_scheme(record: Scheme) -> None:
    """ValueError for a field that means nothing, or fields that contradict each other."""
    fmt = format_of(record.element)
    choice(record.apply, ("reciprocal", "divide", "encode"), "apply")
    choice(record.outer_order, ("decode", "reciprocal_first", "folded", "encode"), "outer_order")
    choice(record.arithmetic, ("float32", "input"), "arithmetic")
    choice(record.codes_from, ("stored", "exact"), "codes_from")
    choice(record.nan, ("block", "nan", "element", "ieee"), "nan")
    choice(record.dequantize, ("float32", "ieee", "target"), "dequantize")
    choice(record.rounding, MODES if fmt.kind != "codebook" else ("nearest_even",), f"rounding to {fmt.name}")
    choice(record.overflow, OVERFLOWS, "overflow")
    code = {"inf": fmt.infinity_code, "nan": fmt.nan_code, "nonfinite": fmt.nan_code}.get(record.overflow, 0)
    if code is None:
        raise ValueError(f"{fmt.name} has no code for overflow {record.overflow!r}; use 'saturate'")
    _check_levels(record)
    if record.zero is not None:
        _check_zero(record, fmt)


def _check_levels(record: Scheme) -> None:
    outer, storage = record.outer, record.scale.storage
    if outer is not None and record.scale.rule in POWER_RULES:
        raise ValueError(
            f"scales of rule {record.scale.rule!r} take no outer scale; use rule 'ratio' or outer=None"
        )
    double = outer is not None and outer.statistic != "absmax_elements"
    if double and storage == "float32":
        raise ValueError(
            "an outer scale over the scales needs scales that are codes, as nf4's int8_nan; got float32"
        )
    if storage != "float32" and FORMATS[storage].kind == "int" and not double:
        raise ValueError(f"scales stored as integers ({storage}) need an outer scale over them, as nf4 has")


def _check_zero(record: Scheme, fmt: Format) -> None:
    if fmt.kind != "int" or record.scale.rule in POWER_RULES:
        raise ValueError(
            f"a zero point needs an integer element and a ratio scale; got {fmt.name}, {record.scale.rule}"
        )
    if fmt.fraction_bits:
        raise ValueError(
            f"a zero point counts integers, and {fmt.name} has a binary point; use int{fmt.bits}"
        )
    low, high = fmt.integer_range
    if record.zero is not None and record.zero.rule == "code" and not (low >= -128 and high <= 127):
        raise ValueError(
            f"zero points are kept as int8 and must hold {low}..{high} of {fmt.name}; use a signed element"
        )
