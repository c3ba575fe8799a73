"""`choose_scales`: the scales and zero points of a tensor, as its scheme's record states; and scales that the caller gives.

Everything is computed on float32 bit patterns with correctly rounded operations (`reference.arrays.softfloat`), or, where
a record says so, with every result rounded again to the input's dtype.

Power-of-two scales (e8m0) come from a block's largest magnitude, by its exponent field and never by a logarithm:
floor(log2(x)) computed in float32 is wrong one unit below most powers of two; the exponent field is exact.

Maxima and minima of blocks are exact, on bit patterns, and sums are in a stated order. The absolute value of a float32 orders
like its bit pattern as an integer, and a NaN is larger than infinity there, so an integer maximum is exact, preserves
subnormals and reports NaN. Minima and maxima with sign use an order-preserving key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reference.arrays.bridges import bridged
from reference.arrays.namespace import Array, DTypeLike, Namespace, float_input, namespace_of, spelled
from reference.arrays.softfloat import (
    INFINITY,
    LARGEST,
    MAGNITUDE,
    MANTISSA,
    NAN,
    SIGN,
    add,
    bits_of,
    ceil_log2_float32,
    divide,
    float32_bits,
    floor_log2_float32,
    is_nan,
    normalized,
    order_key,
    subtract,
)
from reference.formats.encode import Arithmetic
from reference.formats.formats import FORMATS, Format
from reference.formats.storage import load, storage_dtype, store, store_codes
from reference.quantize.blocks import Blocks
from reference.quantize.stored import Scales, tiled_size
from reference.schemes.schemes import Scale, Scheme, scheme_of


@dataclass(frozen=True)
class Chosen:
    """Scales inside the quantizer, as float32 bit patterns of shape (..., blocks, 1)."""

    #: As `quantize` returns them.
    stored: Scales
    #: The block scale as stored, and before it was rounded for storage.
    scale: Array
    exact: Array
    #: The outer scale over all elements, as stored, or None.
    outer: Array | None
    #: Zero point: int32 codes (rule code) or bit patterns (rule value), or None.
    zero: Array | None


@bridged
def choose_scales(x: Any, scheme: str | Scheme, *, axis: int = -1) -> Scales:
    """Scales of x for a scheme.

    x: float32, bfloat16, float16 (float64 is rounded to float32 first), any shape that the scheme's blocks divide; NumPy, JAX
    or torch. axis: the axis along which blocks run (the contraction axis of a matmul). Raises TypeError for other dtypes,
    ValueError for an unknown scheme or a shape that the blocks do not divide.
    """
    scheme = scheme_of(scheme)
    ns, x, name = float_input(x, "choose_scales")
    blocks = Blocks.of(ns.shape(x), scheme.scale, axis)
    split = blocks.split(ns, float32_bits(ns, x, name))
    return choose(ns, split, blocks, scheme, name, None).stored


def choose(
    ns: Namespace, split: Array, blocks: Blocks, scheme: Scheme, dtype: str, given: Scales | None
) -> Chosen:
    """The scales of blocks; `given.outer`, if any, is used as it is."""
    record = scheme.scale
    unit = Arithmetic(ns, dtype if record.compute == "input" else "float32")
    span = _range(ns, split, record)
    outer, stored_outer = _element_outer(ns, split, scheme, dtype, given)
    if record.power_of_two:
        codes = power_codes(ns, span.absmax, record, scheme.format, scheme.nan == "block")
        stored = store_codes(ns, codes, record.storage)
        scale = load(ns, stored, record.storage)
        return Chosen(Scales(blocks.expose(stored, ns)), scale, scale, None, None)
    exact = _ratio(ns, span, scheme, unit, outer, dtype)
    if scheme.outer is not None and outer is None:
        return second_level(ns, exact, blocks, scheme, dtype)
    stored = store(ns, _floor(ns, exact, record, "scale", dtype), record.storage)
    scale = floored(ns, load(ns, stored, record.storage), record, dtype)
    stored = store(ns, scale, record.storage)
    zero, stored_zero = _zero_point(ns, span, exact, scheme, unit, dtype)
    exposed = Scales(
        blocks.expose(stored, ns),
        stored_outer,
        None if stored_zero is None else blocks.expose(stored_zero, ns),
    )
    return Chosen(exposed, scale, exact, outer, zero)


def _range(ns: Namespace, split: Array, record: Scale) -> Range:
    if record.statistic == "absmax":
        largest = absmax(ns, split)
        return Range(largest, largest, largest)
    span = value_range(ns, split)
    return span if record.statistic == "minmax" else with_zero(ns, span)


def _element_outer(
    ns: Namespace, split: Array, scheme: Scheme, dtype: str, given: Scales | None
) -> tuple[Array | None, Array | None]:
    """The scale over all elements: (bit pattern of shape (1,), stored 0-d array)."""
    record = scheme.outer
    if record is None or record.statistic != "absmax_elements":
        return None, None
    if given is not None and given.outer is not None:
        return load(ns, given.outer, record.storage).reshape((1,)), given.outer
    flat = split.reshape((-1,))
    flat = flat if ns.shape(flat)[0] else ns.full((1,), 0, "int32", split)
    largest = absmax(ns, flat, finite_only=scheme.nan == "block")
    unit = Arithmetic(ns, dtype if record.compute == "input" else "float32")
    bits = _plain_ratio(ns, Range(largest, largest, largest), record, unit, scheme)
    if record.nonfinite is not None:
        bits = ns.where(bits >= INFINITY, bits_of(record.nonfinite), bits)
    # An encoding scale of a tiny tensor stays finite (Transformer Engine, compressed-tensors).
    bits = ns.where(bits == INFINITY, LARGEST, bits) if record.stored == "encode" else bits
    bits = floored(ns, bits, record, dtype)
    return bits, store(ns, bits, record.storage).reshape(())


def _ratio(
    ns: Namespace, span: Range, scheme: Scheme, unit: Arithmetic, outer: Array | None, dtype: str
) -> Array:
    """The block scale before storage rounding."""
    record = scheme.scale
    if scheme.outer is not None and outer is not None and scheme.outer_order == "folded":
        multiplier = unit.multiply(
            outer, unit.divide(unit.constant(1.0, outer), unit.constant(record.target, outer))
        )
        return _finite(ns, unit.multiply(span.absmax, multiplier))
    bits = _plain_ratio(ns, span, record, unit, scheme, dtype)
    if outer is None:
        return bits
    wide = Arithmetic(ns, "float32")
    return wide.multiply(outer, bits) if scheme.outer_order == "encode" else wide.divide(bits, outer)


def _plain_ratio(
    ns: Namespace, span: Range, record: Scale, unit: Arithmetic, scheme: Scheme, dtype: str = "float32"
) -> Array:
    statistic = _statistic(ns, span, record, unit, scheme)
    poisoned = span.absmax >= INFINITY if scheme.nan == "block" else is_nan(span.absmax)
    statistic = _floor(ns, statistic, record, "statistic", dtype)
    target = unit.constant(record.target, statistic)
    if record.statistic == "minmax_split":
        bits = statistic
    elif record.stored == "encode":
        twice = record.by_reciprocal
        bits = unit.multiply(unit.reciprocal(statistic), target) if twice else unit.divide(target, statistic)
        bits = _floor_quotient(ns, bits, statistic, record)
    else:
        bits = unit.divide(statistic, target)
    bits = ratio_to_power_of_two(ns, bits, record)
    return ns.where(poisoned, NAN, bits)


def _floor_quotient(ns: Namespace, bits: Array, statistic: Array, record: Scale) -> Array:
    """target / floor where the statistic was at its floor: that quotient is rounded once from the exact decimal floor."""
    if record.floor is None or record.floor[0] != "statistic":
        return bits
    smallest = float(record.floor[1])
    return ns.where(statistic == bits_of(smallest), bits_of(record.target / smallest), bits)


def _statistic(ns: Namespace, span: Range, record: Scale, unit: Arithmetic, scheme: Scheme) -> Array:
    if record.statistic in ("absmax", "absmax_elements"):
        return span.absmax
    if record.statistic == "minmax_split":
        low = unit.divide(span.low, unit.constant(scheme.format.min, span.low))
        high = unit.divide(span.high, unit.constant(record.target, span.high))
        # Both are non-negative, so their bit patterns order as they do.
        return ns.maximum(low & MAGNITUDE, high & MAGNITUDE)
    width = unit.subtract(span.high, span.low)
    return _finite(ns, width) if scheme.nan == "block" else width


def _finite(ns: Namespace, bits: Array) -> Array:
    """+infinity becomes the largest finite float32."""
    return ns.where(bits == INFINITY, LARGEST, bits)


def _floor(ns: Namespace, bits: Array, record: Scale, kind: str, dtype: str) -> Array:
    """max(bits, floor) for non-negative bit patterns; NaN stays NaN (its pattern is the largest)."""
    if record.floor is None or record.floor[0] != kind:
        return bits
    return ns.maximum(bits, bits_of(floor_value(record.floor[1], dtype)))


def floor_value(value: float | str, dtype: str) -> float:
    """A floor as a float: "tiny" and "eps" are those of the input's dtype."""
    if not isinstance(value, str):
        return value
    fmt = FORMATS.get(dtype)
    if fmt is None:
        return {"tiny": 2.0**-126, "eps": 2.0**-23}[value]
    return {"tiny": fmt.smallest_normal, "eps": fmt.epsilon}[value]


