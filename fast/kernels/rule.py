"""A scheme's record as what kernels read at compile time.

Triton specialises a kernel on its constant arguments by their text, so a digest of every field that changes the kernel stands
for the whole: two records with the same fields share a kernel, whatever their names.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl

from fast.kernels.codebooks import has_cubic
from reference.formats import FORMATS, Format
from reference.log2 import LOWEST, steps_above, steps_below
from reference.power_scales import element_mantissa
from reference.scales import floor_value
from reference.schemes import Scale, Scheme
from reference.softfloat import bits_of

# What kernels call the OCP formats: records with the same fields are the same format, whatever their names.
OCP = {
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float6_e2m3fn": "e2m3",
    "float6_e3m2fn": "e3m2",
    "float4_e2m1fn": "e2m1",
}
# Formats whose nearest-even, saturating cast is one instruction on sm_89 and later.
HARDWARE = ("e4m3", "e5m2")
# And those of which a few instructions make four codes at a time, for tiles with four elements of a row in a thread.
SEQUENCES = (*HARDWARE, "e2m1")

# Targets for which one corrected product is the rounded quotient; tests/gpu/kernel_quotients.py checks every significand.
QUOTIENTS = (1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 127.0, 255.0, 448.0, 57344.0, 6.0, 6.0 * 448.0)


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
    """How one number is encoded: a format with a rounding mode and an overflow policy."""


class Level(Constant):
    """How a scale is found from its statistic: a `Scale` record for an input dtype."""


class Rule(Constant):
    """A scheme for an input dtype."""


@lru_cache(maxsize=256)
def ocp_name(fmt: Format) -> str:
    """What `OCP` calls the format with these fields; "" for another one."""
    same = (short for name, short in OCP.items() if replace(fmt, name=name) == FORMATS[name])
    return next(same, "")


def element_of(
    fmt: Format,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    *,
    hardware: bool = True,
    fours: bool = False,
) -> Element:
    """The constants of `encode` and `decode`. hardware: use the conversion instructions (not in the interpreter).

    fours: and the `SEQUENCES`.
    """
    over = {"inf": fmt.infinity_code, "nan": fmt.nan_code, "nonfinite": fmt.infinity_code}.get(overflow, 0)
    beyond = over if over is not None else fmt.nan_code or 0
    casts = SEQUENCES if fours else HARDWARE
    fast = hardware and rounding == "nearest_even" and overflow == "saturate"
    low, high = fmt.integer_range if fmt.kind == "int" else (0, 0)
    name = ocp_name(fmt)
    return Element(
        kind=fmt.kind, bits=fmt.bits, mantissa=fmt.mantissa_bits, emin=fmt.emin, bias=fmt.bias,
        max_code=fmt.max_code, max_bits=bits_of(fmt.max), nan_code=fmt.nan_code or 0, beyond=beyond, sign_mask=fmt.sign_mask,
        negative_zero=fmt.has_negative_zero, specials=fmt.specials, signed=fmt.signed, low=low, high=high,
        fraction_bits=fmt.fraction_bits, thresholds=_thresholds(fmt), zero_code=_zero_code(fmt),
        table=tuple(float(v) for v in fmt.table), values=_values(fmt), rounding=rounding, overflow=overflow,
        hardware=name if fast and name in casts else "", loads=name if hardware and name in HARDWARE else "",
        max_value=fmt.max,
    )  # fmt: skip


def _part(constant: Constant, hardware: bool) -> Any:
    """A constant inside another: the compiler hands it on as a constant, the interpreter as the object it is."""
    return tl.constexpr(constant) if hardware else constant


def _thresholds(fmt: Format) -> tuple[float, ...]:
    """float32 truncations of a codebook's midpoints: x is above a midpoint iff it is above its truncation downwards."""
    if fmt.kind != "codebook":
        return ()
    values = fmt.values.astype(np.float64)
    middle = (values[1:] + values[:-1]) / 2
    floor = middle.astype(np.float32)
    floor = np.where(floor > middle, np.nextafter(floor, np.float32(-np.inf)), floor)
    return tuple(float(v) for v in floor)


def _zero_code(fmt: Format) -> int:
    return int(np.argmin(np.abs(np.asarray(fmt.table)))) if fmt.kind == "codebook" else 0


def _values(fmt: Format) -> tuple[float, ...]:
    """Values of codes where a table is the way to decode (codebooks)."""
    return tuple(float(v) for v in fmt.values) if fmt.kind == "codebook" else ()


