"""Transposable 2:4 masks, and both compressed orientations of a matrix, from one read.

A thread has 8 x 8 elements, four tiles: eight rows of 16 bytes, or of 32. So it makes whole bytes of metadata in both
directions, and nothing moves between threads. A program is one warp, four blocks down and eight across: rows of 128 bytes are
read, and the transposed values of 32 rows fill a sector.

Floor of 16-bit elements: 2 bytes read and 2.25 written, or one of a mask. The search takes fewer instructions than a tile's
bytes leave time for at the copy rate (counts: reports/LOG.md).

NaN and infinities are rare, and only they need `careful_key`: where one of a warp has any, its threads read their tiles again,
one after the other. Keys take two registers, so nothing is kept meanwhile: what is written is read once more, from the
first-level cache.

`best_mask` of a 4 x 4 tile is `reference.sparsity.transposable` by fewer sums, all in registers of one thread. Masks of rows:
element c of a row at bit 3 - c, so that of two pairs the one that comes first in the reference is larger. Pairs are numbered
as there, and 5 - p is the pair of the other two columns. Of rows 0 and 1 with pairs p and q there are

* p = q: rows 2 and 3 both have 5 - p;
* q = 5 - p: rows 2 and 3 have any r and 5 - r, six masks;
* else p and q share a column, and rows 2 and 3 have 5 - p and 5 - q, in one order or the other.

Rounded addition does not decrease where an operand grows, so the largest total of p and q is their sum and the largest sum of
rows 2 and 3: 36 sums of four rows in place of 90. Which mask it was is another matter: sums that differ may be equal once they
are added and rounded, and then the first mask wins. So winners are found by comparing rounded totals with the largest, from
row 0 down, and never by what was larger before it was added.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, MAGNITUDE, bits_of, float_of, high_float, low_float
from fast.kernels.sparsity.groups import (
    bytes_by,
    joined_fours,
    kept_halves,
    kept_words,
    split_fours,
    words_at,
)
from fast.kernels.sparsity.host import mask_call
from fast.launch.launcher import Call, CompiledLaunch
from reference import Compressed

# The host side of transposable masks: which tensors the kernel takes, and the calls. Others get None, and the reference.

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Rows and columns of a block of the kernel.
BLOCK = 8
#: Elements / 8 that are too many: below, seven rows of octets are numbered in 32 bits.
MOST = 2**31
#: Registers of a thread: without a limit the compiler takes so many that eight warps fill a multiprocessor, with it there are
#: twelve.
REGISTERS = 168
#: The same of programs with edges, which need a few more.
UNLIMITED = 255
POINTERS = ("mask", "values", "metadata", "values_t", "metadata_t")


def prune_transposable(
    w: torch.Tensor,
    scores: torch.Tensor | None,
    method: str,
    key: Any = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The mask, by default a new one; None where the kernel does not serve. What is wrong with scores and methods the reference
    says. out: contiguous, without scores."""
    ranked = w if scores is None else scores
    if method != "exact" or not _in_blocks(ranked) or ranked.shape != w.shape or ranked.device != w.device:
        return None
    # Of w only the shape is read where there are scores.
    call = mask_call(w, scores, out)
    call.launch(_launch(ranked), ("w" if scores is None else "scores", *POINTERS))
    result: torch.Tensor = call.result("mask", key)
    return result


def compress_transposable(w: torch.Tensor, key: Any = None) -> tuple[Compressed, Compressed] | None:
    """Both orientations of a matrix; None where the kernel does not serve."""
    if w.dim() != 2 or not _in_blocks(w):
        return None
    call = Call({"w": w}, words=("w",))
    rows, columns = w.shape
    for suffix, (height, width) in (("", (rows, columns)), ("_t", (columns, rows))):
        call.allocate(f"values{suffix}", (height, width // 2), w.dtype)
        call.allocate(f"metadata{suffix}", (height, width // BLOCK), torch.uint8)
    call.launch(_launch(w), ("w", *POINTERS))
    result: tuple[Compressed, Compressed] = call.result(POINTERS[1:], key, None, _pairs)
    return result


def _pairs(made: tuple[torch.Tensor, ...]) -> tuple[Compressed, Compressed]:
    return Compressed(*made[:2]), Compressed(*made[2:])


def _in_blocks(x: torch.Tensor) -> bool:
    """Whether a tensor is floats in whole blocks."""
    if x.dtype not in FLOATS or x.dim() < 2 or not 0 < x.numel() < MOST * BLOCK:
        return False
    return x.shape[-2] % BLOCK == 0 and x.shape[-1] % BLOCK == 0


def _launch(x: torch.Tensor) -> CompiledLaunch:
    """The kernel; matrices of a batch stand below each other."""
    width = x.shape[-1] // BLOCK
    height = x.numel() // x.shape[-1] // BLOCK
    masked = height % DOWN != 0 or width % ACROSS != 0
    tail = (height, width, x.dtype.itemsize, x.dtype == torch.bfloat16, masked, DOWN, ACROSS, TILE)
    programs = -(-height // DOWN) * -(-width // ACROSS)
    return CompiledLaunch(transposable_kernel, programs, tail, 1, maxnreg=UNLIMITED if masked else REGISTERS)


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
def transposed(masks):
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
        high, low = transposed(high), transposed(low)
        at = column.to(tl.int64) * 8 * height + row
        left, right = bytes_by(high, low, 0x5410), bytes_by(high, low, 0x7632)
        transposed_left = transposed_columns(upper, lower, 0, BYTES)
        _write_rows(
            values_t, metadata_t, transposed_left, nibbles_of(left), at, height, inside, 0, BYTES, MASKED
        )
        transposed_right = transposed_columns(upper, lower, 1, BYTES)
        _write_rows(
            values_t, metadata_t, transposed_right, nibbles_of(right), at, height, inside, 4, BYTES, MASKED
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
        result = best_mask(p0, p1, p2, p3) << (tile % 2 * 16)
        high, low = high | tl.where(tile < 2, result, 0), low | tl.where(tile < 2, 0, result)
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
def transposed_columns(upper, lower, HALF: tl.constexpr, BYTES: tl.constexpr):
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
            pointers, result, kept = mask + octet, bits_of_row(masks, row).to(tl.uint8), inside
        else:
            left, right = bytes_of_row(masks, row)
            pointers = words_at(mask, 0) + (octet * 2)[:, None] + tl.arange(0, 2)[None, :]
            result, kept = tl.join(left, right), inside[:, None]
        if MASKED:
            tl.store(pointers, result, mask=kept)
        else:
            tl.store(pointers, result)


__all__ = [
    "ACROSS",
    "DOWN",
    "TILE",
    "compress_transposable",
    "octet_of",
    "prune_transposable",
    "transposable_kernel",
    "transposed",
    "transposed_columns",
]
