"""SwiGLU, silu(gate) * up, for 16-bit floats: silu correctly rounded, the product rounded once, quantized; and the gradient.

silu(v) = v / (1 + exp(-v)). An exponential differs from library to library in its last bits, so a rule in terms of one cannot
be held to bits; a 16-bit float has only 65,536 patterns, so the rule is the table of the correctly rounded results,
computed once in float64 with NumPy. No result is so near a tie that float64's error could matter
(`tests/reference/layers/test_swiglu.py` looks at all of them), but for tiny v: there silu(v) = v / 2 + v**2 / 4 - ... lies
just above v / 2, which is a tie where v / 2 is subnormal and too near to it for float64. Such a result is the next float64
above v / 2.

Edges: silu(-inf) = -0, the limit; silu(+inf) = +inf; zeros keep their sign; a negative result that rounds to zero is -0; NaN
gives the one NaN of the dtype. The product of two 16-bit floats has at most 22 significant bits. So float32 holds it exactly,
or, where bfloat16's is below 2**-134, it rounds to zero either way: y is rounded once. Overflow gives infinity.

The gradient (`swiglu_vjp`): dup = silu(gate) * g, the product of the forward pass. dgate = 2 * u(u(g * d) * up) with u an
operation rounded to float32, rounded once more, with d half of silu'(gate), itself correctly rounded to the dtype: as for silu,
the rule is a table of 65,536 results. The half keeps finite products finite until the last. silu' is 1 at +inf and -0 at -inf,
the limit; a zero gradient gives zero; NaN and infinities propagate.

Source: Shazeer, GLU variants improve transformer, arXiv 2002.05202.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.arrays.bridges import bridged
from reference.arrays.namespace import Array, Namespace, check_companion, float_input, int32_of
from reference.arrays.softfloat import add, float32_bits, multiply
from reference.formats.encode import decode, encode, to_dtype_bits
from reference.quantize.quantize import Quantized, quantize
from reference.schemes.schemes import Scheme

DTYPES = ("bfloat16", "float16")
# Below this magnitude silu(v) - v / 2 = v**2 / 4 is less than 2**-31 of v / 2: only its sign matters to 11 bits.
TINY = 2.0**-30
#: Below this magnitude silu'(v) - (1/2 + v/2) = -v**3/12 + ... only matters by its sign, also in 11 bits.
SMALL = 2.0**-6
_quantize = inspect.unwrap(quantize)


@bridged
def swiglu(gate: Any, up: Any) -> Array:
    """silu(gate) rounded to the dtype, times up, rounded to the dtype.

    gate, up: bfloat16 or float16 of one shape, dtype and library (NumPy, JAX, torch), any shape. Returns the same kind of
    array. Edges as the module says. Raises TypeError for other dtypes, ValueError where gate and up differ.
    """
    ns, gate, name = float_input(gate, "swiglu")
    if name not in DTYPES:
        raise TypeError(
            f"swiglu takes bfloat16 or float16, got {name} of shape {ns.shape(gate)}: silu is defined by the table of its "
            f"65,536 correctly rounded 16-bit results, and no such table of {name} exists; cast gate and up first"
        )
    check_companion(ns, up, name, ns.shape(gate), "up")
    product = multiply(ns, silu_bits(ns, gate, name), float32_bits(ns, up, name))
    return to_dtype_bits(ns, product, name)


@bridged
def swiglu_quantize(gate: Any, up: Any, scheme: str | Scheme, *, packed: bool = False) -> Quantized:
    """quantize(swiglu(gate, up), scheme, packed=packed), blocks along the last axis; errors as in `swiglu` and `quantize`."""
    q: Quantized = _quantize(_swiglu(gate, up), scheme, packed=packed)
    return q


_swiglu = inspect.unwrap(swiglu)


def silu_bits(ns: Namespace, gate: Array, name: str) -> Array:
    """float32 bit patterns (int32) of silu of a 16-bit array."""
    table = ns.constant(_silu_float32(name), gate)
    return ns.take(table, int32_of(ns, ns.bitcast(gate, "uint16")))


@lru_cache
def silu_codes(name: str) -> npt.NDArray[np.uint16]:
    """Bit pattern of silu(v), correctly rounded, for every bit pattern of v; read-only, shape (65536,)."""
    return _of_every_pattern(silu_float64, name)


def _of_every_pattern(
    function: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]], name: str
) -> npt.NDArray[np.uint16]:
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = function(decode(patterns, name).astype(np.float64))
    codes: npt.NDArray[np.uint16] = encode(values, name, overflow="nonfinite")
    codes.flags.writeable = False
    return codes


@lru_cache
def _silu_float32(name: str) -> npt.NDArray[np.int32]:
    values: npt.NDArray[np.float32] = decode(silu_codes(name), name)
    return values.view(np.int32)


def silu_float64(v: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """silu in float64, on the right side of every tie of 16-bit floats."""
    with np.errstate(all="ignore"):
        plain = v / (1 + np.exp(-v))
    tiny = np.where(v == 0, v, np.nextafter(v / 2, np.inf))
    return np.where(v == -np.inf, -0.0, np.where(np.abs(v) < TINY, tiny, plain))


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
    return _of_every_pattern(silu_slope_float64, name)


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
