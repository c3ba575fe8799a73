"""LayerNorm and the quantization after it: mean, variance around it, weight and bias, every rounding stated.

With u the operation rounded to float32, nearest even, K the length of the last axis, and sums over it as in
`reference.layers.normalize` (adjacent pairs, a binary tree over K elements filled with zeros to a power of two):

* m = u(S / K) with S the sum of x.
* d = u(x - m).
* r = u(1 / u(sqrt(u(u(V / K) + eps)))) with V the sum of u(d * d), eps as a float32; root and divisions are correctly rounded.
* y = u(u(u(d * r) * weight) + bias), rounded once more to x's dtype; without a bias nothing is added, and -0 stays.

The values are those of `torch.nn.functional.layer_norm` over the last axis; the variance is taken around the mean, in a second
sum, and never as a difference of two. Nothing saturates: a row with a NaN or an infinity is NaN, as is one whose sum overflows;
a row of differences whose squares overflow becomes the bias (or zeros). With eps = 0 a row of equal numbers becomes NaN where
its differences are zero.
"""

from __future__ import annotations

import inspect
from typing import Any

from reference.arrays.bridges import bridged
from reference.arrays.namespace import Array, Namespace, check_companion
from reference.arrays.softfloat import add, bits_of, divide, float32_bits, multiply, subtract
from reference.formats.encode import to_dtype_bits
from reference.layers.normalize import checked_inputs, reciprocal_rms
from reference.quantize.quantize import Quantized, quantize
from reference.quantize.scales import tree_sum
from reference.schemes.schemes import Scheme

_quantize = inspect.unwrap(quantize)


@bridged
def layer_norm_quantize(
    x: Any,
    weight: Any,
    scheme: str | Scheme,
    *,
    bias: Any = None,
    eps: float = 1e-5,
    packed: bool = False,
) -> Quantized:
    """quantize(y, scheme, packed=packed) with the y of LayerNorm over the last axis, rounded to x's dtype before.

    x: float32, bfloat16 or float16 of shape (..., K), NumPy, JAX or torch. weight: (K,), bias: None or (K,), both of x's dtype.
    eps: 0 <= eps < 2**127. Blocks run along the last axis; rounding and edges as the module says. Raises TypeError for other
    dtypes of x; ValueError where dtype, shape or library of weight or bias differ, for a 0-d x, K above 2**24, or eps out of
    range; other errors as in `quantize`.
    """
    ns, x, name = checked_layer_norm(x, weight, bias, eps)
    h, w = float32_bits(ns, x, name), float32_bits(ns, weight, name)
    b = None if bias is None else float32_bits(ns, bias, name)
    y = to_dtype_bits(ns, _normalized(ns, h, w, b, eps), name)
    result: Quantized = _quantize(y, scheme, packed=packed)
    return result


def _normalized(ns: Namespace, h: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """y of float32 bit patterns, before it is rounded to a dtype."""
    count = ns.full((1,), bits_of(ns.shape(h)[-1]), "int32", h)
    d = subtract(ns, h, divide(ns, tree_sum(ns, h), count))
    y = multiply(ns, multiply(ns, d, reciprocal_rms(ns, d, eps)), weight)
    return y if bias is None else add(ns, y, bias)


def checked_layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> tuple[Namespace, Array, str]:
    """(namespace, x, dtype name), or the errors of `layer_norm_quantize`."""
    ns, x, name = checked_inputs(x, weight, None, eps, "layer_norm_quantize")
    if bias is not None:
        check_companion(ns, bias, name, ns.shape(x)[-1:], "bias")
    return ns, x, name


__all__ = ["layer_norm_quantize"]
