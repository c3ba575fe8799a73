"""Kept values and metadata of a tensor from one read; see `groups`.

Floor: of an octet all bytes are read, half are written, and one byte of metadata: 13 bytes for elements of 8 bits, 25 for 16,
49 for 32; with a mask 8 more. Rows do not matter, as their lengths are multiples of eight: the tensor is one line of octets. A
program has 8 KiB of it, four warps four loads of 16 bytes a thread each, all issued before the first is used.

`quantize_compressed_kernel`: 16-bit floats pruned to 2:4, scaled, rounded to 8-bit floats and compressed. Floor: an octet is
read as 16 bytes and leaves as four codes and a byte of metadata, 21 bytes in all: time for 73 integer operations. What is kept
is selected first, so only half of the elements is scaled and rounded. Programs do not cross rows: each reads the scale of its
row once, and one scale is that of a single row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import high_float, low_float
from fast.kernels.sparsity.groups import (
    ONE,
    TWO,
    bytes_by,
    index_bits,
    kept_bytes,
    kept_halves,
    kept_words,
    marks_of_bytes,
    marks_of_halves,
    marks_of_words,
    metadata_of_halves,
    more_than_two,
    read_fours,
    read_group,
    read_pairs,
    words_at,
    write_fours,
    write_group,
    write_ones,
    write_pairs,
)

BYTES_OF_PROGRAM, WARPS = 8192, 4


@triton.jit
def compress_kernel(
    w, mask, values, metadata, refused, count,
    RULE: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr, NAN_KEY: tl.constexpr, BYTES: tl.constexpr,
    MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """values, metadata of `count` octets. refused: one int32 that becomes 1 where a group has more than two marks."""
    OCTETS: tl.constexpr = TILE // 8
    first = tl.program_id(0).to(tl.int64) * OCTETS
    left = tl.minimum(count - first, OCTETS).to(tl.int32)
    w, values, metadata = words_at(w, first * 2 * BYTES), words_at(values, first * BYTES), metadata + first
    if RULE == "mask":
        mask = words_at(mask, first * 2)
    if BYTES == 1:
        _bytes_tile(w, mask, values, metadata, refused, left, RULE, KIND, SIGNED, MASKED, OCTETS)
    elif BYTES == 2:
        _halves_tile(w, mask, values, metadata, refused, left, RULE, SIGNED, NAN_KEY, MASKED, OCTETS)
    else:
        _words_tile(w, mask, values, metadata, refused, left, RULE, SIGNED, NAN_KEY, MASKED, OCTETS)


@triton.jit
def _bytes_tile(
    w, mask, values, metadata, refused, left,
    RULE: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    """A tile of 8-bit elements."""
    a, b = read_pairs(w, left, 2, MASKED, OCTETS)
    ma, mb = a, b
    if RULE == "mask":
        ma, mb = read_pairs(mask, left, 2, MASKED, OCTETS)
    k0, k1, k2, k3, a, b = marks_of_bytes(a, b, ma, mb, RULE, KIND, SIGNED)
    byte = metadata_of_halves(index_bits(k0, k1, k2, k3, TWO))
    write_ones(values, kept_bytes(a, b, byte), left, 2, MASKED, OCTETS)
    write_ones(metadata, byte.to(tl.uint8), left, 2, MASKED, OCTETS)
    # A thread's two octets say it together: of one address the compiler would give each thread one element.
    wide, wider = tl.split(tl.reshape(more_than_two(k0, k1, k2, k3), (OCTETS // 2, 2)))
    _refuse(refused, (wide | wider) & TWO, RULE)


@triton.jit
def _halves_tile(
    w, mask, values, metadata, refused, left,
    RULE: tl.constexpr, SIGNED: tl.constexpr, NAN_KEY: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    """A tile of 16-bit elements."""
    a0, a1, b0, b1 = read_fours(w, left, MASKED, OCTETS)
    ma, mb = a0, b0
    if RULE == "mask":
        ma, mb = read_pairs(mask, left, 1, MASKED, OCTETS)
    k0, k1, k2, k3, a0, a1, b0, b1 = marks_of_halves(a0, a1, b0, b1, ma, mb, RULE, SIGNED, NAN_KEY)
    byte = metadata_of_halves(index_bits(k0, k1, k2, k3, TWO))
    even, odd = kept_halves(a0, a1, byte), kept_halves(b0, b1, byte >> 4)
    write_pairs(values, even, odd, left, 1, MASKED, OCTETS)
    write_ones(metadata, byte.to(tl.uint8), left, 1, MASKED, OCTETS)
    _refuse(refused, more_than_two(k0, k1, k2, k3) & TWO, RULE)


@triton.jit
def _words_tile(
    w, mask, values, metadata, refused, left,
    RULE: tl.constexpr, SIGNED: tl.constexpr, NAN_KEY: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    """A tile of 32-bit elements: the even groups, the odd groups."""
    a0, a1, a2, a3 = read_group(w, left, 0, MASKED, OCTETS)
    b0, b1, b2, b3 = read_group(w, left, 1, MASKED, OCTETS)
    ma, mb = a0, b0
    if RULE == "mask":
        ma, mb = read_pairs(mask, left, 1, MASKED, OCTETS)
    even, wide, a0, a1 = _kept_of_group(a0, a1, a2, a3, ma, RULE, SIGNED, NAN_KEY)
    odd, wider, b0, b1 = _kept_of_group(b0, b1, b2, b3, mb, RULE, SIGNED, NAN_KEY)
    write_fours(values, a0, a1, b0, b1, left, MASKED, OCTETS)
    write_ones(metadata, (even | (odd << 4)).to(tl.uint8), left, 1, MASKED, OCTETS)
    _refuse(refused, (wide | wider) & ONE, RULE)


@triton.jit
def _kept_of_group(x0, x1, x2, x3, m, RULE: tl.constexpr, SIGNED: tl.constexpr, NAN_KEY: tl.constexpr):
    """Metadata of a group of 32-bit elements, marks of more than two, and what is kept."""
    k0, k1, k2, k3, x0, x1, x2, x3 = marks_of_words(x0, x1, x2, x3, m, RULE, SIGNED, NAN_KEY)
    nibble = (index_bits(k0, k1, k2, k3, ONE) >> 28) & 15
    low, high = kept_words(x0, x1, x2, x3, nibble)
    return nibble, more_than_two(k0, k1, k2, k3), low, high


@triton.jit
def _refuse(refused, marks, RULE: tl.constexpr):
    """Note that some group has too many. Who notes it is no matter, so nothing is added up over threads."""
    if RULE != "largest":
        tl.store(refused + tl.zeros_like(marks), 1, mask=marks != 0)


#: Elements of the largest program, and of one warp.
TILE, TILE_OF_WARP = 4096, 1024
#: Given scales below it count as it, as the records of these schemes say.
FLOOR = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def quantize_compressed_kernel(
    w, scale, values, metadata, width,
    ELEMENT: tl.constexpr, NAN_KEY: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Codes and metadata of rows of `width` octets. Grid: programs along a row, then down."""
    OCTETS: tl.constexpr = TILE // 8
    IS_BF16: tl.constexpr = w.dtype.element_ty == tl.bfloat16
    tiles = tl.cdiv(width, OCTETS)
    row, start = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * OCTETS
    first, left = row * width + start, tl.minimum(width - start, OCTETS)
    a0, a1, b0, b1 = read_fours(words_at(w, first * 4), left, MASKED, OCTETS)
    m = _multiplier(tl.load(scale + row))
    k0, k1, k2, k3, a0, a1, b0, b1 = marks_of_halves(a0, a1, b0, b1, a0, b0, "largest", True, NAN_KEY)
    byte = metadata_of_halves(index_bits(k0, k1, k2, k3, TWO))
    even, odd = kept_halves(a0, a1, byte), kept_halves(b0, b1, byte >> 4)
    codes = _word_of_codes(
        low_float(even, IS_BF16) * m, high_float(even, IS_BF16) * m, low_float(odd, IS_BF16) * m,
        high_float(odd, IS_BF16) * m, ELEMENT,
    )  # fmt: skip
    write_ones(words_at(values, first), codes, left, 1, MASKED, OCTETS)
    write_ones(metadata + first, byte.to(tl.uint8), left, 1, MASKED, OCTETS)


