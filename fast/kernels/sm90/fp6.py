"""Packed 6-bit floats of bfloat16 blocks, made from pairs, as `fp4` makes 4-bit ones: a block of 32 lies in one thread."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.sm90.bit_tricks import mask_unless_poisoned, quarters, store_words
from fast.kernels.sm90.fp4 import side_by_side


def _triple(convert: str) -> tl.constexpr:
    """Four elements, the pairs $1 and $2, times $3, as 24 bits and more above them.

    The conversion makes 8-bit codes of the same exponents, whose bit 5 belongs one place lower (see `bit_tricks.e2m3_bytes`).
    Then 6 bits of each byte move together, what lies between them is dropped.
    """
    halves = ""
    for pair, (low, high) in ((1, "ab"), (2, "cd")):
        halves += f"shl.b32 t, ${pair}, 16; mov.b32 {low}, t; mul.rn.f32 {low}, {low}, $3; "
        halves += f"and.b32 t, ${pair}, 0xFFFF0000; mov.b32 {high}, t; mul.rn.f32 {high}, {high}, $3; "
    return tl.constexpr(
        f"""{{ .reg .b16 l, h; .reg .b32 t, w, o; .reg .f32 a, b, c, d; {halves}
        {convert} l, b, a; {convert} h, d, c; mov.b32 w, {{l, h}};
        and.b32 o, w, 0x20202020; shr.u32 t, o, 5; sub.u32 o, o, t; or.b32 o, o, w;
        shr.u32 t, w, 2; lop3.b32 o, o, t, 0x1F1F1F1F, 0xE4;
        shr.u32 t, o, 2; lop3.b32 o, o, t, 0x003F003F, 0xE4; shr.u32 t, o, 4; lop3.b32 $0, o, t, 0x00000FFF, 0xE4; }}"""
    )


E2M3, E3M2 = _triple("cvt.rn.satfinite.e4m3x2.f32"), _triple("cvt.rn.satfinite.e5m2x2.f32")


@triton.jit
def _six_words(first, second, inv_scale, keep, SCHEME: tl.constexpr):
    """Three words (P, 1) of sixteen codes, of pairs (P, 4) twice; `six_words` for triples with more above them."""
    a, b = _triples(first, inv_scale, SCHEME)
    c, d = _triples(second, inv_scale, SCHEME)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 x, y, z;
        prmt.b32 x, $3, $4, 0x4210; prmt.b32 y, $4, $5, 0x5421; prmt.b32 z, $5, $6, 0x6542;
        and.b32 $0, x, $7; and.b32 $1, y, $7; and.b32 $2, z, $7; }""",
        "=&r,=&r,=&r,r,r,r,r,r", [a, b, c, d, keep], dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _triples(pairs, inv_scale, SCHEME: tl.constexpr):
    p, q, r, s = quarters(pairs)
    return _triple_of(p, q, inv_scale, SCHEME), _triple_of(r, s, inv_scale, SCHEME)


@triton.jit
def _triple_of(p, q, inv_scale, SCHEME: tl.constexpr):
    return tl.inline_asm_elementwise(
        E2M3 if SCHEME.fast_path == "e2m3" else E3M2,
        "=r,r,r,f",
        [p, q, inv_scale],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def store_sixes(codes, a, b, c, d, inv_scale, scale, place, exists, SCHEME: tl.constexpr):
    """Six words of 32 codes, of pairs (P, 4) four times; m is a power of two, scale NaN where the block is poisoned."""
    # The formats of the conversions have the same exponents 2**-6 and 2**-12 times the element.
    factor = inv_scale * (0.015625 if SCHEME.fast_path == "e2m3" else 0.000244140625)
    keep = mask_unless_poisoned(scale, -1)
    u, v, w = _six_words(a, b, factor, keep, SCHEME)
    x, y, z = _six_words(c, d, factor, keep, SCHEME)
    # Two words a store: 24 bytes are aligned to 8.
    store_words(codes, side_by_side(u, v), 3 * place, exists)
    store_words(codes, side_by_side(w, x), 3 * place + 1, exists)
    store_words(codes, side_by_side(y, z), 3 * place + 2, exists)
