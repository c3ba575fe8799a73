"""A scheme's record as what kernels read at compile time.

Triton specialises a kernel on its constant arguments by their text, so a digest of every field that changes the kernel stands
for the whole: two records with the same fields share a kernel, whatever their names.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fast.kernels.scheme.element_constants import Constant, constant_part, element_of, in_dtype, level_of
from fast.kernels.scheme.fast_path_rules import (
    fast_path_of,
    has_pairs,
    is_fast_stochastic,
    is_outer_ordinary,
    is_power_ratio,
    is_ranged,
    is_read_by_sequence,
    is_under_outer,
    never_saturates,
)
from fast.kernels.scheme.ordinary_blocks import (
    bounds,
    difference_thresholds,
    has_single_pairs,
    has_zero_blocks,
    on_ordinary_blocks,
    ordinary_sequence,
    outer_bounds,
    quotient_sequence,
)
from reference.arrays.softfloat import bits_of
from reference.schemes.schemes import Scheme


class SchemeConstants(Constant):
    """A scheme for an input dtype."""


@lru_cache(maxsize=4096)
def constants_of(scheme: Scheme, dtype: str, hardware: bool = True, marking: bool = False) -> SchemeConstants:
    """The constants of a scheme for an input dtype ("float32", "bfloat16", "float16").

    marking: codes only show which elements saturate.
    """
    same = on_ordinary_blocks(scheme, dtype) if hardware and not marking else None
    if same is None or fast_path_of(scheme, True):
        return _rule(scheme, dtype, hardware, marking)
    return _rule(scheme, dtype, hardware, marking, _rule(same, dtype, hardware, ordinary=True))


def _rule(
    scheme: Scheme,
    dtype: str,
    hardware: bool,
    marking: bool = False,
    same: SchemeConstants | None = None,
    *,
    ordinary: bool = False,
) -> SchemeConstants:
    """The constants of a scheme. same: those of its ordinary blocks, where these go by a sequence; ordinary: these are they."""
    fmt = scheme.format
    outer = scheme.outer
    zero = scheme.zero
    low, high = fmt.integer_range if fmt.kind == "int" else (0, 0)
    arithmetic = dtype if scheme.arithmetic == "input" else "float32"
    house = scheme.nan == "block"
    overflow, nan = ("mark", "ieee") if marking else (scheme.overflow, scheme.nan)
    nearest = not marking and scheme.rounding == "nearest_even" and scheme.overflow == "saturate"
    quick = house and scheme.codes_from == "stored"
    fast_path = ordinary_sequence(scheme, dtype) if ordinary else fast_path_of(scheme, nearest and hardware)
    thresholds = difference_thresholds(fmt, dtype) if ordinary and fmt.kind == "codebook" else None
    digits = {"int": "signed" if fmt.kind == "int" and fmt.signed else "unsigned", "stretched": "unsigned"}
    return SchemeConstants(
        dtype=dtype, kind=fmt.kind, bits=fmt.bits, fraction_bits=fmt.fraction_bits,
        element=constant_part(element_of(fmt, scheme.rounding, overflow, hardware=hardware, thresholds=thresholds), hardware),
        level=constant_part(level_of(scheme.scale, dtype, fmt, hardware=hardware, quick=quick, ordinary=ordinary), hardware),
        outer=None if outer is None
        else constant_part(level_of(outer, dtype, fmt, hardware=hardware, quick=quick), hardware),
        has_outer=outer is not None and outer.statistic == "absmax_elements",
        two_level=is_two_level(scheme), group=outer.block if outer is not None and is_two_level(scheme) else 1,
        power_of_two=scheme.scale.power_of_two, with_zero=scheme.scale.statistic != "minmax",
        zero="" if zero is None else zero.rule, zero_storage="" if zero is None else zero.storage,
        middle=in_dtype((low + high + 1) / 2, dtype if scheme.scale.compute == "input" else "float32"),
        middle_input=in_dtype((low + high + 1) / 2, arithmetic), middle_code=(low + high + 1) // 2, low=low, high=high,
        apply=scheme.apply, outer_order=scheme.outer_order, arithmetic=arithmetic, codes_from=scheme.codes_from,
        nan=nan, poison_code=scheme.poison_code, nan_code=None if marking else scheme.nan_code,
        negative_zero=scheme.negative_zero,
        smallest_exponent=scheme.smallest_exponent, dequantize=scheme.dequantize, stored=scheme.scale.stored,
        rounding=scheme.rounding, overflow=overflow, house=house, finite_reciprocal=house and not marking,
        max_bits=bits_of(fmt.limit),
        has_ptx=hardware, signs_nan=scheme.nan == "element", fast_path=fast_path,
        digits=digits.get(fast_path, "") if same is None else same.digits.value,
        under_outer=hardware and not ordinary and is_under_outer(scheme), ordinary=is_outer_ordinary(scheme),
        fast_values=hardware and house
        and scheme.dequantize == "float32" and scheme.scale.stored == "decode" and is_read_by_sequence(fmt),
        ranged=fast_path == "int" and scheme.zero is not None and scheme.zero.rule == "code" if ordinary
        else is_ranged(scheme, fast_path),
        clamps=ordinary or not never_saturates(scheme), lowest=float(low), highest=float(high),
        by_difference=fmt.kind == "codebook" and scheme.arithmetic == "input",
        poison_by_product=house and nearest and scheme.nan_code is None and scheme.poison_code == (fmt.nan_code or 0)
        and fmt.kind in ("float", "int"),
        fast_stochastic=hardware and not marking and is_fast_stochastic(scheme),
        pairs=has_pairs(scheme, dtype, fast_path) or (ordinary and has_single_pairs(scheme, dtype)) if same is None
        else same.pairs and not same.ranged,
        power_ratio=quick and is_power_ratio(scheme.scale),
        on_ordinary=ordinary, same=None if same is None else constant_part(same, hardware), has_same=same is not None,
        corrected=ordinary and scheme.apply == "divide" and quotient_sequence(scheme, dtype) == "corrected",
        e4m3_scales=ordinary and scheme.scale.storage != "float32" and not scheme.scale.power_of_two
        and fmt.kind == "float", **_limits(scheme, dtype), same_values=same is not None and _has_same_values(scheme, dtype),
    )  # fmt: skip


def _limits(scheme: Scheme, dtype: str) -> dict[str, Any]:
    """When blocks are ordinary: patterns of the least magnitude, and of how far above it they may lie."""
    least, most = (bits_of(v) for v in bounds(scheme, dtype))
    outer_least, outer_most = (bits_of(v) for v in outer_bounds(scheme))
    return {
        "least": least, "span": most - least, "outer_least": outer_least, "outer_span": outer_most - outer_least,
        "zero_blocks": has_zero_blocks(scheme),
    }  # fmt: skip


def _has_same_values(scheme: Scheme, dtype: str) -> bool:
    """Whether ordinary blocks have the values of default schemes: products that are rounded once and do not overflow."""
    if scheme.dequantize == "float32":
        return True
    if dtype == "float16" or (scheme.zero is not None and scheme.zero.rule == "value"):
        return False
    short = scheme.scale.power_of_two or scheme.scale.compute == "input" or dtype == "float32"
    return scheme.dequantize == "ieee" or (
        short and scheme.outer is None and scheme.format.kind != "codebook"
    )


def is_two_level(scheme: Scheme) -> bool:
    """Whether scales are quantized themselves, in groups."""
    return scheme.outer is not None and scheme.outer.statistic != "absmax_elements"
