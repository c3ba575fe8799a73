"""Rows sorted by expert times the experts' arranged weights: `linear_small` for each expert, in one launch.

Where an expert's rows begin and end is read on the device, so that the host waits for nothing. A program has a tile of rows
of one expert's weight and goes through the rows of X that are that expert's, BLOCK_M at a time: the weight's words come from
memory once, for more rows from the second-level cache. An expert without rows costs programs that read two numbers.
"""

import triton
import triton.language as tl

from fast.kernels.bits import narrow
from fast.kernels.linear_small.elements import atoms_of_product, has_factors, words_before, words_of
from fast.kernels.linear_small.product import sums_of_tile


@triton.jit(do_not_specialize=["count"])
def grouped_linear_small_kernel(
    x, codes, scale, zero, ends, y, count,
    N: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    BLOCKS: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Rows of y (count, N) that are one expert's, and BLOCK_N of its columns.

    x: (count, LENGTH), sorted by expert; ends: int32 (experts), the row after each expert's last. codes, scale, zero: as of
    `linear_small_kernel`, with an axis of experts in front; BLOCKS: of scales along K. Rows behind the last are not written.
    """
    NB: tl.constexpr = BLOCK_N // 64
    KB: tl.constexpr = atoms_of_product(ELEMENT, GROUP, DTYPE, BLOCK_K)
    WORDS: tl.constexpr = words_of(ELEMENT)
    expert = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    atom = expert * (ROWS // 64) + tl.program_id(0) * NB + tl.arange(0, NB)
    words = codes + atom[:, None] * (COLUMNS // 64 * WORDS) + tl.arange(0, KB * WORDS)[None, :]
    scale += expert * (ROWS // 2 * words_before(COLUMNS, GROUP) if has_factors(ELEMENT) else BLOCKS * ROWS)
    if zero is not None:
        zero += expert * (BLOCKS * ROWS // 2)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    end = tl.minimum(tl.load(ends + expert), count)
    begin = tl.where(expert > 0, tl.load(ends + tl.maximum(expert - 1, 0)), 0)
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        total = sums_of_tile(
            x, words, scale, zero, m, n, end, 0, COLUMNS // BLOCK_K,
            LENGTH, ROWS, COLUMNS, GROUP, ELEMENT, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
        inside = (m < end)[None, :] & (n < N)[:, None]
        tl.store(y + (m[None, :] * N + n[:, None]), narrow(total, OUT, False), mask=inside)
