"""Values of codes by the instruction sequences of `sm90`: those of a tile that is quantized, and those of stored codes."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, LARGEST, MAGNITUDE, SIGN, bits_of, float_of, narrow
from fast.kernels.sm90.bf16x2 import bfloat16_of, float16_of
from fast.kernels.sm90.bit_tricks import (
    TO_INTEGER,
    e2m1_values,
    e2m3_values,
    e3m2_values,
    int4_values,
    integer_values,
    six_triples,
)
from fast.kernels.sm90.codebook16 import codebook_floats, codebook_values, codebook_word_values
from fast.kernels.sm90.pack_32 import load_quads, quad_values
from fast.kernels.sm90.uniform_codebook import stretched_floats, stretched_values
from fast.kernels.tile.fast_codes import integers, scaled


@triton.jit
def rounded_values(v, inv_scale, scale, zero, SCHEME: tl.constexpr):
    """Decoded elements of a tile before scaling, without the codes; the scale of a poisoned block is NaN."""
    if SCHEME.fast_path == "int":
        n = integers(v, inv_scale, scale, zero, SCHEME) - TO_INTEGER
        if SCHEME.zero == "code":
            n = n - zero.to(tl.float32)
        if SCHEME.fraction_bits != 0:
            n = n * (1.0 / (1 << SCHEME.fraction_bits))
        return n
    elif SCHEME.fast_path == "codebook":
        y = scaled(v, inv_scale, scale, zero, SCHEME)
        return codebook_values(bits_of(codebook_floats(y, SCHEME.element)), SCHEME.element)
    elif SCHEME.fast_path == "stretched":
        return stretched_values(stretched_floats(v * inv_scale, SCHEME.element), SCHEME.element)
    else:
        y = scaled(v, inv_scale, scale, zero, SCHEME)
        if SCHEME.fast_path == "e4m3":
            return y.to(tl.float8e4nv).to(tl.float32)
        else:
            return _rounded_float(y, SCHEME.element)


@triton.jit
def _rounded_float(y, E: tl.constexpr):
    """y rounded to a float format by adding and subtracting 1.5 * 2**(e + 23 - mantissa); saturating, sign kept."""
    top: tl.constexpr = E.max_value
    a = tl.minimum(tl.maximum(y, -top), top)
    least = float_of(tl.full((), (E.emin + 127) << 23, tl.int32))
    unit = float_of(
        ((bits_of(tl.maximum(tl.abs(a), least)) & INFINITY) + ((23 - E.mantissa) << 23)) | 0x00400000
    )
    made = (a + unit) - unit
    return float_of((bits_of(made) & MAGNITUDE) | (bits_of(y) & SIGN))


@triton.jit
def finished(product, scale, DTYPE: tl.constexpr):
    """Products as the output dtype: finite values stay finite where the scale is, NaN canonical."""
    finite = (bits_of(scale) & MAGNITUDE) < INFINITY
    if DTYPE == "bfloat16":
        limit = tl.where(finite, 0x7F7F, 0x7F80).to(tl.int16)
        return bfloat16_of(product, tl.broadcast_to(limit, product.shape))
    elif DTYPE == "float16":
        limit = tl.where(finite, 0x7BFF, 0x7C00).to(tl.int16)
        return float16_of(product, tl.broadcast_to(limit, product.shape))
    else:
        bound = float_of(tl.where(finite, LARGEST, INFINITY))
        return narrow(tl.clamp(product, -bound, bound, propagate_nan=tl.PropagateNan.ALL), "float32", True)


@triton.jit
def load_values(
    codes, at, inside, block, exists, zero, SCHEME: tl.constexpr, PACKED: tl.constexpr, SIZE: tl.constexpr
):
    """Decoded elements of a tile before scaling, less the zero point."""
    value = load_elements(codes, at, inside, block, exists, SCHEME, PACKED, SIZE)
    if SCHEME.zero == "code":
        value = value - zero.to(tl.float32)
    return value


@triton.jit
def load_elements(
    codes, at, inside, block, exists, SCHEME: tl.constexpr, PACKED: tl.constexpr, SIZE: tl.constexpr
):
    """Decoded elements of a tile before scaling, read as words where they are packed; zero points are left out."""
    if PACKED and SCHEME.bits == 4:
        words = _load_words(codes, block, exists, SIZE // 8)
        if SCHEME.kind == "int":
            value = int4_values(words)
        elif SCHEME.kind == "codebook":
            value = codebook_word_values(words, SCHEME.element)
        else:
            value = e2m1_values(words)
    elif PACKED and SCHEME.kind == "int":
        value = quad_values(load_quads(codes, block, exists, SIZE, SCHEME.bits), SCHEME.bits)
    elif PACKED:
        COUNT: tl.constexpr = SIZE // 16
        word = codes.to(tl.pointer_type(tl.int32), bitcast=True)
        word += block * (3 * COUNT) + 3 * tl.arange(0, COUNT)[None, :]
        a = tl.load(word, mask=exists, other=0)
        b = tl.load(word + 1, mask=exists, other=0)
        c = tl.load(word + 2, mask=exists, other=0)
        if SCHEME.element.mantissa == 3:
            value = e2m3_values(six_triples(a, b, c))
        else:
            value = e3m2_values(six_triples(a, b, c))
    else:
        code = tl.load(codes + at, mask=inside, other=0)
        if SCHEME.kind == "int":
            value = integer_values(code.to(tl.int8, bitcast=True), SCHEME.bits)
        elif SCHEME.kind == "codebook":
            value = codebook_values(code.to(tl.int32), SCHEME.element)
        else:
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if SCHEME.fraction_bits != 0:
        value = value * (1.0 / (1 << SCHEME.fraction_bits))
    return value


@triton.jit
def _load_words(codes, block, exists, COUNT: tl.constexpr):
    out = codes.to(tl.pointer_type(tl.int32), bitcast=True) + block * COUNT + tl.arange(0, COUNT)[None, :]
    return tl.load(out, mask=exists, other=0)
