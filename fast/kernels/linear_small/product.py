"""Y = X W' + bias: the tensor core takes 64 rows of the weight from registers and 8 or more rows of X from shared memory.

    (BLOCK_N, GROUP) of W times (GROUP, BLOCK_M) of X'  ->  a tile of Y'

Every product begins at zero, and its sums are added to the total times the scale. That is where a group's scale belongs, and
what keeps `wgmma` with operands in registers right: with sums that go from product to product both assemblers gave wrong ones.
So no scale rounds a weight: elements less zero points are exact, and the result is within `reference.linear_error_bound`.
Scales of few bits are in the elements (`fast.scale_factors`), which stay exact, and sums take what is left, one scale in all.

Parts of K are programs of their own (SPLITS); `sum_splits_kernel` adds their sums, the first part first. So the same operands
have the same bits every time, with any number of multiprocessors.
"""

import triton
import triton.language as tl

from fast import codebook_scales
from fast.kernels.bits import narrow
from fast.kernels.linear_small.decode import zero_pairs
from fast.kernels.linear_small.elements import (
    atoms_of_product,
    half_elements,
    has_factors,
    own_scale,
    row_factors,
    spread,
    spread_factors,
    takes_factors,
    tile_elements,
    tile_levels,
    word_halves,
    words_of,
)
from fast.scale_factors import EXPONENTS

#: What second terms of levels are multiplied by.
SECOND = tl.constexpr(codebook_scales.SECOND)


