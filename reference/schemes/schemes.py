"""Schemes as data: how a tensor is stored.

A `Scheme` says which `Format` the elements have, how their scales are found (`Scale`, and a second one, `outer`, over all
elements or over the scales), whether a zero point exists (`Zero`), and in which order and precision the arithmetic happens.
One quantizer reads these records (`reference.quantize`); a convention of another project is the same record with other
values, under its own name (`reference.schemes.conventions`), never a branch.

Default schemes (no prefix in the name) follow five rules. The scale is a correctly rounded division; one correctly rounded
reciprocal per block multiplies every element, followed by one rounding; powers of two are applied exactly; a block of zeros
stores zeros (in `stretched2`, which has none, its smallest magnitude, -2**-127); and a finite input never becomes NaN or
infinity: scales have a floor below which they do not fall, and dequantization stops at the largest finite value. A NaN or an
infinity turns its block NaN and no other.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from reference.arrays.errors import choice, lookup
from reference.formats.formats import BUILT_IN as BUILT_IN_FORMATS
from reference.formats.formats import FORMATS, Format, format_name, format_of
from reference.formats.rounding import MODES, OVERFLOWS
from reference.schemes.scale import POWER_RULES, Block, Scale, Zero, flat_size

#: Every scheme by name. `reference.schemes.all_schemes` fills it when `reference` is imported.
SCHEMES: dict[str, Scheme] = {}
#: Every record ever created, by its key.
RECORDS: dict[str, Scheme] = {}
#: The records that `SCHEMES` has when `reference` is imported, which every process knows.
BUILT_IN: dict[str, Scheme] = {}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a tensor is stored; see the module text for the default rules and each field for other conventions."""

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
        check_scheme(self)
        # While SCHEMES is being filled there is nothing to compare with: the name is the key. That of a registered record is
        # not: other processes do not know it.
        known = not SCHEMES or BUILT_IN.get(self.name) == self
        key = self.name if known else json.dumps(scheme_fields(self), separators=(",", ":"))
        object.__setattr__(self, "_key", key)
        RECORDS[key] = self

    @property
    def key(self) -> str:
        """The record as text: its name in `SCHEMES`, or, for a record that is not there, all fields as JSON.

        `reference.schemes.record_text.record_of` finds the record again, in any process.
        """
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


def scheme_fields(scheme: Scheme) -> dict[str, Any]:
    """A record as plain values; "formats" has those that `reference.register` added, as plain values too, where there are
    any.
    """
    scales = (scheme.scale, scheme.outer)
    names = [scheme.element, *(one.storage for one in scales if one is not None)]
    own = [name for name in dict.fromkeys(names) if name in FORMATS and name not in BUILT_IN_FORMATS]
    return {**asdict(scheme), **({"formats": [asdict(FORMATS[name]) for name in own]} if own else {})}


def scheme_of(scheme: str | Scheme) -> Scheme:
    """The record of a name; a record passes through. Unknown names raise ValueError with the nearest ones."""
    return scheme if isinstance(scheme, Scheme) else lookup(scheme, SCHEMES, "scheme")


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
            f"zero points are stored as int8 and must hold {low}..{high} of {fmt.name}; use a signed element"
        )


__all__ = [
    "RECORDS",
    "SCHEMES",
    "Block",
    "Scale",
    "Scheme",
    "Zero",
    "flat_size",
    "scheme_fields",
    "scheme_of",
]
