"""Two arranged weights of one shape and scheme times the same rows of X: both products, or silu of the first times the second.

A program's tile is half of the first weight's rows and half of the second's: the product that `linear_small_kernel` makes of as
many rows of one weight, with addresses of two. The tensor core's sums of both halves lie in the same lane where a warp has rows
of each, so that what multiplies them moves nothing.

Sums are rounded to the dtype before silu, as two products by themselves round them; then `reference.swiglu` holds.
"""

import triton
import triton.language as tl

from fast.kernels.bits import narrow
from fast.kernels.layers.swiglu import silu
from fast.kernels.linear_small.elements import atoms_of_product, words_of
from fast.kernels.linear_small.product import sums_of_tile
from fast.kernels.sm90.bf16x2 import clamped_gate, gated


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
def linear_small_pair_kernel(
    x, codes, scale, zero, codes2, scale2, zero2, y, y2, count,
    N: tl.constexpr, LENGTH: tl.constexpr, GROUP: tl.constexpr, ELEMENT: tl.constexpr, DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N / 2 columns of y and y2 (count, N), or of y alone where y2 is None; where SPLITS > 1, of the parts
    (SPLITS, 2, count, N), float32, in y.

    x: (count, LENGTH). Weights (N, LENGTH) fill their tiles, else as of `linear_small_kernel`; N is a multiple of BLOCK_N / 2.
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
