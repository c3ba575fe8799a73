"""`quantize` and `dequantize`: one generic quantizer for every record.

A tensor is split into blocks (`reference.quantize.blocks`), each block gets its scale (`reference.quantize.scales`), its
elements are divided by it and rounded once. Dequantization multiplies back.

`quantize_both` gives both copies of a matrix: along its rows for the forward GEMM, along its columns for the weight gradient. A
block scale belongs to elements that one dot product adds up. Y = X W^T contracts over K, the weight gradient dW = dY^T X over
M, so a training step needs X in blocks along K and in blocks along M. The second copy is computed from X itself, not from the
first copy: quantizing twice would round twice.

OCP MX schemes in NumPy go through tables that the general rules fill. Block maximum, e8m0 scale and the shift of the exponent
all act on float32 rounded to odd to bfloat16, which decides every rounding to at most 6 significant bits
(`reference.formats.encode`). Blocks so small that subnormal inputs matter are left to the general path.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from reference.arrays.bridges import bridged
from reference.arrays.namespace import (
    FLOAT_DTYPES,
    Array,
    DTypeLike,
    Namespace,
    codes_of,
    dtype_name,
    float_input,
    int32_of,
    namespace_of,
)
from reference.arrays.softfloat import (
    INFINITY,
    LARGEST,
    MAGNITUDE,
    SIGN,
    SMALLEST_NORMAL,
    float32_bits,
    is_nan,
    normalized,
)
from reference.formats.encode import (
    CHUNK,
    SLAB,
    Arithmetic,
    check_mode,
    check_random_bits,
    clamp_integer,
    encode_bits,
    encode_parts,
    encode_table,
    fits_table,
    nearest_even_codes,
    odd_halves,
    round_to_integer,
    run_in_slabs,
    to_dtype_bits,
)
from reference.formats.formats import Format
from reference.formats.storage import pack, packed_shape, unpack
from reference.quantize.blocks import Blocks
from reference.quantize.checks import check_quantized, not_quantized_message, unpacked
from reference.quantize.scales import (
    Chosen,
    check_scales,
    choose,
    given_scales,
    power_codes,
    usable,
)
from reference.quantize.stored import Quantized, check_tiled, with_plain_scales, with_tiled_scales
from reference.schemes.schemes import Scheme, scheme_of

# Inside a rule the plain functions: no conversion from torch, no JAX program of their own.
_pack, _unpack = inspect.unwrap(pack), inspect.unwrap(unpack)
E8M0_BIAS = 127
SMALLEST_NORMAL_BFLOAT16 = 0x0080
# An exponent above every element format's.
BEYOND = 128
# Below this e8m0 code a subnormal input could still reach the element's grid; such tensors take the general path.
LEAST_CODE = 32
SYMMETRIC_ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero")


@bridged
def quantize(
    x: Any,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Any = None,
    random_bits: Any = None,
    packed: bool = False,
    tiled: bool = False,
) -> Quantized:
    """Quantize x by a scheme: codes of its elements, scales and zero points.

    x: float32, bfloat16 or float16 of any shape that the scheme's blocks divide, NumPy, JAX or torch (float64 is rounded to
    float32 first). scheme: a name of `SCHEMES` or a record. axis: where blocks run; the contraction axis of a matmul.
    scales: `Scales` from an earlier call or a calibration (static scales), a bare array where the scheme has only a block
    scale, or `Scales(outer=g)` alone to fix the second level. (NF4's codes come from its scales before they were rounded, so
    giving the stored ones back changes a few.) They are stored as given, and `dequantize` multiplies by them as they are.
    Only for the codes do default schemes replace a given scale below its record's floor (0, negative, too small) by the floor,
    and an outer one that comes with block scales likewise; an outer scale alone is used unchanged. So 0 gives 0 back and a
    negative scale the other sign: clamp scales first where they may be such.
    random_bits: uint32 of x's shape, where the record rounds stochastically.
    packed: whether codes below 8 bits come as `pack` stores them, along the last axis whatever `axis` is.
    tiled: whether the scales come as `tile_scales` stores them: of a matrix, blocks along its last axis, a byte each.

    Raises TypeError for integer, complex or 8-bit input, ValueError for an unknown scheme, a shape that the blocks do not
    divide, scales of another shape or dtype than `choose_scales` gives, a 0-d tensor of sub-byte codes to be packed, or scales
    that have no tiled form.
    """
    scheme = scheme_of(scheme)
    ns, x, name = float_input(x, "quantize")
    check_mode(scheme.rounding, random_bits)
    if packed:
        packed_shape(ns.shape(x), scheme.format)  # refuses a 0-d tensor before anything is computed
    if tiled:
        check_tiled(scheme, ns.shape(x), axis)
    q = _quantize(ns, x, name, scheme, axis, scales, random_bits)
    q = replace(q, codes=_pack(q.codes, scheme.format), packed=True) if packed else q
    return with_tiled_scales(q) if tiled else q


def _quantize(
    ns: Namespace, x: Array, name: str, scheme: Scheme, axis: int, scales: Any, random_bits: Any
) -> Quantized:
    """One code per element."""
    shape = ns.shape(x)
    blocks = Blocks.of(shape, scheme.scale, axis)
    given = check_scales(ns, scales, scheme, blocks)
    tabulated = ns.name == "numpy" and name in ("float32", "bfloat16") and quantizes_by_table(scheme)
    if given is None and tabulated:
        fast = _quantize_by_table(ns, x, blocks, scheme)
        if fast is not None:
            return fast
    split = blocks.split(ns, float32_bits(ns, x, name))
    if given is None or given.scale is None:
        chosen = choose(ns, split, blocks, scheme, name, given)
    else:
        chosen = usable(ns, given_scales(ns, given, blocks, scheme), scheme, name)
    words = block_words(ns, blocks, x, random_bits)
    codes = element_codes(ns, split, chosen, scheme, name, words)
    codes = codes_of(ns, blocks.join(ns, codes), scheme.format.bits)
    stored = chosen.stored
    return Quantized(codes, stored.scale, stored.outer, stored.zero, shape, blocks.axis, scheme)


def _quantize_by_table(ns: Namespace, x: Array, blocks: Blocks, scheme: Scheme) -> Quantized | None:
    """An OCP MX tensor in NumPy by `reference.quantize.quantize`, or None where that cannot be exact."""
    carrier = "uint32" if ns.dtype_name(x) == "float32" else "uint16"
    split = np.ascontiguousarray(blocks.split(ns, ns.bitcast(x, carrier)))
    result = quantize_blocks(split, scheme)
    if result is None:
        return None
    codes, scale = result
    codes = blocks.join(ns, codes)
    return Quantized(codes, blocks.expose(scale, ns), None, None, blocks.shape, blocks.axis, scheme)


@bridged
def dequantize(q: Quantized, dtype: DTypeLike = "float32") -> Array:
    """The tensor that q represents, as float32, bfloat16, float16 or float64 (in any spelling), shape q.shape.

    The value is code * scale in float32, correctly rounded, and rounded again (nearest even) to a narrower dtype; a finite
    code with a finite scale never becomes infinite but stops at the dtype's largest value. Conventions may differ
    (`Scheme.dequantize`). A NaN scale or code gives NaN. Bits of a code above its format's are ignored.

    Raises TypeError for codes of another dtype than `quantize` returns, for an invalid shape or axis and for a scheme that is
    not a record, ValueError for codes, scales or zero points that are missing or do not fit the scheme and the shape.
    """
    dtype = dtype_name(dtype, FLOAT_DTYPES, "dtype")
    if not isinstance(q, Quantized):
        raise TypeError(not_quantized_message(q))
    scheme, blocks = q.scheme, check_quantized(q)
    codes = unpacked(q).codes
    ns = namespace_of(codes)
    chosen = given_scales(ns, q.scales, blocks, scheme, dtype if scheme.dequantize == "target" else "float32")
    split = blocks.split(ns, int32_of(ns, codes))
    bits = blocks.join(ns, scaled_values(ns, split, chosen, scheme, dtype))
    return to_dtype_bits(ns, bits, dtype, saturate=scheme.dequantize == "float32")


def scaled_values(ns: Namespace, codes: Array, chosen: Chosen, scheme: Scheme, dtype: str) -> Array:
    """float32 bit patterns of int32 codes times their scales, which broadcast."""
    unit = Arithmetic(ns, dtype if scheme.dequantize == "target" else "float32")
    scale = unit.round(chosen.scale)
    if chosen.outer is not None:
        scale = combined_scale(unit, scale, chosen.outer, scheme)
    value = block_values(ns, codes, chosen, scheme)
    if scheme.scale.stored == "encode":
        return unit.divide(value, scale)
    product = _product(ns, unit.round(value), scale, unit, scheme)
    by_value = scheme.zero is not None and scheme.zero.rule == "value"
    return unit.add(product, chosen.zero) if by_value else product


def block_values(ns: Namespace, codes: Array, chosen: Chosen, scheme: Scheme) -> Array:
    """float32 bit patterns of the decoded elements before scaling: format values, or integers less the zero point."""
    codes = codes & ((1 << scheme.format.bits) - 1)
    if scheme.zero is None:
        return _decoded(ns, codes, scheme)
    if scheme.zero.rule == "code":
        return _integer_bits(ns, _signed(ns, codes, scheme) - chosen.zero)
    low, high = scheme.format.integer_range
    return _integer_bits(ns, codes - (low + high + 1) // 2)


def _product(ns: Namespace, value: Array, scale: Array, unit: Arithmetic, scheme: Scheme) -> Array:
    product = unit.multiply(value, scale)
    if scheme.dequantize != "float32":
        return product
    # Finite times finite stays finite.
    finite = ((value & MAGNITUDE) < INFINITY) & ((scale & MAGNITUDE) < INFINITY)
    overflow = ((product & MAGNITUDE) == INFINITY) & finite
    return ns.where(overflow, (product & SIGN) | LARGEST, product)


def combined_scale(unit: Arithmetic, scale: Array, outer: Array, scheme: Scheme) -> Array:
    """Block scale and outer scale as one decoding scale."""
    if scheme.outer_order == "encode":
        return unit.divide(scale, outer)
    return unit.multiply(scale, unit.reciprocal(outer) if scheme.outer_order == "folded" else outer)


def _decoded(ns: Namespace, codes: Array, scheme: Scheme) -> Array:
    fmt = scheme.format
    return ns.take(ns.constant(fmt.values.view("int32"), codes), codes)


def _signed(ns: Namespace, codes: Array, scheme: Scheme) -> Array:
    fmt = scheme.format
    return ns.where(codes > fmt.max_code, codes - (1 << fmt.bits), codes)


def _integer_bits(ns: Namespace, integer: Array) -> Array:
    """int32 below 2**24 in magnitude as float32 bit patterns, exact."""
    return ns.bitcast(ns.astype(integer, "float32"), "int32")


def block_words(ns: Namespace, blocks: Blocks, x: Array, random_bits: Any) -> Array | None:
    """The random words of x's elements as int32 in blocks, or None; ValueError where they do not fit x."""
    words = check_random_bits(ns, x, random_bits)
    return None if words is None else blocks.split(ns, ns.bitcast(words, "int32"))


