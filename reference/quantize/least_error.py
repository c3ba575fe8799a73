"""`refine_float16_scales`: scales that are kept in float16, chosen by the error of their block where float16 is coarse.

A scale that is rounded to the float16 of its tensor (`compute="input"`) loses bits below float16's normal numbers, and vanishes
below 2**-25, with all weights of its block. Scales of 2**-17 and above keep what bfloat16 keeps, 8 bits, and are left alone.
Below, float16 holds multiples of 2**-24: the two neighbours of the exact scale are tried, never 0, and the one with the smaller
squared error is taken.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from reference.arrays.bridges import bridged
from reference.arrays.namespace import Array, Namespace, float_input
from reference.arrays.softfloat import bits_of, float32_bits, multiply, subtract
from reference.formats.storage import load
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import check_quantized, dequantize, quantize
from reference.quantize.scales import choose, rounds_scales_to_float16, tree_sum
from reference.quantize.stored import Quantized, Scales
from reference.schemes.schemes import Scheme

#: Smaller scales have fewer than 8 bits in float16.
COARSE = 2.0**-17
#: The distance of two of them in float16: its smallest subnormal number.
STEP = 2.0**-24
#: No block with a smaller exact scale holds a float16 but zero.
EMPTY = 2.0**-60

# Inside a rule the plain functions: no conversion from torch, no JAX program of their own.
_quantize, _dequantize = inspect.unwrap(quantize), inspect.unwrap(dequantize)


@bridged
def refine_float16_scales(x: Any, q: Quantized) -> Quantized:
    """q = quantize(x, scheme) with other scales below 2**-17, and the codes under them.

    x: the tensor of q, NumPy, JAX or torch. q is returned as it is unless x is float16 and the scheme rounds its scales to that
    (`rounds_scales_to_float16`).

    With s the exact scale, that of the record with compute="float32", a block whose scale is below 2**-17 and whose s is above
    2**-60 gets ceil(s / 2**-24) * 2**-24 or max(floor(s / 2**-24), 1) * 2**-24: of a matrix whose blocks lie along its last
    axis the one with the smaller sum of u(u(v - x) * u(v - x)), v the dequantized float32 value, u a float32 operation rounded
    to nearest even, terms added in float32 as a tree of adjacent pairs, filled with zeros; the larger one of two as good, and
    for every other tensor. Scales are float32 in the shape of q.scale, these ones exact in float16. Blocks of zeros, NaN and
    infinities keep theirs; every code is that of `quantize` under the result's scales.

    Raises TypeError for an x that is no float array, TypeError or ValueError where q is not what `quantize` returns, ValueError
    where x has another shape than q says.
    """
    ns, x, name = float_input(x, "refine_float16_scales")
    if not rounds_scales_to_float16(q.scheme, name):
        return q
    blocks = check_quantized(q)
    if ns.shape(x) != q.shape:
        raise ValueError(f"x of shape {ns.shape(x)} is not the tensor of q, whose shape is {q.shape}")
    above, below = _neighbours(ns, x, q, blocks)
    scale = above
    if errors_decide(q):
        smaller = _errors(ns, x, q, below, blocks) < _errors(ns, x, q, above, blocks)
        scale = ns.where(smaller, below, above)
    return _with_scales(ns, x, q, scale, blocks)


def errors_decide(q: Quantized) -> bool:
    """Whether q is a matrix with blocks along its last axis; the larger neighbour is taken for others."""
    return isinstance(q.scheme.scale.block, int) and len(q.shape) == 2 and q.axis == 1


def exact_record(scheme: Scheme) -> Scheme:
    """The record whose scales are not rounded to the input's dtype."""
    return replace(scheme, scale=replace(scheme.scale, compute="float32"))


def _neighbours(ns: Namespace, x: Array, q: Quantized, blocks: Blocks) -> tuple[Array, Array]:
    """The multiples of 2**-24 around the exact scales that are to be refined, as float32 patterns; q's for the others."""
    split = blocks.split(ns, float32_bits(ns, x, "float16"))
    exact = choose(ns, split, blocks, exact_record(q.scheme), "float16", None).scale
    old = blocks.accept(load(ns, q.scale, "float32"), ns)
    small = (old < bits_of(COARSE)) & (exact > bits_of(EMPTY))
    significand = (exact & 0x007FFFFF) | 0x00800000
    # exact = significand * 2**(e - 150), e the exponent field, so 2**-24 stands 126 - e bits above its last bit.
    shift = ns.minimum(ns.maximum(126 - (exact >> 23), 0), 24)
    floor = significand >> shift
    ceil = floor + ns.where((floor << shift) == significand, 0, 1)
    above = ns.where(small, _times_step(ns, ceil), old)
    return above, ns.where(small, _times_step(ns, ns.maximum(floor, 1)), old)


def _times_step(ns: Namespace, count: Array) -> Array:
    """Integers from 1 to 2**24, times 2**-24: the exponent of their exact float32 moves."""
    return ns.bitcast(ns.astype(count, "float32"), "int32") - (24 << 23)


def _with_scales(ns: Namespace, x: Array, q: Quantized, scale: Array, blocks: Blocks) -> Quantized:
    """x under given scales, float32 patterns of shape (..., blocks, 1)."""
    stored = ns.bitcast(blocks.expose(scale, ns), "float32")
    result: Quantized = _quantize(x, q.scheme, axis=q.axis, scales=Scales(stored), packed=q.packed)
    return result


def _errors(ns: Namespace, x: Array, q: Quantized, scale: Array, blocks: Blocks) -> Array:
    """The squared errors of blocks under given scales, as float32 patterns of their shape."""
    values = _dequantize(_with_scales(ns, x, replace(q, packed=False), scale, blocks))
    off = subtract(ns, float32_bits(ns, values, "float32"), float32_bits(ns, x, "float16"))
    return tree_sum(ns, blocks.split(ns, multiply(ns, off, off), zeros=True))


__all__ = ["errors_decide", "exact_record", "refine_float16_scales"]
