"""The largest magnitude of each column in each group of rows, or of each group: `columns` makes scales of them.

As `rowwise_colwise.maxima`, of 16-bit floats in pairs of neighbouring columns. A program goes down a strip of grains, 16 places
of one group each, and leaves its maxima where the group changes and at the end, by atomic maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.rowwise_colwise.maxima import as_float32
from fast.kernels.rowwise_colwise.mxfp8 import LOW_HALF, MAGNITUDES, larger_halves, largest_halves

#: Places that have one owner.
GRAIN = tl.constexpr(16)


@triton.jit
def _leave(
    top, statistic, owner, word, words, element: tl.constexpr, WHOLE: tl.constexpr, HAS_PTX: tl.constexpr
):
    """Maxima (WARPS, WORDS) of a group's pairs of columns into its row of `statistic`; WHOLE: into its one number."""
    pair = largest_halves(top, 0, HAS_PTX)
    low, high = as_float32(pair & LOW_HALF, element), as_float32(pair >> 16, element)
    if WHOLE:
        tl.atomic_max(statistic + owner, tl.max(tl.maximum(low, high), axis=0), sem="relaxed")
    else:
        own = statistic + owner.to(tl.int64) * (2 * words)
        tl.atomic_max(own + 2 * word, low, mask=word < words, sem="relaxed")
        tl.atomic_max(own + 2 * word + 1, high, mask=word < words, sem="relaxed")


@triton.jit
def group_maxima_kernel(
    x, source, owners, statistic, places, columns,
    WHOLE: tl.constexpr, HAS_PTX: tl.constexpr, TURNS: tl.constexpr, WARPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """statistic (groups + 1, columns), or (WHOLE) (groups + 1,): patterns of the largest magnitudes; all 0 before.

    x: rows of an even number of columns; source, owners: see `layout.group_layout`. TURNS: grains of a strip, of ROWS places.
    """
    WORDS: tl.constexpr = COLUMNS // 2
    element: tl.constexpr = x.dtype.element_ty
    words = columns // 2
    across = tl.cdiv(words, WORDS)
    first = tl.program_id(0) // across * TURNS
    word = tl.program_id(0) % across * WORDS + tl.arange(0, WORDS)
    pairs = x.to(tl.pointer_type(tl.int32), bitcast=True)
    owner = tl.load(owners + first)
    top = tl.zeros((WARPS, WORDS), tl.int32)
    for grain in range(first, tl.minimum(first + TURNS, places // ROWS)):
        mine = tl.load(owners + grain)
        if mine != owner:
            _leave(top, statistic, owner, word, words, element, WHOLE, HAS_PTX)
            top = tl.zeros((WARPS, WORDS), tl.int32)
            owner = mine
        row = tl.load(source + grain * ROWS + tl.arange(0, ROWS))
        at = row.to(tl.int64)[:, None] * words + word[None, :]
        m = tl.load(pairs + at, mask=(row >= 0)[:, None] & (word < words)[None, :], other=0) & MAGNITUDES
        own = largest_halves(tl.reshape(m, (ROWS // WARPS, WARPS, WORDS)), 0, HAS_PTX)
        top = larger_halves(top, own, HAS_PTX)
    _leave(top, statistic, owner, word, words, element, WHOLE, HAS_PTX)


__all__ = ["group_maxima_kernel"]