def scale_groups(blocks: Blocks, outer: Scale, scheme: Scheme) -> Blocks:
    """Blocks of a flat scale array; ValueError in terms of the tensor where the second level does not divide them."""
    try:
        return Blocks.of(blocks.scale_shape, outer, 0)
    except ValueError as error:
        raise ValueError(
            f"scheme {scheme.name}: a tensor of shape {blocks.shape} has {blocks.scale_shape[0]} scales, and its second "
            f"level takes them in full blocks of {outer.block}; pad the tensor, or use nf4, which allows a short last block"
        ) from error


def rounds_scales_to_float16(scheme: Scheme, dtype: DTypeLike) -> bool:
    """Whether scales of a tensor of this dtype are rounded to float16 and kept so; no zero points, one level of scales."""
    scale = scheme.scale
    plain = scheme.outer is None and scheme.zero is None and scale.stored == "decode"
    return plain and scale.compute == "input" and scale.storage == "float32" and spelled(dtype) == "float16"


def floored(ns: Namespace, bits: Array, record: Scale, dtype: str) -> Array:
    """Non-negative float32 patterns raised to the record's floor on stored scales."""
    if record.floor is not None and record.floor[0] == "zero":
        return ns.where(bits == 0, bits_of(floor_value(record.floor[1], dtype)), bits)
    return _floor(ns, bits, record, "stored", dtype)


