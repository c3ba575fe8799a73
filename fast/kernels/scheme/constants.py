"""A scheme's record as what kernels read at compile time.

Triton specialises a kernel on its constant arguments by their text, so a digest of every field that changes the kernel stands
for the whole: two records with the same fields share a kernel, whatever their names.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl

from fast.kernels.scheme.fast_path_rules import (
    HARDWARE,
    SEQUENCES,
    bounds,
    difference_thresholds,
    fast_path_of,
    has_pairs,
    has_single_pairs,
    has_zero_blocks,
    is_fast_stochastic,
    is_outer_ordinary,
    is_power_ratio,
    is_quick,
    is_ranged,
    is_read_by_sequence,
    is_under_outer,
    never_saturates,
    ocp_name,
    on_ordinary_blocks,
    ordinary_sequence,
    outer_bounds,
    quotient_sequence,
    storage_kind,
)
from reference.arrays.softfloat import LOWEST, bits_of, steps_above, steps_below
from reference.formats.encode import midpoint_floors
from reference.formats.formats import FORMATS, Format
from reference.quantize.scales import even_carry, floor_value
from reference.schemes.schemes import Scale, Scheme

# Formats and scales as constants of kernels.


class Constant:
    """An object of plain attributes that a kernel takes as a constant; its text is a digest of them."""

    def __init__(self, **attributes: Any) -> None:
        # A plain string could not be handed on to a device function; numbers and booleans can.
        self.__dict__.update(
            {name: tl.constexpr(v) if isinstance(v, str) else v for name, v in attributes.items()}
        )
        text = ";".join(f"{name}={value!r}" for name, value in sorted(attributes.items()))
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:20]

    def __repr__(self) -> str:
        return f"{type(self).__name__}_{self.digest}"

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and other.digest == self.digest

    def __getattr__(self, name: str) -> Any:
        # Only for type checkers: attributes live in __dict__.
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


class Element(Constant):
    """How an element is encoded: a format with a rounding mode and an overflow policy."""


class Level(Constant):
    """How a scale is found from its statistic: a `Scale` record for an input dtype."""


def element_of(
    fmt: Format,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    *,
    hardware: bool = True,
    fp4: bool = False,
    thresholds: tuple[float, ...] | None = None,
) -> Element:
    """The constants of `encode` and `decode`. hardware: use the conversion instructions (not in the interpreter).

    fp4: and the `SEQUENCES`. thresholds: the largest value of each code of a codebook, where that is not the midpoint.
    """
    over = {"inf": fmt.infinity_code, "nan": fmt.nan_code, "nonfinite": fmt.infinity_code}.get(overflow, 0)
    beyond = over if over is not None else fmt.nan_code or 0
    casts = SEQUENCES if fp4 else HARDWARE
    fast = hardware and rounding == "nearest_even" and overflow == "saturate"
    low, high = fmt.integer_range if fmt.kind == "int" else (0, 0)
    name = ocp_name(fmt)
    return Element(
        kind=fmt.kind, bits=fmt.bits, mantissa=fmt.mantissa_bits, emin=fmt.emin, bias=fmt.bias,
        max_code=fmt.max_code, max_bits=bits_of(fmt.max), nan_code=fmt.nan_code or 0, beyond=beyond, sign_mask=fmt.sign_mask,
        negative_zero=fmt.has_negative_zero, specials=fmt.specials, signed=fmt.signed, low=low, high=high,
        fraction_bits=fmt.fraction_bits,
        thresholds=_thresholds(fmt) if thresholds is None else thresholds, zero_code=_zero_code(fmt),
        table=tuple(float(v) for v in fmt.table), values=_values(fmt), rounding=rounding, overflow=overflow,
        hardware=name if fast and name in casts else "", loads=name if hardware and name in HARDWARE else "",
        max_value=fmt.max,
    )  # fmt: skip


def constant_part(constant: Constant, hardware: bool) -> Any:
    """A constant inside another: the compiler hands it on as a constant, the interpreter as the object it is."""
    return tl.constexpr(constant) if hardware else constant


def _thresholds(fmt: Format) -> tuple[float, ...]:
    return tuple(float(v) for v in midpoint_floors(fmt)) if fmt.kind == "codebook" else ()


def _zero_code(fmt: Format) -> int:
    return int(np.argmin(np.abs(np.asarray(fmt.table)))) if fmt.kind == "codebook" else 0


def _values(fmt: Format) -> tuple[float, ...]:
    """Values of codes where a table is the way to decode (codebooks)."""
    return tuple(float(v) for v in fmt.values) if fmt.kind == "codebook" else ()


def level_of(
    record: Scale,
    dtype: str,
    element: Format,
    *,
    hardware: bool = True,
    quick: bool = False,
    ordinary: bool = False,
) -> Level:
    """The constants of one level of scales. quick: see `is_quick`; of records whose exact scales nobody divides by.

    ordinary: of ordinary blocks alone, see `ordinary_blocks`.
    """
    compute = dtype if record.compute == "input" else "float32"
    floor, kind = 0, ""
    if record.floor is not None:
        kind, value = record.floor[0], record.floor[1]
        floor = bits_of(floor_value(value, dtype))
    floor_code = 0
    if (kind == "stored" or (kind == "zero" and ordinary)) and record.storage != "float32":
        fmt = FORMATS[record.storage]
        floor_code = int(np.flatnonzero(fmt.values.view(np.int32) == floor)[0]) if fmt.kind != "int" else 0
    quotient = None
    if kind == "statistic" and record.stored == "encode" and record.floor is not None:
        quotient = bits_of(record.target / float(record.floor[1]))
    target = bits_of(record.target)
    return Level(
        statistic=record.statistic, target=in_dtype(record.target, compute), rule=record.rule,
        target_exponent=(target >> 23) - 127, target_fraction=target & 0x7FFFFF, compute=compute, stored=record.stored,
        by_reciprocal=record.by_reciprocal, floor_kind=kind, floor=floor, floor_code=floor_code, floor_quotient=quotient,
        nonfinite=None if record.nonfinite is None else bits_of(record.nonfinite), storage=storage_kind(record.storage),
        even_carry=even_carry(record, element), element_min=in_dtype(element.min, compute),
        in_dtype=record.storage == dtype and record.compute == "input",
        steps=_runs(record.rule), one_over_target=in_dtype(float(np.float32(1) / np.float32(record.target)), compute),
        quick=hardware and (ordinary or (quick and is_quick(record))), ordinary=ordinary,
        target_reciprocal=float(np.float32(1) / np.float32(record.target)),
        simple_power=_is_simple(record.rule, (target >> 23) - 127),
        carry=_carry(record.rule, target & 0x7FFFFF, even_carry(record, element)),
        storage_element=None if record.storage == "float32" else constant_part(_storage(record.storage, hardware), hardware),
    )  # fmt: skip


def in_dtype(value: float, dtype: str) -> float:
    """A constant rounded to the dtype of the arithmetic, as float32."""
    import ml_dtypes

    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    return float(np.float32(value).astype(kinds[dtype]))


def _is_simple(rule: str, target_exponent: int) -> bool:
    """Whether the exponent field alone decides: no scale of a subnormal maximum lies above 2**-127."""
    return (rule in ("floor", "ceil", "rceil", "even") and target_exponent >= 1) or (
        rule == "floor" and target_exponent == 0
    )


def _carry(rule: str, fraction: int, even: int) -> int:
    """What, added to a pattern, carries into the exponent exactly where the rule rounds up."""
    return {"floor": 0, "ceil": 0x7FFFFF, "rceil": 0x7FFFFF - fraction, "even": even}.get(rule, 0)


def _storage(name: str, hardware: bool) -> Element:
    """Scales are rounded and read without the conversion instructions: one after the other was compiled wrongly (LOG.md)."""
    fmt = FORMATS[name]
    overflow = "nonfinite" if fmt.specials == "ieee" else "saturate"
    return element_of(fmt, "nearest_even", overflow, hardware=hardware and ocp_name(fmt) not in HARDWARE)


def _runs(rule: str) -> tuple[tuple[int, int], ...]:
    """torchao's float32-logarithm tables as (first exponent, steps) of each run of equal values."""
    if rule not in ("ratio_pow2_log2", "rceil_log2"):
        return ()
    table = steps_below() if rule == "ratio_pow2_log2" else steps_above()
    starts = [0, *(np.flatnonzero(np.diff(table)) + 1)]
    return tuple((int(start) + LOWEST, int(table[start])) for start in starts)


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
    block_nan = scheme.nan == "block"
    overflow, nan = ("mark", "ieee") if marking else (scheme.overflow, scheme.nan)
    nearest = not marking and scheme.rounding == "nearest_even" and scheme.overflow == "saturate"
    quick = block_nan and scheme.codes_from == "stored"
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
        rounding=scheme.rounding, overflow=overflow, block_nan=block_nan, finite_reciprocal=block_nan and not marking,
        max_bits=bits_of(fmt.limit),
        has_ptx=hardware, signs_nan=scheme.nan == "element", fast_path=fast_path,
        digits=digits.get(fast_path, "") if same is None else same.digits.value,
        under_outer=hardware and not ordinary and is_under_outer(scheme), ordinary=is_outer_ordinary(scheme),
        fast_values=hardware and block_nan
        and scheme.dequantize == "float32" and scheme.scale.stored == "decode" and is_read_by_sequence(fmt),
        ranged=fast_path == "int" and scheme.zero is not None and scheme.zero.rule == "code" if ordinary
        else is_ranged(scheme, fast_path),
        clamps=ordinary or not never_saturates(scheme), lowest=float(low), highest=float(high),
        by_difference=fmt.kind == "codebook" and scheme.arithmetic == "input",
        poison_by_product=block_nan and nearest and scheme.nan_code is None and scheme.poison_code == (fmt.nan_code or 0)
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


