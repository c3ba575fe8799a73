"""Rows of RMSNorm that are no power of two, as two or three pieces that are: 14336 = 8192 + 4096 + 2048.

Nothing is masked and nothing is read beyond the row. The pieces are branches of the tree in which squares are added (of the
row filled with zeros to a power of two), as they are aligned to their own length; a sum with the zeros beyond the last one is
the sum. Where scales belong to blocks that divide the smallest piece, one piece after the other is normalized and quantized;
a row under one scale is normalized whole before (see `quantize.split_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from fast.kernels.layers.tiles import quantize_rows
from fast.kernels.quantize.split_rows import quantize_row
from fast.kernels.rules.trees import summed, tree_sum
from fast.kernels.sm90.bf16x2 import floats, normal

# The smallest piece, and the largest: more of a row does not fit registers.
LEAST, MOST = 512, 8192
PER_THREAD = 32


@triton.jit
def norm_pieces_kernel(
    x, residual, weight, new_residual, y, codes, scale, zero, eps, length, per_row,
    SCHEME: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, GROUP: tl.constexpr, THREADS: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """A row: A elements, B and, unless it is 0, C; blocks of GROUP, or as many as divide the smallest piece.

    THREADS: those of a program where the row has one scale, or 0.
    """
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    start = row * length
    # A row under one scale is a row of each piece.
    a = _piece(x, residual, new_residual, start, A, A if THREADS > 0 else GROUP, DTYPE, HAS_PTX)
    b = _piece(x, residual, new_residual, start + A, B, B if THREADS > 0 else GROUP, DTYPE, HAS_PTX)
    rest = _squares(b, HAS_PTX)
    if C > 0:
        c = _piece(x, residual, new_residual, start + (A + B), C, C if THREADS > 0 else GROUP, DTYPE, HAS_PTX)
        rest += _squares(c, HAS_PTX)
    total = _squares(a, HAS_PTX) + rest
    mean = tl.div_rn(total, tl.zeros_like(total) + length)
    r = tl.div_rn(tl.zeros_like(total) + 1.0, tl.sqrt_rn(mean + eps))
    if THREADS > 0:
        v, w = _normal_row(a, r, weight, 0, DTYPE, HAS_PTX), _normal_row(b, r, weight, A, DTYPE, HAS_PTX)
        u = w
        if C > 0:
            u = _normal_row(c, r, weight, A + B, DTYPE, HAS_PTX)
        quantize_row(v, w, u, codes, scale, start, row, SCHEME, OP, C, THREADS)
    else:
        first = row * per_row
        _finish(a, r, weight, y, codes, scale, zero, start, 0, first, SCHEME, OP, DTYPE, GROUP, HAS_PTX)
        _finish(b, r, weight, y, codes, scale, zero, start, A, first, SCHEME, OP, DTYPE, GROUP, HAS_PTX)
        if C > 0:
            _finish(
                c, r, weight, y, codes, scale, zero, start, A + B, first, SCHEME, OP, DTYPE, GROUP, HAS_PTX
            )


@triton.jit
def _columns(SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Elements of a piece as (blocks, GROUP)."""
    return tl.arange(0, SIZE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _piece(
    x, residual, new_residual, start, SIZE: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr
):  # fmt: skip
    """SIZE elements from `start` on, with the residual, which is written."""
    at = start + _columns(SIZE, GROUP)
    h = summed(x, residual, at, None, DTYPE, HAS_PTX)
    if new_residual is not None:
        tl.store(new_residual + at, h)
    return h


@triton.jit
def _squares(h, HAS_PTX: tl.constexpr):
    """The sum of squares of a piece, a scalar."""
    wide = floats(h, HAS_PTX)
    return tl.sum(tree_sum(tl.reshape(wide * wide, (1, h.shape[0] * h.shape[1]))))


@triton.jit
def _normal_row(h, r, weight, offset, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """A piece of shape (1, length) that begins at `offset`, normalized, as float32."""
    w = tl.load(weight + offset + tl.arange(0, h.shape[1])[None, :])
    return normal(h, tl.zeros_like(floats(h, HAS_PTX)) + r, w, DTYPE, True, HAS_PTX)


@triton.jit
def _finish(
    h, r, weight, y, codes, scale, zero, start, offset, first, SCHEME: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr,
    GROUP: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Normalize a piece that begins at `offset`, and quantize it where there is a SCHEME; first: the row's first block."""
    COUNT: tl.constexpr = h.shape[0]
    column = offset + _columns(COUNT * GROUP, GROUP)
    # The weight comes from the L2, and late, so that it takes no registers before.
    w = tl.load(weight + column)
    by = tl.zeros_like(floats(h, HAS_PTX)) + r
    if SCHEME is None:
        tl.store(y + start + column, normal(h, by, w, DTYPE, False, HAS_PTX))
    else:
        v = normal(h, by, w, DTYPE, True, HAS_PTX)
        block = first + offset // GROUP + tl.arange(0, COUNT)[:, None]
        inside, exists = tl.full(h.shape, 1, tl.int1), tl.full((COUNT, 1), 1, tl.int1)
        quantize_rows(v, codes, scale, zero, start + column, inside, block, exists, SCHEME, OP)


@dataclass(frozen=True)
class Pieces:
    """A row's pieces, C = 0 where there are two, the blocks in which they lie, and the warps of a program."""

    a: int
    b: int
    c: int
    group: int
    warps: int


def pieces(length: int, block: int | None, per_thread: int = PER_THREAD) -> Pieces | None:
    """Pieces for rows of this length in blocks of `block` (None: no blocks), or None where they do not serve.

    per_thread: elements of the largest piece in a thread; the others add up to three quarters of it.
    """
    powers = [1 << i for i in reversed(range(length.bit_length())) if length >> i & 1]
    if len(powers) not in (2, 3) or powers[-1] < LEAST or powers[0] > MOST:
        return None
    group = powers[-1] if block is None else block
    if powers[-1] % group:
        return None
    warps = max(1, powers[0] // (32 * per_thread))
    return Pieces(powers[0], powers[1], powers[2] if len(powers) == 3 else 0, group, warps)