def _zero_point(
    ns: Namespace, span: Range, exact: Array, scheme: Scheme, unit: Arithmetic, dtype: str
) -> tuple[Array | None, Array | None]:
    if scheme.zero is None:
        return None, None
    low, high = scheme.format.integer_range
    scale = _floor(ns, exact, scheme.scale, "scale", dtype)
    scale = _floor(ns, scale, scheme.scale, "stored", dtype)
    if scheme.zero.rule == "value":
        middle = unit.constant((low + high + 1) / 2, scale)
        bits = unit.add(span.low, unit.multiply(scale, middle))
        stored = store(ns, bits, scheme.zero.storage)
        return load(ns, stored, scheme.zero.storage), stored
    steps = unit.divide(span.low, scale)
    codes = ns.minimum(ns.maximum(low - unit.round_integer(steps), low), high)
    codes = ns.where(is_nan(steps), 0, codes)
    return codes, store_codes(ns, codes & 0xFF, scheme.zero.storage)


def second_level(ns: Namespace, exact: Array, blocks: Blocks, scheme: Scheme, dtype: str) -> Chosen:
    """Scales quantized in blocks, about their mean (NF4's double quantization)."""
    record, outer = scheme.scale, scheme.outer
    if outer is None:
        raise ValueError(f"scheme {scheme.name} has no outer scale")
    unit = Arithmetic(ns, dtype if outer.compute == "input" else "float32")
    values = floored(ns, exact, record, dtype).reshape((-1,))
    center = unit.round(mean(ns, values, finite_only=scheme.nan == "block"))
    shifted = unit.round(centered(ns, values, center))
    groups = scale_groups(blocks, outer, scheme)
    split = groups.split(ns, shifted)
    largest = absmax(ns, split, finite_only=scheme.nan == "block")
    bits = _plain_ratio(ns, Range(largest, largest, largest), outer, unit, scheme, dtype)
    product = unit.multiply(split, bits)
    codes = _scale_codes(ns, unit, product, record)
    stored = store_codes(ns, groups.join(ns, codes), record.storage)
    scale = double_scale(ns, stored, bits, center, groups, scheme, "float32")
    stored_scales = Scales(
        stored.reshape(blocks.scale_shape),
        groups.expose(ns.bitcast(bits, "float32"), ns),
        ns.bitcast(center, "float32").reshape(()),
    )
    return Chosen(stored_scales, scale.reshape(ns.shape(exact)), values.reshape(ns.shape(exact)), None, None)


