"""Schemes as data: how a tensor is stored.

A `Scheme` says which `Format` the elements have, how their scales are found (`Scale`, and a second one, `outer`, over all
elements or over the scales), whether a zero point exists (`Zero`), and in which order and precision the arithmetic happens.
One quantizer reads these records (`reference.quantize.scales`, `reference.quantize`); a convention of another project is
the same record with other values, under its own name (`reference.schemes.conventions`), never a branch.

House schemes (no prefix in the name) follow five rules. The scale is a correctly rounded division; one correctly rounded
reciprocal per block multiplies every element, followed by one rounding; powers of two are applied exactly; a block of zeros
stores zeros (in `stretched2`, which has none, its smallest number, -2**-127); and a finite input never becomes NaN or infinity:
scales have a floor below which they do not fall, and dequantization stops at the largest finite value. A NaN or an infinity
makes its own block NaN and touches no other.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property

from reference.arrays.errors import choice, lookup
from reference.formats.formats import FORMATS, Format
from reference.schemes.record_checks import FLAT, POWER_RULES, ZERO_STORAGE, check_scale, check_scheme

Block = int | tuple[int, int] | str
#: Every record ever made, by its key.
RECORDS: dict[str, Scheme] = {}


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
    #: What the statistic maps onto: 448, 6, 127, 15, ...
    target: float
    rule: str = "ratio"
    #: Arithmetic of the ratio: "float32", or "input" (every operation rounded to the input's own dtype). "float64" divides in
    #: float64 and rounds to float32, which is the correctly rounded float32 quotient.
    compute: str = "float32"
    #: "decode" multiplies a code, "encode" multiplies an element.
    stored: str = "decode"
    #: An encoding scale is t * (1 / a), rounded twice, as PyTorch computes number / tensor.
    by_reciprocal: bool = False
    #: ("statistic" | "scale" | "stored" | "zero", smallest value). "scale" applies before the scale is rounded for storage,
    #: "stored" after, and "zero" replaces only a stored zero. The value "tiny" stands for the smallest normal number of
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


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a tensor is stored; see the module text for what the house requires and each field for what others do."""

    name: str
    #: Name of the element format.
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
    #: What this convention does that the house forbids, in words.
    deviations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_scheme(self)
        # While the records below are made, there is nothing yet to compare them with: their names are theirs.
        known = not SCHEMES or SCHEMES.get(self.name) == self
        key = self.name if known else json.dumps(asdict(self), separators=(",", ":"))
        object.__setattr__(self, "_key", key)
        RECORDS[key] = self

    @property
    def key(self) -> str:
        """What stands for the record where only text can travel: its name, or all fields of a record of one's own as JSON.

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


# Smallest float32 scale of the house: its reciprocal is 2**126, so no product of a finite element overflows.
FLOOR = ("stored", 2.0**-126)
# Smallest outer scale: times the smallest e4m3 scale, 2**-9, it still has a reciprocal.
OUTER_FLOOR = ("stored", 2.0**-112)
OCP_BLOCK = 32
SHORT = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float6_e2m3fn": "e2m3", "float6_e3m2fn": "e3m2"}


def _fp8() -> list[Scheme]:
    blocks: dict[str, Block] = {"tensorwise": "tensor", "rowwise": -1, "1x128": 128, "128x128": (128, 128)}
    made = []
    for element, suffix in (("float8_e4m3fn", ""), ("float8_e5m2", "_e5m2")):
        for name, block in blocks.items():
            scale = Scale(block=block, target=FORMATS[element].max, floor=FLOOR, partial=True)
            made.append(Scheme(name=f"fp8_{name}{suffix}", element=element, scale=scale))
    return made


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
    made = [
        _integer("int8_tensorwise", 8, "tensor", False),
        _integer("int8_rowwise", 8, -1, False),
        _integer("int8_rowwise_asymmetric", 8, -1, True),
    ]
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128, 256):
            for suffix in ("", "_asymmetric"):
                made.append(_integer(f"int{bits}_g{group}{suffix}", bits, group, bool(suffix)))
    return made


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


def _schemes() -> dict[str, Scheme]:
    from reference.schemes.conventions import conventions

    house = [*_fp8(), *_mx(), _nvfp4(), *_integers(), *_stretched(), _nf4()]
    return {scheme.name: scheme for scheme in [*house, *conventions()]}


SCHEMES: dict[str, Scheme] = {}


def load_schemes() -> dict[str, Scheme]:
    """Fill SCHEMES once; conventions are built from the records above, so they come second."""
    if not SCHEMES:
        SCHEMES.update(_schemes())
        # A record that only served to make another may have had a name of these.
        RECORDS.update(SCHEMES)
    return SCHEMES


def scheme_of(scheme: str | Scheme) -> Scheme:
    """The record of a name; a record passes through. Unknown names raise ValueError with the nearest ones."""
    return scheme if isinstance(scheme, Scheme) else lookup(scheme, load_schemes(), "scheme")


__all__ = [
    "MX_ELEMENTS",
    "SCHEMES",
    "Block",
    "Scale",
    "Scheme",
    "Zero",
    "load_schemes",
    "mx_name",
    "mx_scheme",
    "scheme_of",
    "stretched_scheme",
]
