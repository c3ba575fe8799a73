"""Transposable 2:4 masks, and both compressed orientations of a matrix, from one read.

A thread has 8 x 8 elements, four tiles: eight rows of 16 bytes, or of 32. So it makes whole bytes of metadata in both
directions, and nothing moves between threads. A program is one warp, four blocks down and eight across: rows of 128 bytes are
read, and the transposed values of 32 rows fill a sector.

Floor of 16-bit elements: 2 bytes read and 2.25 written, or one of a mask. The search takes fewer instructions than a tile's
bytes leave time for at the copy rate (counts: reports/LOG.md).

NaN and infinities are rare, and only they need `careful_key`: where one of a warp has any, its threads read their tiles again,
one after the other. Keys take two registers, so nothing is kept meanwhile: what is written is read once more, from the
first-level cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, bits_of, float_of, high_float, low_float
from fast.kernels.sparsity.groups import bytes_by, kept_halves, kept_words
from fast.kernels.sparsity.octets import joined_fours, split_fours, words_at
from fast.kernels.sparsity.tiles import (
    best_mask,
    bits_of_row,
    bytes_of_row,
    careful_key,
    nibbles_of,
    octet_of,
    pair_sums,
    turned,
)

#: Blocks of 8 x 8 that a program has down and across, and its elements.
DOWN, ACROSS, TILE = 4, 8, 2048
BLOCKS = tl.constexpr(DOWN * ACROSS)


@triton.jit(do_not_specialize=["height", "width"])
def transposable_kernel(
    w, mask, values, metadata, values_t, metadata_t, height, width,
    BYTES: tl.constexpr, IS_BF16: tl.constexpr, MASKED: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Of w, height x width blocks of 8 x 8: the mask, or where there is none, values and metadata of w and of its transpose."""
    programs = tl.cdiv(width, ACROSS)
    lane = tl.arange(0, DOWN * ACROSS)
    row = tl.program_id(0) // programs * DOWN + lane // ACROSS
    column = tl.program_id(0) % programs * ACROSS + lane % ACROSS
    inside = (row < height) & (column < width)
    # Octets: where the first row of a block begins.
    at = row.to(tl.int64) * 8 * width + column
    w = words_at(w, 0)
    upper = _four_rows(w, at, width, inside, "evict_last", BYTES, MASKED)
    lower = _four_rows(w, at + 4 * width, width, inside, "evict_last", BYTES, MASKED)
    m0, s0 = _plain_mask(upper, 0, BYTES, IS_BF16)
    m1, s1 = _plain_mask(upper, 1, BYTES, IS_BF16)
    m2, s2 = _plain_mask(lower, 0, BYTES, IS_BF16)
    m3, s3 = _plain_mask(lower, 1, BYTES, IS_BF16)
    high, low = m0 | (m1 << 16), m2 | (m3 << 16)
    if tl.max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), 0) >= INFINITY:
        high, low = _careful_masks(w, at, width, inside, BYTES, IS_BF16, MASKED)
    if mask is not None:
        _write_masks(mask, high, at, width, inside, 0, MASKED)
        _write_masks(mask, low, at, width, inside, 4, MASKED)
    else:
        upper = _four_rows(w, at, width, inside, "evict_first", BYTES, MASKED)
        lower = _four_rows(w, at + 4 * width, width, inside, "evict_first", BYTES, MASKED)
        _write_rows(values, metadata, upper, nibbles_of(high), at, width, inside, 0, BYTES, MASKED)
        _write_rows(values, metadata, lower, nibbles_of(low), at, width, inside, 4, BYTES, MASKED)
        high, low = turned(high), turned(low)
        at = column.to(tl.int64) * 8 * height + row
        left, right = bytes_by(high, low, 0x5410), bytes_by(high, low, 0x7632)
        turned_left = turned_columns(upper, lower, 0, BYTES)
        _write_rows(values_t, metadata_t, turned_left, nibbles_of(left), at, height, inside, 0, BYTES, MASKED)
        turned_right = turned_columns(upper, lower, 1, BYTES)
        _write_rows(
            values_t, metadata_t, turned_right, nibbles_of(right), at, height, inside, 4, BYTES, MASKED
        )