def element_codes(
    ns: Namespace, split: Array, chosen: Chosen, scheme: Scheme, dtype: str, random_bits: Array | None
) -> Array:
    """int32 codes of blocks (..., blocks, size)."""
    if scheme.scale.power_of_two:
        codes = _shifted(ns, split, chosen.scale, scheme, random_bits)
    else:
        codes = _scaled(ns, split, chosen, scheme, dtype, random_bits)
    if scheme.nan == "ieee":
        return codes
    poisoned = is_nan(chosen.scale)
    if scheme.nan == "element":
        return ns.where(poisoned, _signed_nan(ns, split, scheme), codes)
    return ns.where(poisoned, scheme.poison_code, codes)


def _signed_nan(ns: Namespace, split: Array, scheme: Scheme) -> Array:
    """Codes of a block divided by infinity: zeros and NaNs with their signs, infinities a NaN without."""
    sign = ns.where(split < 0, scheme.format.sign_mask, 0)
    codes = ns.where(is_nan(split), scheme.poison_code, 0) | sign
    return ns.where((split & MAGNITUDE) == INFINITY, scheme.poison_code, codes)


def _shifted(ns: Namespace, split: Array, scale: Array, scheme: Scheme, random_bits: Array | None) -> Array:
    """x * 2**-e rounded once: the exponent moves, no bit is lost before the rounding."""
    fmt = scheme.format
    # The e8m0 scale as a float32: 2**-127 is subnormal, its exponent field is 0.
    exponent = ns.maximum(scale >> 23, 0) - E8M0_BIAS
    if scheme.smallest_exponent is not None:
        exponent = ns.where(exponent == -E8M0_BIAS, scheme.smallest_exponent, exponent)
    if fmt.kind == "int":
        return _shifted_integer(ns, split, exponent, scheme, random_bits)
    if fmt.kind == "codebook":
        # Exact, or below 2**-126.
        inverse = ns.where(exponent == E8M0_BIAS, SMALLEST_NORMAL >> 1, (E8M0_BIAS - exponent) << 23)
        return encode_bits(
            ns, Arithmetic(ns, "float32").multiply(split, inverse), fmt, "nearest_even", "saturate"
        )
    if scheme.rounding == "nearest_even":
        shifted = _shifted_magnitude(ns, split & MAGNITUDE, exponent, infinite=scheme.nan != "block")
        return nearest_even_codes(ns, split, shifted, fmt, scheme.overflow)
    exponents, significand = normalized(ns, split & MAGNITUDE)
    # Infinity divided by any scale is infinity.
    exponents = ns.where((split & MAGNITUDE) >= INFINITY, BEYOND, exponents - exponent)
    return encode_parts(ns, split, exponents, significand, fmt, scheme.rounding, scheme.overflow, random_bits)


