"""Root mean square normalization, with the residual addition before it, the quantization after it, and its gradient.

With u the operation rounded to float32, nearest even, and K the length of the last axis:

* h = x + residual, rounded to float32 and again to x's dtype: that is the new residual. Without a residual h = x.
* S = the sum of u(h * h) over adjacent pairs, a binary tree over K elements filled with zeros to a power of two.
* r = u(1 / u(sqrt(u(u(S / K) + eps)))), eps as a float32; the square root and both divisions are correctly rounded.
* y = u(u(h * r) * weight), rounded once more to x's dtype.

The values are those of `torch.nn.functional.rms_norm` over the last axis; here the order of the sum and every rounding are
part of the rule, so that a kernel can be held to the bits. Nothing saturates: overflow gives infinity, a row whose squares
overflow becomes zeros (as r is 0), an infinite element there NaN, and a row with a NaN is NaN. With eps = 0 a row of zeros
becomes NaN.

The gradient (`rms_norm_vjp`): with n = u(x * r), s = u(g * weight), and m = u(S / K) with S the sum of u(s * n) over the row,
in the order of the forward pass, dx = u(r * u(s - u(n * m))), the residual's gradient added in float32 where there is one,
rounded once to x's dtype. dweight: u(g * n) is summed over rows, first PIECE rows one after the other, from +0 on, then these
sums as a binary tree over adjacent pairs, filled with zeros; rounded once. Rows whose squares overflow have r = 0 and dx = 0; a
zero gradient gives zero; NaN and infinities propagate.
"""

from __future__ import annotations

import inspect
from typing import Any

from reference.arrays.bridges import bridged
from reference.arrays.namespace import Array, Namespace, check_companion, float_input
from reference.arrays.softfloat import add, bits_of, divide, float32_bits, multiply, square_root, subtract
from reference.formats.encode import Arithmetic, to_dtype_bits
from reference.quantize.quantize import Quantized, quantize
from reference.quantize.scales import tree_sum
from reference.schemes.schemes import Scheme

DTYPES = ("float32", "bfloat16", "float16")
# Counts up to here are exact in float32.
LONGEST = 1 << 24
#: Rows whose contributions to the weight's gradient are added one after the other.
PIECE = 16
_quantize = inspect.unwrap(quantize)


@bridged
def rms_norm(x: Any, weight: Any, *, eps: float = 1e-6, residual: Any = None) -> tuple[Array, Array | None]:
    """(y, new residual or None): x, after a residual is added, divided by its root mean square and multiplied by weight.

    x: float32, bfloat16 or float16 of shape (..., K), NumPy, JAX or torch. weight: (K,), residual: None or of x's shape, both
    of x's dtype. eps: 0 <= eps < 2**127. y and the new residual have x's shape and dtype; rounding and edges as the module
    says. Raises TypeError for other dtypes of x; ValueError where dtype, shape or library of weight or residual differ, for a
    0-d x, K above 2**24, or eps out of range.
    """
    ns, x, name = checked_inputs(x, weight, residual, eps)
    h = float32_bits(ns, x, name)
    if residual is not None:
        h = Arithmetic(ns, name).add(h, float32_bits(ns, residual, name))
    scaled = multiply(ns, h, reciprocal_rms(ns, h, eps))
    y = to_dtype_bits(ns, multiply(ns, scaled, float32_bits(ns, weight, name)), name)
    return y, None if residual is None else to_dtype_bits(ns, h, name)


@bridged
def rms_norm_quantize(
    x: Any,
    weight: Any,
    scheme: str | Scheme,
    *,
    eps: float = 1e-6,
    residual: Any = None,
    packed: bool = False,
) -> tuple[Quantized, Array | None]:
    """(quantize(y, scheme, packed=packed), new residual or None) with the y of `rms_norm`, which is rounded to x's dtype.

    Arguments and errors as in `rms_norm` and `quantize`; blocks run along the last axis.
    """
    y, new_residual = _rms_norm(x, weight, eps=eps, residual=residual)
    return _quantize(y, scheme, packed=packed), new_residual


