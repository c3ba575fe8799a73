"""y = ((A B') s_a) s_b + bias for codes A (M, K) and B (N, K) of 8-bit floats or int8, read through TMA descriptors.

Each program makes a tile of y, or of one of the parts of K that SPLITS says. With few rows the weight B is the operand that
the tensor core takes 64 rows of and A the one it takes 8 or more of (SWAP), so that no products of missing rows are made:

    SWAP      (BLOCK_N, K) of B times (K, BLOCK_M) of A'  ->  the tile transposed
    no SWAP   (BLOCK_M, K) of A times (K, BLOCK_N) of B'  ->  the tile

What a descriptor reads beyond M, N or K is zero; rows that are missing cost more than those that are there. Sums of floats are
the tensor core's own (`reference.matmul`, "hopper_fp8"); with several parts of K these are added in float32, the first part
first. Sums of integers are exact in int32, in any order and any number of parts. A zero point z of a row of int8 A is taken off
as z times the sum of the weight's row, which the tensor core makes beside the products: a product of the weight with 16 columns
of ones, an eighth of the work of a tile of 128 rows, and no second reading of the weight. Scales and bias follow one by one in
float32, then one rounding: nothing of the result's size is written but the result, or its parts.
"""

import triton
import triton.language as tl

from fast.kernels.bits import narrow


@triton.jit
def _tile_of(m_size, n_size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr):
    """The first row and column of a program's tile: TOGETHER tiles along M, column by column, so that programs at work at a
    time read few rows of both operands, from the second-level cache."""
    across = tl.cdiv(n_size, BLOCK_N)
    down = tl.cdiv(m_size, BLOCK_M)
    program = tl.program_id(0)
    first = program // (TOGETHER * across) * TOGETHER
    height = tl.minimum(down - first, TOGETHER)
    place = program % (TOGETHER * across)
    return (first + place % height) * BLOCK_M, place // height * BLOCK_N