def _shifted_magnitude(ns: Namespace, magnitude: Array, exponent: Array, *, infinite: bool) -> Array:
    """Float32 pattern of |x| * 2**-e, below 2**21 and 0 below 2**-126: all that rounding to nearest sees of it."""
    # A subnormal is an integer count of 2**-149, which its exact conversion to float normalises; zero goes below zero.
    counted = ns.bitcast(ns.astype(magnitude, "float32"), "int32") - (149 << 23)
    # Zero stays where subtracting the largest exponent does not wrap.
    wide = ns.where(magnitude < SMALLEST_NORMAL, ns.maximum(counted, -(128 << 23)), magnitude)
    # The cap keeps given scales that are far too small from wrapping; for e >= 107 it is the largest finite float32.
    largest = ((ns.minimum(exponent, 107) + 148) << 23) - 1
    shifted = ns.maximum(ns.minimum(wide, largest) - (exponent << 23), 0)
    return ns.where(magnitude >= INFINITY, 147 << 23, shifted) if infinite else shifted


def _shifted_integer(
    ns: Namespace, split: Array, exponent: Array, scheme: Scheme, random_bits: Array | None
) -> Array:
    fmt = scheme.format
    integer = round_to_integer(ns, split, fmt.fraction_bits - exponent, scheme.rounding, random_bits)
    # A NaN under a given scale; integers have no code for it.
    return ns.where(is_nan(split), 0, clamp_integer(ns, integer, fmt, scheme.overflow))


