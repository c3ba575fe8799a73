"""`quantize` and `dequantize`: one generic quantizer for every record.

A tensor is split into blocks (`reference.blocks`), each block gets its scale (`reference.scales`), its elements are divided by it
and rounded once (`reference.elements`). Dequantization multiplies back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reference.arithmetic import Arithmetic
from reference.arrays import Array, Namespace, code_input, codes_of, float_input, int32_of, namespace_of
from reference.blocks import Blocks
from reference.bridge import bridged
from reference.elements import element_codes
from reference.errors import choice
from reference.rounding import check_mode
from reference.scales import Chosen, Scales, choose, double_scale, unpack_zero
from reference.schemes import Scheme, scheme_of
from reference.softfloat import bits_of, is_nan
from reference.storage import load, storage_dtype
from reference.widen import INFINITY, LARGEST, MAGNITUDE, SIGN, float32_bits, to_dtype_bits


@dataclass(frozen=True)
class Quantized:
    """A stored tensor.

    codes: uint8 (uint16 for 16-bit elements) of the tensor's shape, one code per element; `reference.pack` makes sub-byte
    storage. scale, outer, zero: as in `Scales`. shape, axis: of the tensor that was quantized. scheme: the record.
    """

    codes: Any
    scale: Any
    outer: Any
    zero: Any
    shape: tuple[int, ...]
    axis: int
    scheme: Scheme

    @property
    def scales(self) -> Scales:
        """The scales alone, to be given to `quantize` again."""
        return Scales(self.scale, self.outer, self.zero)


@bridged
def quantize(
    x: Any, scheme: str | Scheme, *, axis: int = -1, scales: Any = None, random_bits: Any = None
) -> Quantized:
    """Quantize x.

    x: float32, bfloat16 or float16 of any shape that the scheme's blocks divide, NumPy, JAX or torch (float64 is rounded to
    float32 first). scheme: a name of `SCHEMES` or a record. axis: where blocks run; the contraction axis of a matmul.
    scales: `Scales` from an earlier call or a calibration (static scales), a bare array where the scheme has only a block
    scale, or `Scales(outer=g)` alone to fix the second level. random_bits: uint32 of x's shape, where the record rounds
    stochastically.

    Raises TypeError for integer, complex or 8-bit input, ValueError for an unknown scheme, a shape that the blocks do not
    divide, or scales of another shape or dtype than `choose_scales` gives.
    """
    scheme = scheme_of(scheme)
    ns, x, name = float_input(x, "quantize")
    check_mode(scheme.rounding, random_bits)
    shape = ns.shape(x)
    blocks = Blocks.of(shape, scheme.scale, axis)
    given = check_scales(ns, scales, scheme, blocks)
    split = blocks.split(ns, float32_bits(ns, x, name))
    if given is None or given.scale is None:
        chosen = choose(ns, split, blocks, scheme, name, given)
    else:
        chosen = _given(ns, given, blocks, scheme)
    words = None if random_bits is None else blocks.split(ns, _random_words(ns, random_bits, shape))
    codes = element_codes(ns, split, chosen, scheme, name, words)
    codes = codes_of(ns, blocks.join(ns, codes), scheme.format.bits)
    kept = chosen.kept
    return Quantized(codes, kept.scale, kept.outer, kept.zero, shape, blocks.axis, scheme)


@bridged
def dequantize(q: Quantized, dtype: str = "float32") -> Array:
    """The tensor that q stands for, as float32, bfloat16, float16 or float64, shape q.shape.

    The value is code * scale in float32, correctly rounded, and rounded again (nearest even) to a narrower dtype; a finite
    code with a finite scale never becomes infinite but stops at the dtype's largest value. Conventions may differ
    (`Scheme.dequantize`). A NaN scale or code gives NaN.
    """
    choice(dtype, ("float32", "bfloat16", "float16", "float64"), "dtype")
    if not isinstance(q, Quantized):
        raise TypeError(f"dequantize takes a Quantized, got {type(q).__name__}; see quantize")
    scheme = q.scheme
    ns, codes = code_input(q.codes, "dequantize")
    if ns.shape(codes) != q.shape:
        raise ValueError(f"codes have shape {ns.shape(codes)}, the tensor has {q.shape}; unpack sub-byte codes first")
    blocks = Blocks.of(q.shape, scheme.scale, q.axis)
    chosen = _given(ns, q.scales, blocks, scheme, dtype if scheme.dequantize == "target" else "float32")
    split = blocks.split(ns, int32_of(ns, codes))
    bits = blocks.join(ns, _values(ns, split, chosen, scheme, dtype))
    return to_dtype_bits(ns, bits, dtype, saturate=scheme.dequantize == "float32")


def _values(ns: Namespace, codes: Array, chosen: Chosen, scheme: Scheme, dtype: str) -> Array:
    """float32 bit patterns of code blocks times their scales."""
    unit = Arithmetic(ns, dtype if scheme.dequantize == "target" else "float32")
    scale = unit.round(chosen.scale)
    if chosen.outer is not None:
        scale = _combined(unit, scale, chosen.outer, scheme)
    if scheme.zero is None:
        value = _decoded(ns, codes, scheme)
        if scheme.scale.stored == "encode":
            return unit.divide(value, scale)
        return _product(ns, unit.round(value), scale, unit, scheme)
    if scheme.zero.rule == "code":
        value = _integer_bits(ns, _signed(ns, codes, scheme) - chosen.zero)
        return _product(ns, value, scale, unit, scheme)
    low, high = scheme.format.integer_range
    value = _integer_bits(ns, codes - (low + high + 1) // 2)
    return unit.add(unit.multiply(value, scale), chosen.zero)


def _product(ns: Namespace, value: Array, scale: Array, unit: Arithmetic, scheme: Scheme) -> Array:
    product = unit.multiply(value, scale)
    if scheme.dequantize != "float32":
        return product
    # Finite times finite stays finite.
    finite = ((value & MAGNITUDE) < INFINITY) & ((scale & MAGNITUDE) < INFINITY)
    overflow = ((product & MAGNITUDE) == INFINITY) & finite
    return ns.where(overflow, (product & SIGN) | LARGEST, product)


def _combined(unit: Arithmetic, scale: Array, outer: Array, scheme: Scheme) -> Array:
    """Block scale and outer scale as one decoding scale."""
    if scheme.outer_order == "encode":
        return unit.divide(scale, outer)
    return unit.multiply(scale, unit.reciprocal(outer) if scheme.outer_order == "folded" else outer)


def _decoded(ns: Namespace, codes: Array, scheme: Scheme) -> Array:
    fmt = scheme.format
    return ns.take(ns.constant(fmt.values.view("int32"), codes), codes & ((1 << fmt.bits) - 1))


def _signed(ns: Namespace, codes: Array, scheme: Scheme) -> Array:
    fmt = scheme.format
    return ns.where(codes > fmt.max_code, codes - (1 << fmt.bits), codes)


def _integer_bits(ns: Namespace, integer: Array) -> Array:
    """int32 below 2**24 in magnitude as float32 bit patterns, exact."""
    return ns.bitcast(ns.astype(integer, "float32"), "int32")


def _given(ns: Namespace, given: Scales, blocks: Blocks, scheme: Scheme, dtype: str = "float32") -> Chosen:
    """Kept scales as the quantizer needs them."""
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
    groups = Blocks.of(blocks.scale_shape, outer, 0)
    bits = groups.accept(load(ns, given.outer, "float32"), ns)
    center = load(ns, given.zero, "float32").reshape((1,))
    scale = double_scale(ns, given.scale, bits, center, groups, scheme, dtype)
    scale = scale.reshape((*blocks.scale_shape, 1))
    return Chosen(given, scale, scale, None, None)


def check_scales(ns: Namespace, scales: Any, scheme: Scheme, blocks: Blocks) -> Scales | None:
    """`scales` as a complete `Scales` (or one with only an outer level), or None; ValueError where it does not fit."""
    if scales is None:
        return None
    if not isinstance(scales, Scales):
        if not hasattr(scales, "shape"):
            raise TypeError(f"scales is a Scales or an array, got {type(scales).__name__}; see choose_scales")
        scales = Scales(scales)
    double = scheme.outer is not None and scheme.outer.statistic != "absmax_elements"
    groups = Blocks.of(blocks.scale_shape, scheme.outer, 0).scale_shape if double and scheme.outer else ()
    zero = ("float32", ()) if double else None
    if scheme.zero is not None:
        zero = (storage_dtype(scheme.zero.storage), blocks.scale_shape)
    expected = {
        "scale": (storage_dtype(scheme.scale.storage), blocks.scale_shape),
        "outer": None if scheme.outer is None else ("float32", groups),
        "zero": zero,
    }
    only_outer = scales.scale is None and scales.outer is not None and not double
    for part, want in expected.items():
        _check_part(ns, getattr(scales, part), want, part, scheme, only_outer and part != "outer")
    return scales


def _check_part(
    ns: Namespace, got: Any, want: tuple[str, tuple[int, ...]] | None, part: str, scheme: Scheme, missing: bool
) -> None:
    rule = "none" if want is None or missing else f"{want[0]} of shape {want[1]}"
    if got is None and rule == "none":
        return
    if got is None or rule == "none" or namespace_of(got) is not ns:
        given = "none" if got is None else f"a {type(got).__name__}"
        raise ValueError(f"scheme {scheme.name} takes {part} = {rule} in x's library, got {given}; see choose_scales")
    have = f"{ns.dtype_name(got)} of shape {ns.shape(got)}"
    if have != rule:
        raise ValueError(f"scheme {scheme.name} takes {part} = {rule}, got {have}; see choose_scales")


def _random_words(ns: Namespace, random_bits: Any, shape: tuple[int, ...]) -> Array:
    given = ns.dtype_name(random_bits) if namespace_of(random_bits) is ns else type(random_bits).__name__
    if given != "uint32" or ns.shape(random_bits) != shape:
        raise ValueError(f"random_bits is one uint32 per element of x in x's library, shape {shape}; got {given}")
    return ns.bitcast(random_bits, "int32")


__all__ = ["Quantized", "Scales", "bits_of", "codes_of", "dequantize", "is_nan", "quantize"]