def level_of(
    record: Scale, dtype: str, element: Format, *, hardware: bool = True, quick: bool = False
) -> Level:
    """The constants of one level of scales. quick: see `_is_quick`; of records whose exact scales nobody divides by."""
    compute = dtype if record.compute == "input" else "float32"
    floor, kind = 0, ""
    if record.floor is not None:
        kind, value = record.floor[0], record.floor[1]
        floor = bits_of(floor_value(value, dtype))
    floor_code = 0
    if kind == "stored" and record.storage != "float32":
        fmt = FORMATS[record.storage]
        floor_code = int(np.flatnonzero(fmt.values.view(np.int32) == floor)[0]) if fmt.kind != "int" else 0
    quotient = None
    if kind == "statistic" and record.stored == "encode" and record.floor is not None:
        quotient = bits_of(record.target / float(record.floor[1]))
    target = bits_of(record.target)
    return Level(
        statistic=record.statistic, target=_in_dtype(record.target, compute), rule=record.rule,
        target_exponent=(target >> 23) - 127, target_fraction=target & 0x7FFFFF, compute=compute, stored=record.stored,
        by_reciprocal=record.by_reciprocal, floor_kind=kind, floor=floor, floor_code=floor_code, floor_quotient=quotient,
        nonfinite=None if record.nonfinite is None else bits_of(record.nonfinite), storage=_kept_as(record.storage),
        even_carry=1 << (22 - element_mantissa(element)), element_min=_in_dtype(element.min, compute),
        steps=_runs(record.rule), one_over_target=_in_dtype(float(np.float32(1) / np.float32(record.target)), compute),
        quick=hardware and quick and _is_quick(record), inverse=float(np.float32(1) / np.float32(record.target)),
        simple_power=_is_simple(record.rule, (target >> 23) - 127),
        carry=_carry(record.rule, target & 0x7FFFFF, 1 << (22 - element_mantissa(element))),
        storage_element=None if record.storage == "float32" else _part(_storage(record.storage, hardware), hardware),
    )  # fmt: skip


def _in_dtype(value: float, dtype: str) -> float:
    """A constant rounded to the dtype of the arithmetic, as float32."""
    import ml_dtypes

    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    return float(np.float32(value).astype(kinds[dtype]))


def _is_quick(record: Scale) -> bool:
    """Whether `words.quotient` serves: plain ratios that are raised to 2**-126 or more, exactly computed for this target.

    Only in records where infinity poisons a block: the quotient of infinity is NaN.
    """
    plain = record.rule == "ratio" and record.stored == "decode" and record.compute == "float32"
    floors = _is_raised(record, 2.0**-126) and record.storage == "float32"
    return plain and floors and record.statistic != "minmax_split" and record.target in QUOTIENTS


def _is_raised(record: Scale, least: float) -> bool:
    """Whether stored scales are raised to `least` or more. "tiny" and "eps" of no dtype lie below 2**-126."""
    kind, value = record.floor or ("", 0.0)
    return kind == "stored" and (2.0**-126 if isinstance(value, str) else value) >= least


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


def _kept_as(storage: str) -> str:
    """What kernels tell apart among storages: "float32", a name of `OCP`, or "" for other codes."""
    return storage if storage == "float32" else ocp_name(FORMATS[storage])


def _runs(rule: str) -> tuple[tuple[int, int], ...]:
    """torchao's float32-logarithm tables (`reference.log2`) as (first exponent, steps) of each run of equal values."""
    if rule not in ("ratio_pow2_log2", "rceil_log2"):
        return ()
    table = steps_below() if rule == "ratio_pow2_log2" else steps_above()
    starts = [0, *(np.flatnonzero(np.diff(table)) + 1)]
    return tuple((int(start) + LOWEST, int(table[start])) for start in starts)