def _scaled(
    ns: Namespace, split: Array, chosen: Chosen, scheme: Scheme, dtype: str, random_bits: Array | None
) -> Array:
    unit = Arithmetic(ns, dtype if scheme.arithmetic == "input" else "float32")
    scale = chosen.exact if scheme.codes_from == "exact" else chosen.scale
    if scheme.zero is not None and scheme.zero.rule == "value":
        return _from_minimum(ns, split, scale, chosen.zero, scheme, unit, random_bits)
    scaled = _apply(ns, unit, split, scale, chosen.outer, scheme)
    fmt = scheme.format
    if fmt.kind == "codebook" and scheme.arithmetic == "input":
        return _nearest_by_difference(ns, scaled, fmt, unit)
    if fmt.kind != "int":
        codes = encode_bits(ns, scaled, fmt, scheme.rounding, scheme.overflow, random_bits)
        return _special_codes(ns, codes, scaled, scheme)
    integer = round_to_integer(ns, scaled, fmt.fraction_bits, scheme.rounding, random_bits)
    if chosen.zero is not None:
        integer = integer + chosen.zero
    return ns.where(is_nan(scaled), 0, clamp_integer(ns, integer, fmt, scheme.overflow))


def _special_codes(ns: Namespace, codes: Array, scaled: Array, scheme: Scheme) -> Array:
    """NaN from the arithmetic, and a scaled -0, where the convention has a code for them."""
    if not scheme.negative_zero:
        codes = ns.where(scaled == SIGN, 0, codes)
    return codes if scheme.nan_code is None else ns.where(is_nan(scaled), scheme.nan_code, codes)


