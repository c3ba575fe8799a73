"""`matmul` of JAX arrays and quantized tensors, traced or not; `reference.matmul` is the exact one, on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ao_lab.jax.device import require_array
from ao_lab.jax.functions import dequantize
from ao_lab.jax.training.operands import Factor, factor, product
from reference import Quantized
from reference.arrays.errors import DTypeLike, dtype_name
from reference.quantize.quantize import unpacked, with_plain_scales

DTYPES = ("float32", "bfloat16", "float16")
Operand = Any  # a jax.Array or a Quantized


def matmul(
    a: Operand,
    b: Operand,
    *,
    out_dtype: DTypeLike = "float32",
    bias: jax.Array | None = None,
    precision: Any = None,
) -> jax.Array:
    """a (..., M, K) times b (..., K, N) plus bias, to `out_dtype`: (..., M, N).

    a, b: float32, bfloat16 or float16 arrays, or `Quantized`, whose value is what `dequantize` gives in float32; a matrix
    whose blocks lie along K is multiplied as codes, scales that hold for all of K being applied to the sums. Sums are float32
    in XLA's order, one rounding to `out_dtype` (float32, bfloat16, float16, in any spelling): within
    `reference.matmul_error_bound` of accumulation "blocked" where nothing is subnormal. precision: of products of two arrays;
    others have the highest. bias: added to the sums in float32; broadcasts. Works under jit, vmap and grad (no gradient flows
    into codes).

    Raises TypeError for other arrays and dtypes, ValueError for shapes that do not multiply.
    """
    name = dtype_name(out_dtype, DTYPES, "out_dtype")
    _check(a, b)
    if len(a.shape) == len(b.shape) == 2:
        total = product(_factor(a, 1), _factor(_swapped(b), 1), jnp.float32, precision)
    else:
        exact = isinstance(a, Quantized) or isinstance(b, Quantized)
        precision = jax.lax.Precision.HIGHEST if exact else precision
        values = [dequantize(one) if isinstance(one, Quantized) else one for one in (a, b)]
        total = jnp.matmul(*_promoted(*values), precision=precision, preferred_element_type=jnp.float32)
    total = total if bias is None else total + bias.astype(jnp.float32)
    return total.astype(name)


def _check(a: Any, b: Any) -> None:
    for value in (a, b):
        array = require_array(value.codes if isinstance(value, Quantized) else value, "matmul")
        if not isinstance(value, Quantized) and str(array.dtype) not in DTYPES:
            raise TypeError(
                f"matmul takes {', '.join(DTYPES)} or a Quantized, got {array.dtype} of shape {array.shape}; cast it"
            )
    shapes = tuple(a.shape), tuple(b.shape)
    if min(map(len, shapes)) < 2 or shapes[0][-1] != shapes[1][-2]:
        raise ValueError(
            f"a (..., M, K) times b (..., K, N) needs one K, got shapes {shapes[0]} and {shapes[1]}; transpose b if it is "
            f"(N, K)"
        )


def _factor(value: Operand, axis: int) -> Factor:
    """A matrix (rows, sum) as it is multiplied."""
    if isinstance(value, Quantized) and value.axis != axis:
        return Factor(dequantize(value))
    return factor(value)


def _swapped(value: Operand) -> Operand:
    """The transposed matrix; of blocks of the flattened tensor as values."""
    if not isinstance(value, Quantized):
        return value.T
    q = unpacked(with_plain_scales(value))
    if q.scheme.scale.flat_size or (q.scheme.outer is not None and q.outer.ndim):
        return dequantize(q).T
    parts = {name: _turned(getattr(q, name)) for name in ("codes", "scale", "zero")}
    return replace(q, **parts, shape=q.shape[::-1], axis=1 - q.axis)


def _turned(part: Any) -> Any:
    return part if part is None or part.ndim < 2 else part.T


def _promoted(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both in the wider dtype: explicitly, as strict promotion asks."""
    wide = a.dtype if a.dtype == b.dtype else jnp.float32
    return a.astype(wide), b.astype(wide)
