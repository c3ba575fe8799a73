"""16-bit floats in pairs: what Hopper does with two bfloat16 or float16 elements in one register.

The instructions round, compare and multiply both elements at once. They make one NaN, 0x7fff, which as a signed integer is
the only pattern above the canonical one: a minimum of integers replaces it. HAS_PTX is False in Triton's interpreter, which
knows no instructions: there float32 and integer operations do the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, SIGN, bits_of, canonical, float_of, is_nan, rounded, widened

# Pairs d as floats.
_WIDEN_BFLOAT16 = "shl.b32 l, d, 16; and.b32 h, d, 0xFFFF0000; mov.b32 $0, l; mov.b32 $1, h;"
_WIDEN_FLOAT16 = "{ .reg .b16 p, q; mov.b32 {p, q}, d; cvt.f32.f16 $0, p; cvt.f32.f16 $1, q; }"


def _narrow(kind: str, nan: str) -> tl.constexpr:
    """Two floats as a pair, NaN canonical."""
    return tl.constexpr(
        f"{{ .reg .b32 d, n; cvt.rn.{kind}x2.f32 d, $2, $1; mov.b32 n, {nan}; min.s16x2 $0, d, n; }}"
    )


def _round(kind: str, widen: str) -> tl.constexpr:
    """Two floats rounded."""
    return tl.constexpr(f"{{ .reg .b32 d, l, h; cvt.rn.{kind}x2.f32 d, $3, $2; {widen} }}")


def _clamp(kind: str, low: str, top: str, widen: str) -> tl.constexpr:
    """A pair clamped between two bounds, as floats; NaN becomes the upper one."""
    return tl.constexpr(
        f"""{{ .reg .b32 d, n, l, h;
        mov.b32 n, {top}; min.{kind}x2 d, $2, n; mov.b32 n, {low}; max.{kind}x2 d, d, n; {widen} }}"""
    )


def _gate(kind: str, top: str, last: str, at: int) -> tl.constexpr:
    """silu (floats $at, $at + 1) of a pair of gates, times a pair; see `gated`.

    Beyond `top` silu is the gate. There the float is `top` itself, and the difference of patterns is added to its pattern.
    """
    return tl.constexpr(
        f"""{{ .reg .b32 d, w, n, t, l, h;
        cvt.rn.{kind}x2.f32 d, ${at + 1}, ${at};
        mov.b32 t, {top}; max.NaN.{kind}x2 w, ${at + 2}, t;
        sub.u32 w, w, t; add.u32 d, d, w;
        lop3.b32 d, d, ${at + 2}, 0x80008000, 0xD8;
        mul.rn.{kind}x2 d, d, ${at + 3};
        {last} }}"""
    )


def _normal(pair: str, round_to: str, last: str, at: int) -> tl.constexpr:
    """(pair $at times $at + 2, $at + 3) times pair $at + 1, each product rounded to float32, the last one to 16 bits."""
    return tl.constexpr(
        f"""{{ .reg .b32 d, n, l, h; .reg .f32 a, b, p, q;
        mov.b32 d, ${at}; {pair} mul.rn.f32 a, a, ${at + 2}; mul.rn.f32 b, b, ${at + 3}; mov.b32 d, ${at + 1};
        {pair.replace("a,", "p,").replace("b,", "q,")} mul.rn.f32 a, a, p; mul.rn.f32 b, b, q;
        cvt.rn.{round_to}x2.f32 d, b, a; {last} }}"""
    )


_LAST = "mov.b32 n, {}; min.s16x2 $0, d, n;"
WIDEN_BFLOAT16 = tl.constexpr(f"{{ .reg .b32 d, l, h; mov.b32 d, $2; {_WIDEN_BFLOAT16} }}")
WIDEN_FLOAT16 = tl.constexpr(f"{{ .reg .b32 d; mov.b32 d, $2; {_WIDEN_FLOAT16} }}")
NARROW_BFLOAT16, NARROW_FLOAT16 = _narrow("bf16", "0x7FC07FC0"), _narrow("f16", "0x7E007E00")
ROUND_BFLOAT16, ROUND_FLOAT16 = _round("bf16", _WIDEN_BFLOAT16), _round("f16", _WIDEN_FLOAT16)
CLAMP_BFLOAT16 = _clamp("bf16", "0xC2D0C2D0", "0x42804280", _WIDEN_BFLOAT16)
CLAMP_FLOAT16 = _clamp("f16", "0xD000D000", "0x50005000", _WIDEN_FLOAT16)
GATE_BFLOAT16 = _gate("bf16", "0x42804280", _LAST.format("0x7FC07FC0"), 1)
GATE_FLOAT16 = _gate("f16", "0x50005000", _LAST.format("0x7E007E00"), 1)
GATE_WIDE_BFLOAT16 = _gate("bf16", "0x42804280", _WIDEN_BFLOAT16, 2)
GATE_WIDE_FLOAT16 = _gate("f16", "0x50005000", _WIDEN_FLOAT16, 2)
_PAIR_BFLOAT16 = "shl.b32 l, d, 16; and.b32 h, d, 0xFFFF0000; mov.b32 a, l; mov.b32 b, h;"
_PAIR_FLOAT16 = "{ .reg .b16 u, v; mov.b32 {u, v}, d; cvt.f32.f16 a, u; cvt.f32.f16 b, v; }"
NORMAL_BFLOAT16 = _normal(_PAIR_BFLOAT16, "bf16", _LAST.format("0x7FC07FC0"), 1)
NORMAL_FLOAT16 = _normal(_PAIR_FLOAT16, "f16", _LAST.format("0x7E007E00"), 1)
NORMAL_WIDE_BFLOAT16 = _normal(_PAIR_BFLOAT16, "bf16", _WIDEN_BFLOAT16, 2)
NORMAL_WIDE_FLOAT16 = _normal(_PAIR_FLOAT16, "f16", _WIDEN_FLOAT16, 2)


@triton.jit
def floats(v, HAS_PTX: tl.constexpr):
    """float32 of a tensor, pair by pair where it has 16 bits."""
    if v.dtype == tl.float32 or not HAS_PTX:
        return widened(v)
    else:
        text: tl.constexpr = WIDEN_BFLOAT16 if v.dtype == tl.bfloat16 else WIDEN_FLOAT16
        return tl.inline_asm_elementwise(text, "=f,=f,r", [v], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def set_aside(tile, PAIRS: tl.constexpr):
    """The same elements: a copy of registers that the assembler drops.

    For a tile that is made float32 late, so that pairs, half the registers, wait for the block's scale. Without it Triton
    gives the floats the layout of a reduction of the pairs, and moves them through shared memory.
    """
    if PAIRS and tile.dtype != tl.float32:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=True, pack=2
        )
    else:
        return tile


@triton.jit
def narrowed(v, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """float32 rounded to a dtype, nearest even, overflow to infinity, NaN canonical."""
    if DTYPE == "float32":
        return canonical(v)
    elif not HAS_PTX:
        return _by_integers(v, DTYPE)
    elif DTYPE == "bfloat16":
        return tl.inline_asm_elementwise(
            NARROW_BFLOAT16, "=r,f,f", [v], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            NARROW_FLOAT16, "=r,f,f", [v], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def _by_integers(v, DTYPE: tl.constexpr):
    if DTYPE == "bfloat16":
        half = (bits_of(rounded(v, DTYPE)) >> 16).to(tl.int16)
        return tl.where(is_nan(v), tl.cast(0x7FC0, tl.int16), half).to(tl.bfloat16, bitcast=True)
    else:
        half = v.to(tl.float16).to(tl.int16, bitcast=True)
        return tl.where(is_nan(v), tl.cast(0x7E00, tl.int16), half).to(tl.float16, bitcast=True)


@triton.jit
def rounded_once(v, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """float32 rounded to a dtype and back to float32; a NaN is some positive NaN."""
    if DTYPE == "float32":
        return canonical(v)
    elif not HAS_PTX:
        return floats(_by_integers(v, DTYPE), HAS_PTX)
    else:
        text: tl.constexpr = ROUND_BFLOAT16 if DTYPE == "bfloat16" else ROUND_FLOAT16
        return tl.inline_asm_elementwise(text, "=f,=f,f,f", [v], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def clamped_gate(g, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """float32 of a gate between the bounds of `gated`: [-104, 64] for bfloat16, [-32, 32] for float16; NaN: the upper one."""
    if not HAS_PTX:
        v = widened(g)
        low: tl.constexpr = -104.0 if DTYPE == "bfloat16" else -32.0
        top: tl.constexpr = 64.0 if DTYPE == "bfloat16" else 32.0
        return tl.where(is_nan(v), top, tl.minimum(tl.maximum(v, low), top))
    else:
        text: tl.constexpr = CLAMP_BFLOAT16 if DTYPE == "bfloat16" else CLAMP_FLOAT16
        return tl.inline_asm_elementwise(text, "=f,=f,r", [g], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def gated(silu, g, up, DTYPE: tl.constexpr, WIDE: tl.constexpr, HAS_PTX: tl.constexpr):
    """silu(g), given in float32 for the clamped gate, rounded, times up, rounded; NaN canonical.

    WIDE: the same as float32, where a NaN is some positive NaN. Beyond the upper bound T of the clamp silu(g) is g: the pattern
    of max(g, T) less that of T is added to the pattern of silu(T) = T, an addition of integers and so exact. The sign is the
    gate's, also that of zeros.
    """
    IS_BF16: tl.constexpr = DTYPE == "bfloat16"
    if not HAS_PTX:
        result = _gated_by_selects(silu, g, up, DTYPE)
        if WIDE:
            return widened(result)
        else:
            return result
    elif WIDE:
        text: tl.constexpr = GATE_WIDE_BFLOAT16 if IS_BF16 else GATE_WIDE_FLOAT16
        return tl.inline_asm_elementwise(
            text, "=&f,=&f,f,f,r,r", [silu, g, up], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        text: tl.constexpr = GATE_BFLOAT16 if IS_BF16 else GATE_FLOAT16
        return tl.inline_asm_elementwise(
            text, "=r,f,f,r,r", [silu, g, up], dtype=g.dtype, is_pure=True, pack=2
        )


@triton.jit
def _gated_by_selects(silu, g, up, DTYPE: tl.constexpr):
    v = widened(g)
    b = bits_of(v)
    top: tl.constexpr = 64.0 if DTYPE == "bfloat16" else 32.0
    result = (bits_of(rounded(silu, DTYPE)) & MAGNITUDE) | (b & SIGN)
    result = tl.where((v > top) | is_nan(v), b, result)
    return _by_integers(float_of(result) * widened(up), DTYPE)


@triton.jit
def normal(h, r, w, DTYPE: tl.constexpr, WIDE: tl.constexpr, HAS_PTX: tl.constexpr):
    """(h * r) * w in float32, rounded to the dtype of h and w; r is float32. NaN canonical.

    WIDE: the same as float32, where a NaN is some positive NaN. 16-bit floats are taken as pairs again: floats that were used
    before need not be kept, and cost registers.
    """
    IS_BF16: tl.constexpr = DTYPE == "bfloat16"
    if DTYPE == "float32" or not HAS_PTX:
        product = (floats(h, HAS_PTX) * r) * floats(w, HAS_PTX)
        if WIDE:
            return rounded_once(product, DTYPE, HAS_PTX)
        else:
            return narrowed(product, DTYPE, HAS_PTX)
    elif WIDE:
        text: tl.constexpr = NORMAL_WIDE_BFLOAT16 if IS_BF16 else NORMAL_WIDE_FLOAT16
        return tl.inline_asm_elementwise(
            text, "=&f,=&f,r,r,f,f", [h, w, r], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        text: tl.constexpr = NORMAL_BFLOAT16 if IS_BF16 else NORMAL_FLOAT16
        return tl.inline_asm_elementwise(text, "=r,r,r,f,f", [h, w, r], dtype=h.dtype, is_pure=True, pack=2)


def _limited(kind: str, nan: str) -> tl.constexpr:
    """A pair of floats rounded to 16 bits and stopped at +-$3; every NaN becomes `nan`.

    The conversion writes 0x7fff for NaN, the only pattern above it as a signed integer.
    """
    return tl.constexpr(
        f"""{{
        .reg .b32 d, n;
        cvt.rn.{kind}x2.f32 d, $2, $1;
        xor.b32 n, $3, 0x80008000;
        min.NaN.{kind}x2 d, d, $3;
        max.NaN.{kind}x2 d, d, n;
        mov.b32 n, {nan};
        min.s16x2 $0, d, n;
        }}"""
    )


LIMITED_BFLOAT16, LIMITED_FLOAT16 = _limited("bf16", "0x7FC07FC0"), _limited("f16", "0x7E007E00")


@triton.jit
def bfloat16_of(v, limit):
    """float32 rounded to bfloat16 and stopped at +-limit (int16 pattern of a bfloat16); every NaN becomes 0x7fc0."""
    return tl.inline_asm_elementwise(
        LIMITED_BFLOAT16, "=r,f,f,r", [v, limit], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def float16_of(v, limit):
    """The same for float16; NaN becomes 0x7e00."""
    return tl.inline_asm_elementwise(
        LIMITED_FLOAT16, "=r,f,f,r", [v, limit], dtype=tl.float16, is_pure=True, pack=2
    )
