"""silu(gate) * up of sums in a program's registers, in Gluon: what `swiglu` makes of two products, a few elements at a time."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from fast.kernels.layers.swiglu import silu
from fast.kernels.linear.gluon import narrowed
from fast.kernels.sm90.bf16x2 import clamped_gate, gated


@gluon.jit
def gated_sums(gate, up, DTYPE: gl.constexpr):
    """silu(gate) * up of float32 values that are rounded to a 16-bit dtype first, as two products by themselves are."""
    g, u = narrowed(gate, DTYPE), narrowed(up, DTYPE)
    # Element by element: pairs of 16-bit floats need not lie in one lane here.
    return gated(silu(clamped_gate(g, DTYPE, False), DTYPE, True), g, u, DTYPE, False, False)