@lru_cache(maxsize=4096)
def rule_of(scheme: Scheme, dtype: str, hardware: bool = True, marking: bool = False) -> Rule:
    """The constants of a scheme for an input dtype ("float32", "bfloat16", "float16").

    marking: codes only show which elements saturate.
    """
    fmt = scheme.format
    outer = scheme.outer
    zero = scheme.zero
    low, high = fmt.integer_range if fmt.kind == "int" else (0, 0)
    arithmetic = dtype if scheme.arithmetic == "input" else "float32"
    house = scheme.nan == "block"
    overflow, nan = ("mark", "ieee") if marking else (scheme.overflow, scheme.nan)
    nearest = not marking and scheme.rounding == "nearest_even" and scheme.overflow == "saturate"
    quick = house and scheme.codes_from == "stored"
    return Rule(
        dtype=dtype, kind=fmt.kind, bits=fmt.bits, fraction_bits=fmt.fraction_bits,
        element=_part(element_of(fmt, scheme.rounding, overflow, hardware=hardware), hardware),
        level=_part(level_of(scheme.scale, dtype, fmt, hardware=hardware, quick=quick), hardware),
        outer=None if outer is None
        else _part(level_of(outer, dtype, fmt, hardware=hardware, quick=quick), hardware),
        has_outer=outer is not None and outer.statistic == "absmax_elements",
        two_level=is_two_level(scheme), group=outer.block if outer is not None and is_two_level(scheme) else 1,
        power_of_two=scheme.scale.power_of_two, with_zero=scheme.scale.statistic != "minmax",
        zero="" if zero is None else zero.rule, zero_storage="" if zero is None else zero.storage,
        middle=_in_dtype((low + high + 1) / 2, dtype if scheme.scale.compute == "input" else "float32"),
        middle_input=_in_dtype((low + high + 1) / 2, arithmetic), middle_code=(low + high + 1) // 2, low=low, high=high,
        apply=scheme.apply, outer_order=scheme.outer_order, arithmetic=arithmetic, codes_from=scheme.codes_from,
        nan=nan, poison_code=scheme.poison_code, nan_code=None if marking else scheme.nan_code,
        negative_zero=scheme.negative_zero,
        smallest_exponent=scheme.smallest_exponent, dequantize=scheme.dequantize, stored=scheme.scale.stored,
        rounding=scheme.rounding, overflow=overflow, house=house, finite_reciprocal=house and not marking,
        max_bits=bits_of(fmt.max),
        native=hardware, signs_nan=scheme.nan == "element", hot=_hot(scheme, nearest and hardware),
        under_outer=hardware and _under_outer(scheme), ordinary=_outer_is_ordinary(scheme), hot_values=hardware and house
        and scheme.dequantize == "float32" and scheme.scale.stored == "decode" and _has_sequence(fmt),
        ranged=_is_ranged(scheme, _hot(scheme, nearest and hardware)),
        clamps=not _never_saturates(scheme), lowest=float(low), highest=float(high),
        by_difference=fmt.kind == "codebook" and scheme.arithmetic == "input",
        poison_by_product=house and nearest and scheme.nan_code is None and scheme.poison_code == (fmt.nan_code or 0)
        and fmt.kind in ("float", "int"),
        drawn=hardware and not marking and _is_drawn(scheme),
        pairs=_has_pairs(scheme, dtype, _hot(scheme, nearest and hardware)),
    )  # fmt: skip


def is_two_level(scheme: Scheme) -> bool:
    """Whether scales are quantized themselves, in groups."""
    return scheme.outer is not None and scheme.outer.statistic != "absmax_elements"


def _is_drawn(scheme: Scheme) -> bool:
    """Whether `drawn` rounds: MX floats of the house, stochastically, with multipliers that are normal numbers."""
    fmt, scale = scheme.format, scheme.scale
    plain = scheme.nan == "block" and scheme.nan_code is None and scheme.smallest_exponent is None
    signed = fmt.kind == "float" and fmt.bits <= 8 and bool(fmt.sign_mask) and fmt.has_negative_zero
    drawn = scheme.rounding == "stochastic" and scheme.overflow == "saturate" and scheme.negative_zero
    return plain and signed and drawn and scale.power_of_two and scheme.outer is None and scale.target >= 4.0


def _has_pairs(scheme: Scheme, dtype: str, hot: str) -> bool:
    """Whether packed codes are made from pairs.

    `fours` and `sixes`: MX floats below 8 bits and NVFP4, of bfloat16. `ranges`: 4-bit integers with zero points, of 16 bits.
    """
    scale = scheme.scale
    if _is_ranged(scheme, hot):
        return dtype != "float32" and scheme.format.bits == 4 and scale.block in (32, 64, 128, 256)
    if dtype != "bfloat16":
        return False
    if scheme.outer is not None:
        return hot == "e2m1" and scale.block == 16 and not scale.power_of_two
    return hot in ("e2m1", "e2m3", "e3m2") and scale.block == 32 and scale.power_of_two