def _scale_codes(ns: Namespace, unit: Arithmetic, product: Array, record: Scale) -> Array:
    fmt = FORMATS[record.storage]
    low, high = fmt.integer_range
    integer = ns.minimum(ns.maximum(unit.round_integer(product), low), high)
    return ns.where(is_nan(product), fmt.nan_code or 0, integer & 0xFF)


def double_scale(
    ns: Namespace, stored: Array, outer: Array, center: Array, groups: Blocks, scheme: Scheme, dtype: str
) -> Array:
    """q / G + mean as float32 bit patterns (n,), each step rounded to `dtype`; the NaN code of the storage gives NaN."""
    unit = Arithmetic(ns, dtype)
    split = groups.split(ns, load(ns, stored.reshape((-1,)), scheme.scale.storage))
    values = groups.join(ns, unit.divide(split, outer))
    total = unit.add(values, center)
    # A scale that was rounded up may lie beyond the largest float32.
    return _finite(ns, total) if scheme.dequantize == "float32" else total


def unpack_zero(ns: Namespace, stored: Array, scheme: Scheme) -> Array | None:
    """Kept zero points as int32 codes (signed as the element is) or bit patterns."""
    if scheme.zero is None or stored is None:
        return None
    if scheme.zero.rule == "value":
        return load(ns, stored, scheme.zero.storage)
    return ns.astype(stored, "int32")


#: dtype and shape of a stored array; None where there is none.
Part = tuple[str, tuple[int, ...]] | None


def given_scales(
    ns: Namespace, given: Scales | None, blocks: Blocks, scheme: Scheme, dtype: str = "float32"
) -> Chosen:
    """Stored scales as float32 bit patterns of shape (..., blocks, 1); ValueError where there are none."""
    if given is None:
        raise ValueError(f"scheme {scheme.name} needs its scales; see choose_scales")
    record = scheme.scale
    if scheme.outer is not None and scheme.outer.statistic != "absmax_elements":
        return _given_double(ns, given, blocks, scheme, dtype)
    scale = blocks.accept(load(ns, given.scale, record.storage), ns)
    outer = None if scheme.outer is None else load(ns, given.outer, scheme.outer.storage).reshape((1,))
    zero = unpack_zero(ns, given.zero, scheme)
    return Chosen(given, scale, scale, outer, None if zero is None else blocks.accept(zero, ns))


def _given_double(ns: Namespace, given: Scales, blocks: Blocks, scheme: Scheme, dtype: str) -> Chosen:
    outer = scheme.outer
    if outer is None:
        raise ValueError(f"scheme {scheme.name} has no outer scale")
    groups = scale_groups(blocks, outer, scheme)
    bits = groups.accept(load(ns, given.outer, "float32"), ns)
    center = load(ns, given.zero, "float32").reshape((1,))
    scale = double_scale(ns, given.scale, bits, center, groups, scheme, dtype)
    scale = scale.reshape((*blocks.scale_shape, 1))
    return Chosen(given, scale, scale, None, None)


def usable(ns: Namespace, chosen: Chosen, scheme: Scheme, dtype: str) -> Chosen:
    """Given scales raised to the floors of a default scheme, for dividing x of this dtype: a scale of 0 gives no NaN then.

    A NaN or infinite scale turns its block NaN; a negative one is replaced by the floor. Only codes are computed with these:
    `stored` has the scales as given, by which `dequantize` multiplies. Other conventions and powers of two are unchanged.
    """
    if scheme.nan != "block" or scheme.scale.power_of_two:
        return chosen
    outer = chosen.outer
    if outer is not None and scheme.outer is not None:
        outer = floored(ns, outer, scheme.outer, dtype)
    return replace(chosen, scale=floored(ns, chosen.scale, scheme.scale, dtype), outer=outer)


def check_scales(ns: Namespace, scales: Any, scheme: Scheme, blocks: Blocks) -> Scales | None:
    """`scales` as a complete `Scales` (or one with only an outer level), or None; ValueError where it does not fit."""
    if scales is None:
        return None
    if not isinstance(scales, Scales) and not hasattr(scales, "shape"):
        raise TypeError(f"scales is a Scales or an array, got {type(scales).__name__}; see choose_scales")
    given = scales if isinstance(scales, Scales) else Scales(scales)
    only_outer = given.scale is None and given.outer is not None and not _is_double(scheme)
    for part, want in stored_parts(scheme, blocks).items():
        want = None if only_outer and part != "outer" else want
        _check_part(ns, getattr(given, part), want, part, scheme, "x's")
    return given


