"""The best transposable mask of a 4 x 4 tile, all in registers of one thread: `reference.sparsity.transposable` by fewer sums.

Masks of rows: element c of a row at bit 3 - c, so that of two pairs the one that comes first in the reference is larger. Pairs
are numbered as there, and 5 - p is the pair of the other two columns. Of rows 0 and 1 with pairs p and q there are

* p = q: rows 2 and 3 both have 5 - p;
* q = 5 - p: rows 2 and 3 have any r and 5 - r, six masks;
* else p and q share a column, and rows 2 and 3 have 5 - p and 5 - q, in one order or the other.

Rounded addition does not decrease where an operand grows, so the largest total of p and q is their sum and the largest sum of
rows 2 and 3: 36 sums of four rows in place of 90. Which mask it was is another matter: sums that differ may be equal once they
are added and rounded, and then the first mask wins. So winners are found by comparing rounded totals with the largest, from
row 0 down, and never by what was larger before it was added.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, MAGNITUDE, bits_of, float_of

#: What a NaN counts beside an infinity, as in the reference.
NAN_COUNT = tl.constexpr(9)
#: The high half of a key, see `careful_key`.
COUNTS = tl.constexpr(-(1 << 32))
#: The masks of the six pairs.
ROWS = tl.constexpr((12, 10, 9, 6, 5, 3))


@triton.jit
def careful_key(bits):
    """int64 of the pattern of a magnitude: how special it is in the high half, the pattern of a finite one in the low."""
    bits = bits & MAGNITUDE
    count = tl.where(bits > INFINITY, NAN_COUNT, tl.where(bits == INFINITY, 1, 0))
    return (count.to(tl.int64) << 32) | tl.where(bits < INFINITY, bits, 0).to(tl.int64)


@triton.jit
def plus(a, b):
    """The sum of magnitudes, rounded; of keys the counts are added, and the finite parts as floats."""
    if a.dtype == tl.float32:
        return a + b
    else:
        total = float_of(a.to(tl.int32)) + float_of(b.to(tl.int32))
        return ((a & COUNTS) + (b & COUNTS)) | bits_of(total).to(tl.int64)


@triton.jit
def largest(v):
    """The largest of six."""
    return tl.maximum(tl.maximum(tl.maximum(v[0], v[1]), tl.maximum(v[2], v[3])), tl.maximum(v[4], v[5]))


@triton.jit
def first_where(keys, top, values):
    """Of six values that of the first key that equals `top`; one does."""
    chosen = tl.where(keys[4] == top, values[4], values[5])
    chosen = tl.where(keys[3] == top, values[3], chosen)
    chosen = tl.where(keys[2] == top, values[2], chosen)
    chosen = tl.where(keys[1] == top, values[1], chosen)
    return tl.where(keys[0] == top, values[0], chosen)


@triton.jit
def pair_sums(a, b, c, d):
    """Sums of the six pairs of a row."""
    return plus(a, b), plus(a, c), plus(a, d), plus(b, c), plus(b, d), plus(c, d)


@triton.jit
def _pair_total(top, p2, p3, cross, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The largest total of pairs FIRST and SECOND of rows 0 and 1, whose sum is `top`."""
    if FIRST + SECOND == 5:
        return plus(top, cross)
    elif FIRST == SECOND:
        return plus(top, plus(p2[5 - FIRST], p3[5 - FIRST]))
    else:
        one, other = plus(p2[5 - FIRST], p3[5 - SECOND]), plus(p2[5 - SECOND], p3[5 - FIRST])
        return plus(top, tl.maximum(one, other))


@triton.jit
def _row_totals(p0, p1, p2, p3, cross, FIRST: tl.constexpr):
    """The largest totals of pair FIRST of row 0 and each of row 1."""
    return (
        _pair_total(plus(p0[FIRST], p1[0]), p2, p3, cross, FIRST, 0),
        _pair_total(plus(p0[FIRST], p1[1]), p2, p3, cross, FIRST, 1),
        _pair_total(plus(p0[FIRST], p1[2]), p2, p3, cross, FIRST, 2),
        _pair_total(plus(p0[FIRST], p1[3]), p2, p3, cross, FIRST, 3),
        _pair_total(plus(p0[FIRST], p1[4]), p2, p3, cross, FIRST, 4),
        _pair_total(plus(p0[FIRST], p1[5]), p2, p3, cross, FIRST, 5),
    )


@triton.jit
def _rows_where(keys, top, a, b, c, d, e, f):
    """Of six rows of six values that of the first key that equals `top`."""
    v0 = first_where(keys, top, (a[0], b[0], c[0], d[0], e[0], f[0]))
    v1 = first_where(keys, top, (a[1], b[1], c[1], d[1], e[1], f[1]))
    v2 = first_where(keys, top, (a[2], b[2], c[2], d[2], e[2], f[2]))
    v3 = first_where(keys, top, (a[3], b[3], c[3], d[3], e[3], f[3]))
    v4 = first_where(keys, top, (a[4], b[4], c[4], d[4], e[4], f[4]))
    v5 = first_where(keys, top, (a[5], b[5], c[5], d[5], e[5], f[5]))
    return v0, v1, v2, v3, v4, v5


