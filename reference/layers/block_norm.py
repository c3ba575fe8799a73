"""Root mean square of blocks of columns, with hard swish and quantization behind it: what a GEMM's epilogue can do.

A block of `block` columns is normalised by itself: y = x / sqrt(mean(x^2) + eps) * weight. Rules are those of `rms_norm`:
squares in float32 are added in a binary tree over adjacent pairs, mean, root and reciprocal are rounded correctly, then two
products. Activation "hard_swish": (y * clamp(y + 3, 0, 6)) * (1/6 as float32), every operation rounded to float32. One rounding
to the dtype at the end; where a scheme quantizes, values are the float32 ones.

The source of the mods is LoKA (arXiv 2605.10886); what its block norm computes exactly is not public, this is a reconstruction.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from reference.arrays.bridges import bridged
from reference.arrays.namespace import (
    Array,
    DTypeLike,
    Namespace,
    check_companion,
    choice,
    dtype_name,
    float_input,
    namespace_of,
)
from reference.arrays.softfloat import add, bits_of, float32_bits, is_nan, multiply
from reference.formats.encode import to_dtype_bits
from reference.layers.normalize import reciprocal_rms
from reference.matmul.linear import check_linear, linear
from reference.quantize.quantize import Quantized, quantize
from reference.schemes.schemes import Scheme

ACTIVATIONS = ("none", "hard_swish")
DTYPES = ("float32", "bfloat16", "float16")
BLOCK = 256
SIXTH = float(np.float32(1 / 6))
_quantize = inspect.unwrap(quantize)


@bridged
def block_norm(
    x: Any,
    weight: Any,
    *,
    block: int = BLOCK,
    eps: float = 1e-6,
    activation: str = "none",
    dtype: DTypeLike | None = None,
) -> Array:
    """x (..., N) normalised in blocks of its last axis, times weight (N,), through an activation: x's shape, `dtype`.

    x: float32, bfloat16 or float16, NumPy, JAX or torch; weight of its library and dtype. dtype: None is x's. activation:
    "none" or "hard_swish". NaN and infinities make their block NaN, as in `rms_norm`. Raises TypeError for other dtypes,
    ValueError where blocks do not divide N, for a weight of another shape or dtype, for eps below 0 and unknown activations.
    """
    ns, x, name = float_input(x, "block_norm")
    if name not in DTYPES:
        raise TypeError(f"block_norm takes {', '.join(DTYPES)}, got {name}; cast it first")
    check_companion(ns, weight, name, ns.shape(x)[-1:], "weight")
    out = name if dtype is None else dtype_name(dtype, DTYPES, "dtype")
    values = normalized(ns, float32_bits(ns, x, name), float32_bits(ns, weight, name), block, eps, activation)
    return to_dtype_bits(ns, values, out)


def normalized(ns: Namespace, h: Array, weight: Array, block: int, eps: float, activation: str) -> Array:
    """float32 bit patterns of the result, of those of x and weight; ValueError for what does not fit."""
    choice(activation, ACTIVATIONS, "activation")
    shape = ns.shape(h)
    check_blocks(shape, block, eps)
    blocks = h.reshape((*shape[:-1], shape[-1] // block, block))
    scaled = multiply(ns, blocks, reciprocal_rms(ns, blocks, eps)).reshape(shape)
    y = multiply(ns, scaled, weight)
    return y if activation == "none" else hard_swish_bits(ns, y)


def check_blocks(shape: tuple[int, ...], block: int, eps: float) -> None:
    """ValueError where blocks do not divide the last axis, and for eps out of range."""
    if block < 1 or not shape or shape[-1] % block:
        raise ValueError(
            f"block_norm: {shape} is no whole blocks of {block} columns; choose a block that divides the last axis"
        )
    if not 0 <= eps < 2.0**127:
        raise ValueError(f"eps is a number from 0 to 2**127, got {eps!r}")


def check_linear_block_norm(x: Any, w: Any, weight: Any, bias: Any, block: int, eps: float) -> None:
    """Raise as `linear_block_norm` does where operands do not go together."""
    if not isinstance(x, Quantized):
        raise TypeError(
            f"linear_block_norm takes Quantized inputs, got {type(x).__name__}; quantize them first"
        )
    check_linear(x, w, bias)
    check_companion(namespace_of(weight), weight, "float32", (w.shape[0],), "weight")
    check_blocks((x.shape[0], w.shape[0]), block, eps)


def hard_swish_bits(ns: Namespace, y: Array) -> Array:
    """(y * clamp(y + 3, 0, 6)) * (1/6) of float32 bit patterns; the gate of NaN is NaN."""
    gate = add(ns, y, ns.full((1,), bits_of(3.0), "int32", y))
    six = bits_of(6.0)
    # Patterns of positive floats order as integers do.
    clamped = ns.where(gate < 0, 0, ns.minimum(gate, six))
    clamped = ns.where(is_nan(gate), gate, clamped)
    return multiply(ns, multiply(ns, y, clamped), ns.full((1,), bits_of(SIXTH), "int32", y))


def linear_block_norm(
    x: Quantized,
    w: Quantized,
    weight: Any,
    *,
    bias: Any = None,
    block: int = BLOCK,
    eps: float = 1e-6,
    activation: str = "none",
    scheme: str | Scheme | None = None,
    dtype: DTypeLike = "bfloat16",
) -> Any:
    """`block_norm` of x (M, K) times the transpose of w (N, K), plus bias: (M, N) in `dtype`, or quantized along rows.

    x, w: quantized along K. weight (N,), bias (N,) or None: float32. scheme: None, or how the result is quantized. The linear
    layer's sums are rounded to float32, everything behind them is as in `block_norm`, in float32. TypeError for x or w that is
    no `Quantized`; other errors as in `linear`, `block_norm` and `quantize`.
    """
    check_linear_block_norm(x, w, weight, bias, block, eps)
    y = linear(x, w, bias, out_dtype="float32")
    if scheme is None:
        return block_norm(y, weight, block=block, eps=eps, activation=activation, dtype=dtype)
    return quantize(block_norm(y, weight, block=block, eps=eps, activation=activation), scheme)


__all__ = ["block_norm", "linear_block_norm"]
