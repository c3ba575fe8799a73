"""Stretched levels: codebooks of levels one apart, as many below zero as above, the code of which is a rounding.

Level k of 2**B is k - (2**B - 1) / 2, so that midpoints are integers and x belongs to the code ceil(x) + 2**(B - 1) - 1: on a
midpoint the lower of two levels, as in every codebook of `reference`. Between the first and the last level a sum with
1.5 * 2**23 + 2**(B - 1) - 1, rounded upwards, counts that code for every float32, subnormal ones too (rounded to nearest it
would lose what separates a small value from zero).
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from fast.kernels.sm90.bit_tricks import TO_INTEGER
from reference.formats.formats import Format


def is_stretched(fmt: Format) -> bool:
    """Whether the codebook's levels are 2 to 128 halves of odd integers, one apart, around zero."""
    levels = (1 << fmt.bits) if fmt.kind == "codebook" and fmt.bits < 8 else 0
    return levels > 1 and np.array_equal(fmt.values, np.arange(levels) - (levels - 1) / 2)


@triton.jit
def stretched_floats(y, E: tl.constexpr):
    """1.5 * 2**23 plus the codes of y, float32; 0 for NaN."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 c; max.f32 c, $1, $2; min.f32 c, c, $3; add.rp.f32 $0, c, $4; }",
        "=f,f,f,f,f", [y, -E.max_value, E.max_value, TO_INTEGER + (E.max_value - 0.5)],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def stretched_values(numbers, E: tl.constexpr):
    """The levels of such floats."""
    return (numbers - TO_INTEGER) - E.max_value
