"""16-bit floats pruned to 2:4, scaled, rounded to 8-bit floats and compressed, from one read.

Floor: an octet is read as 16 bytes and leaves as four codes and a byte of metadata, 21 bytes in all: time for 73 integer
operations. What is kept is selected first, so only half of the elements is scaled and rounded. Programs do not cross rows: each
reads the scale of its row once, and one scale is that of a single row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import high_float, low_float
from fast.kernels.sparsity.groups import TWO, index_bits, kept_halves, metadata_of_halves
from fast.kernels.sparsity.marks import marks_of_halves
from fast.kernels.sparsity.octets import read_fours, words_at, write_ones

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


__all__ = ["TILE", "TILE_OF_WARP", "quantize_compressed_kernel"]
