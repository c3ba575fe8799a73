"""Gradients of RMSNorm and SwiGLU: every rounding and the order of every sum.

With u an operation rounded to float32, nearest even:

* `rms_norm_vjp`. r as in `reference.layers.normalize`, n = u(x * r), s = u(g * weight), and m = u(S / K) with S the sum of
  u(s * n) over the row, in the order of the forward pass. dx = u(r * u(s - u(n * m))), the residual's gradient added in
  float32 where there is one, rounded once to x's dtype. dweight: u(g * n) is summed over rows, first PIECE rows one after the
  other, from +0 on, then these sums as a binary tree over adjacent pairs, filled with zeros; rounded once.
* `swiglu_vjp`. dup = silu(gate) * g, the product of the forward pass. dgate = 2 * u(u(g * d) * up), rounded once more, with d
  half of silu'(gate), itself correctly rounded to the dtype: as for silu, the rule is a table of 65,536 results. The half
  keeps finite products finite until the last.

Edges: rows whose squares overflow have r = 0 and dx = 0; a zero gradient gives zero; NaN and infinities propagate. silu' is 1
at +inf and -0 at -inf, the limit.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.arrays.namespace import Array, Namespace, check_companion, float_input, int32_of
from reference.arrays.softfloat import add, bits_of, divide, multiply, subtract
from reference.arrays.torch_bridge import bridged
from reference.arrays.widen import float32_bits
from reference.formats.encode import decode, encode
from reference.formats.narrow import to_dtype_bits
from reference.layers.normalize import checked_inputs, reciprocal_rms
from reference.layers.swiglu import swiglu
from reference.quantize.statistics import tree_sum

#: Rows whose contributions to the weight's gradient are added one after the other.
PIECE = 16
#: Below this magnitude silu'(v) - (1/2 + v/2) = -v**3/12 + ... only matters by its sign, also in 11 bits.
SMALL = 2.0**-6
_swiglu = inspect.unwrap(swiglu)


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
    mean = divide(ns, total, ns.full((1,), bits_of(float(ns.shape(x)[-1])), "int32", h))
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


@bridged
def swiglu_vjp(g: Any, gate: Any, up: Any) -> tuple[Array, Array]:
    """(dgate, dup) of swiglu(gate, up) for an output gradient g of their shape and dtype; errors as in `swiglu`."""
    dup = _swiglu(gate, g)
    ns, gate, name = float_input(gate, "swiglu_vjp")
    check_companion(ns, up, name, ns.shape(gate), "up")
    table = ns.constant(_halves_float32(name), gate)
    half = ns.take(table, int32_of(ns, ns.bitcast(gate, "uint16")))
    product = multiply(ns, multiply(ns, float32_bits(ns, g, name), half), float32_bits(ns, up, name))
    return to_dtype_bits(ns, add(ns, product, product), name), dup


@lru_cache
def silu_slope_codes(name: str) -> npt.NDArray[np.uint16]:
    """Bit pattern of silu'(v), correctly rounded, for every bit pattern of v; read-only, shape (65536,)."""
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = silu_slope_float64(decode(patterns, name).astype(np.float64))
    codes: npt.NDArray[np.uint16] = encode(values, name, overflow="nonfinite")
    codes.flags.writeable = False
    return codes


@lru_cache
def _halves_float32(name: str) -> npt.NDArray[np.int32]:
    values: npt.NDArray[np.float32] = decode(silu_slope_codes(name), name)
    return (values * np.float32(0.5)).view(np.int32)


def silu_slope_float64(v: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """silu'(v) = (1 + e (1 + v)) / (1 + e)**2 with e = exp(-v), in float64, on the right side of every tie of 16-bit floats."""
    with np.errstate(all="ignore"):
        positive = np.exp(-np.abs(v))
        right = (1 + positive * (1 + v)) / (1 + positive) ** 2
        left = positive * (positive + (1 + v)) / (1 + positive) ** 2
    plain = np.where(v == np.inf, 1.0, np.where(v >= 0, right, left))
    small = np.nextafter(0.5 + 0.5 * v, 0.5)
    # From -750 on the exponential vanishes in float64; the result is less than half of any subnormal of 16 bits.
    plain = np.where(v < -700, -0.0, plain)
    return np.where(np.abs(v) < SMALL, small, plain)