@triton.jit
def _words(w, place, inside, KEEP: tl.constexpr, MASKED: tl.constexpr):
    """Four words of each block, as four tensors. KEEP: how long caches should have them."""
    pointers = w + place[:, None] + tl.arange(0, 4)[None, :]
    if MASKED:
        return split_fours(tl.load(pointers, mask=inside[:, None], other=0, eviction_policy=KEEP), BLOCKS)
    else:
        return split_fours(tl.load(pointers, eviction_policy=KEEP), BLOCKS)


@triton.jit
def _row(w, octet, inside, KEEP: tl.constexpr, BYTES: tl.constexpr, MASKED: tl.constexpr):
    """The words of an octet of each block: four, or eight."""
    if BYTES == 2:
        return _words(w, octet * 4, inside, KEEP, MASKED)
    else:
        a0, a1, a2, a3 = _words(w, octet * 8, inside, KEEP, MASKED)
        b0, b1, b2, b3 = _words(w, octet * 8 + 4, inside, KEEP, MASKED)
        return a0, a1, a2, a3, b0, b1, b2, b3


@triton.jit
def _four_rows(w, at, width, inside, KEEP: tl.constexpr, BYTES: tl.constexpr, MASKED: tl.constexpr):
    """Four rows of words."""
    a = _row(w, at, inside, KEEP, BYTES, MASKED)
    b = _row(w, at + width, inside, KEEP, BYTES, MASKED)
    c = _row(w, at + 2 * width, inside, KEEP, BYTES, MASKED)
    return a, b, c, _row(w, at + 3 * width, inside, KEEP, BYTES, MASKED)


@triton.jit
def _floats(row, HALF: tl.constexpr, BYTES: tl.constexpr, IS_BF16: tl.constexpr):
    """The four elements of half of a row of words."""
    if BYTES == 2:
        a, b = row[2 * HALF], row[2 * HALF + 1]
        return low_float(a, IS_BF16), high_float(a, IS_BF16), low_float(b, IS_BF16), high_float(b, IS_BF16)
    else:
        return (
            float_of(row[4 * HALF]), float_of(row[4 * HALF + 1]), float_of(row[4 * HALF + 2]), float_of(row[4 * HALF + 3])
        )  # fmt: skip


@triton.jit
def _pairs_of_row(row, HALF: tl.constexpr, BYTES: tl.constexpr, IS_BF16: tl.constexpr):
    """Sums of pairs of magnitudes."""
    a, b, c, d = _floats(row, HALF, BYTES, IS_BF16)
    return pair_sums(tl.abs(a), tl.abs(b), tl.abs(c), tl.abs(d))


@triton.jit
def _plain_mask(rows, HALF: tl.constexpr, BYTES: tl.constexpr, IS_BF16: tl.constexpr):
    """The mask of a tile of finite numbers, and a pattern below that of infinity where they are."""
    p0, p1 = _pairs_of_row(rows[0], HALF, BYTES, IS_BF16), _pairs_of_row(rows[1], HALF, BYTES, IS_BF16)
    p2, p3 = _pairs_of_row(rows[2], HALF, BYTES, IS_BF16), _pairs_of_row(rows[3], HALF, BYTES, IS_BF16)
    total = (p0[0] + p1[5] + (p2[0] + p3[5])) + (p0[5] + p1[0] + (p2[5] + p3[0]))
    return best_mask(p0, p1, p2, p3), bits_of(total)


