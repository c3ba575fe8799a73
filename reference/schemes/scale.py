"""How a block's scale and zero point are found, as records: `Scale` and `Zero`, and the rules that their fields satisfy."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from reference.arrays.errors import choice
from reference.formats.formats import Format, format_name, format_of

Block = int | tuple[int, int] | str
STATISTICS = ("absmax", "minmax", "minmax_with_zero", "minmax_split", "absmax_elements")
POWER_RULES = ("floor", "ceil", "rceil", "rceil_log2", "even")
RULES = ("ratio", "ratio_pow2", "ratio_pow2_log2", *POWER_RULES)
FLOORS = ("statistic", "scale", "stored", "zero")
POWER_STORAGE = "float8_e8m0fnu"
# What the text of a block of the flattened tensor begins with; its size follows.
FLAT = "flat:"
# Storage dtypes of zero points by rule.
ZERO_STORAGE = {"code": ("int8",), "value": ("float32", "bfloat16", "float16")}
# Targets outside would let the ratio of two float32 values overflow or vanish.
LEAST_TARGET, LARGEST_TARGET = 2.0**-20, 2.0**20


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
    if not LEAST_TARGET <= record.target <= LARGEST_TARGET:
        raise ValueError(
            f"target lies between 2**-20 and 2**20, got {record.target!r}; use the element's largest value"
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


__all__ = ["POWER_RULES", "Block", "Scale", "Zero", "flat_size"]
