"""The largest magnitudes of rows and columns of a matrix, from one read: what `tiles` needs where each has one scale.

Magnitudes of floats order as their patterns do, NaN above all, so 16-bit floats are compared in pairs of neighbouring columns
(`max.u16x2`) and become patterns of float32 at the end. A program goes down a strip of columns: a thread keeps the maxima of
its columns in registers, while those of each turn's rows leave, over the lanes of a warp, by atomic maximum.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of
from fast.kernels.quantize.geometry import ceil_div
from fast.kernels.rowwise_colwise.mxfp8 import LOW_HALF, MAGNITUDES, larger_halves, largest_halves
from fast.kernels.rules.statistics import larger
from fast.kernels.scheme.constants import SchemeConstants
from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch

# Rows of a warp in a turn, words of a row (128: what the lanes of a warp read at once), turns, and warps.
ROWS, WORDS, TURNS, WARPS = 8, 128, 8, 4
# Neighbours that a thread has of a row: 16 bytes of 16-bit floats.
TOGETHER = tl.constexpr(8)
HALF_MAGNITUDE = tl.constexpr(0x7FFF)
INT32 = 2**31


@triton.jit
def tile_places(row, column, rows, columns, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """(offsets of a tile in a row-major matrix, which of them exist: a mask that the compiler drops unless MASKED)."""
    wide = row.to(tl.int64) if WIDE else row
    at = wide[:, None] * columns + column[None, :]
    if not MASKED:
        inside = tl.full(at.shape, 1, tl.int1)
    else:
        inside = (row[:, None] < rows) & (column[None, :] < columns)
    return at, inside


@triton.jit
def largest_along(v, AXIS: tl.constexpr, HAS_PTX: tl.constexpr):
    """Patterns of the largest magnitudes along an axis, which goes; HAS_PTX: by float maxima, see `absmax`."""
    if HAS_PTX:
        return bits_of(tl.reduce(tl.abs(v), AXIS, larger)) & MAGNITUDE
    else:
        return tl.max(bits_of(v) & MAGNITUDE, axis=AXIS)


@triton.jit
def largest_of_rows(v, HAS_PTX: tl.constexpr):
    """The same of rows: over a thread's neighbours, then over lanes, which one instruction does for integers."""
    ROWS: tl.constexpr = v.shape[0]
    COLUMNS: tl.constexpr = v.shape[1]
    parts = largest_along(tl.reshape(v, (ROWS, COLUMNS // TOGETHER, TOGETHER)), 2, HAS_PTX)
    return tl.max(parts, axis=1)


@triton.jit
def _magnitudes(x, at, inside, PAIRS: tl.constexpr):
    """Patterns of magnitudes as int32: of two 16-bit floats (PAIRS), or of one float of any size."""
    if PAIRS:
        words = x.to(tl.pointer_type(tl.int32), bitcast=True)
        return tl.load(words + at, mask=inside, other=0) & MAGNITUDES
    elif x.dtype.element_ty == tl.float32:
        return bits_of(tl.load(x + at, mask=inside, other=0)) & MAGNITUDE
    else:
        return tl.load(x + at, mask=inside, other=0).to(tl.int16, bitcast=True).to(tl.int32) & HALF_MAGNITUDE


@triton.jit
def as_float32(pattern, element: tl.constexpr):
    """Patterns of float32 of the same magnitudes."""
    if element == tl.float32:
        return pattern
    elif element == tl.bfloat16:
        return pattern << 16
    else:
        return bits_of(pattern.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)) & MAGNITUDE


@triton.jit
def _over_rows(m, AXIS: tl.constexpr, PAIRS: tl.constexpr, HAS_PTX: tl.constexpr):
    """Maxima of words along an axis; of pairs for each half."""
    if PAIRS:
        return largest_halves(m, AXIS, HAS_PTX)
    else:
        return tl.max(m, axis=AXIS)


@triton.jit
def _over_words(m, PAIRS: tl.constexpr, HAS_PTX: tl.constexpr):
    """Maxima of all numbers of a row: in a thread, then over lanes."""
    SIZE: tl.constexpr = m.shape[1]
    parts = tl.reshape(m, (m.shape[0], SIZE // 4, 4))
    if PAIRS:
        word = largest_halves(parts, 2, HAS_PTX)
        return tl.max(tl.maximum(word & LOW_HALF, word >> 16), axis=1)
    else:
        return tl.max(tl.max(parts, axis=2), axis=1)


@triton.jit
def maxima_kernel(
    x, statistic, rows, columns,
    OF_ROWS: tl.constexpr, PAIRS: tl.constexpr, HAS_PTX: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TURNS: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """statistic: patterns of the columns' largest magnitudes, then (OF_ROWS) of the rows'; all 0 before.

    BATCH: of the columns of each matrix; the grid's second axis goes over matrices.
    """
    element: tl.constexpr = x.dtype.element_ty
    if BATCH:
        matrix = tl.program_id(1).to(tl.int64)
        x += matrix * rows * columns
        statistic += matrix * columns
    WORDS: tl.constexpr = COLUMNS // 2 if PAIRS else COLUMNS
    words = columns // 2 if PAIRS else columns
    across = tl.cdiv(words, WORDS)
    down = tl.program_id(0) // across * (TURNS * ROWS)
    word = tl.program_id(0) % across * WORDS + tl.arange(0, WORDS)
    top = tl.zeros((WARPS, WORDS), tl.int32)
    for turn in range(TURNS):
        row = down + turn * ROWS + tl.arange(0, ROWS)
        at, inside = tile_places(row, word, rows, words, MASKED, WIDE)
        m = _magnitudes(x, at, inside, PAIRS)
        own = _over_rows(tl.reshape(m, (ROWS // WARPS, WARPS, WORDS)), 0, PAIRS, HAS_PTX)
        top = larger_halves(top, own, HAS_PTX) if PAIRS else tl.maximum(top, own)
        if OF_ROWS:
            largest = as_float32(_over_words(m, PAIRS, HAS_PTX), element)
            tl.atomic_max(statistic + columns + row, largest, mask=row < rows, sem="relaxed")
    top = _over_rows(top, 0, PAIRS, HAS_PTX)
    if PAIRS:
        low, high = as_float32(top & LOW_HALF, element), as_float32(top >> 16, element)
        tl.atomic_max(statistic + 2 * word, low, mask=word < words, sem="relaxed")
        tl.atomic_max(statistic + 2 * word + 1, high, mask=word < words, sem="relaxed")
    else:
        tl.atomic_max(statistic + word, as_float32(top, element), mask=word < words, sem="relaxed")


def leave_maxima(
    call: Call, rule: SchemeConstants, of_rows: bool, rows: int = ROWS, words: int = WORDS, turns: int = TURNS,
    warps: int = WARPS,
) -> None:  # fmt: skip
    """Allocate `statistic`, and fill it with the maxima of the matrix `x`, or of the columns of each of a batch.

    rows: of a warp in a turn.
    """
    x = call.tensors["x"]
    *batch, height, width = x.shape
    call.allocate("statistic", (prod(batch) * width + of_rows * height,), torch.int32, (0,))
    pairs = x.element_size() == 2 and width % 2 == 0
    columns, tall = words * (1 + pairs), rows * warps * turns
    masked = bool(height % tall or width % columns)
    tail = (
        height, width, of_rows, pairs, bool(rule.has_ptx), masked, height * width >= INT32, rows * warps, turns, warps,
        columns, bool(batch),
    )  # fmt: skip
    grid = (ceil_div(height, tall) * ceil_div(width, columns), prod(batch), 1)
    call.launch(CompiledLaunch(maxima_kernel, grid, tail, warps), ("x", "statistic"))
