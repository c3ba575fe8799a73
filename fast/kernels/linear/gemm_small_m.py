"""Y = X W' + bias for a stored weight W (N, K) and some rows X (M, K): codes become 16-bit floats for the tensor core.

Codes of up to 8 bits, less their zero points, are exact in bfloat16 and float16, so products are exact and sums are float32's;
scales multiply sums. Where a scale changes along K, each block is a product of its own from a zero accumulator, which is
scaled and added. Weights are the tensor core's second operand: with the first one decoded in registers some configurations
of the accumulating form gave wrong sums.
"""

import triton
import triton.language as tl

from fast.kernels.bits import narrow
from fast.kernels.linear.weight_values import block_scales, block_zeros, row_elements


@triton.jit
def gemm_small_m_kernel(
    x, codes, scale, outer, zero, bias, y, count, rows, per_row,
    LENGTH: tl.constexpr,
    SCHEME: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile (BLOCK_M, ROWS) of Y. `count`: M; the others as in `gemv_any`; SIZE is at most BLOCK where that is
    positive."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(n, rows - 1)[:, None]
    row = row.to(tl.int64) if WIDE else row
    inputs = x + m.to(tl.int64)[:, None] * LENGTH + tl.arange(0, SIZE)[None, :]
    total = tl.zeros((BLOCK_M, ROWS), tl.float32)
    for k in tl.range(0, LENGTH, SIZE, num_stages=STAGES):
        c = row_elements(codes, row, k, LENGTH, SCHEME, PACKED, SIZE)
        v = tl.load(inputs + k, mask=m[:, None] < count, other=0.0)
        if BLOCK > 0:
            block = row // BLOCK_ROWS * per_row + k // BLOCK
            if SCHEME.zero == "code":
                c = c - block_zeros(zero, block, SCHEME)
            s = block_scales(scale, outer, zero, block, SCHEME)
            w = tl.trans(c.to(x.dtype.element_ty))
            total += tl.dot(v, w) * tl.reshape(s, (1, ROWS))
        else:
            total = tl.dot(v, tl.trans(c.to(x.dtype.element_ty)), total)
    if BLOCK <= 0:
        block = row if BLOCK == 0 else row * 0
        total = total * tl.reshape(block_scales(scale, outer, zero, block, SCHEME), (1, ROWS))
    inside = n < rows
    if bias is not None:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = m.to(tl.int64)[:, None] * rows + n[None, :]
    tl.store(y + at, narrow(total, DTYPE, False), mask=(m[:, None] < count) & inside[None, :])