# A number of rows gets no kernel of its own for being a multiple of 16, or 1.
@triton.jit(do_not_specialize=["m_size"])
def triton_int_scaled_mm_kernel(
    a, b, scale_a, zero_a, scale_b, bias, y, parts, m_size, n_size, k_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, SWAP: tl.constexpr,
    TOGETHER: tl.constexpr, EACH_A: tl.constexpr, EACH_B: tl.constexpr, DTYPE: tl.constexpr, STAGES: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """A tile of y (M, N), or of parts (SPLITS, M, N), int32, where SPLITS > 1.

    a, b: descriptors of blocks (BLOCK_M, BLOCK_K) and (BLOCK_N, BLOCK_K) of int8; zero_a: None, or int8; EACH_A: whether each
    row of A has a scale and zero point; EACH_B: whether each row of B has a scale.
    """
    first_m, first_n = _tile_of(m_size, n_size, BLOCK_M, BLOCK_N, TOGETHER)
    steps = tl.cdiv(tl.cdiv(k_size, BLOCK_K), SPLITS) * BLOCK_K
    start = tl.program_id(1) * steps
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    whole = tl.zeros((BLOCK_N, 16), tl.int32)
    ones = tl.full((BLOCK_K, 16), 1, tl.int8)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    for k in tl.range(start, tl.minimum(start + steps, k_size), BLOCK_K, num_stages=STAGES):
        v = a.load([first_m, k])
        w = b.load([first_n, k])
        if SWAP:
            total = tl.dot(w, v.T, total, out_dtype=tl.int32)
        else:
            total = tl.dot(v, w.T, total, out_dtype=tl.int32)
        if zero_a is not None:
            whole = tl.dot(w, ones, whole, out_dtype=tl.int32)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SWAP:
        total = tl.trans(total)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    inside = (m < m_size)[:, None] & (n < n_size)[None, :]
    if zero_a is not None:
        # All 16 columns are the same.
        of_row = tl.max(whole, axis=1)
        zero = tl.load(zero_a + (m if EACH_A else m * 0), mask=m < m_size, other=0).to(tl.int32)
        total -= zero[:, None] * of_row[None, :]
    at = m.to(tl.int64)[:, None] * n_size + n[None, :]
    if SPLITS > 1:
        tl.store(parts + tl.program_id(1).to(tl.int64) * m_size * n_size + at, total, mask=inside)
    else:
        left = tl.load(scale_a + (m if EACH_A else m * 0), mask=m < m_size, other=0.0)
        right = tl.load(scale_b + (n if EACH_B else n * 0), mask=n < n_size, other=0.0)
        result = total.to(tl.float32) * left[:, None] * right[None, :]
        if bias is not None:
            result += tl.load(bias + n, mask=n < n_size, other=0.0).to(tl.float32)[None, :]
        tl.store(y + at, narrow(result, DTYPE, False), mask=inside)


# A number of rows gets no kernel of its own for being a multiple of 16, or 1.
@triton.jit(do_not_specialize=["m_size"])
def triton_scaled_mm_kernel(
    a, b, scale_a, scale_b, bias, y, parts, m_size, n_size, k_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, SWAP: tl.constexpr,
    TOGETHER: tl.constexpr, PROMOTE: tl.constexpr, EACH_A: tl.constexpr, EACH_B: tl.constexpr, DTYPE: tl.constexpr,
    STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A tile of y (M, N), or of parts (SPLITS, M, N) where SPLITS > 1.

    a, b: descriptors of blocks (BLOCK_M, BLOCK_K) and (BLOCK_N, BLOCK_K); PROMOTE: whether sums of BLOCK_K products are added
    in float32, else the tensor core adds all; EACH_A, EACH_B: whether each row has a scale.
    """
    first_m, first_n = _tile_of(m_size, n_size, BLOCK_M, BLOCK_N, TOGETHER)
    steps = tl.cdiv(tl.cdiv(k_size, BLOCK_K), SPLITS) * BLOCK_K
    start = tl.program_id(1) * steps
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    for k in tl.range(start, tl.minimum(start + steps, k_size), BLOCK_K, num_stages=STAGES):
        v = a.load([first_m, k])
        w = b.load([first_n, k])
        if SWAP and PROMOTE:
            total += tl.dot(w, v.T)
        elif SWAP:
            total = tl.dot(w, v.T, total)
        elif PROMOTE:
            total += tl.dot(v, w.T)
        else:
            total = tl.dot(v, w.T, total)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SWAP:
        total = tl.trans(total)
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    inside = (m < m_size)[:, None] & (n < n_size)[None, :]
    at = m.to(tl.int64)[:, None] * n_size + n[None, :]
    if SPLITS > 1:
        tl.store(parts + tl.program_id(1).to(tl.int64) * m_size * n_size + at, total, mask=inside)
    else:
        left = tl.load(scale_a + (m if EACH_A else m * 0), mask=m < m_size, other=0.0)
        right = tl.load(scale_b + (n if EACH_B else n * 0), mask=n < n_size, other=0.0)
        total = total * left[:, None] * right[None, :]
        if bias is not None:
            total += tl.load(bias + n, mask=n < n_size, other=0.0).to(tl.float32)[None, :]
        tl.store(y + at, narrow(total, DTYPE, False), mask=inside)


@triton.jit(do_not_specialize=["m_size"])
def add_parts_kernel(
    parts, scale_a, scale_b, bias, y, m_size, n_size,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, EACH_A: tl.constexpr, EACH_B: tl.constexpr, DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """SIZE elements of a row of y: the parts (SPLITS, M, N), int32 or float32, added from the first on, scaled, plus bias."""
    tiles = tl.cdiv(n_size, SIZE)
    m = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * SIZE + tl.arange(0, SIZE)
    inside = n < n_size
    at = m.to(tl.int64) * n_size + n
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(parts + at, mask=inside, other=0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + (at + tl.full((), part, tl.int64) * m_size * n_size), mask=inside, other=0)
    total = total.to(tl.float32) * tl.load(scale_a + (m if EACH_A else 0))
    total = total * tl.load(scale_b + (n if EACH_B else n * 0), mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, narrow(total, DTYPE, False), mask=inside)