def _is_ranged(scheme: Scheme, hot: str) -> bool:
    """Whether `ranges.scale_of_range` makes scales and zero points.

    From a target of 4 on no reciprocal is below 2**-126; up to the span of the codes no zero point lies beyond them.
    """
    scale, zero = scheme.scale, scheme.zero
    coded = hot == "int" and zero is not None and zero.rule == "code"
    return (
        coded
        and scale.statistic == "minmax_with_zero"
        and _is_quick(scale)
        and 4 <= scale.target <= 2**scheme.format.bits - 1
    )


def _has_sequence(fmt: Format) -> bool:
    """Whether `words` reads this element: signed integers and the OCP formats without infinities; or `codebooks`."""
    if fmt.kind == "codebook":
        return fmt.bits == 4
    return ocp_name(fmt) in ("e4m3", "e2m3", "e3m2", "e2m1") or (
        fmt.kind == "int" and fmt.signed and fmt.specials == "none" and fmt.bits <= 8
    )


def _hot(scheme: Scheme, nearest: bool) -> str:
    """Which sequence of `words` makes the codes of a house scheme whose scales come from the tile; "" for none."""
    fmt = scheme.format
    if not nearest or scheme.nan != "block" or scheme.nan_code is not None or scheme.apply != "reciprocal":
        return ""
    if scheme.smallest_exponent is not None or not scheme.negative_zero or scheme.arithmetic != "float32":
        return ""
    if not _has_reciprocals(scheme):
        return ""
    if fmt.kind == "int" and fmt.signed and fmt.specials == "none":
        return (
            ""
            if scheme.outer is not None or (scheme.zero is not None and scheme.zero.rule == "value")
            else "int"
        )
    if fmt.kind == "codebook":
        return "codebook" if _fills_codebook(scheme) else ""
    if scheme.outer is not None and not _under_outer(scheme):
        return ""
    if fmt.bits == 6 and scheme.scale.target > fmt.max:
        # Far beyond the largest code the conversions of 8 bits, which stand in, reach bits that codes of 6 do not have.
        return ""
    return ocp_name(fmt)


def _has_reciprocals(scheme: Scheme) -> bool:
    """Whether codes come from scales that multiply them too, each with a finite reciprocal."""
    scale = scheme.scale
    finite = scheme.codes_from == "stored" and _is_raised(scale, 2.0**-126)
    return scale.stored == "decode" and (finite or scale.power_of_two)


def _fills_codebook(scheme: Scheme) -> bool:
    """Whether scales are maxima, so that scaled elements lie between -1 and 1, and `codebooks.codebook_numbers` serves."""
    scale = scheme.scale
    plain = scale.statistic == "absmax" and scale.rule == "ratio" and scale.storage == "float32"
    kept = scale.stored == "decode" and scale.compute == "float32" and scale.target == 1.0
    return plain and kept and scheme.outer is None and scheme.poison_code == 0 and has_cubic(scheme.format)


def _under_outer(scheme: Scheme) -> bool:
    """Whether `hot.choose_under_outer` makes the scales: e4m3 block scales with a floor under a float32 outer scale."""
    scale, outer = scheme.scale, scheme.outer
    if (
        outer is None
        or outer.statistic != "absmax_elements"
        or outer.stored != "decode"
        or scheme.nan != "block"
    ):
        return False
    plain = (
        scale.rule == "ratio"
        and scale.stored == "decode"
        and scale.compute == "float32"
        and scheme.zero is None
    )
    kept = _kept_as(scale.storage) == "e4m3" and scale.floor is not None and scale.floor[0] == "stored"
    return (
        plain
        and kept
        and scale.statistic == "absmax"
        and scheme.outer_order == "decode"
        and scale.target in QUOTIENTS
    )


def _outer_is_ordinary(scheme: Scheme) -> bool:
    """Whether an outer scale that comes from a tensor is raised to 2**-112 and below 2**117."""
    outer = scheme.outer
    return outer is not None and _is_raised(outer, 2.0**-112) and 2.0**128 / outer.target <= 2.0**117


def _never_saturates(scheme: Scheme) -> bool:
    """Whether |x| <= amax cannot round beyond the largest code: symmetric integers with a float32 scale amax / qmax.

    Three roundings of relative size 2**-24 separate x * (1 / s) from at most qmax, far less than a half.
    """
    scale, fmt = scheme.scale, scheme.format
    plain = scale.statistic == "absmax" and scale.rule == "ratio" and scale.storage == "float32"
    return (
        plain
        and scheme.zero is None
        and scheme.outer is None
        and fmt.kind == "int"
        and scale.target == fmt.max
    )