def _apply(
    ns: Namespace, unit: Arithmetic, x: Array, scale: Array, outer: Array | None, scheme: Scheme
) -> Array:
    """Elements divided by their scale, in the order of the record."""
    factor = element_factor(ns, unit, scale, outer, scheme)
    return unit.divide(x, factor) if scheme.apply == "divide" else unit.multiply(x, factor)


def element_factor(
    ns: Namespace, unit: Arithmetic, scale: Array, outer: Array | None, scheme: Scheme
) -> Array:
    """What elements are multiplied by, or divided by where the record's `apply` is "divide"; one for each scale."""
    if scheme.apply == "encode":
        return scale
    if scheme.apply == "divide":
        return scale if outer is None else unit.divide(scale, outer)
    return _reciprocal(ns, unit, scale, outer, scheme)


def _reciprocal(ns: Namespace, unit: Arithmetic, scale: Array, outer: Array | None, scheme: Scheme) -> Array:
    """One reciprocal per block."""
    if outer is None:
        return unit.reciprocal(scale)
    if scheme.outer_order == "reciprocal_first":
        return unit.divide(unit.reciprocal(outer), scale)
    if scheme.outer_order == "folded":
        bits = unit.reciprocal(unit.multiply(scale, unit.reciprocal(outer)))
        return ns.where(bits == INFINITY, LARGEST, bits)
    bits = unit.reciprocal(unit.multiply(outer, scale))
    # A given outer scale may be so small that its reciprocal overflows; then zero would become NaN.
    if scheme.nan != "block":
        return bits
    # Of either sign: a given outer scale may be negative, and zero times infinity is NaN.
    return ns.where((bits & MAGNITUDE) == INFINITY, bits - 1, bits)


def _from_minimum(
    ns: Namespace,
    split: Array,
    scale: Array,
    zero: Array | None,
    scheme: Scheme,
    unit: Arithmetic,
    random_bits: Array | None,
) -> Array:
    """tinygemm: round((x - (z - s * mid)) / s), every operation rounded to the input's dtype."""
    low, high = scheme.format.integer_range
    middle = unit.constant((low + high + 1) / 2, scale)
    minimum = unit.subtract(zero, unit.multiply(scale, middle))
    scaled = unit.divide(unit.subtract(split, minimum), scale)
    integer = round_to_integer(ns, scaled, 0, scheme.rounding, random_bits)
    return ns.where(is_nan(scaled), 0, clamp_integer(ns, integer, scheme.format, scheme.overflow))


def _nearest_by_difference(ns: Namespace, scaled: Array, fmt: Format, unit: Arithmetic) -> Array:
    """Index of the smallest rounded |x - value|, the first of equals (NaN: 0), as an argmin over the table finds it."""
    best = index = None
    for code, value in enumerate(np.asarray(fmt.table, np.float32)):
        distance = unit.subtract(scaled, unit.constant(float(value), scaled)) & MAGNITUDE
        if best is None or index is None:
            best, index = distance, distance * 0
            continue
        closer = distance < best
        best, index = ns.where(closer, distance, best), ns.where(closer, code, index)
    return ns.where(is_nan(scaled), 0, index)


def quantize_both(
    x: Any,
    scheme: str | Scheme,
    *,
    scales: Any = None,
    random_bits: Any = None,
    packed: bool = False,
    tiled: bool = False,
) -> tuple[Quantized, Quantized]:
    """(rows, columns): `quantize(x)` of shape (M, K) and `quantize(x.T)` of shape (K, M), each along its last axis.

    x: a matrix (M, K) of float32, bfloat16, float16 or float64 in NumPy, JAX or torch; the scheme's blocks divide K and M.
    scales: None, or a pair of what `quantize` takes as scales (either may be None). random_bits: None, or a pair of uint32
    words of shapes (M, K) and (K, M), which a stochastic record needs; different streams make the errors of the two copies
    independent. packed, tiled, rounding, edges and further errors: as in `quantize`. Raises ValueError where x is no matrix and
    TypeError where scales or random_bits is no pair.
    """
    ns, x, name = float_input(x, "quantize_both")
    if len(ns.shape(x)) != 2:
        raise ValueError(
            f"quantize_both takes a matrix (M, K), got {name} of shape {ns.shape(x)}; reshape it to two axes"
        )
    row_scales, column_scales = _pair(scales, "scales")
    row_bits, column_bits = _pair(random_bits, "random_bits")
    rows = quantize(x, scheme, scales=row_scales, random_bits=row_bits, packed=packed, tiled=tiled)
    columns = quantize(x.T, scheme, scales=column_scales, random_bits=column_bits, packed=packed, tiled=tiled)
    return rows, columns