def check_stored(ns: Namespace, stored: Any, scheme: Scheme, blocks: Blocks, tiled: bool) -> None:
    """ValueError unless `stored` (a `Scales` or `Quantized`) has every scale as `quantize` stores it."""
    expected = stored_parts(scheme, blocks)
    if tiled:
        rows, columns = blocks.scale_shape
        expected["scale"] = ("uint8", (tiled_size((rows, columns)),))
    for part, want in expected.items():
        _check_part(ns, getattr(stored, part), want, part, scheme, "the codes'")


def _is_double(scheme: Scheme) -> bool:
    return scheme.outer is not None and scheme.outer.statistic != "absmax_elements"


def stored_parts(scheme: Scheme, blocks: Blocks) -> dict[str, Part]:
    """dtype and shape of scale, outer scale and zero point as `quantize` stores them for a tensor in these blocks."""
    double = _is_double(scheme)
    groups = scale_groups(blocks, scheme.outer, scheme).scale_shape if double and scheme.outer else ()
    zero: Part = ("float32", ()) if double else None
    if scheme.zero is not None:
        zero = (storage_dtype(scheme.zero.storage), blocks.scale_shape)
    return {
        "scale": (storage_dtype(scheme.scale.storage), blocks.scale_shape),
        "outer": None if scheme.outer is None else ("float32", groups),
        "zero": zero,
    }


def _check_part(ns: Namespace, got: Any, want: Part, part: str, scheme: Scheme, like: str) -> None:
    """like: whose library the array has to be of."""
    rule = "none" if want is None else f"{want[0]} of shape {want[1]}"
    if got is None and rule == "none":
        return
    if got is None or rule == "none" or not hasattr(got, "dtype") or namespace_of(got) is not ns:
        given = "none" if got is None else f"a {type(got).__name__}"
        raise ValueError(
            f"scheme {scheme.name} takes {part} = {rule} in {like} library, got {given}; see choose_scales"
        )
    have = f"{ns.dtype_name(got)} of shape {ns.shape(got)}"
    # NumPy's integers among lengths are written otherwise.
    if have != rule and (ns.dtype_name(got), ns.shape(got)) != want:
        raise ValueError(f"scheme {scheme.name} takes {part} = {rule}, got {have}; see choose_scales")


class Range(NamedTuple):
    """float32 bit patterns (int32) of shape (..., blocks, 1): largest magnitude, least and greatest value of each block."""

    absmax: Array
    low: Array
    high: Array


def absmax(ns: Namespace, blocks: Array, *, finite_only: bool = False) -> Array:
    """Largest magnitude of each block; with finite_only NaN and infinity count as 0."""
    magnitude = blocks & MAGNITUDE
    if finite_only:
        magnitude = ns.where(magnitude < INFINITY, magnitude, 0)
    return ns.reduce_max(magnitude, -1)


def value_range(ns: Namespace, blocks: Array) -> Range:
    """Magnitude, minimum and maximum; a NaN in the block shows in `absmax` and both others are NaN then."""
    largest = absmax(ns, blocks)
    keys = order_key(ns, blocks)
    nan = largest > INFINITY
    low = ns.where(nan, NAN, order_key(ns, ns.reduce_min(keys, -1)))
    high = ns.where(nan, NAN, order_key(ns, ns.reduce_max(keys, -1)))
    return Range(largest, low, high)


def with_zero(ns: Namespace, span: Range) -> Range:
    """The range widened to hold zero (as +0); NaN stays."""
    nan = span.absmax > INFINITY
    low = ns.where(nan, NAN, ns.where(span.low < 0, span.low, 0))
    high = ns.where(nan, NAN, ns.where(span.high < 0, 0, span.high))
    # A lone -0 is no minimum below zero.
    return Range(span.absmax, ns.where(low == SIGN, 0, low), high)


def mean(ns: Namespace, values: Array, *, finite_only: bool) -> Array:
    """Mean of non-negative float32 bit patterns (n,), as shape (1,).

    The order of addition is part of the rule: adjacent pairs are averaged, in a binary tree over n filled up with zeros to
    a power of two p; averaging cannot overflow. The average times p / n is the mean, rounded once.
    """
    if finite_only:
        values = ns.where((values & MAGNITUDE) < INFINITY, values, 0)
    count = ns.shape(values)[0]
    filled = 1
    while filled < count:
        filled *= 2
    if filled > count:
        values = ns.concatenate([values, ns.full((filled - count,), 0, "int32", values)], 0)
    values = ns.combine_pairs(values, lambda a, b: add(ns, _half(ns, a), _half(ns, b)))
    return divide(ns, values, _constant(ns, count / filled, values))


