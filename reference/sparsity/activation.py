"""Sparse squared ReLU: the two largest of every four activations, squared, scaled and stored in one rule.

Networks with a squared ReLU have activations that are mostly zero, so a 2:4 mask of them loses little, and the product with
the next weight can be sparse. Of every four consecutive elements x along the last axis the two largest are kept, by signed
value: what is negative becomes 0 anyway. The order is NaN, +inf, ..., +-0 (equal), ..., -inf, ties to the lower index, so the
mask is a function of x alone. With u an operation rounded to float32, nearest even:

* not kept, or x <= 0: +0;
* kept and positive: y = u(x * x), the largest float32 where that overflows for a finite x; with a scale s, u(y / s);
* NaN: NaN, kept and visible.

The result is then cast once: to x's dtype (nearest even, overflow gives infinity), or to codes of a format, which saturate as
in `encode`. Square, division and cast keep the order of positive numbers, so the mask could be taken at any stage but for ties
that rounding makes: taken first, it is the same for every scale and format.

The scale divides. Kernels of torchao multiplied by 1 / s, which rounds twice; 1 / s also overflows for subnormal s.

Source: Haziza et al., "Accelerating Transformer Inference and Training with 2:4 Activation Sparsity" (arXiv 2503.16672),
and the kernel of its authors in torchao.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from reference.arrays.namespace import Array, Namespace, namespace_of
from reference.arrays.softfloat import (
    INFINITY,
    LARGEST,
    MAGNITUDE,
    NAN,
    divide,
    float32_bits,
    is_nan,
    multiply,
    order_key,
)
from reference.formats.encode import encode, to_dtype_bits
from reference.formats.formats import Format
from reference.sparsity.compress import is_traced
from reference.sparsity.prune import NAN_KEY, check_groups, float_weights, rank_in_groups


class SparseActivation(NamedTuple):
    """`values` of the shape of x, zeros where nothing was kept, and the bool `mask`: what `compress` takes."""

    values: Array
    mask: Array


def squared_relu_24(x: Any, *, scale: Any = None, fmt: str | Format | None = None) -> SparseActivation:
    """The two largest of every four of x, squared where positive, as values and mask; `compress(*result)` stores them.

    x: float32, bfloat16 or float16 of shape (..., K), K a multiple of 4. scale: None, or positive finite float32 that
    broadcasts to x's shape and is of its library: (..., 1) for one a row, 0-d or (1,) for one. fmt: None for values of
    x's dtype, or a name of `FORMATS` or a record for its codes, uint8 (uint16 for 16-bit formats). Rounding, ties and NaN as
    the module says. Exactly two of a group are kept in the mask, also where their values are 0.

    Raises TypeError for other dtypes of x or scale; ValueError for K % 4 != 0, a scale of another shape or library, one
    that is not positive and finite (not seen under `jax.jit` and `torch.compile`), or an unknown name.
    """
    ns, x, name = float_weights(x, "squared_relu_24")
    shape = ns.shape(x)
    check_groups(shape, 4, "2:4 activation")
    bits = float32_bits(ns, x, name)
    mask = _largest_two(ns, bits)
    squared = ns.where(mask, _squared_relu(ns, bits), 0)
    if scale is not None:
        squared = divide(ns, squared, _scale_bits(ns, scale, shape))
    if fmt is None:
        return SparseActivation(to_dtype_bits(ns, squared, name), mask)
    return SparseActivation(encode(ns.bitcast(squared, "float32"), fmt), mask)


def _largest_two(ns: Namespace, bits: Array) -> Array:
    """Bool, two of every four: the largest signed values of float32 patterns, NaN first, ties to the lower index."""
    shape = ns.shape(bits)
    zero = (bits & MAGNITUDE) == 0
    key = ns.where(is_nan(bits), NAN_KEY, ns.where(zero, 0, order_key(ns, bits)))
    return (rank_in_groups(ns, key.reshape(*shape[:-1], shape[-1] // 4, 4), 4) < 2).reshape(shape)


def _squared_relu(ns: Namespace, bits: Array) -> Array:
    """u(x * x) of positive x, at most the largest float32 where x is finite; NaN of NaN, else +0."""
    product = multiply(ns, bits, bits)
    product = ns.where(bits < INFINITY, ns.minimum(product, LARGEST), product)
    return ns.where(is_nan(bits), NAN, ns.where(bits > 0, product, 0))


def _scale_bits(ns: Namespace, scale: Any, shape: tuple[int, ...]) -> Array:
    """Patterns of the scale; the errors of `squared_relu_24`."""
    if not hasattr(scale, "dtype") or namespace_of(scale) is not ns:
        raise ValueError(
            f"scale is a float32 array of x's library, got {type(scale).__name__}: {scale!r:.60}"
        )
    if ns.dtype_name(scale) != "float32":
        raise TypeError(f"scale is float32, got {ns.dtype_name(scale)} of shape {ns.shape(scale)}; cast it")
    given = ns.shape(scale)
    if len(given) > len(shape) or any(
        n not in (1, full) for n, full in zip(given[::-1], shape[::-1], strict=False)
    ):
        raise ValueError(
            f"scale of shape {given} does not broadcast to x of shape {shape}; (..., 1) is one a row"
        )
    bits = ns.bitcast(scale, "int32")
    if not is_traced(ns, scale) and bool(((bits <= 0) | (bits >= INFINITY)).any()):
        raise ValueError(
            "a scale is positive and finite; another value makes finite activations NaN or infinite"
        )
    return bits
