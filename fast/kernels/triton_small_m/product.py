"""Y = X W' + bias: the tensor core takes 64 rows of the weight from registers and 8 or more rows of X from shared memory.

    (BLOCK_N, GROUP) of W times (GROUP, BLOCK_M) of X'  ->  a tile of Y'

Every product begins at zero, and its sums are added to the total times the scale. That is where a group's scale belongs, and
what keeps `wgmma` with operands in registers right: with sums that go from product to product both assemblers gave wrong
ones. So no scale rounds a weight: elements less zero points are exact, and the result is within
`reference.linear_error_bound`. Scales of few bits are in the elements (`fast.scale_factors`), which stay exact, and sums take
what is left, one scale in all.

Parts of K are programs of their own (SPLITS); `sum_splits_kernel` adds their sums, the first part first. So the same operands
have the same bits every time, with any number of multiprocessors.

Rows sorted by expert times the experts' arranged weights: `linear_small` for each expert, in one launch.

Where an expert's rows begin and end is read on the device, so that the host waits for nothing. A program has a tile of rows
of one expert's weight and goes through the rows of X that are that expert's, BLOCK_M at a time: the weight's words come from
memory once, for more rows from the second-level cache. An expert without rows costs programs that read two numbers.

Two arranged weights of one shape and scheme times the same rows of X: both products, or silu of the first times the second.

A program's tile is half of the first weight's rows and half of the second's: the product that `triton_small_m_kernel` makes
of as many rows of one weight, with addresses of two. The tensor core's sums of both halves lie in the same lane where a warp
has rows of each, so that what multiplies them moves nothing.

Sums are rounded to the dtype before silu, as two products by themselves round them; then `reference.swiglu` holds.
"""

import triton
import triton.language as tl

from fast import scale_factors
from fast.kernels.bits import narrow
from fast.kernels.layers.swiglu import silu
from fast.kernels.sm90.bf16x2 import clamped_gate, gated
from fast.kernels.triton_small_m.decode import (
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
    words_before,
    words_of,
    zero_pairs,
)
from fast.scale_factors import EXPONENTS


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

    words: addresses of the first words of the tile's atoms (NB, words of KB atoms); else as `triton_small_m_kernel`.
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
def triton_small_m_kernel(
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


@triton.jit
def _inputs(x, m, k, count, LENGTH: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr):
    """SIZE columns of rows m from k on, zeros beyond both ends. WHOLE: no column is beyond."""
    column = k + tl.arange(0, SIZE)[None, :]
    exists = m[:, None] < count
    if not WHOLE:
        exists = exists & (column < LENGTH)
    return tl.load(x + (m[:, None] * LENGTH + column), mask=exists, other=0.0)


@triton.jit(do_not_specialize=["count"])
def triton_small_m_experts_kernel(
    x, codes, scale, zero, ends, y, count,
    N: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
    BLOCKS: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Rows of y (count, N) that are one expert's, and BLOCK_N of its columns.

    x: (count, LENGTH), sorted by expert; ends: int32 (experts), the row after each expert's last. codes, scale, zero: as of
    `triton_small_m_kernel`, with an axis of experts in front; BLOCKS: of scales along K. Rows behind the last are not written.
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


@triton.jit
def gated_sums(gate, up, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """silu(gate) * up of float32 values that are rounded to a 16-bit dtype first."""
    g, u = narrow(gate, DTYPE, False), narrow(up, DTYPE, False)
    return gated(silu(clamped_gate(g, DTYPE, False), DTYPE, HAS_PTX), g, u, DTYPE, False, False)


@triton.jit
def _store(y, y2, at, first, second, inside, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """Both sums rounded; y2 None: silu of one times the other."""
    if y2 is None:
        tl.store(y + at, gated_sums(first, second, DTYPE, HAS_PTX), mask=inside)
    else:
        tl.store(y + at, narrow(first, DTYPE, False), mask=inside)
        tl.store(y2 + at, narrow(second, DTYPE, False), mask=inside)


@triton.jit(do_not_specialize=["count"])
def triton_small_m_pair_kernel(
    x, codes, scale, zero, codes2, scale2, zero2, y, y2, count,
    N: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N / 2 columns of y and y2 (count, N), or of y alone where y2 is None; where SPLITS > 1, of the parts
    (SPLITS, 2, count, N), float32, in y.

    x: (count, LENGTH). Weights (N, LENGTH) fill their tiles, else as of `triton_small_m_kernel`; N is a multiple of BLOCK_N /
    2.
    """
    NB: tl.constexpr = BLOCK_N // 64
    KB: tl.constexpr = atoms_of_product(ELEMENT, GROUP, DTYPE, BLOCK_K)
    WORDS: tl.constexpr = words_of(ELEMENT)
    HALF: tl.constexpr = BLOCK_N // 2
    ATOM: tl.constexpr = LENGTH // 64 * WORDS
    STEPS: tl.constexpr = LENGTH // BLOCK_K
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    program, begin = tl.program_id(0), tl.program_id(1) * EACH
    atom, row, pair = tl.arange(0, NB), tl.arange(0, BLOCK_N), tl.arange(0, 32 * NB)
    # Places in the second weight are counted on from those in the first.
    atoms = tl.where(atom < NB // 2, codes, codes2 - NB // 2 * ATOM)
    atoms += (program * (NB // 2) + atom).to(tl.int64) * ATOM
    words = atoms[:, None] + tl.arange(0, KB * WORDS)[None, :]
    scales, zeros = tl.where(row < HALF, scale, scale2 - HALF), zero
    if zero is not None:
        # `sums_of_tile` adds the place of a program whose rows are all of one weight.
        zeros = tl.where(pair < HALF // 2, zero, zero2 - HALF // 2) - program * (HALF // 2)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    total = sums_of_tile(
        x, words, scales, zeros, m, program * HALF + row, count, begin, tl.minimum(begin + EACH, STEPS),
        LENGTH, N, LENGTH, GROUP, ELEMENT, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    if SPLITS > 1:
        part = tl.program_id(1) * 2 + row // HALF
        at = (part[:, None] * count + m[None, :]) * N + (program * HALF + row % HALF)[:, None]
        tl.store(y + at, total, mask=(m < count)[None, :])
    else:
        first, second = tl.split(tl.permute(tl.reshape(total, (2, HALF, BLOCK_M)), (1, 2, 0)))
        at = m[None, :] * N + (program * HALF + tl.arange(0, HALF))[:, None]
        _store(y, y2, at, first, second, (m < count)[None, :], DTYPE, USE_PDL)


@triton.jit(do_not_specialize=["count"])
def sum_pair_splits_kernel(
    parts, y, y2, count, N: tl.constexpr, SPLITS: tl.constexpr, DTYPE: tl.constexpr, TILE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """TILE elements of a row of y and y2 (count, N), or of y alone where y2 is None: the parts (SPLITS, 2, count, N) of each
    added from the first on."""
    m = tl.program_id(1)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = n < N
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.load(parts + (m * N + n), mask=inside, other=0.0)
    second = tl.load(parts + ((count + m) * N + n), mask=inside, other=0.0)
    for part in tl.static_range(1, SPLITS):
        first += tl.load(parts + ((2 * part * count + m) * N + n), mask=inside, other=0.0)
        second += tl.load(parts + (((2 * part + 1) * count + m) * N + n), mask=inside, other=0.0)
    _store(y, y2, m * N + n, first, second, inside, DTYPE, USE_PDL)


#: What second terms of levels are multiplied by.
SECOND = tl.constexpr(scale_factors.SECOND)