_rms_norm = inspect.unwrap(rms_norm)


@bridged
def rms_norm_vjp(
    g: Any, x: Any, weight: Any, *, eps: float = 1e-6, residual_grad: Any = None
) -> tuple[Array, Array]:
    """(dx, dweight) of y = rms_norm(x, weight) for an output gradient g of x's shape and dtype.

    x: what was normalized, (..., K): after a residual was added, the sum. residual_grad: the gradient of that sum from
    elsewhere, of x's shape and dtype, or None; it is added to dx. Other arguments and errors as in `rms_norm`.
    """
    ns, x, name = checked_inputs(x, weight, residual_grad, eps)
    check_companion(ns, g, name, ns.shape(x), "g")
    h, wide, w = (float32_bits(ns, t, name) for t in (x, g, weight))
    r = reciprocal_rms(ns, h, eps)
    normal, scaled = multiply(ns, h, r), multiply(ns, wide, w)
    total = tree_sum(ns, multiply(ns, scaled, normal))
    mean = divide(ns, total, _constant(ns, ns.shape(x)[-1], h))
    dx = multiply(ns, r, subtract(ns, scaled, multiply(ns, normal, mean)))
    if residual_grad is not None:
        dx = add(ns, dx, float32_bits(ns, residual_grad, name))
    dweight = _sum_of_rows(ns, multiply(ns, wide, normal))
    return to_dtype_bits(ns, dx, name), to_dtype_bits(ns, dweight, name)


def _sum_of_rows(ns: Namespace, bits: Array) -> Array:
    """The sum over all axes but the last: pieces of PIECE rows in order, then adjacent pairs."""
    length = ns.shape(bits)[-1]
    rows = bits.reshape(-1, length)
    missing = -len(rows) % PIECE if len(rows) else PIECE
    if missing:
        rows = ns.concatenate([rows, ns.full((missing, length), 0, "int32", bits)], 0)
    pieces = rows.reshape(-1, PIECE, length)
    total = ns.full((len(pieces), length), 0, "int32", bits)
    for at in range(PIECE):
        total = add(ns, total, pieces[:, at])
    return tree_sum(ns, ns.moveaxis(total, 0, -1))[..., 0]


def reciprocal_rms(ns: Namespace, h: Array, eps: float) -> Array:
    """1 / sqrt(mean(h**2) + eps) over the last axis (keepdims) of float32 bit patterns."""
    total = tree_sum(ns, multiply(ns, h, h))
    mean = divide(ns, total, _constant(ns, ns.shape(h)[-1], h))
    root = square_root(ns, add(ns, mean, _constant(ns, eps, h)))
    return divide(ns, _constant(ns, 1.0, h), root)


def _constant(ns: Namespace, value: float, like: Array) -> Array:
    return ns.full((1,), bits_of(value), "int32", like)


def checked_inputs(
    x: Any, weight: Any, residual: Any, eps: float, what: str = "rms_norm"
) -> tuple[Namespace, Array, str]:
    """(namespace, x, dtype name), or the errors of `rms_norm`. what: the function that is named in them."""
    ns, x, name = float_input(x, what)
    shape = ns.shape(x)
    if name not in DTYPES:
        raise TypeError(f"{what} takes {', '.join(DTYPES)}, got {name} of shape {shape}; cast it first")
    if not shape or shape[-1] > LONGEST:
        raise ValueError(f"{what} takes x of shape (..., K) with K up to 2**24, got shape {shape}")
    check_companion(ns, weight, name, shape[-1:], "weight")
    if residual is not None:
        check_companion(ns, residual, name, shape, "residual")
    if not 0 <= eps < 2.0**127:
        raise ValueError(f"eps is a number from 0 to 2**127, got {eps!r}")
    return ns, x, name