@triton.jit
def _careful_masks(
    w, at, width, inside, BYTES: tl.constexpr, IS_BF16: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Masks of the upper and the lower two tiles with any elements."""
    high, low = tl.zeros_like(at).to(tl.int32), tl.zeros_like(at).to(tl.int32)
    for tile in range(4):
        place = at + (tile // 2 * 4) * width
        p0 = _careful_pairs(w, place, tile % 2, inside, BYTES, IS_BF16, MASKED)
        p1 = _careful_pairs(w, place + width, tile % 2, inside, BYTES, IS_BF16, MASKED)
        p2 = _careful_pairs(w, place + 2 * width, tile % 2, inside, BYTES, IS_BF16, MASKED)
        p3 = _careful_pairs(w, place + 3 * width, tile % 2, inside, BYTES, IS_BF16, MASKED)
        found = best_mask(p0, p1, p2, p3) << (tile % 2 * 16)
        high, low = high | tl.where(tile < 2, found, 0), low | tl.where(tile < 2, 0, found)
    return high, low


@triton.jit
def _careful_pairs(
    w, octet, half, inside, BYTES: tl.constexpr, IS_BF16: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Sums of pairs of keys, of half an octet."""
    if BYTES == 2:
        w0, w1, w2, w3 = _words(w, octet * 4, inside, "evict_last", MASKED)
        row = (tl.where(half == 0, w0, w2), tl.where(half == 0, w1, w3))
    else:
        row = _words(w, octet * 8 + half * 4, inside, "evict_last", MASKED)
    a, b, c, d = _floats(row, 0, BYTES, IS_BF16)
    return pair_sums(
        careful_key(bits_of(a)), careful_key(bits_of(b)), careful_key(bits_of(c)), careful_key(bits_of(d))
    )


@triton.jit
def turned_columns(upper, lower, HALF: tl.constexpr, BYTES: tl.constexpr):
    """Four columns of a block as rows of words."""
    if BYTES == 2:
        a, b = _two_columns(upper, lower, 2 * HALF), _two_columns(upper, lower, 2 * HALF + 1)
        return a[0], a[1], b[0], b[1]
    else:
        return (
            _column(upper, lower, 4 * HALF), _column(upper, lower, 4 * HALF + 1), _column(upper, lower, 4 * HALF + 2),
            _column(upper, lower, 4 * HALF + 3),
        )  # fmt: skip


@triton.jit
def _two_columns(upper, lower, WORD: tl.constexpr):
    """The columns of the low and the high halves of words."""
    a, b, c, d = upper[0][WORD], upper[1][WORD], upper[2][WORD], upper[3][WORD]
    e, f, g, h = lower[0][WORD], lower[1][WORD], lower[2][WORD], lower[3][WORD]
    even = (bytes_by(a, b, 0x5410), bytes_by(c, d, 0x5410), bytes_by(e, f, 0x5410), bytes_by(g, h, 0x5410))
    odd = (bytes_by(a, b, 0x7632), bytes_by(c, d, 0x7632), bytes_by(e, f, 0x7632), bytes_by(g, h, 0x7632))
    return even, odd


@triton.jit
def _column(upper, lower, WORD: tl.constexpr):
    """A column of 32-bit elements."""
    return (
        upper[0][WORD], upper[1][WORD], upper[2][WORD], upper[3][WORD],
        lower[0][WORD], lower[1][WORD], lower[2][WORD], lower[3][WORD],
    )  # fmt: skip


@triton.jit
def _write_rows(
    values, metadata, rows, nibbles, at, stride, inside, FIRST: tl.constexpr, BYTES: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Values and metadata of rows FIRST to FIRST + 3 of blocks."""
    for row in tl.static_range(4):
        octet = at + (FIRST + row) * stride
        byte = octet_of(nibbles, row)
        x = rows[row]
        if BYTES == 2:
            kept = tl.join(kept_halves(x[0], x[1], byte), kept_halves(x[2], x[3], byte >> 4))
            pointers = words_at(values, 0) + (octet * 2)[:, None] + tl.arange(0, 2)[None, :]
        else:
            a, b = kept_words(x[0], x[1], x[2], x[3], byte)
            c, d = kept_words(x[4], x[5], x[6], x[7], byte >> 4)
            kept = joined_fours(a, b, c, d, BLOCKS)
            pointers = words_at(values, 0) + (octet * 4)[:, None] + tl.arange(0, 4)[None, :]
        if MASKED:
            tl.store(pointers, kept, mask=inside[:, None])
            tl.store(metadata + octet, byte.to(tl.uint8), mask=inside)
        else:
            tl.store(pointers, kept)
            tl.store(metadata + octet, byte.to(tl.uint8))


@triton.jit
def _write_masks(mask, masks, at, width, inside, FIRST: tl.constexpr, MASKED: tl.constexpr):
    """Rows FIRST to FIRST + 3 of blocks: a byte an element of a bool mask, a bit of uint8."""
    for row in tl.static_range(4):
        octet = at + (FIRST + row) * width
        if mask.dtype.element_ty == tl.uint8:
            pointers, made, kept = mask + octet, bits_of_row(masks, row).to(tl.uint8), inside
        else:
            left, right = bytes_of_row(masks, row)
            pointers = words_at(mask, 0) + (octet * 2)[:, None] + tl.arange(0, 2)[None, :]
            made, kept = tl.join(left, right), inside[:, None]
        if MASKED:
            tl.store(pointers, made, mask=kept)
        else:
            tl.store(pointers, made)


__all__ = ["ACROSS", "DOWN", "TILE", "transposable_kernel", "turned_columns"]
