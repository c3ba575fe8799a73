"""Gradients of fake quantization with given scales: dx, and sums over blocks of g * dy/ds and g * dy/dz.

The counterpart of `reference.fake_quantize._parameter_gradients`, on the tiles of `blocks`. A sum runs over adjacent pairs, in
a binary tree over the block filled with zeros to a power of two. The parts of a block that is larger than a tile are aligned
and powers of two, so each is a branch of that tree: programs leave their sums, and `part_sums_kernel` goes on from there.

A short last block is filled, as in the reference, with its last element under a gradient of 0: where that element's slope is
not finite the sum is NaN, and a sum of zeros has the sign of all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import SIGN, bits_of, canonical, float_of, read, widened
from fast.kernels.quantize.kernel import block_places, in_block
from fast.kernels.rules.scaled import element_codes
from fast.kernels.rules.scales import loaded_scale
from fast.kernels.rules.trees import MOST_LEVELS, tree_sum
from fast.kernels.rules.values import decoding, in_units, passed_on, saturated, unscaled
from fast.kernels.tile.quantize import loaded_scales


@triton.jit
def slopes_kernel(
    x, g, words, scale, divisor, outer, zero, y, dscale, dzero,
    count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column,
    SCHEME: tl.constexpr, MARKING: tl.constexpr, SHAPE: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, TRANSPOSED: tl.constexpr, SPLIT: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """dx of a tile, and the sums of its blocks or, CHUNKED or SPLIT, of its parts of a block.

    MARKING: the rule under which codes show what saturates. TRANSPOSED: blocks are read down their columns (transposed in
    registers before the sums, they had others on a GPU). SPLIT: rectangles that are parts of blocks, of their "rows" or
    "columns". divisor: float32 scales that made the codes, beside the `scale` of their values, where scales are quantized
    themselves; None elsewhere.
    """
    at, inside, block, exists, _ = block_places(
        count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column,
        SHAPE, CHUNKED, MASKED, WIDE, False, SIZE, INNER, P, TRANSPOSED,
    )  # fmt: skip
    near, belongs = at, inside
    if MASKED:
        near, belongs = _filled(
            at,
            block,
            exists,
            columns,
            rows,
            length,
            limit,
            chunks,
            inner_row,
            inner_column,
            SHAPE,
            CHUNKED,
            SIZE,
            INNER,
            P,
            TRANSPOSED,
        )
    part = block
    if CHUNKED:
        part = block * chunks + _chunk(columns, chunks, SHAPE, P)
    elif SPLIT == "rows":
        row, column = block // columns, block % columns
        block = row // chunks * columns + column
        part = block * chunks + row % chunks
    elif SPLIT == "columns":
        block = block // chunks
    v = widened(read(x + near, belongs), SCHEME.signs_nan)
    drawn = None
    if SCHEME.rounding == "stochastic":
        drawn = read(words + near, belongs)
    if divisor is None:
        o = tl.full((), 1.0, tl.float32)
        if SCHEME.has_outer:
            o = loaded_scale(tl.load(outer), SCHEME.outer)
        d, s, o, z = loaded_scales(scale, zero, o, block, exists, SCHEME)
        if SCHEME.codes_from != "exact":
            d = s
    else:
        o = tl.full((), 1.0, tl.float32)
        s, d = canonical(read(scale + block, exists)), canonical(read(divisor + block, exists))
        z = s
    marked = element_codes(v, d, o, z, drawn, MARKING)
    lost = saturated(v, marked, d, o, MARKING)
    dy = read(g + at, inside)
    tl.store(y + at, passed_on(dy, lost, SCHEME.dtype), mask=inside)
    dy = widened(dy)
    value = unscaled(element_codes(v, d, o, z, drawn, SCHEME), z, SCHEME)
    slopes = dy * _slope(v, value, lost, s, o, z, SCHEME)
    _leave(dscale, part, exists, tl.where(belongs, slopes, 0.0), SCHEME.has_ptx)
    if SCHEME.zero == "value":
        _leave(dzero, part, exists, tl.where(belongs & lost, dy, 0.0), SCHEME.has_ptx)
    elif SCHEME.zero == "code":
        _leave(
            dzero, part, exists, tl.where(belongs & lost, dy * negative_by_product(s), 0.0), SCHEME.has_ptx
        )


@triton.jit
def _chunk(columns, chunks, SHAPE: tl.constexpr, P: tl.constexpr):
    """Which part of its block a program takes; see `kernel.block_places`."""
    program = tl.program_id(0)
    if SHAPE == "columns":
        return program // tl.cdiv(columns, P) % chunks
    else:
        return program % chunks


@triton.jit
def _filled(
    at, block, exists, columns, rows, length, limit, chunks, inner_row, inner_column,
    SHAPE: tl.constexpr, CHUNKED: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(offsets, which belong to a block): a short block goes on with its last element, what lies beyond a block is none."""
    i = in_block(SIZE, INNER, TRANSPOSED)
    if CHUNKED:
        i = i + _chunk(columns, chunks, SHAPE, P) * SIZE
    if SHAPE == "flat":
        return tl.minimum(at, limit - 1), exists & (i < length)
    elif SHAPE == "columns":
        beyond = tl.maximum(block // columns % rows * length + i - (limit - 1), 0)
        return at - beyond.to(at.dtype) * inner_row, exists & (i < length)
    else:
        row, column = block // columns % rows, block % columns
        below = tl.maximum(row * (SIZE // INNER) + i // INNER - (limit - 1), 0)
        right = tl.maximum(column * INNER + i % INNER - (length - 1), 0)
        return at - below.to(at.dtype) * inner_row - right * inner_column, exists & (i < SIZE)


@triton.jit
def negative_by_product(v):
    """-v; Triton's own minus is 0 - v, which makes +0 of +0."""
    return float_of(bits_of(v) ^ SIGN)


@triton.jit
def _slope(v, value, lost, scale, outer, zero, SCHEME: tl.constexpr):
    """dy/ds for values in units of the scale: their difference from x / s, or they themselves where they saturated."""
    slope = value - tl.where(lost, 0.0, in_units(v, scale, outer, zero, SCHEME))
    if SCHEME.stored == "encode":
        # y = v / S: the derivative of 1 / S is -1 / S**2.
        slope = negative_by_product(tl.div_rn(slope, scale * scale))
    if SCHEME.has_outer:
        slope = slope * decoding(outer, SCHEME)
    return slope


@triton.jit
def _leave(sums, part, exists, v, HAS_PTX: tl.constexpr):
    """Store the sums of the rows of (P, SIZE)."""
    tl.store(sums + part, canonical(added(v, HAS_PTX)), mask=exists)


@triton.jit
def added(v, HAS_PTX: tl.constexpr):
    """`tree_sum`; the interpreter's own sum of two -0 is +0, so there the pairs are taken apart."""
    if HAS_PTX:
        v = tree_sum(v)
    else:
        COUNT: tl.constexpr = v.shape[0]
        for _ in tl.static_range(MOST_LEVELS):
            if v.shape[1] > 1:
                even, odd = tl.split(tl.reshape(v, (COUNT, v.shape[1] // 2, 2)))
                v = even + odd
    return v


@triton.jit
def part_sums_kernel(parts, sums, rows, length, HAS_PTX: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr):
    """Sums of rows of `length` elements, or of their parts of SIZE: one part of P rows a program."""
    per_row = tl.cdiv(length, SIZE)
    part = tl.program_id(0) % per_row
    row = tl.program_id(0) // per_row * P + tl.arange(0, P)[:, None]
    i = part * SIZE + tl.arange(0, SIZE)[None, :]
    v = tl.load(parts + row * length + i, mask=(row < rows) & (i < length), other=0.0)
    tl.store(sums + row * per_row + part, canonical(added(v, HAS_PTX)), mask=row < rows)
