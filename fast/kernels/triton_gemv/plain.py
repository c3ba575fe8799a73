"""Y = X W' + bias for a stored weight W (N, K) and some rows X (M, K): codes become 16-bit floats for the tensor core.

Codes of up to 8 bits, less their zero points, are exact in bfloat16 and float16, so products are exact and sums are float32's;
scales multiply sums. Where a scale changes along K, each block is a product of its own from a zero accumulator, which is
scaled and added. Weights are the tensor core's second operand: with the first one decoded in registers some configurations
of the accumulating form gave wrong sums.

Rows of stored weights as decoded elements: what products of dequantization and multiplication read.

A decoded element is the value of a code before scaling and without the zero point. Scales and zero points follow after sums of
products, so that a weight costs one multiplication and no rounding.

y = W x + bias for a stored weight W (N, K) and one vector x: weights are read once, as they are stored.

A program takes ROWS rows, a warp some of them, and walks along K. Neighbours in a thread, SUB of them, lie in one block: their
products are added there, and what the block's scale and zero point make of the sum is added to the row's,

    y[n] = sum over blocks b of s[n, b] (sum over k in b of c[n, k] x[k]  -  z[n, b] sum over k in b of x[k]),

all in float32, with fused multiply-adds, each thread's part in order and the parts of a row in a tree. One scale for a row
or a matrix follows after the last sum. Bound by the memory: a weight of 4 or 8 bits costs 3 to 4 instructions, of which at the
copy rate about 7 (4 bits) fit.
"""

import triton
import triton.language as tl

from fast.kernels.bits import narrow, read
from fast.kernels.rules.elements import decode, load_packed
from fast.kernels.rules.scales import double_scale, loaded_scale
from fast.kernels.rules.values import combined, loaded_zero
from fast.kernels.tile.fast_codes import load_elements


@triton.jit
def triton_gemv_any_kernel(
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
    result = tl.sum(total, axis=1)
    at = first + tl.arange(0, ROWS)
    inside = at < rows
    if BLOCK <= 0:
        block = tl.minimum(at, rows - 1) if BLOCK == 0 else at * 0
        result = result * block_scales(scale, outer, zero, block, SCHEME)
    if bias is not None:
        result += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, narrow(result, DTYPE, False), mask=inside)


@triton.jit
def row_elements(codes, row, k, length, SCHEME: tl.constexpr, PACKED: tl.constexpr, SIZE: tl.constexpr):
    """Decoded elements (P, SIZE), float32, from k on of rows (P, 1); `length` codes a row, a multiple of SIZE, like k."""
    at = row * length + (k + tl.arange(0, SIZE))[None, :]
    block = row * (length // SIZE) + k // SIZE
    exists = row >= 0
    if SCHEME.fast_values and (PACKED or SCHEME.bits == 8):
        return load_elements(codes, at, exists, block, exists, SCHEME, PACKED, SIZE)
    else:
        if PACKED:
            code = load_packed(codes, block, exists, SIZE, SCHEME.bits)
        else:
            code = tl.load(codes + at).to(tl.int32) & ((1 << SCHEME.bits) - 1)
        if SCHEME.zero == "value":
            return (code - SCHEME.middle_code).to(tl.float32)
        else:
            return decode(code, SCHEME.element)


@triton.jit
def block_scales(scale, outer, zero, block, SCHEME: tl.constexpr):
    """Decoding scales of blocks, the outer scale included, float32."""
    exists = block >= 0
    if SCHEME.two_level:
        s = double_scale(scale, outer, zero, block, exists, SCHEME, "float32")
    else:
        s = loaded_scale(tl.load(scale + block), SCHEME.level)
    o = tl.full((), 1.0, tl.float32)
    if SCHEME.has_outer:
        o = loaded_scale(tl.load(outer), SCHEME.outer)
    return combined(s, o, SCHEME, "float32")


@triton.jit
def block_zeros(zero, block, SCHEME: tl.constexpr):
    """Zero points of blocks, float32: in units of the scale, or (SCHEME.zero "value") of the weight."""
    return loaded_zero(read(zero + block, block >= 0), SCHEME).to(tl.float32)


@triton.jit
def triton_gemm_small_m_kernel(
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
