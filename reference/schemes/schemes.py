"""Schemes as data: how a tensor is stored.

A `Scheme` says which `Format` the elements have, how their scales are found (`Scale`, and a second one, `outer`, over all
elements or over the scales), whether a zero point exists (`Zero`), and in which order and precision the arithmetic happens.
One quantizer reads these records (`reference.quantize`); a convention of another project is the same record with other
values, under its own name (`reference.schemes.conventions`), never a branch.

Default schemes (no prefix in the name) follow the rules that `Scheme` states; scales have floors, and dequantization stops at
the largest finite value. A block of zeros in `stretched2`, which has none, stores its smallest magnitude, -2**-127.

`register` gives records of one's own a name. For files, and for whatever carries only text, `scheme_fields` and `scheme_from`
convert a record to plain values (numbers, text, lists) and back, with the formats that it needs and that are not built in;
`format_fields` and `format_from` the same of a format alone. `record_of` finds the record of a `Scheme.key` in any process.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import isfinite
from typing import Any, TypeVar

from reference.arrays.namespace import HINTS, choice, lookup
from reference.formats.encode import MODES, OVERFLOWS
from reference.formats.formats import BUILT_IN as BUILT_IN_FORMATS
from reference.formats.formats import FORMATS, Format, format_name, format_of
from reference.schemes.checks import (
    LARGEST_TARGET,
    LEAST_TARGET,
    POWER_RULES,
    POWER_STORAGE,
    check_levels,
    check_registered,
    check_zero,
    default_target,
)

Block = int | tuple[int, int] | str
STATISTICS = ("absmax", "minmax", "minmax_with_zero", "minmax_split", "absmax_elements")
RULES = ("ratio", "ratio_pow2", "ratio_pow2_log2", *POWER_RULES)
FLOORS = ("statistic", "scale", "stored", "zero")
# What the text of a block of the flattened tensor begins with; its size follows.
FLAT = "flat:"
# Storage dtypes of zero points by rule.
ZERO_STORAGE = {"code": ("int8",), "value": ("float32", "bfloat16", "float16")}


def flat_size(block: Block) -> int:
    """The n of "flat:n"; 0 for any other block."""
    return int(block.removeprefix(FLAT)) if isinstance(block, str) and block.startswith(FLAT) else 0


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a block's scale is found.

    With a the statistic of the block and t the target:

    * ``ratio``: a / t, or t / a if stored for encoding. ``ratio_pow2`` rounds that to a power of two, up (down if stored for
      encoding), so that nothing overflows. ``ratio_pow2_log2`` is torchao's exp2(floor(log2(s))) in float32.
    * The power-of-two rules give 2**e. ``floor``: e = floor(log2 a) - floor(log2 t) (OCP MX 1.0, section 6.3). ``ceil``:
      ceil(log2 a) - floor(log2 t). ``rceil``: ceil(log2(a / t)), exactly: the smallest scale that overflows nothing.
      ``even``: as floor, with a first rounded to the element's mantissa bits (or `even_bits`). ``rceil_log2`` is torchao's
      ceil(log2(a / t)) with both steps rounded to float32.
    """

    #: n: blocks of n along the axis; -1: the whole axis; (r, c): c along the axis and r along the last other one;
    #: "tensor": one block; "flat:n": blocks of n of the flattened tensor.
    block: Block
    #: absmax; minmax; minmax_with_zero (the range is widened to hold 0); minmax_split (the larger of -min / -qmin and
    #: max / qmax); absmax_elements (an outer scale's maximum over the elements, not over the scales).
    statistic: str = "absmax"
    #: What the statistic maps onto: 448, 6, 127, 15, ...; 0: the largest that a `Scheme`'s element holds, 2**20 at most.
    target: float = 0.0
    rule: str = "ratio"
    #: Arithmetic of the ratio: "float32", or "input" (every operation rounded to the input's dtype). "float64" divides in
    #: float64 and rounds to float32, which is the correctly rounded float32 quotient.
    compute: str = "float32"
    #: "decode" multiplies a code, "encode" multiplies an element.
    stored: str = "decode"
    #: An encoding scale is t * (1 / a), rounded twice, as PyTorch computes scalar / tensor.
    by_reciprocal: bool = False
    #: ("statistic" | "scale" | "stored" | "zero", smallest value). "scale" applies before the scale is rounded for storage,
    #: "stored" after, and "zero" replaces only a stored zero. The value "tiny" is the smallest normal value of
    #: the input's dtype.
    floor: tuple[str, float | str] | None = None
    #: What an infinite or NaN outer scale becomes; None: NaN stays, infinity is the largest float32 if stored for encoding.
    nonfinite: float | None = None
    #: "float32" or the name of a format.
    storage: str = "float32"
    #: "mean": the mean of the scales is subtracted before they are quantized (outer scales only).
    center: str = "none"
    #: Whether the last block of an axis may be short.
    partial: bool = False
    #: Mantissa bits to which ``even`` rounds the statistic; None: those of the element.
    even_bits: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.storage, Format):
            object.__setattr__(self, "storage", format_name(self.storage, "storage"))
        check_scale(self)

    @property
    def flat_size(self) -> int:
        """Elements of a block of the flattened tensor; 0 for other blocks."""
        return flat_size(self.block)

    @property
    def power_of_two(self) -> bool:
        """Whether every scale is 2**e in e8m0, which is applied by shifting exponents."""
        return self.rule in POWER_RULES


