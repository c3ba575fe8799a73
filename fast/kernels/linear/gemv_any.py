"""y = W x + bias for a stored weight W (N, K) and one vector x: weights are read once, as they are stored.

A program takes ROWS rows, a warp some of them, and walks along K. Neighbours in a thread, SUB of them, lie in one block: their
products are added there, and what the block's scale and zero point make of the sum is added to the row's,

    y[n] = sum over blocks b of s[n, b] (sum over k in b of c[n, k] x[k]  -  z[n, b] sum over k in b of x[k]),

all in float32, with fused multiply-adds, each thread's part in order and the parts of a row in a tree. One scale for a row
or a matrix follows after the last sum. Bound by the memory: a weight of 4 or 8 bits costs 3 to 4 instructions, of which at the
copy rate about 7 (4 bits) fit.
"""

import triton
import triton.language as tl

from fast.kernels.bits import narrow
from fast.kernels.linear.weight_values import block_scales, block_zeros, row_elements


@triton.jit
def gemv_any_kernel(
    x, codes, scale, outer, zero, bias, y, rows, per_row,
    LENGTH: tl.constexpr,
    SCHEME: tl.constexpr, DTYPE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """ROWS elements of y. LENGTH: K; per_row: blocks in a row of them; BLOCK: elements of a block along K, 0 for one scale a
    row, -1 for one in all; BLOCK_ROWS: rows of a block; SUB: neighbours that are added before they are scaled."""
    first = tl.program_id(0) * ROWS
    row = tl.minimum(first + tl.arange(0, ROWS), rows - 1)[:, None]
    row = row.to(tl.int64) if WIDE else row
    total = tl.zeros((ROWS, SIZE // SUB), tl.float32)
    for k in range(0, LENGTH, SIZE):
        c = row_elements(codes, row, k, LENGTH, SCHEME, PACKED, SIZE)
        v = tl.load(x + k + tl.arange(0, SIZE)).to(tl.float32)
        t = tl.sum(tl.reshape(c * v[None, :], (ROWS, SIZE // SUB, SUB)), axis=2)
        if BLOCK > 0:
            part = (k + SUB * tl.arange(0, SIZE // SUB)) // BLOCK
            block = row // BLOCK_ROWS * per_row + part[None, :]
            s = block_scales(scale, outer, zero, block, SCHEME)
            if SCHEME.zero != "":
                z = block_zeros(zero, block, SCHEME)
                sums = tl.sum(tl.reshape(v, (SIZE // SUB, SUB)), axis=1)[None, :]
            if SCHEME.zero == "code":
                t = t - z * sums
            total += t * s
            if SCHEME.zero == "value":
                total += z * sums
        else:
            total += t
    made = tl.sum(total, axis=1)
    at = first + tl.arange(0, ROWS)
    inside = at < rows
    if BLOCK <= 0:
        block = tl.minimum(at, rows - 1) if BLOCK == 0 else at * 0
        made = made * block_scales(scale, outer, zero, block, SCHEME)
    if bias is not None:
        made += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, narrow(made, DTYPE, False), mask=inside)
