"""`matmul` of JAX arrays and quantized tensors, traced or not; `reference.matmul` is the exact one, on the host.

A product multiplies what the codes stand for, in bfloat16 where that is exact (every recipe of `reference.RECIPES`:
an element has at most 8 significant bits, its block's scale included), else in float32, by `jax.lax.dot_general` with float32
sums; scales that do not change along the sum multiply the sums. So it is `reference.matmul` of the tier "blocked", with sums in
XLA's order, within `matmul_error_bound(..., accumulation="blocked")`, but that XLA may flush subnormal values to zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from ao_lab.jax.functions import dequantize, require_array
from reference import Quantized, decode
from reference.arrays.namespace import DTypeLike, dtype_name
from reference.formats.formats import FORMATS, Format
from reference.quantize.quantize import unpacked, with_plain_scales
from reference.schemes.schemes import POWER_RULES, Scheme

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
        # Strict promotion asks for the wider dtype explicitly.
        wide = values[0].dtype if values[0].dtype == values[1].dtype else jnp.float32
        factors = (value.astype(wide) for value in values)
        total = jnp.matmul(*factors, precision=precision, preferred_element_type=jnp.float32)
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
    parts = {name: getattr(q, name) for name in ("codes", "scale", "zero")}
    transposed = {name: p if p is None or p.ndim < 2 else p.T for name, p in parts.items()}
    return replace(q, **transposed, shape=q.shape[::-1], axis=1 - q.axis)


#: Bits of a significand of bfloat16.
BFLOAT16_BITS = 8


@dataclass(frozen=True)
class Factor:
    """One operand as it is multiplied: values (rows, sum), and the scales of sums, each 0-d or (rows, 1)."""

    values: Any
    scales: tuple[Any, ...] = ()
    quantized: bool = True


def product(a: Factor, b: Factor, dtype: Any, precision: Any) -> jax.Array:
    """a @ b.T in `dtype`; precision: where neither is quantized."""
    # By name: strict promotion has no way from one dtype to another.
    carrier = a.values.dtype if a.values.dtype == b.values.dtype else jnp.dtype("float32")
    if a.quantized or b.quantized:
        # Whatever the default is: a GPU's is 10 bits of each float32 factor. bfloat16 factors are multiplied exactly.
        precision = jax.lax.Precision.HIGHEST if carrier == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    values = (a.values.astype(carrier), b.values.astype(carrier))
    total = jax.lax.dot_general(*values, dimensions, precision, preferred_element_type=jnp.float32)
    for scale in a.scales:
        total = total * scale
    for scale in b.scales:
        total = total * scale.reshape((1, -1))
    return total.astype(dtype)


def factor(q: Any) -> Factor:
    """An operand as it is multiplied."""
    if not isinstance(q, Quantized):
        return Factor(q, (), False)
    inner = _without_outer(q.scheme)
    if inner is None:
        return Factor(dequantize(q))
    outer = () if q.outer is None else (q.outer,)
    dtype = "bfloat16" if _fits_bfloat16(inner) else "float32"
    if inner.scale.block in ("tensor", -1) and inner.scale.storage == "float32":
        return Factor(decode(q.codes, inner.element).astype(dtype), (q.scale, *outer))
    return Factor(dequantize(replace(q, scheme=inner, outer=None), dtype), outer)


def transposed_factor(q: Quantized) -> Factor:
    """`factor` of the transposed matrix, for codes that serve it (`Operand.serves_transposed`)."""
    made = factor(q)
    return Factor(made.values.T, made.scales)


@lru_cache(maxsize=256)
def _without_outer(scheme: Scheme) -> Scheme | None:
    """The scheme of code times block scale, where a value is that times the outer scale; None for other values."""
    scale, outer = scheme.scale, scheme.outer
    plain = scheme.zero is None and scheme.format.kind in ("float", "int") and scale.stored == "decode"
    simple = outer is None or (
        outer.statistic == "absmax_elements" and outer.stored == "decode" and outer.storage == "float32"
    )
    if not plain or not simple or scheme.dequantize != "float32" or scale.flat_size:
        return None
    return scheme if outer is None else replace(scheme, name=f"{scheme.name}_inner", outer=None)


def _fits_bfloat16(scheme: Scheme) -> bool:
    """Whether a code, times a block's scale where scales change along the sum, has at most 8 significant bits."""
    scale = scheme.scale
    bits = _significant(scheme.format)
    if scale.block not in ("tensor", -1) and scale.rule not in (*POWER_RULES, "ratio_pow2"):
        bits += 24 if scale.storage == "float32" else _significant(FORMATS[scale.storage])
    return bits <= BFLOAT16_BITS


def _significant(fmt: Format) -> int:
    return fmt.mantissa_bits + 1 if fmt.kind == "float" else fmt.bits
