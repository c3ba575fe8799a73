"""Randomized Hadamard transform of blocks along the last axis: y = (x * sign) H, H Sylvester's matrix over sqrt(length).

H is orthogonal, and both operands of a product have the same signs: what is mixed before quantization cancels in the product.
It spreads outliers over a block (Ashkboos et al., QuaRot, arXiv 2404.00456; arXiv 2502.20586, section 4; arXiv 2509.25149,
section 4.4).

The sum is a butterfly: in stage s elements 2**s apart are replaced by their sum and difference, each rounded to float32, from
s = 0 on; the result is multiplied by the float32 nearest to 1 / sqrt(length), and rounded to the input's dtype. So the order of
every addition is part of the rule.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from reference.arrays.bridges import bridged
from reference.arrays.namespace import Array, Namespace, float_input
from reference.arrays.softfloat import SIGN, add, bits_of, float32_bits, multiply
from reference.formats.encode import to_dtype_bits

#: Transformer Engine's signs of 16 elements (common/hadamard_transform): the same for all layers and steps.
SIGNS_16 = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@bridged
def hadamard(x: Any, length: int) -> Array:
    """x with blocks of `length` elements along its last axis transformed; shape and dtype of x.

    x: float32, bfloat16 or float16, NumPy, JAX or torch; its last axis is a multiple of `length`, a power of two. Raises
    TypeError for other dtypes, ValueError for another length. NaN and infinities spread over their block as NaN.
    """
    ns, x, name = float_input(x, "hadamard")
    shape = ns.shape(x)
    if length < 1 or length & (length - 1) or not shape or shape[-1] % length:
        raise ValueError(
            f"hadamard mixes blocks of a power of two that divides the last axis, got {length} for shape {shape}; pad it"
        )
    bits = float32_bits(ns, x, name).reshape((-1, length)) ^ _sign_bits(ns, length, x)
    for stage in range(length.bit_length() - 1):
        bits = _butterfly(ns, bits, 1 << stage)
    factor = ns.full((1, 1), bits_of(1 / sqrt(length)), "int32", x)
    scaled = multiply(ns, bits, factor)
    return to_dtype_bits(ns, scaled.reshape(shape), name)


def signs(length: int) -> tuple[int, ...]:
    """The signs of a block: Transformer Engine's sixteen, repeated."""
    return (SIGNS_16 * -(-length // 16))[:length]


def _sign_bits(ns: Namespace, length: int, like: Array) -> Array:
    return ns.constant(np.asarray([SIGN if s < 0 else 0 for s in signs(length)], np.int32), like)


def _butterfly(ns: Namespace, bits: Array, distance: int) -> Array:
    """Sums and differences of elements at a distance."""
    rows, length = ns.shape(bits)
    pairs = bits.reshape((rows, length // (2 * distance), 2, distance))
    left, right = pairs[:, :, 0], pairs[:, :, 1]
    mixed = ns.stack([add(ns, left, right), add(ns, left, right ^ SIGN)], axis=2)
    return mixed.reshape((rows, length))
