"""Rotary position embedding of heads, and its gradient: pairs (i, i + D/2) of a head turned by the angle of a position.

With u16 a rounding to the dtype, c and s the tables' elements of the same position:

    y[i] = u16(u16(x[i] c[i]) - u16(x[i + D/2] s[i])),  y[i + D/2] = u16(u16(x[i + D/2] c[i + D/2]) + u16(x[i] s[i + D/2]))

These are the roundings of torch's x * cosine + cat(-second, first) * sine, operation by operation. `inverse` is the transposed
map, the gradient of x: y[i] = u16(u16(x[i] c[i]) + u16(x[i + D/2] s[i + D/2])), and so on; where both halves of the tables are
the same it turns back. In float32 every operation is rounded once. Products in float32 of two 16-bit floats are exact.

Source: Su et al., RoFormer, arXiv 2104.09864; the order of pairs is that of transformers' Llama.
"""

from __future__ import annotations

from typing import Any

from reference.arrays.bridges import bridged
from reference.arrays.namespace import Array, Namespace, float_input
from reference.arrays.softfloat import SIGN, add, float32_bits, multiply
from reference.formats.encode import to_dtype_bits
from reference.layers.normalize import DTYPES


@bridged
def rotary(x: Any, cosine: Any, sine: Any, *, inverse: bool = False) -> Array:
    """x (B, H, T, D), turned by tables of shape (T, D), (1, T, D) or (B, T, D) in x's dtype: float32, bfloat16 or float16.

    inverse: the gradient. NaN and infinities propagate as in the sums above. Raises TypeError for other dtypes; ValueError for
    other shapes, an odd D, and tables in another dtype.
    """
    ns, x, name = float_input(x, "rotary")
    if name not in DTYPES:
        raise TypeError(f"rotary takes {', '.join(DTYPES)}, got {name}; cast it first")
    shape = ns.shape(x)
    tables = [_table(ns, table, name, shape, what) for table, what in ((cosine, "cosine"), (sine, "sine"))]
    v, (c, s) = float32_bits(ns, x, name), tables
    half = shape[-1] // 2
    if inverse:
        turned = multiply(ns, v, s)
        turned = ns.concatenate([turned[..., half:], turned[..., :half] ^ SIGN], -1)
    else:
        turned = multiply(ns, ns.concatenate([v[..., half:] ^ SIGN, v[..., :half]], -1), s)
    parts = (float32_bits(ns, to_dtype_bits(ns, t, name), name) for t in (multiply(ns, v, c), turned))
    return to_dtype_bits(ns, add(ns, *parts), name)


def _table(ns: Namespace, table: Any, name: str, shape: tuple[int, ...], what: str) -> Array:
    """A table's float32 patterns as (1 or B, 1, T, D)."""
    if len(shape) != 4 or shape[-1] % 2:
        raise ValueError(f"rotary takes x of shape (B, H, T, D) with an even D, got {shape}")
    _, table, given = float_input(table, "rotary")
    batch, _, length, width = shape
    result = ns.shape(table)
    if given != name or result not in ((length, width), (1, length, width), (batch, length, width)):
        raise ValueError(
            f"{what} is {name} of shape ({length}, {width}), (1, ...) or ({batch}, ...), as x is; got {given} of {result}"
        )
    bits = float32_bits(ns, table, name)
    return bits.reshape(-1, 1, length, width)