def _pair(value: Any, what: str) -> tuple[Any, Any]:
    """None as (None, None); TypeError for anything but a tuple or list of two."""
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"{what} is None or a pair, for x along its rows and for x.T; got {type(value).__name__}"
        )
    return value[0], value[1]


def quantizes_by_table(scheme: Scheme) -> bool:
    """Whether `quantize_blocks` covers the record: e8m0 scales, a float element, a NaN makes its block NaN."""
    covered = scheme.scale.power_of_two and scheme.format.kind == "float" and fits_table(scheme.format)
    return (
        covered
        and scheme.nan == "block"
        and scheme.rounding in SYMMETRIC_ROUNDINGS
        and scheme.overflow == "saturate"
    )


def quantize_blocks(split: Array, scheme: Scheme) -> tuple[Array, Array] | None:
    """(uint8 codes, uint8 e8m0 scales (..., blocks, 1)) of contiguous patterns (..., blocks, size), uint32 or uint16.

    None when a block is so small that subnormal inputs matter: the general path computes those.
    """
    size = split.shape[-1]
    rows = split.reshape(-1, size)
    codes, scales = np.empty(rows.shape, np.uint8), np.empty(len(rows), np.uint8)
    step = max(CHUNK // size, 1)

    def run(start: int, stop: int) -> None:
        for begin in range(start, stop, step):
            part = slice(begin, min(begin + step, stop))
            _quantize_chunk(rows[part], codes[part], scales[part], scheme)

    run_in_slabs(run, len(rows), max(SLAB // size, 1))
    if (scales < LEAST_CODE).any() and _has_small(rows, scales):
        return None
    return codes.reshape(split.shape), scales.reshape((*split.shape[:-1], 1))


def _has_small(rows: Array, scales: Array) -> bool:
    """Whether a block with a tiny scale holds anything but zeros."""
    small = rows[scales < LEAST_CODE]
    return bool((small << 1 & (0xFFFFFFFF if small.dtype == np.uint32 else 0xFFFF)).any())


def _quantize_chunk(rows: Array, codes: Array, scales: Array, scheme: Scheme) -> None:
    index = rows if rows.dtype == np.uint16 else odd_halves(rows)
    magnitude = (index & np.uint16(0x7FFF)).view(np.int16)
    scales[:] = scale_table(scheme)[magnitude.max(axis=1)]
    shift = (scales.astype(np.int16) - np.int16(E8M0_BIAS)) << np.int16(7)
    shifted = magnitude - shift[:, None]
    # Zeros stay zeros, and what falls below the 16-bit normals is far below half the smallest element.
    np.maximum(shifted, 0, out=shifted)
    shifted *= magnitude >= SMALLEST_NORMAL_BFLOAT16
    shifted.view(np.uint16)[:] |= index & np.uint16(0x8000)
    np.take(
        encode_table(scheme.format, scheme.rounding, scheme.overflow),
        shifted.view(np.uint16),
        out=codes,
        mode="clip",
    )
    poisoned = scales == 255
    if poisoned.any():
        codes[poisoned] = scheme.poison_code


@lru_cache(maxsize=64)
def scale_table(scheme: Scheme) -> Any:
    """e8m0 code of every 16-bit block maximum (odd ones inexact), by the rule of the record."""
    patterns = np.arange(1 << 15, dtype=np.uint32)
    bits = ((patterns << 16) | (patterns & 1)).view(np.int32)
    return power_codes(namespace_of(bits), bits, scheme.scale, scheme.format, True).astype(np.uint8)


__all__ = [
    "Quantized",
    "block_values",
    "block_words",
    "check_quantized",
    "combined_scale",
    "dequantize",
    "element_codes",
    "element_factor",
    "quantize",
    "scaled_values",
    "unpacked",
    "with_plain_scales",
    "with_tiled_scales",
]