# What a launch does with a tile.


class BlockOp(Constant):
    """What a launch does with the tiles of a tensor.

    source: where scales come from: "tile", "statistic" (of an earlier pass) or "given". outer: the same of the outer scale, ""
    for none. codes, scales, statistic: what is written. output: dtype of dequantized values, or "". gradient: y = g where the
    element did not saturate. dequantize: codes are read, not x. packed: codes are packed. reverse: programs begin at the end of
    x. tiled: scales are written in the tiles of `reference.quantize.stored`, and `stride` is the number of blocks in a
    row. pairs: x is read in pairs of 16-bit floats. level: "averages" or "groups": scales that are quantized themselves are
    averaged, and quantized (`second_level`). exact: such scales divide elements as they are, below the floor or not.
    saturation: "mask": which blocks saturate is written to the argument `codes`; "gradient": g is masked in place by it.
    parts, share: the power of two above the number of averages, or of parts of one block whose statistics lie side by side, and
    1 over that above the number of scales.
    """


def block_op(
    *, source: str = "tile", outer: str = "", codes: bool = False, scales: bool = False, statistic: bool = False,
    output: str = "", gradient: bool = False, dequantize: bool = False, packed: bool = False, exact: bool = False,
    reverse: bool = False, tiled: bool = False, pairs: bool = False, level: str = "", parts: int = 1, share: float = 1.0,
    saturation: str = "",
) -> BlockOp:  # fmt: skip
    """A `BlockOp`; what is not named is off."""
    return BlockOp(
        source=source, outer=outer, codes=codes, scales=scales, statistic=statistic, output=output, gradient=gradient,
        dequantize=dequantize, packed=packed, exact=exact, reverse=reverse,
        tiled=tiled, pairs=pairs, level=level, parts=parts, share=share, saturation=saturation,
    )  # fmt: skip
