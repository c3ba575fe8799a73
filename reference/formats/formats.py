"""Number formats as data: how one element is stored.

A `Format` is a frozen record of a few parameters; its limits and its table of values are derived from them and nowhere
retyped. Four kinds exist:

* ``float``: sign, exponent and mantissa fields, as IEEE 754 or the OCP 8-bit, 6-bit and 4-bit formats;
* ``int``: two's complement or unsigned integers, with an implied binary point (`fraction_bits`, used by MXINT8);
* ``codebook``: an ascending table of values, code = index;
* ``scale``: an unsigned power of two (`float8_e8m0fnu`), which has neither zero nor sign.

Names are those of ml_dtypes. `specials` says what the all-ones patterns mean: ``ieee`` (infinities and NaNs), ``nan_ones``
(a NaN with all ones in exponent and mantissa, no infinity: the suffix fn), ``nan_negative_zero`` (one NaN in the place of
-0: fnuz), ``nan_all_ones`` (0xFF: e8m0), ``nan_minimum`` (the lowest integer stands for NaN), ``unused_minimum`` (it is never
written: as many levels below zero as above) or ``none``.

Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0, sections 5.1 to 5.4; Dettmers et al.,
QLoRA (arXiv 2305.14314), appendix E, for NF4; Liu et al., ParetoQ (arXiv 2502.02631), stretched elastic quantization, for
`ternary` and `stretched2`.

Codebooks of optimizers' states are computed, as dynamic tree maps: ``dynamic8`` and ``dynamic8_unsigned`` are those of
bitsandbytes and torchao, value for value, ``dynamic4`` and ``linear4_unsigned`` (which has no 0) torchao's of 4 bits.

Sources: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), section 2; of 4 bits Li et al.,
Memory Efficient Optimizers with 4-bit States (arXiv 2309.01507).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.arrays.namespace import choice, lookup

Floats = npt.NDArray[np.float32]


def dynamic_map(signed: bool, exponents: int, bits: int) -> tuple[float, ...]:
    """The values of the dynamic tree format: decimal exponents down to 10**(1 - exponents), fractions finer toward 1.

    Ascending float32. As bitsandbytes and torchao compute them: midpoints of linspace(0.1, 1) in float32, each of its points
    rounded once, times 10**k rounded to float32.
    """
    values = [0.0, 1.0]
    for exponent in range(exponents):
        count = 2 ** (bits - 1 - exponents + exponent + (not signed)) + 1
        points = _linspace(count)
        middle = (points[:-1] + points[1:]) / np.float32(2) * np.float32(10.0 ** (exponent - exponents + 1))
        values += [*middle.tolist(), *((-middle).tolist() if signed else ())]
    return tuple(sorted(values))


def _linspace(count: int) -> Floats:
    """torch.linspace(0.1, 1, count): from both ends, with the step in float32 and one rounding a point."""
    start, end = np.float32(0.1), np.float32(1)
    step = np.float64(np.float32((end - start) / np.float32(count - 1)))
    at = np.arange(count)
    low, high = np.float64(start) + step * at, np.float64(end) - step * (count - 1 - at)
    return np.where(at < count // 2, low, high).astype(np.float32)


#: Name, bits, whether it has negative values, table.
CODEBOOKS: tuple[tuple[str, int, bool, tuple[float, ...]], ...] = (
    ("dynamic8", 8, True, dynamic_map(True, 7, 8)),
    ("dynamic8_unsigned", 8, False, dynamic_map(False, 7, 8)),
    ("dynamic4", 4, True, dynamic_map(True, 3, 4)),
    ("linear4_unsigned", 4, False, tuple(i / 16 for i in range(1, 17))),
)

# What makes a `Format` one: its fields fit its kind, and every value is exact in float32; ValueError or TypeError where not.
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
#: Widest code of each kind: of integers magnitudes up to 2**14 are told apart (`reference.formats.encode`).
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


def _usual_bias(kind: Any, exponent_bits: Any) -> int:
    """2**(exponent_bits - 1) - 1 of floats and scales; 0 of other kinds, and of widths that `check_format` refuses."""
    has = kind in ("float", "scale") and type(exponent_bits) is int and 1 <= exponent_bits <= WIDEST["float"]
    return (1 << exponent_bits - 1) - 1 if has else 0


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


# QLoRA's NormalFloat4 in float32, and the same table to four decimals as torchao stores it.
NF4_TABLE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NF4_TORCHAO_TABLE = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Format:
    """One element format. Codes are unsigned integers of `bits` bits; everything else is derived.

    Fields are given by name. For all kinds:

    name: letters, digits and _.
    kind: "float", "int", "codebook" (a table of values) or "scale" (powers of two).
    bits: of a code, 1 to 16 (float), 14 (int) or 8 (codebook, scale).

    Further fields of each kind:

    * "float" has exponent_bits, mantissa_bits (bits is 1 more than both), bias (subtracted from the stored exponent; left
      out, 2**(exponent_bits - 1) - 1), and specials: "ieee" (infinities and NaN, as in float16), "nan_ones" (a NaN of ones,
      no infinity), "nan_negative_zero" (a NaN in the place of -0) or "none", which it is unless given.
    * "int" has signed (True: two's complement; False: from 0), fraction_bits (the value is the integer times
      2**-fraction_bits), specials, "none", "nan_minimum" (the lowest integer is NaN) or "unused_minimum" (it is never written).
    * "codebook" has table, a tuple of 2**bits values that ascend strictly, the code being the place; signed: whether there are
      negative ones.
    * "scale" has exponent_bits = bits, bias, signed=False, specials="nan_all_ones".
    * "int" and "codebook" have reach, the magnitude that scales map a block's largest element onto where that is beyond
      the outermost value, as of levels that stand for intervals; 0: the outermost value itself.

    Derived: max, min, limit, values (all, float32), smallest_normal, smallest_subnormal, epsilon, emin, emax.

    ValueError or TypeError where fields do not fit together. `ao_lab.register` gives a record of one's own a name. print
    shows the fields and the range.
    """

    name: str
    #: ``float``, ``int``, ``codebook`` or ``scale``.
    kind: str
    #: Width of a code.
    bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0
    #: Exponent bias (float and scale kinds); left out, 2**(exponent_bits - 1) - 1, as IEEE 754 has it, and 0 in other kinds.
    bias: int = None  # type: ignore[assignment]
    #: ``ieee``, ``nan_ones``, ``nan_negative_zero``, ``nan_all_ones`` or ``none``.
    specials: str = "none"
    #: Whether negative values exist.
    signed: bool = True
    #: Implied binary point of the int kind: value = integer * 2**-fraction_bits.
    fraction_bits: int = 0
    #: Ascending values of the codebook kind.
    table: tuple[float, ...] = ()
    #: Stretched formats: the end of the interval that the outermost values represent; 0 where they are its end themselves.
    reach: float = 0.0

    def __post_init__(self) -> None:
        given: Any = self.bias
        if given is None:
            object.__setattr__(self, "bias", _usual_bias(self.kind, self.exponent_bits))
        check_format(self)

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number (float), or of the smallest value (scale)."""
        return -self.bias if self.kind == "scale" else 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value: floor(log2(max))."""
        return int(np.floor(np.log2(self.max)))

    @property
    def sign_mask(self) -> int:
        """The sign bit of a code, 0 where the format has none."""
        return 1 << (self.bits - 1) if self.signed and self.kind == "float" else 0

    @property
    def max_code(self) -> int:
        """Code of the largest finite positive value."""
        ones = (1 << (self.bits - 1)) - 1
        if self.kind == "float":
            if self.specials == "ieee":
                return ((1 << self.exponent_bits) - 1 << self.mantissa_bits) - 1
            return ones - 1 if self.specials == "nan_ones" else ones
        if self.kind == "scale":
            return (1 << self.bits) - 2
        return ones if self.kind == "int" and self.signed else (1 << self.bits) - 1

    @property
    def infinity_code(self) -> int | None:
        """Code of +infinity, or None."""
        return self.max_code + 1 if self.specials == "ieee" else None

    @property
    def nan_code(self) -> int | None:
        """The one NaN that `encode` writes, or None where the format has no NaN.

        Formats of up to 12 bits have ones in exponent and mantissa, as Hopper's cvt instructions write them (0x7f in 8 bits);
        bfloat16 and float16 are the quiet NaN without payload.
        """
        codes = {
            "ieee": (1 << (self.bits - 1)) - 1,
            "nan_ones": (1 << (self.bits - 1)) - 1,
            "nan_negative_zero": 1 << (self.bits - 1),
            "nan_all_ones": (1 << self.bits) - 1,
            "nan_minimum": 1 << (self.bits - 1),
        }
        if self.specials == "ieee" and self.bits == 16:
            return self.max_code + 1 | 1 << (self.mantissa_bits - 1)
        return codes.get(self.specials)

    @property
    def has_negative_zero(self) -> bool:
        """Whether -0 is a code of its own."""
        return self.kind == "float" and self.signed and self.specials != "nan_negative_zero"

    @cached_property
    def values(self) -> npt.NDArray[np.float32]:
        """float32 value of every code, shape (2**bits,). Every value of every format is exact in float32."""
        codes = np.arange(1 << self.bits, dtype=np.int64)
        decoders = {"float": self._float_values, "int": self._int_values, "scale": self._scale_values}
        values = np.array(self.table, np.float32) if self.kind == "codebook" else decoders[self.kind](codes)
        values.setflags(write=False)
        return values

    def _float_values(self, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        magnitude = codes & ((1 << (self.exponent_bits + self.mantissa_bits)) - 1)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        significand = np.where(exponent > 0, mantissa + (1 << self.mantissa_bits), mantissa)
        values = np.ldexp(
            significand.astype(np.float64), np.maximum(exponent, 1) - self.bias - self.mantissa_bits
        )
        if self.specials == "ieee":
            values[magnitude > self.max_code] = np.nan
            values[magnitude == self.max_code + 1] = np.inf
        elif self.specials == "nan_ones":
            values[magnitude > self.max_code] = np.nan
        values = np.where(codes >> (self.bits - 1) > 0, -values, values)
        if self.specials == "nan_negative_zero":
            values[1 << (self.bits - 1)] = np.nan
        return np.where(np.isnan(values), np.float32(np.nan), values).astype(np.float32)

    def _int_values(self, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        wrap = (1 << self.bits) if self.signed else 0
        integers = np.where(codes > self.max_code, codes - wrap, codes)
        values = np.ldexp(integers.astype(np.float64), -self.fraction_bits)
        values[codes == self.nan_code] = np.nan
        return values.astype(np.float32)

    def _scale_values(self, codes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        values = np.ldexp(np.ones(len(codes)), codes - self.bias).astype(np.float64)
        values[-1] = np.nan
        return values.astype(np.float32)

    @property
    def max(self) -> float:
        """Largest finite value."""
        return float(self.values[self.max_code])

    @property
    def limit(self) -> float:
        """The magnitude that scales map a block's largest element onto; a codebook saturates beyond it."""
        return self.reach or self.max

    @property
    def min(self) -> float:
        """Lowest value that is written (0 for unsigned integers, the smallest power of two for e8m0)."""
        if self.kind == "int":
            return float(np.ldexp(self.integer_range[0], -self.fraction_bits))
        return float(np.nanmin(np.where(np.isinf(self.values), np.nan, self.values)))

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal value; for integers and codebooks the smallest positive value."""
        if self.kind == "float":
            return float(2.0**self.emin)
        return float(self.values[self.values > 0].min())

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value."""
        return float(self.values[self.values > 0].min())

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger value (float), the step (int); NaN for other kinds."""
        if self.kind == "float":
            return float(2.0**-self.mantissa_bits)
        return float(2.0**-self.fraction_bits) if self.kind == "int" else float("nan")

    @property
    def integer_range(self) -> tuple[int, int]:
        """(qmin, qmax) of the int kind."""
        lowest = -(1 << (self.bits - 1)) + (self.specials in ("nan_minimum", "unused_minimum"))
        return (lowest if self.signed else 0), self.max_code

    def __repr__(self) -> str:
        return f"Format({self.name})"

    def __str__(self) -> str:
        """The fields that the kind has, but a table, and the range: for people."""
        default = {field.name: field.default for field in fields(self)}
        told = [
            f"{name}={value!r}"
            for name in (
                "kind",
                "bits",
                "exponent_bits",
                "mantissa_bits",
                "bias",
                "specials",
                "signed",
                "fraction_bits",
                "reach",
            )
            if name not in ABSENT[self.kind]
            and ((value := getattr(self, name)) != default[name] or name == "specials")
        ]
        return f"Format({self.name}: {', '.join(told)}; {self.min:g} to {self.max:g})"


def _float(name: str, exponent: int, mantissa: int, bias: int, specials: str) -> Format:
    return Format(
        name=name, kind="float", bits=1 + exponent + mantissa, exponent_bits=exponent, mantissa_bits=mantissa,
        bias=bias, specials=specials,
    )  # fmt: skip


def _integers() -> list[Format]:
    # One bit has no signed integers but -1 and 0.
    pairs = [(bits, signed) for signed in (True, False) for bits in range(2 if signed else 1, 9)]
    return [Format(name=f"{'' if s else 'u'}int{b}", kind="int", bits=b, signed=s) for b, s in pairs]


def _formats() -> list[Format]:
    return [
        _float("float8_e4m3fn", 4, 3, 7, "nan_ones"),
        _float("float8_e5m2", 5, 2, 15, "ieee"),
        _float("float8_e4m3fnuz", 4, 3, 8, "nan_negative_zero"),
        _float("float8_e5m2fnuz", 5, 2, 16, "nan_negative_zero"),
        _float("float6_e2m3fn", 2, 3, 1, "none"),
        _float("float6_e3m2fn", 3, 2, 3, "none"),
        _float("float4_e2m1fn", 2, 1, 1, "none"),
        Format(name="float8_e8m0fnu", kind="scale", bits=8, exponent_bits=8, bias=127, specials="nan_all_ones",
               signed=False),
        *_integers(),
        # Scales of the default NF4: a block with a NaN needs a scale that is NaN.
        Format(name="int8_nan", kind="int", bits=8, specials="nan_minimum"),
        Format(name="mxint8", kind="int", bits=8, fraction_bits=6),
        Format(name="nf4", kind="codebook", bits=4, table=NF4_TABLE),
        Format(name="nf4_torchao", kind="codebook", bits=4, table=NF4_TORCHAO_TABLE),
        # Three and four levels, stretched so that each represents an interval of the same width.
        Format(name="ternary", kind="int", bits=2, specials="unused_minimum", reach=1.5),
        Format(name="stretched2", kind="codebook", bits=2, table=(-1.5, -0.5, 0.5, 1.5), reach=2.0),
        _float("bfloat16", 8, 7, 127, "ieee"),
        _float("float16", 5, 10, 15, "ieee"),
        # float32 with three fraction bits, to which optimizers' moments are rounded before they are stored.
        _float("e8m3", 8, 3, 127, "ieee"),
        *(Format(name=name, kind="codebook", bits=bits, table=table, signed=signed) for name, bits, signed, table in CODEBOOKS),
    ]  # fmt: skip


#: Every format by name: these, and those of `reference.register`.
FORMATS: dict[str, Format] = {record.name: record for record in _formats()}
#: Names of the formats of this file, which every process knows.
BUILT_IN = frozenset(FORMATS)


def format_name(fmt: str | Format, what: str) -> str:
    """The name of a format in `FORMATS`, for a record that names it; ValueError for a record that is not there."""
    if isinstance(fmt, Format):
        if FORMATS.get(fmt.name) != fmt:
            raise ValueError(f"{what} is a format that FORMATS does not have: register({fmt!r}) first, once")
        return fmt.name
    return format_of(fmt).name


def format_of(fmt: str | Format) -> Format:
    """The record of a name; a record passes through. Unknown names raise ValueError with the nearest ones."""
    return fmt if isinstance(fmt, Format) else lookup(fmt, FORMATS, "format")
