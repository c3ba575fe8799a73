"""Which fields of a `Scheme` contradict each other, and what `register` refuses unless a record's `deviations` name it.

A record that breaks a rule here is a mistake of whoever wrote it: it computes, and loses values without a word. What a scheme
cannot be at all (`check_levels`, `check_zero`) is refused when the record is made; what is rarely meant (`check_registered`)
when it gets a name, since parts of recipes of training, which have none, need it.
"""

from __future__ import annotations

import re
from typing import Any

from reference.formats.formats import FORMATS

POWER_RULES = ("floor", "ceil", "rceil", "rceil_log2", "even")
POWER_STORAGE = "float8_e8m0fnu"
# Targets outside would let the ratio of two float32 values overflow or vanish.
LEAST_TARGET, LARGEST_TARGET = 2.0**-20, 2.0**20
# What a shell's word and a list between commas hold: names are typed as "NAME key=value" and "NAME,NAME".
NAME = re.compile(r"[A-Za-z0-9_.+-]+")


def default_target(record: Any) -> float:
    """The largest target with which nothing saturates: the element's limit, 2**20 at most; with a zero point max - min."""
    fmt = record.format
    largest: float = fmt.limit - fmt.min if record.zero is not None else fmt.limit
    return min(largest, LARGEST_TARGET)


def check_levels(record: Any) -> None:
    """ValueError for scales, and scales of scales, that do not go together."""
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


def check_zero(record: Any) -> None:
    """ValueError for a zero point beside an element or a scale that it does not go with."""
    if record.zero is None:
        return
    fmt = record.format
    if fmt.kind != "int" or record.scale.rule in POWER_RULES:
        raise ValueError(
            f"a zero point needs an integer element and a ratio scale; got {fmt.name}, {record.scale.rule}"
        )
    if fmt.fraction_bits:
        raise ValueError(
            f"a zero point counts integers, and {fmt.name} has a binary point; use int{fmt.bits}"
        )
    low, high = fmt.integer_range
    if record.zero.rule == "code" and not (low >= -128 and high <= 127):
        raise ValueError(
            f"zero points are stored as int8 and must hold {low}..{high} of {fmt.name}; use a signed element"
        )
    _check_zero_range(record)


def _check_zero_range(record: Any) -> None:
    """ValueError for zero points beside a statistic that is no range of values, unless `deviations` name that."""
    if not record.scale.statistic.endswith(("minmax", "with_zero")) and not record.deviations:
        raise ValueError(
            f"{record.name} has zero points, and its scales are of statistic {record.scale.statistic!r}, which maps a block's "
            "largest magnitude onto the whole range of codes: most values of one sign are lost. Give Scale(statistic="
            "'minmax_with_zero'), as int4_g32_asymmetric has; or leave zero out; or name it in deviations"
        )


def check_registered(record: Any) -> None:
    """ValueError for a name that no command line takes, and for what loses values of a block, unless `deviations` name it."""
    if not NAME.fullmatch(record.name):
        raise ValueError(
            f"{record.name!r} is to be typed in commands and lists of names: letters, digits, '_', '.', '+' and '-' alone"
        )
    _check_signed(record)
    _check_target(record)
    _check_range(record)


def _check_signed(record: Any) -> None:
    """ValueError for integers without negative ones that no zero point moves, unless `deviations` name that."""
    fmt = record.format
    if fmt.kind == "int" and fmt.min >= 0 and record.zero is None and not record.deviations:
        raise ValueError(
            f"{record.name} has elements of {fmt.name}, from {fmt.min:g} on, and no zero points: all negative values become 0. "
            "Give zero=Zero() and Scale(statistic='minmax_with_zero'); or a signed element; or name it in deviations"
        )


def _check_target(record: Any) -> None:
    """ValueError for a target with which the largest elements of every block saturate, unless `deviations` name that.

    Half of a range of integers, as 127.5 of int8, is what others map a block's largest onto. Parts of recipes of training,
    which are not registered, have such targets.
    """
    fmt, target = record.format, record.scale.target
    largest = max(default_target(record), (fmt.limit - fmt.min) / 2)
    if target > largest and not record.deviations:
        half = "half of that range" if largest != fmt.limit else "the largest that it holds"
        held = "all of that range" if record.zero is not None else half
        raise ValueError(
            f"target {target:g} of {record.name} is beyond {largest:g} ({fmt.name} holds {fmt.min:g} to {fmt.limit:g}; "
            f"{largest:g} is {held}), so that a block's largest elements saturate; leave target out, or name the saturation in "
            "deviations of the scheme if it is meant"
        )


def _check_range(record: Any) -> None:
    """ValueError for scales of 8 bits that are no powers of two and have no outer scale, and for ratios that are rounded to the
    nearest power of two, unless `deviations` name that."""
    scale = record.scale
    if scale.storage == "float32" or record.outer is not None or record.deviations:
        return
    storage, powers = FORMATS[scale.storage], scale.storage == POWER_STORAGE
    if powers and scale.rule == "ratio":
        raise ValueError(
            f"scales of {record.name} are ratios rounded to the nearest power of two, down as well as up, so that the largest "
            "ones saturate by up to 30%. Give rule='rceil', which saturates none, or OCP's 'floor', or name it in deviations"
        )
    if not powers and storage.kind == "float" and storage.bits <= 8:
        raise ValueError(
            f"scales of {record.name} lie in {storage.name}, which ends at {storage.max:g}, without an outer scale: others "
            f"saturate or are 0. Give outer=Scale(block='tensor', statistic='absmax_elements', "
            f"target={scale.target * storage.max:g}), as nvfp4 has; or name it in deviations"
        )


__all__ = [
    "LARGEST_TARGET", "LEAST_TARGET", "POWER_RULES", "POWER_STORAGE", "check_levels", "check_registered", "check_zero",
    "default_target",
]  # fmt: skip
