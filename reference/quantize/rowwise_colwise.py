"""Both quantized copies of a matrix: along its rows for the forward GEMM, along its columns for the weight gradient.

A block scale belongs to elements that one dot product adds up. Y = X W^T contracts over K, the weight gradient dW = dY^T X over
M, so a training step needs X in blocks along K and in blocks along M. The second copy is computed from X itself, not from the
first copy: quantizing twice would round twice.
"""

from __future__ import annotations

from typing import Any

from reference.arrays.namespace import float_input
from reference.quantize.quantize import Quantized, quantize
from reference.schemes.schemes import Scheme


def quantize_both(
    x: Any,
    scheme: str | Scheme,
    *,
    scales: Any = None,
    random_bits: Any = None,
    packed: bool = False,
    tiled: bool = False,
) -> tuple[Quantized, Quantized]:
    """(rows, columns): `quantize(x)` of shape (M, K) and `quantize(x.T)` of shape (K, M), each along its last axis.

    x: a matrix (M, K) of float32, bfloat16, float16 or float64 in NumPy, JAX or torch; the scheme's blocks divide K and M.
    scales: None, or a pair of what `quantize` takes as scales (either may be None). random_bits: None, or a pair of uint32
    words of shapes (M, K) and (K, M), which a stochastic record needs; different streams make the errors of the two copies
    independent. packed, tiled, rounding, edges and further errors: as in `quantize`. Raises ValueError where x is no matrix and
    TypeError where scales or random_bits is no pair.
    """
    ns, x, name = float_input(x, "quantize_both")
    if len(ns.shape(x)) != 2:
        raise ValueError(
            f"quantize_both takes a matrix (M, K), got {name} of shape {ns.shape(x)}; reshape it to two axes"
        )
    row_scales, column_scales = _pair(scales, "scales")
    row_bits, column_bits = _pair(random_bits, "random_bits")
    rows = quantize(x, scheme, scales=row_scales, random_bits=row_bits, packed=packed, tiled=tiled)
    columns = quantize(x.T, scheme, scales=column_scales, random_bits=column_bits, packed=packed, tiled=tiled)
    return rows, columns


def _pair(value: Any, what: str) -> tuple[Any, Any]:
    """None as (None, None); TypeError for anything but a tuple or list of two."""
    if value is None:
        return None, None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(
            f"{what} is None or a pair, for x along its rows and for x.T; got {type(value).__name__}"
        )
    return value[0], value[1]