@triton.jit
def _multiplier(scale):
    """What the elements of a row are multiplied by; a scale that is NaN stays so."""
    return tl.div_rn(1.0, tl.where(scale < FLOOR, FLOOR, scale))


@triton.jit
def _word_of_codes(a, b, c, d, ELEMENT: tl.constexpr):
    """Codes of four floats in a word, nearest even, saturating; NaN is 0x7f."""
    if ELEMENT == "float8_e4m3fn":
        return tl.inline_asm_elementwise(
            """{ .reg .b16 l, h;
            cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }""",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b16 l, h;
            cvt.rn.satfinite.e5m2x2.f32 l, $2, $1; cvt.rn.satfinite.e5m2x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }""",
            "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


# The dense tensor of kept values and metadata, one line of octets; see `compress` for the floor, which is the same.


@triton.jit
def decompress_kernel(
    values, metadata, w, count, BYTES: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr
):
    """w of `count` octets."""
    OCTETS: tl.constexpr = TILE // 8
    first = tl.program_id(0).to(tl.int64) * OCTETS
    left = tl.minimum(count - first, OCTETS).to(tl.int32)
    w, values, metadata = words_at(w, first * 2 * BYTES), words_at(values, first * BYTES), metadata + first
    if BYTES == 1:
        byte = _read_ones(metadata, left, 2, MASKED, OCTETS).to(tl.int32)
        v = _read_ones(values, left, 2, MASKED, OCTETS)
        a = bytes_by(v, 0, _byte_selector(byte, 0x10))
        write_pairs(w, a, bytes_by(v, 0, _byte_selector(byte >> 4, 0x32)), left, 2, MASKED, OCTETS)
    elif BYTES == 2:
        byte = _read_ones(metadata, left, 1, MASKED, OCTETS).to(tl.int32)
        a, b = read_pairs(values, left, 1, MASKED, OCTETS)
        even, odd = _half_selector(byte), _half_selector(byte >> 4)
        a0, a1, b0 = bytes_by(a, 0, even), bytes_by(a, 0, even >> 16), bytes_by(b, 0, odd)
        write_fours(w, a0, a1, b0, bytes_by(b, 0, odd >> 16), left, MASKED, OCTETS)
    else:
        byte = _read_ones(metadata, left, 1, MASKED, OCTETS).to(tl.int32)
        a0, a1, b0, b1 = read_fours(values, left, MASKED, OCTETS)
        _write_placed(w, a0, a1, byte, left, 0, MASKED, OCTETS)
        _write_placed(w, b0, b1, byte >> 4, left, 1, MASKED, OCTETS)


@triton.jit
def _read_ones(pointer, left, NEIGHBOURS: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr):
    """One element of each octet."""
    at = tl.max_contiguous(tl.arange(0, OCTETS), [NEIGHBOURS])
    if MASKED:
        return tl.load(pointer + at, mask=at < left, other=0)
    else:
        return tl.load(pointer + at)


@triton.jit
def _byte_selector(nibble, BYTES: tl.constexpr):
    """Which byte of (values, 0) each element of a group of bytes is. BYTES: those of its values, a digit each.

    Digit 4 is a byte of zeros. Where both indices are one, the second value wins, as in the reference.
    """
    first, second = (nibble << 2) & 12, nibble & 12
    low = 0x4444 ^ ((4 ^ (BYTES & 15)) << first)
    return (low & ~(15 << second)) | ((BYTES >> 4) << second)


@triton.jit
def _half_selector(nibble):
    """The same for a group of halves in 32 bits: the digits of two words."""
    first, second = (nibble << 3) & 24, (nibble << 1) & 24
    low = 0x44444444 ^ (0x54 << first)
    return (low & ~(255 << second)) | (0x32 << second)


@triton.jit
def _write_placed(
    w, low, high, nibble, left, GROUP: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr
):
    """A group of 32-bit elements."""
    first, second = nibble & 3, (nibble >> 2) & 3
    w0 = tl.where(second == 0, high, tl.where(first == 0, low, 0))
    w1 = tl.where(second == 1, high, tl.where(first == 1, low, 0))
    w2 = tl.where(second == 2, high, tl.where(first == 2, low, 0))
    w3 = tl.where(second == 3, high, tl.where(first == 3, low, 0))
    write_group(w, w0, w1, w2, w3, left, GROUP, MASKED, OCTETS)


__all__ = [
    "BYTES_OF_PROGRAM",
    "TILE",
    "TILE_OF_WARP",
    "WARPS",
    "compress_kernel",
    "decompress_kernel",
    "quantize_compressed_kernel",
]