def _half(ns: Namespace, values: Array) -> Array:
    """values / 2 of non-negative float32 bit patterns, rounded to nearest even; infinity and NaN stay."""
    # Below 2**-125 a bit pattern counts units of 2**-149, and so does its half.
    subnormal = (values + ((values >> 1) & 1)) >> 1
    normal = ns.where(values < INFINITY, values - 0x00800000, values)
    return ns.where(values < 0x01000000, subnormal, normal)


def _constant(ns: Namespace, value: float, like: Array) -> Array:
    return ns.full((1,), bits_of(value), "int32", like)


def centered(ns: Namespace, values: Array, center: Array) -> Array:
    """values - center."""
    return subtract(ns, values, center)


def tree_sum(ns: Namespace, bits: Array) -> Array:
    """Sum over the last axis (keepdims) of float32 patterns: adjacent pairs, in a tree filled up with zeros."""
    length = ns.shape(bits)[-1]
    size = 1
    while size < length:
        size *= 2
    if size > length:
        filler = ns.full((*ns.shape(bits)[:-1], size - length), 0, "int32", bits)
        bits = ns.concatenate([bits, filler], -1)
    while size > 1:
        bits = add(ns, bits[..., 0::2], bits[..., 1::2])
        size //= 2
    return bits


BIAS = 127
NAN_CODE = 255
LARGEST_CODE = 254


def power_codes(ns: Namespace, absmax: Array, record: Scale, element: Format, poison_infinity: bool) -> Array:
    """e8m0 codes (int32) of float32 bit patterns of block maxima.

    A NaN maximum gives 255, so does infinity where the scheme says so; otherwise infinity counts as 2**128. A maximum of zero
    and whatever is too small give 0, that is 2**-127.
    """
    if record.rule == "rceil_log2":
        ratio = divide(ns, absmax, ns.full((1,), bits_of(record.target), "int32", absmax))
        exponent = ceil_log2_float32(ns, ratio)
        exponent = ns.where(absmax == INFINITY, BIAS, exponent)
    else:
        exponent = _exponent(ns, absmax, record, element)
    codes = ns.minimum(ns.maximum(exponent + BIAS, 0), LARGEST_CODE)
    codes = ns.where((absmax & MAGNITUDE) == 0, 0, codes)
    poisoned = absmax >= INFINITY if poison_infinity else is_nan(absmax)
    return ns.where(poisoned, NAN_CODE, codes)


def _exponent(ns: Namespace, absmax: Array, record: Scale, element: Format) -> Array:
    target = bits_of(record.target)
    target_exponent, target_fraction = (target >> 23) - 127, target & 0x7FFFFF
    if record.rule == "even":
        # Rounding to the element's mantissa bits, ties away, as the carry of one addition.
        absmax = ns.minimum(absmax + even_carry(record, element), INFINITY)
    exponent, significand = normalized(ns, absmax)
    fraction = significand & 0x7FFFFF
    if record.rule == "ceil":
        exponent = exponent + ns.astype(fraction > 0, "int32")
    if record.rule == "rceil":
        exponent = exponent + ns.astype(fraction > target_fraction, "int32")
    return exponent - target_exponent


def even_carry(record: Scale, element: Format) -> int:
    """What rule "even" adds to a float32 pattern before it drops the mantissa: half of the last bit that remains."""
    bits = element_mantissa(element) if record.even_bits is None else record.even_bits
    return 1 << (22 - bits)


def element_mantissa(element: Format) -> int:
    """Fraction bits of the element's largest binade: mantissa bits, or the bits below an integer's first."""
    return element.mantissa_bits if element.kind == "float" else element.bits - 2


def ratio_to_power_of_two(ns: Namespace, bits: Array, record: Scale) -> Array:
    """The power-of-two rounding of a non-negative ratio (float32 bit patterns) that the record's rule states.

    ``ratio_pow2`` rounds up, or down where the scale is stored for encoding; ``ratio_pow2_log2`` is torchao's. Zero, infinity,
    NaN and ratios under other rules pass through.
    """
    if record.rule == "ratio_pow2":
        # One below the next power of two carries into the exponent; an encoding scale drops its mantissa instead.
        raised = bits if record.stored == "encode" else bits + MANTISSA
        return ns.where(bits < INFINITY, raised & INFINITY, bits)
    return floor_log2_float32(ns, bits) if record.rule == "ratio_pow2_log2" else bits