@dataclass(frozen=True, kw_only=True)
class Zero:
    """A zero point.

    ``code``: qmin - rne(min / s), clamped, from the scale (at least its floor) before storage rounding. ``value``: the float
    min + s * (qmin + qmax + 1) / 2 of tinygemm.
    """

    rule: str = "code"
    storage: str = "int8"

    def __post_init__(self) -> None:
        choice(self.rule, ("code", "value"), "zero rule")
        choice(self.storage, ZERO_STORAGE[self.rule], f"the storage of a zero point of rule {self.rule!r}")


def check_scale(record: Scale) -> None:
    """ValueError for a field that means nothing, or fields that contradict each other."""
    choice(record.statistic, STATISTICS, "statistic")
    choice(record.rule, RULES, "rule")
    choice(record.compute, ("float32", "float64", "input"), "compute")
    choice(record.stored, ("decode", "encode"), "stored")
    choice(record.center, ("none", "mean"), "center")
    _check_block(record.block)
    if record.target != 0 and not LEAST_TARGET <= record.target <= LARGEST_TARGET:
        raise ValueError(
            f"target lies between 2**-20 and 2**20, got {record.target!r}; leave it out for the element's largest value"
        )
    fmt = None if record.storage == "float32" else format_of(record.storage)
    if record.rule in POWER_RULES and record.storage != POWER_STORAGE:
        raise ValueError(
            f"rule {record.rule!r} gives powers of two, stored as {POWER_STORAGE}; got storage {record.storage!r}. "
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
    # Integer storage holds scales relative to an outer one, so its floor is on the value before that.
    absolute = fmt is not None and fmt.kind in ("float", "scale")
    if kind in ("stored", "zero") and fmt is not None and absolute and not bool((fmt.values == value).any()):
        raise ValueError(
            f"a floor on the stored scale is a value of its storage {fmt.name}; {value!r} is none"
        )


#: Every scheme by name. `reference.schemes.conventions` fills it when `reference` is imported.
SCHEMES: dict[str, Scheme] = {}
#: Every record ever created, by its key.
RECORDS: dict[str, Scheme] = {}
#: The records that `SCHEMES` has when `reference` is imported, which every process knows.
BUILT_IN: dict[str, Scheme] = {}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a tensor is stored.

    Default rules: the scale is a correctly rounded division; a correctly rounded reciprocal per block multiplies every element,
    then one rounding; powers of two are exact; zeros stay zeros, finite inputs finite; NaN and infinity turn their block NaN.
    Fields beside element and scale are other conventions; values: the documentation's "Arrays, formats and schemes".
    """

    name: str
    #: Name of the element format; its record becomes its name.
    element: str
    scale: Scale
    #: Second level: over all elements (statistic absmax_elements), or over the scale array.
    outer: Scale | None = None
    zero: Zero | None = None
    #: "reciprocal": x * (1 / s); "divide": x / s; "encode": x * S.
    apply: str = "reciprocal"
    #: How an outer scale over elements enters: "decode": block scale (a / t) / g, element reciprocal 1 / (g s);
    #: "reciprocal_first": the same block scale, (1 / g) / s; "folded": Transformer Engine's a * (G * (1 / t)) and
    #: min(1 / (s * (1 / G)), largest float32), with the encoding scale G; "encode": G * (a / t) and x / (s / G).
    outer_order: str = "decode"
    #: "float32" or "input": precision of the arithmetic on elements.
    arithmetic: str = "float32"
    #: "stored" or "exact": whether elements are divided by the scale as stored or before its rounding.
    codes_from: str = "stored"
    rounding: str = "nearest_even"
    overflow: str = "saturate"
    #: "block": NaN or infinity makes the block's scale NaN and its codes `nan_code`; "nan": only NaN does; "element": NaN
    #: makes the scale NaN, its finite elements zero and its NaN elements `nan_code` with their sign; "ieee": arithmetic
    #: decides.
    nan: str = "block"
    #: Code of elements of a NaN block; by default the format's NaN, or 0.
    nan_code: int | None = None
    #: False: an element that is -0 after scaling gets the code of +0; a negative one that rounds to zero keeps its sign.
    negative_zero: bool = True
    #: Power of two that stands in for the smallest e8m0 scale, 2**-127, when elements are scaled; None: itself.
    smallest_exponent: int | None = None
    #: "float32": float32 products, one rounding, finite stays finite; "ieee": the same, overflow gives infinity;
    #: "target": every operation rounded to the output's dtype.
    dequantize: str = "float32"
    #: Where this convention breaks the default rules, in words.
    deviations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "element", format_name(self.element, "element"))
        if self.scale.target == 0:
            object.__setattr__(self, "scale", replace(self.scale, target=default_target(self)))
        check_scheme(self)
        # While SCHEMES is being filled there is nothing to compare with: the name is the key. That of a registered record is
        # not: other processes do not know it.
        known = not SCHEMES or BUILT_IN.get(self.name) == self
        key = self.name if known else json.dumps(scheme_fields(self), separators=(",", ":"))
        object.__setattr__(self, "_key", key)
        RECORDS[key] = self

    @property
    def key(self) -> str:
        """The record as text, by which `record_of` finds it in any process: its name in `SCHEMES`, or all fields as JSON."""
        return self._key  # type: ignore[attr-defined, no-any-return]

    @cached_property
    def format(self) -> Format:
        """The element's record."""
        return FORMATS[self.element]

    @property
    def poison_code(self) -> int:
        """Code of every element of a NaN block."""
        return self.nan_code if self.nan_code is not None else self.format.nan_code or 0

    def __repr__(self) -> str:
        return f"Scheme({self.name})"

    def __str__(self) -> str:
        """The fields that are not the default ones: for people."""
        return _told(self)


def _told(record: Scheme | Scale | Zero) -> str:
    """A record with the fields that differ from their defaults, records within it likewise."""
    told = []
    for one in fields(record):
        value = getattr(record, one.name)
        if value != one.default:
            told.append(f"{one.name}={_told(value) if isinstance(value, (Scale, Zero)) else repr(value)}")
    return f"{type(record).__name__}({', '.join(told)})"


def scheme_fields(scheme: Scheme) -> dict[str, Any]:
    """A record as plain values; "formats" has those that `reference.register` added, likewise, where there are any."""
    scales = (scheme.scale, scheme.outer)
    names = [scheme.element, *(one.storage for one in scales if one is not None)]
    own = [name for name in dict.fromkeys(names) if name in FORMATS and name not in BUILT_IN_FORMATS]
    return {**asdict(scheme), **({"formats": [asdict(FORMATS[name]) for name in own]} if own else {})}


def scheme_of(scheme: str | Scheme) -> Scheme:
    """The record of a name; a record passes through. Unknown names raise ValueError with the nearest ones."""
    return scheme if isinstance(scheme, Scheme) else lookup(scheme, SCHEMES, "scheme")


def _scheme_not_format(name: str) -> str:
    return f"{name} is a scheme; its elements are {SCHEMES[name].format.name}" if name in SCHEMES else ""


def _format_not_scheme(name: str) -> str:
    if name not in FORMATS:
        return ""
    having = [one.name for one in SCHEMES.values() if one.format.name == name and "." not in one.name]
    return f"{name} is a format; schemes with such elements are {', '.join(sorted(having, key=len)[:SHOWN]) or 'none'}"


#: Schemes that an error names.
SHOWN = 3
HINTS.update(format=_scheme_not_format, scheme=_format_not_scheme)


def check_scheme(record: Scheme) -> None:
    """ValueError for a field that means nothing, or fields that contradict each other."""
    if not isinstance(record.name, str) or not record.name or record.name.startswith("{"):
        raise ValueError(
            f"the name of a scheme is text that does not begin with a brace, got {record.name!r}"
        )
    fmt = format_of(record.element)
    if record.nan_code is not None and not 0 <= record.nan_code < 1 << fmt.bits:
        raise ValueError(
            f"nan_code is a code of {fmt.name}, 0 to {(1 << fmt.bits) - 1}, got {record.nan_code!r}"
        )
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
    check_levels(record)
    check_zero(record)
    _check_outer_target(record)


def _check_outer_target(record: Scheme) -> None:
    if record.outer is not None and record.outer.target == 0:
        raise ValueError(
            "an outer scale has a target of its own: over elements the element's largest value times that of the scales' "
            "storage, over scales the largest code"
        )


Record = TypeVar("Record", Format, Scheme)


def register(record: Record) -> Record:
    """Give a format or a scheme its name: functions take it, and configurations, for as long as the process lives.

    record: a `Format`, which schemes may then name, or a `Scheme`; it comes back, so that one line makes and registers it.
    Again with an equal record does nothing. A saved model has the records of its weights with it, and of their formats.
    ValueError where the name is another record's (names are never given anew) or none that a command line takes, and, unless
    `deviations` say so, for targets beyond what elements hold, scales of 8 bits without an outer one, unsigned integers without
    zero points; TypeError for anything else.
    """
    if not isinstance(record, (Format, Scheme)):
        raise TypeError(f"register takes a Format or a Scheme, got {type(record).__name__}: {record!r:.60}")
    table: dict[str, Format] | dict[str, Scheme] = FORMATS if isinstance(record, Format) else SCHEMES
    known = table.get(record.name)
    if known is not None and known != record:
        raise ValueError(
            f"{record.name!r} is the name of another {type(record).__name__.lower()}; give this one a name of its own"
        )
    if known is None:
        if isinstance(record, Scheme):
            check_registered(record)
            RECORDS[record.name] = record
        table[record.name] = record  # type: ignore[assignment]
    return record


def format_fields(fmt: Format) -> dict[str, Any]:
    """A format as plain values."""
    return asdict(fmt)


def format_from(fields: dict[str, Any]) -> Format:
    """The format of these plain values; ValueError or TypeError where they describe none. Lists may stand for tuples."""
    return Format(**{name: _tuples(value) for name, value in fields.items()})


def scheme_from(fields: dict[str, Any]) -> Scheme:
    """The record of these plain values; ValueError or TypeError where they describe none. Lists may stand for tuples.

    Formats that come with it are registered, a name that is taken by another record being a ValueError.
    """
    for one in fields.get("formats", ()):
        register(format_from(one))
    given = {name: _tuples(value) for name, value in fields.items() if name != "formats"}
    for name, record in (("scale", Scale), ("outer", Scale), ("zero", Zero)):
        if given.get(name) is not None:
            given[name] = record(**{key: _tuples(value) for key, value in given[name].items()})
    return Scheme(**given)


def record_of(text: str) -> Scheme:
    """The record of a name or of a `Scheme.key`; ValueError where there is none."""
    if (result := RECORDS.get(text)) is not None:
        return result
    return scheme_from(json.loads(text)) if text.startswith("{") else scheme_of(text)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# The default schemes, and the parts that conventions of other projects share with them.


# Smallest float32 scale of the default schemes: its reciprocal is 2**126, so no product of a finite element overflows.
FLOOR = ("stored", 2.0**-126)
# Smallest outer scale: times the smallest e4m3 scale, 2**-9, it still has a reciprocal.
OUTER_FLOOR = ("stored", 2.0**-112)
OCP_BLOCK = 32
SHORT = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float6_e2m3fn": "e2m3", "float6_e3m2fn": "e3m2"}


def _fp8() -> list[Scheme]:
    blocks: dict[str, Block] = {"tensorwise": "tensor", "rowwise": -1, "1x128": 128, "128x128": (128, 128)}
    schemes = []
    for element, suffix in (("float8_e4m3fn", ""), ("float8_e5m2", "_e5m2")):
        for name, block in blocks.items():
            scale = Scale(block=block, target=FORMATS[element].max, floor=FLOOR, partial=True)
            schemes.append(Scheme(name=f"fp8_{name}{suffix}", element=element, scale=scale))
    return schemes


def mx_name(element: str) -> str:
    """mxfp8_e4m3, mxfp6_e2m3, mxfp4, mxint8: the name of the MX scheme with this element."""
    fmt = FORMATS[element]
    return (
        element
        if fmt.kind == "int"
        else "mxfp" + str(fmt.bits) + ("_" + SHORT[element] if element in SHORT else "")
    )


def mx_scheme(element: str, rule: str = "floor", suffix: str = "") -> Scheme:
    """An OCP MX scheme: blocks of 32, e8m0 scales."""
    scale = Scale(block=OCP_BLOCK, target=FORMATS[element].max, rule=rule, storage="float8_e8m0fnu")
    return Scheme(name=mx_name(element) + suffix, element=element, scale=scale)


MX_ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn")


def _mx() -> list[Scheme]:
    floor = [mx_scheme(element) for element in (*MX_ELEMENTS, "mxint8")]
    return floor + [mx_scheme(element, "rceil", "_rceil") for element in MX_ELEMENTS]


def _nvfp4() -> Scheme:
    # Unlike torchao, subnormal e4m3 scales are used: blocks far below the tensor's maximum keep their precision.
    scale = Scale(block=16, target=6.0, floor=("stored", 2.0**-9), storage="float8_e4m3fn")
    outer = Scale(block="tensor", statistic="absmax_elements", target=6.0 * 448.0, floor=OUTER_FLOOR)
    return Scheme(name="nvfp4", element="float4_e2m1fn", scale=scale, outer=outer)


def _integer(name: str, bits: int, block: Block, asymmetric: bool) -> Scheme:
    qmax = FORMATS[f"int{bits}"].max
    if not asymmetric:
        return Scheme(name=name, element=f"int{bits}", scale=Scale(block=block, target=qmax, floor=FLOOR))
    scale = Scale(block=block, statistic="minmax_with_zero", target=2.0**bits - 1, floor=FLOOR)
    return Scheme(name=name, element=f"int{bits}", scale=scale, zero=Zero())


def _integers() -> list[Scheme]:
    schemes = [
        _integer("int8_tensorwise", 8, "tensor", False),
        _integer("int8_rowwise", 8, -1, False),
        _integer("int8_rowwise_asymmetric", 8, -1, True),
    ]
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128, 256):
            for suffix in ("", "_asymmetric"):
                schemes.append(_integer(f"int{bits}_g{group}{suffix}", bits, group, bool(suffix)))
    return schemes