@triton.jit
def best_mask(p0, p1, p2, p3):
    """The mask of a tile from the sums of pairs of its rows: 16 bits, element (r, c) at bit 15 - 4 r - c."""
    crossed = (
        plus(p2[0], p3[5]), plus(p2[1], p3[4]), plus(p2[2], p3[3]), plus(p2[3], p3[2]), plus(p2[4], p3[1]),
        plus(p2[5], p3[0]),
    )  # fmt: skip
    cross = largest(crossed)
    m0, m1 = _row_totals(p0, p1, p2, p3, cross, 0), _row_totals(p0, p1, p2, p3, cross, 1)
    m2, m3 = _row_totals(p0, p1, p2, p3, cross, 2), _row_totals(p0, p1, p2, p3, cross, 3)
    m4, m5 = _row_totals(p0, p1, p2, p3, cross, 4), _row_totals(p0, p1, p2, p3, cross, 5)
    keys = (largest(m0), largest(m1), largest(m2), largest(m3), largest(m4), largest(m5))
    top = largest(keys)
    totals = _rows_where(keys, top, m0, m1, m2, m3, m4, m5)
    row0, row1 = first_where(keys, top, ROWS), first_where(totals, top, ROWS)
    upper = plus(first_where(keys, top, p0), first_where(totals, top, p1))
    # The pair that comes first goes to row 2, unless only the other order has the largest total.
    early, late = 15 - tl.minimum(row0, row1), 15 - tl.maximum(row0, row1)
    in_order = plus(upper, plus(_of_row(early, p2), _of_row(late, p3))) == top
    row2 = tl.where(row0 + row1 == 15, _free_row(upper, top, crossed), tl.where(in_order, early, late))
    # Each column has two: the four rows add up to it without carries.
    return (row0 << 12) | (row1 << 8) | (row2 << 4) | (30 - row0 - row1 - row2)


@triton.jit
def _of_row(row, v):
    """Of six values, one for each pair, that of the mask of a row."""
    chosen = tl.where(row == 5, v[4], v[5])
    chosen = tl.where(row == 6, v[3], chosen)
    chosen = tl.where(row == 9, v[2], chosen)
    chosen = tl.where(row == 10, v[1], chosen)
    return tl.where(row == 12, v[0], chosen)


@triton.jit
def _free_row(upper, top, crossed):
    """Row 2 where rows 0 and 1 have complementary pairs: the first of six with the largest total."""
    totals = (
        plus(upper, crossed[0]), plus(upper, crossed[1]), plus(upper, crossed[2]), plus(upper, crossed[3]),
        plus(upper, crossed[4]), plus(upper, crossed[5]),
    )  # fmt: skip
    return first_where(totals, top, ROWS)


@triton.jit
def turned(masks):
    """Two masks of tiles, in the halves of words, transposed."""
    far = (masks ^ (masks >> 3)) & 0x0A0A0A0A
    masks = masks ^ far ^ (far << 3)
    far = (masks ^ (masks >> 6)) & 0x00CC00CC
    return masks ^ far ^ (far << 6)


@triton.jit
def nibbles_of(masks):
    """The four bits of metadata in place of each row of two masks: the lower index, then the higher one two bits above."""
    both = (masks >> 3) & (masks >> 2)
    first = ((masks >> 2) & ~(masks >> 3) & 0x11111111) | ((masks & (masks >> 1) & 0x11111111) << 1)
    return first | (((masks | both) & 0x11111111) << 2) | ((~both & 0x11111111) << 3)


@triton.jit
def octet_of(nibbles, ROW: tl.constexpr):
    """The byte of metadata of row ROW of two tiles beside each other, and nothing above it."""
    return ((nibbles >> (12 - 4 * ROW)) & 0x0F) | ((nibbles >> (24 - 4 * ROW)) & 0xF0)


@triton.jit
def bytes_of_row(masks, ROW: tl.constexpr):
    """Two words of bytes 0 or 1 of row ROW of two tiles beside each other."""
    left, right = (masks >> (12 - 4 * ROW)) & 15, (masks >> (28 - 4 * ROW)) & 15
    return ((left * 0x08040201) >> 3) & 0x01010101, ((right * 0x08040201) >> 3) & 0x01010101


@triton.jit
def bits_of_row(masks, ROW: tl.constexpr):
    """The byte of row ROW of two tiles beside each other: the first element is the top bit, and nothing is above it."""
    return (((masks >> (12 - 4 * ROW)) & 15) << 4) | ((masks >> (28 - 4 * ROW)) & 15)


__all__ = [
    "best_mask", "bits_of_row", "bytes_of_row", "careful_key", "nibbles_of", "octet_of", "pair_sums", "turned",
]  # fmt: skip