@triton.jit
def _inputs(x, m, k, count, LENGTH: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """SIZE columns of rows m from k on, zeros beyond both ends. WHOLE: no column is beyond."""
    column = k + tl.arange(0, SIZE)[None, :]
    exists = m[:, None] < count
    if not WHOLE:
        exists = exists & (column < LENGTH)
    return tl.load(x + (m[:, None] * LENGTH + column), mask=exists, other=0.0)


@triton.constexpr_function
def lacking(element, group):
    """Powers of two that factors have beside a block's scale, and those of them that decoding does not take off."""
    exponent, whole = EXPONENTS[(element, group)], 126 if element == "e2m1" else 120
    return 2.0**-exponent, 2.0 ** (whole - exponent)


@triton.jit
def zero_points_of(
    zero, block, ROWS: tl.constexpr, NB: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr
):
    """Zero points of a block of the rows of a program, as `decode` takes them (32 NB)."""
    first = block * (ROWS // 2) + tl.program_id(0) * (32 * NB)
    return zero_pairs(tl.load(zero + (first + tl.arange(0, 32 * NB))), ELEMENT, DTYPE)


@triton.jit
def _ask(atoms, first, COUNT: tl.constexpr, LAST: tl.constexpr):
    """Bring at most COUNT words, from `first` on behind these addresses (NB, 1), to the second-level cache: lines of 32 words,
    half a power of two of them at least, none beyond LAST."""
    LINES: tl.constexpr = triton.next_power_of_2(COUNT // 32 // 2 + 1)
    line = atoms + tl.minimum(first + tl.arange(0, LINES) * 32, LAST)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [line.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sums_of_tile(
    x, words, scale, zero, m, n, count, begin, end,
    LENGTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, ELEMENT: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums (BLOCK_N, BLOCK_M) of rows n of the weight times rows m of X below count, over steps of BLOCK_K columns.

    words: addresses of the first words of the tile's atoms (NB, words of KB atoms); else as `linear_small_kernel`.
    """
    NB: tl.constexpr = BLOCK_N // 64
    KB: tl.constexpr = atoms_of_product(ELEMENT, GROUP, DTYPE, BLOCK_K)
    WORDS: tl.constexpr = words_of(ELEMENT)
    SPAN: tl.constexpr = 64 * KB
    WHOLE: tl.constexpr = LENGTH == COLUMNS
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if GROUP == 0:
        s = tl.load(scale + n)
    if has_factors(ELEMENT):
        ADDED: tl.constexpr = lacking(ELEMENT, GROUP)
        own, factors = own_scale(scale), scale + ROWS // 2
    for step in tl.range(begin, end, num_stages=STAGES):
        for piece in tl.static_range(BLOCK_K // SPAN):
            k = step * BLOCK_K + piece * SPAN
            w = tl.load(words + k // 64 * WORDS)
            if takes_factors(ELEMENT, GROUP, DTYPE):
                f = spread_factors(factors, k // 64, ROWS, NB, KB, GROUP, ELEMENT, DTYPE)
                t = tile_elements(w, f, NB, KB, ELEMENT, DTYPE)
                v = _inputs(x, m, k, count, LENGTH, SPAN, WHOLE)
                # The factor is of all, and yet of each: sums that nothing multiplies would go on from product to product.
                total += tl.dot(t, v.T) * (own * ADDED[1])
            elif ELEMENT == "nf4":
                first, second = tile_levels(w, NB, KB, DTYPE)
                v = _inputs(x, m, k, count, LENGTH, SPAN, WHOLE).T
                s = tl.load(scale + k // GROUP * ROWS + n).to(tl.float32, bitcast=True)
                # A sum of both products would be one of sums that go on from product to product; this is none.
                total += tl.fma(tl.dot(second, v), SECOND, tl.dot(first, v)) * s[:, None]
            elif GROUP == 32:
                parts = word_halves(w, NB, ELEMENT)
                for half in tl.static_range(2):
                    block = k // 32 + half
                    less = None
                    if zero is not None:
                        less = spread(
                            zero_points_of(zero, block, ROWS, NB, ELEMENT, DTYPE), NB, 1, WORDS // 64
                        )
                    t = half_elements(parts[half], less, NB, ELEMENT, DTYPE)
                    v = _inputs(x, m, k + 32 * half, count, LENGTH, 32, WHOLE)
                    if has_factors(ELEMENT):
                        s = row_factors(factors, n, block, ROWS, GROUP) * ADDED[0] * own
                    else:
                        s = tl.load(scale + block * ROWS + n)
                    total += tl.dot(t, v.T) * s[:, None]
            else:
                block = 0 if GROUP == 0 else k // GROUP
                less = None
                if zero is not None:
                    less = spread(
                        zero_points_of(zero, block, ROWS, NB, ELEMENT, DTYPE), NB, KB * WORDS // 512, 16
                    )
                t = tile_elements(w, less, NB, KB, ELEMENT, DTYPE)
                v = _inputs(x, m, k, count, LENGTH, SPAN, WHOLE)
                if GROUP > 0:
                    s = tl.load(scale + block * ROWS + n)
                total += tl.dot(t, v.T) * s[:, None]
    return total


@triton.jit(do_not_specialize=["count"])
def linear_small_kernel(
    x, codes, scale, zero, x_scale, bias, y, count,
    N: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    ELEMENT: tl.constexpr, DTYPE: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A tile of y (count, N), or of its parts (SPLITS, count, N), float32 without x_scale and bias, where SPLITS > 1.

    x: (count, LENGTH). The weight (N, LENGTH) is arranged as (ROWS, COLUMNS), multiples of 64 and of BLOCK_K that hold it.
    scale: float32 (blocks, ROWS), or int32 (rows of words, ROWS / 2) of elements with factors; zero: None, or int32
    (blocks, ROWS / 2); GROUP: columns of a block, 0 where a row is one.
    x_scale: None, or float32 (count): of rows of X, whose sums are multiplied by it.
    EARLY: ask for the first words before the kernel in front has ended, which must not be what writes them.
    """
    NB: tl.constexpr = BLOCK_N // 64
    KB: tl.constexpr = atoms_of_product(ELEMENT, GROUP, DTYPE, BLOCK_K)
    WORDS: tl.constexpr = words_of(ELEMENT)
    STEPS: tl.constexpr = COLUMNS // BLOCK_K
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    begin = tl.program_id(1) * EACH
    atoms = codes + (tl.program_id(0) * NB + tl.arange(0, NB)).to(tl.int64)[:, None] * (COLUMNS // 64 * WORDS)
    if USE_PDL:
        if EARLY:
            STEP_WORDS: tl.constexpr = BLOCK_K // 64 * WORDS
            _ask(atoms, begin * STEP_WORDS, (STAGES - 1) * STEP_WORDS, COLUMNS // 64 * WORDS - 32)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    words = atoms + tl.arange(0, KB * WORDS)[None, :]
    total = sums_of_tile(
        x, words, scale, zero, m, n, count, begin, tl.minimum(begin + EACH, STEPS),
        LENGTH, ROWS, COLUMNS, GROUP, ELEMENT, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    inside = (m < count)[None, :] & (n < N)[:, None]
    at = m[None, :] * N + n[:, None]
    if SPLITS > 1:
        tl.store(y + (tl.program_id(1) * count * N + at), total, mask=inside)
    else:
        if x_scale is not None:
            total *= tl.load(x_scale + m, mask=m < count, other=0.0)[None, :]
        if bias is not None:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y + at, narrow(total, OUT, False), mask=inside)


@triton.jit(do_not_specialize=["count"])
def sum_splits_kernel(
    parts, x_scale, bias, y, count, N: tl.constexpr, SPLITS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """TILE elements of a row of y (count, N): parts (SPLITS, count, N) added from the first on, times x_scale, plus bias."""
    m = tl.program_id(1)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = n < N
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(parts + (m * N + n), mask=inside, other=0.0)
    for part in tl.static_range(1, SPLITS):
        total += tl.load(parts + ((part * count + m) * N + n), mask=inside, other=0.0)
    if x_scale is not None:
        total *= tl.load(x_scale + m)
    if bias is not None:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + (m * N + n), narrow(total, OUT, False), mask=inside)