def stretched_scheme(element: str, block: Block, name: str) -> Scheme:
    """ParetoQ's stretched levels (arXiv 2502.02631): a block's largest magnitude is the end of the outermost interval."""
    scale = Scale(block=block, target=FORMATS[element].limit, floor=FLOOR)
    return Scheme(name=name, element=element, scale=scale)


def _stretched() -> list[Scheme]:
    blocks: dict[str, Block] = {"rowwise": -1, "g32": 32}
    elements = ("ternary", "stretched2")
    return [stretched_scheme(e, block, f"{e}_{name}") for e in elements for name, block in blocks.items()]


def _nf4() -> Scheme:
    scale = Scale(block="flat:64", target=1.0, floor=FLOOR, storage="int8_nan", partial=True)
    outer = Scale(
        block=256, target=127.0, stored="encode", center="mean", floor=("statistic", 2.0**-112), partial=True
    )
    return Scheme(name="nf4", element="nf4", scale=scale, outer=outer, codes_from="exact")


def default_schemes() -> list[Scheme]:
    """Every scheme without a prefix."""
    return [*_fp8(), *_mx(), _nvfp4(), *_integers(), *_stretched(), _nf4()]


__all__ = [
    "FLOOR", "MX_ELEMENTS", "POWER_RULES", "RECORDS", "SCHEMES", "Block", "Scale", "Scheme", "Zero", "default_schemes",
    "flat_size", "format_fields", "format_from", "mx_name", "mx_scheme", "record_of", "register", "scheme_fields",
    "scheme_from", "scheme_of", "stretched_scheme",
]  # fmt: skip
