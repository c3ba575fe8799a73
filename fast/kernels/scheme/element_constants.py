"""Formats and scales as constants of kernels."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import triton.language as tl

from fast.kernels.scheme.fast_path_rules import HARDWARE, SEQUENCES, is_quick, ocp_name, storage_kind
from reference.arrays.softfloat import LOWEST, bits_of, steps_above, steps_below
from reference.formats.formats import FORMATS, Format
from reference.quantize.power_scales import even_carry
from reference.quantize.scales import floor_value
from reference.schemes.schemes import Scale


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
    fours: bool = False,
    thresholds: tuple[float, ...] | None = None,
) -> Element:
    """The constants of `encode` and `decode`. hardware: use the conversion instructions (not in the interpreter).

    fours: and the `SEQUENCES`. thresholds: the largest value of each code of a codebook, where that is not the midpoint.
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
