"""Attention of a few queries over a stored cache: split over the context, one program for a key head and a part of its tokens.

The queries of all heads that share a key head are rows of one product, so that codes are read and decoded once: 16 rows at
least, as the tensor core's instruction has them. Codes become 16-bit floats in registers, exactly: bfloat16 caches are
multiplied as they are, 8-bit and 4-bit codes as float16, beside queries that are divided by a power of two each. A key's scale
multiplies its score, in float32; a value's scale its weight, before that is rounded to 16 bits, over the largest one of the
tile as a power of two, so that neither overflows or is lost. Everything else is float32; exponentials have base 2.

How many tokens there are is read on the device. The number of parts is fixed by the room of the cache, and tokens that are
there are divided among the parts, so that a CUDA graph replays and all multiprocessors have work at any length.
`combine_kernel` adds the parts, in order; where there is one, it is not launched.

Codes are read as words of 16 bits, two or four channels of a token: that is what the tensor core's operands are moved and
transposed by (`ldmatrix`). A score is a sum over channels, so channels of one place in a word are a product of their own, by
every second or fourth channel of the queries; of values they are every second or fourth channel of the result.

Milakov and Gimelshein, arXiv 1805.02867 (softmax of parts); Flash-Decoding (parts of the context).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.quantize.geometry import power_above
from fast.launch.launcher import interpreted
from fast.stored_tokens import StoredTokens

LOG2E = 1.4426950408889634
#: Rows of the tensor core's product.
ROWS = 16
#: Most rows of queries that a program takes: beyond, prefill's attention is the better one.
MOST_ROWS = 64
#: Programs that keep all multiprocessors of an H200 busy: four of each for 16-bit values, two for codes.
PROGRAMS, FEW_PROGRAMS = {"value": 528}, 264
#: The fewest tokens worth a program.
FEWEST = 128
#: Elements of codes by their format: how a kernel decodes them.
KINDS = {"float8_e4m3fn": "fp8", "int8": "int8", "int4": "int4"}
#: Widths of heads.
WIDTHS = (64, 128, 256)

# Two words of 16 bits in a register, of neighbouring tokens or of neighbouring channels: what lies at one place in both of them
# becomes the two halves of a result.
FP8_PAIRS = tl.constexpr("""{
.reg .b16 l, h; .reg .b32 a, b;
mov.b32 {l, h}, $2;
cvt.rn.f16x2.e4m3x2 a, l;
cvt.rn.f16x2.e4m3x2 b, h;
prmt.b32 $0, a, b, 0x5410;
prmt.b32 $1, a, b, 0x7632;
}""")
# (code ^ 128) in the fraction of 1024, less 1152.
INT8_PAIRS = tl.constexpr("""{
.reg .b32 x, c, e, o;
xor.b32 x, $2, 0x80808080;
mov.b32 c, 0x64806480;
prmt.b32 e, x, 0x64646464, 0x4240;
prmt.b32 o, x, 0x64646464, 0x4341;
sub.f16x2 $0, e, c;
sub.f16x2 $1, o, c;
}""")
# (code ^ 8) in the fraction of 1024, less 1032; of the higher nibble of a byte 16 times as much, over 16, less 72.
INT4_FOURS = tl.constexpr("""{
.reg .b32 y, a, b, c, d, low, over, high;
mov.b32 low, 0x64086408;
mov.b32 over, 0x2C002C00;
mov.b32 high, 0xD480D480;
shr.u32 y, $4, 8;
lop3.b32 a, $4, 0x000F000F, 0x64086408, 0x6A;
lop3.b32 b, $4, 0x00F000F0, 0x64806480, 0x6A;
lop3.b32 c, y, 0x000F000F, 0x64086408, 0x6A;
lop3.b32 d, y, 0x00F000F0, 0x64806480, 0x6A;
sub.f16x2 $0, a, low;
fma.rn.f16x2 $1, b, over, high;
sub.f16x2 $2, c, low;
fma.rn.f16x2 $3, d, over, high;
}""")


@triton.jit
def pairs(words, KIND: tl.constexpr, HAS_PTX: tl.constexpr):
    """float16 of the low and of the high bytes of 16-bit words; exact."""
    if KIND == "fp8" and HAS_PTX:
        return tl.inline_asm_elementwise(FP8_PAIRS, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    elif KIND == "int8" and HAS_PTX:
        return tl.inline_asm_elementwise(INT8_PAIRS, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        low, high = (words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8)
        if KIND == "fp8":
            low = low.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            high = high.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            low, high = (
                low.to(tl.int8, bitcast=True).to(tl.float16),
                high.to(tl.int8, bitcast=True).to(tl.float16),
            )
        return low, high


@triton.jit
def fours(words, HAS_PTX: tl.constexpr):
    """float16 of the four nibbles of 16-bit words, two's complement, the lowest first; exact."""
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            INT4_FOURS, "=r,=r,=r,=r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )
    else:
        return _nibble(words), _nibble(words >> 4), _nibble(words >> 8), _nibble(words >> 12)


@triton.jit
def _nibble(words):
    return ((words & 15) ^ 8).to(tl.float16) - 8.0


@triton.jit
def _power_below(x):
    """The power of two at or below positive numbers, 0 for 0."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _one_over_power(power):
    """1 / power of a power of two; of 0 2**127."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _part_of(length, split, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """First token of a part and the one behind its last: whole blocks, divided evenly."""
    blocks = tl.cdiv(length, BLOCK)
    each = tl.cdiv(blocks, SPLITS) * BLOCK
    first = split * each
    return first, tl.minimum(first + each, length)


@triton.jit
def _weights(scores, top, total):
    """exp2(score - largest so far), the new largest and sum, and what earlier sums shrink by."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    # Rows that have seen nothing: no difference of infinities.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, new_top, total * shrink + tl.sum(weights, 1), shrink


@triton.jit
def _visible(scores, at, row, end, length, mask, mask_token, GROUPS: tl.constexpr, TOKENS: tl.constexpr,
             HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Scores, -inf where a row does not see a key. mask: of this sequence; end: of this part."""
    seen = (at < end)[None, :]
    if CAUSAL and TOKENS > 1:
        seen = seen & (at[None, :] < (length - TOKENS + 1 + row // GROUPS)[:, None])
    if HAS_MASK:
        if TOKENS == 1:
            kept = tl.load(mask + at, mask=at < end, other=0)
            seen = seen & (kept != 0)[None, :]
        else:
            token = tl.minimum(row // GROUPS, TOKENS - 1)
            where = mask + token[:, None].to(tl.int64) * mask_token + at[None, :]
            seen = seen & (tl.load(where, mask=(at < end)[None, :], other=0) != 0)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def value_kernel(
    q, k, k_scale, v, v_scale, length, mask, y, parts, stats, factor, q_batch, q_head, q_token, mask_batch, mask_token, room,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    K_GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr, STAGES: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """A part of one key head's tokens, 16-bit values. factor: of scores, times log2 e."""
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length).to(tl.int32)
    first, end = _part_of(count, split, SPLITS, BLOCK)
    row, d, n = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    pair = (batch * KV_HEADS + kv_head).to(tl.int64)
    k += pair * room * WIDTH
    v += pair * room * WIDTH
    if HAS_MASK:
        mask += batch.to(tl.int64) * mask_batch
    valid = row < GROUPS * TOKENS
    head, token = kv_head * GROUPS + row % GROUPS, row // GROUPS
    place = batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + token.to(tl.int64) * q_token
    queries = tl.load(q + place[:, None] + d[None, :], mask=valid[:, None], other=0.0)
    if not HAS_PTX:
        # Triton's interpreter multiplies the bit patterns of bfloat16 as integers.
        queries = queries.to(tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        at = start + n
        inside = tl.minimum(at, room - 1)
        keys = tl.load(k + inside[:, None] * WIDTH + d[None, :]).to(queries.dtype)
        scores = tl.dot(queries, keys.T) * factor
        scores = _visible(scores, at, row, end, count, mask, mask_token, GROUPS, TOKENS, HAS_MASK, CAUSAL)
        weights, top, total, shrink = _weights(scores, top, total)
        values = tl.load(v + inside[:, None] * WIDTH + d[None, :])
        weights = weights.to(values.dtype)
        sums = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), sums * shrink[:, None])
    if SPLITS == 1:
        sums = sums / tl.where(total == 0, 1.0, total)[:, None]
        out = (batch.to(tl.int64) * TOKENS + token) * HEADS + head
        tl.store(y + out[:, None] * WIDTH + d[None, :], sums.to(y.dtype.element_ty), mask=valid[:, None])
    else:
        _store_part(
            parts, stats, pair, split, row, valid, d, top, total, sums, GROUPS * TOKENS, WIDTH, SPLITS
        )


@triton.jit
def _scaled(weights, scale):
    """Weights times their values' scales over the largest one of the tile as a power of two, float16, and that power.

    Scales beyond the end may be anything finite; their weights are 0.
    """
    largest = _power_below(tl.max(scale, 0))
    return (weights * (scale * _one_over_power(largest))[None, :]).to(tl.float16), largest


@triton.jit
def _queries(source, valid):
    """Channels of queries in float32."""
    return tl.load(source, mask=valid[:, None], other=0.0).to(tl.float32)


@triton.jit
def _store(y, parts, stats, pair, split, batch, token, head, row, valid, channel, top, total, sums,
           HEADS: tl.constexpr, TOKENS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
           SPLITS: tl.constexpr):  # fmt: skip
    """Some channels of the result, or of a part."""
    if SPLITS == 1:
        out = (batch.to(tl.int64) * TOKENS + token) * HEADS + head
        sums = sums / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(
            y + out[:, None] * WIDTH + channel[None, :], sums.to(y.dtype.element_ty), mask=valid[:, None]
        )
    else:
        _store_part(parts, stats, pair, split, row, valid, channel, top, total, sums, COUNT, WIDTH, SPLITS)


@triton.jit
def byte_kernel(
    q, k, k_scale, v, v_scale, length, mask, y, parts, stats, factor, q_batch, q_head, q_token, mask_batch, mask_token, room,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    K_GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr, STAGES: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """The same of codes of 8 bits with one scale a token, two channels in a word."""
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length).to(tl.int32)
    first, end = _part_of(count, split, SPLITS, BLOCK)
    WORDS: tl.constexpr = WIDTH // 2
    COUNT: tl.constexpr = GROUPS * TOKENS
    row, d, n = tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, BLOCK)
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    pair = (batch * KV_HEADS + kv_head).to(tl.int64)
    k += pair * room * WORDS
    v += pair * room * WORDS
    k_scale += pair * room
    v_scale += pair * room
    if HAS_MASK:
        mask += batch.to(tl.int64) * mask_batch
    valid = row < GROUPS * TOKENS
    head, token = kv_head * GROUPS + row % GROUPS, row // GROUPS
    place = batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + token.to(tl.int64) * q_token
    source = q + place[:, None] + 2 * d[None, :]
    q0, q1 = _queries(source, valid), _queries(source + 1, valid)
    power = _power_below(tl.maximum(tl.max(tl.abs(q0), 1), tl.max(tl.abs(q1), 1)))
    less = _one_over_power(power)[:, None]
    factors = power * factor
    q0, q1 = (q0 * less).to(tl.float16), (q1 * less).to(tl.float16)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums0 = tl.zeros((ROWS, WORDS), tl.float32)
    sums1 = tl.zeros((ROWS, WORDS), tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        at = start + n
        inside = tl.minimum(at, room - 1)
        line = inside[:, None] * WORDS + d[None, :]
        k0, k1 = pairs(tl.load(k + line), KIND, HAS_PTX)
        scores = tl.dot(q1, k1.T, tl.dot(q0, k0.T))
        scores = scores * factors[:, None] * tl.load(k_scale + inside)[None, :]
        scores = _visible(scores, at, row, end, count, mask, mask_token, GROUPS, TOKENS, HAS_MASK, CAUSAL)
        weights, top, total, shrink = _weights(scores, top, total)
        w, largest = _scaled(weights, tl.load(v_scale + inside))
        v0, v1 = pairs(tl.load(v + line), KIND, HAS_PTX)
        sums0 = sums0 * shrink[:, None] + tl.dot(w, v0) * largest
        sums1 = sums1 * shrink[:, None] + tl.dot(w, v1) * largest
    _store(y, parts, stats, pair, split, batch, token, head, row, valid, 2 * d, top, total, sums0, HEADS, TOKENS, COUNT,
           WIDTH, SPLITS)  # fmt: skip
    _store(y, parts, stats, pair, split, batch, token, head, row, valid, 2 * d + 1, top, total, sums1, HEADS, TOKENS, COUNT,
           WIDTH, SPLITS)  # fmt: skip


@triton.jit
def _store_part(parts, stats, pair, split, row, valid, d, top, total, sums, COUNT: tl.constexpr, WIDTH: tl.constexpr,
                SPLITS: tl.constexpr):  # fmt: skip
    """Sums (pairs, rows, splits, WIDTH), and of each the largest score and the sum of weights."""
    place = (pair * COUNT + row) * SPLITS + split
    tl.store(parts + place[:, None] * WIDTH + d[None, :], sums, mask=valid[:, None])
    tl.store(stats + place * 2, top, mask=valid)
    tl.store(stats + place * 2 + 1, total, mask=valid)


@triton.jit
def nibble_kernel(
    q, k, k_scale, v, v_scale, length, mask, y, parts, stats, factor, q_batch, q_head, q_token, mask_batch, mask_token, room,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    K_GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr, STAGES: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """The same of codes of 4 bits, four channels in a word, with K_GROUPS (1 or 2) scales along head_dim."""
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length).to(tl.int32)
    first, end = _part_of(count, split, SPLITS, BLOCK)
    WORDS: tl.constexpr = WIDTH // 4 // K_GROUPS
    ALL: tl.constexpr = WIDTH // 4
    COUNT: tl.constexpr = GROUPS * TOKENS
    row, d, n = tl.arange(0, ROWS), tl.arange(0, WORDS), tl.arange(0, BLOCK)
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    pair = (batch * KV_HEADS + kv_head).to(tl.int64)
    k += pair * room * ALL
    v += pair * room * ALL
    k_scale += pair * room * K_GROUPS
    v_scale += pair * room * K_GROUPS
    if HAS_MASK:
        mask += batch.to(tl.int64) * mask_batch
    valid = row < GROUPS * TOKENS
    head, token = kv_head * GROUPS + row % GROUPS, row // GROUPS
    place = batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + token.to(tl.int64) * q_token
    source = q + place[:, None] + 4 * d[None, :]
    a0, a1 = _queries(source, valid), _queries(source + 1, valid)
    a2, a3 = _queries(source + 2, valid), _queries(source + 3, valid)
    most = tl.max(tl.maximum(tl.maximum(tl.abs(a0), tl.abs(a1)), tl.maximum(tl.abs(a2), tl.abs(a3))), 1)
    if K_GROUPS == 2:
        source += 4 * WORDS
        b0, b1 = _queries(source, valid), _queries(source + 1, valid)
        b2, b3 = _queries(source + 2, valid), _queries(source + 3, valid)
        other = tl.maximum(tl.maximum(tl.abs(b0), tl.abs(b1)), tl.maximum(tl.abs(b2), tl.abs(b3)))
        most = tl.maximum(most, tl.max(other, 1))
    power = _power_below(most)
    less = _one_over_power(power)[:, None]
    factors = power * factor
    a0, a1 = (a0 * less).to(tl.float16), (a1 * less).to(tl.float16)
    a2, a3 = (a2 * less).to(tl.float16), (a3 * less).to(tl.float16)
    sa0 = tl.zeros((ROWS, WORDS), tl.float32)
    sa1 = tl.zeros((ROWS, WORDS), tl.float32)
    sa2 = tl.zeros((ROWS, WORDS), tl.float32)
    sa3 = tl.zeros((ROWS, WORDS), tl.float32)
    if K_GROUPS == 2:
        b0, b1 = (b0 * less).to(tl.float16), (b1 * less).to(tl.float16)
        b2, b3 = (b2 * less).to(tl.float16), (b3 * less).to(tl.float16)
        sb0 = tl.zeros((ROWS, WORDS), tl.float32)
        sb1 = tl.zeros((ROWS, WORDS), tl.float32)
        sb2 = tl.zeros((ROWS, WORDS), tl.float32)
        sb3 = tl.zeros((ROWS, WORDS), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        at = start + n
        inside = tl.minimum(at, room - 1)
        line = inside[:, None] * ALL + d[None, :]
        c0, c1, c2, c3 = fours(tl.load(k + line), HAS_PTX)
        scores = tl.dot(a3, c3.T, tl.dot(a2, c2.T, tl.dot(a1, c1.T, tl.dot(a0, c0.T))))
        scores = scores * tl.load(k_scale + inside * K_GROUPS)[None, :]
        if K_GROUPS == 2:
            c0, c1, c2, c3 = fours(tl.load(k + line + WORDS), HAS_PTX)
            more = tl.dot(b3, c3.T, tl.dot(b2, c2.T, tl.dot(b1, c1.T, tl.dot(b0, c0.T))))
            scores += more * tl.load(k_scale + inside * 2 + 1)[None, :]
        scores = scores * factors[:, None]
        scores = _visible(scores, at, row, end, count, mask, mask_token, GROUPS, TOKENS, HAS_MASK, CAUSAL)
        weights, top, total, shrink = _weights(scores, top, total)
        w, largest = _scaled(weights, tl.load(v_scale + inside * K_GROUPS))
        c0, c1, c2, c3 = fours(tl.load(v + line), HAS_PTX)
        sa0 = sa0 * shrink[:, None] + tl.dot(w, c0) * largest
        sa1 = sa1 * shrink[:, None] + tl.dot(w, c1) * largest
        sa2 = sa2 * shrink[:, None] + tl.dot(w, c2) * largest
        sa3 = sa3 * shrink[:, None] + tl.dot(w, c3) * largest
        if K_GROUPS == 2:
            w, largest = _scaled(weights, tl.load(v_scale + inside * 2 + 1))
            c0, c1, c2, c3 = fours(tl.load(v + line + WORDS), HAS_PTX)
            sb0 = sb0 * shrink[:, None] + tl.dot(w, c0) * largest
            sb1 = sb1 * shrink[:, None] + tl.dot(w, c1) * largest
            sb2 = sb2 * shrink[:, None] + tl.dot(w, c2) * largest
            sb3 = sb3 * shrink[:, None] + tl.dot(w, c3) * largest
    _store(y, parts, stats, pair, split, batch, token, head, row, valid, 4 * d + 0, top, total, sa0, HEADS, TOKENS, COUNT,
           WIDTH, SPLITS)  # fmt: skip
    _store(y, parts, stats, pair, split, batch, token, head, row, valid, 4 * d + 1, top, total, sa1, HEADS, TOKENS, COUNT,
           WIDTH, SPLITS)  # fmt: skip
    _store(y, parts, stats, pair, split, batch, token, head, row, valid, 4 * d + 2, top, total, sa2, HEADS, TOKENS, COUNT,
           WIDTH, SPLITS)  # fmt: skip
    _store(y, parts, stats, pair, split, batch, token, head, row, valid, 4 * d + 3, top, total, sa3, HEADS, TOKENS, COUNT,
           WIDTH, SPLITS)  # fmt: skip
    if K_GROUPS == 2:
        d += WORDS
        _store(y, parts, stats, pair, split, batch, token, head, row, valid, 4 * d + 0, top, total, sb0, HEADS, TOKENS,
               COUNT, WIDTH, SPLITS)  # fmt: skip
        _store(y, parts, stats, pair, split, batch, token, head, row, valid, 4 * d + 1, top, total, sb1, HEADS, TOKENS,
               COUNT, WIDTH, SPLITS)  # fmt: skip
        _store(y, parts, stats, pair, split, batch, token, head, row, valid, 4 * d + 2, top, total, sb2, HEADS, TOKENS,
               COUNT, WIDTH, SPLITS)  # fmt: skip
        _store(y, parts, stats, pair, split, batch, token, head, row, valid, 4 * d + 3, top, total, sb3, HEADS, TOKENS,
               COUNT, WIDTH, SPLITS)  # fmt: skip


@triton.jit
def combine_kernel(
    parts, stats, length, y, HEADS: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row of queries: its parts, CHUNK at a time, weighted by the sums of their exponentials."""
    row, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(length).to(tl.int32)
    blocks = tl.cdiv(count, BLOCK)
    # Parts that have a token.
    live = tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, SPLITS), 1))
    d, c = tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    place = (pair * (GROUPS * TOKENS) + row) * SPLITS
    top, total, sums = float("-inf"), 0.0, tl.zeros((WIDTH,), tl.float32)
    for start in tl.range(0, live, CHUNK):
        part = start + c
        there = part < live
        tops = tl.load(stats + (place + part) * 2, mask=there, other=float("-inf"))
        totals = tl.load(stats + (place + part) * 2 + 1, mask=there, other=0.0)
        held = tl.load(parts + (place + part)[:, None] * WIDTH + d[None, :], mask=there[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(tops - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(totals * weights, 0)
        sums = sums * shrink + tl.sum(held * weights[:, None], 0)
        top = new_top
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    batch, kv_head = pair // KV_HEADS, pair % KV_HEADS
    out = (batch * TOKENS + row // GROUPS) * HEADS + kv_head * GROUPS + row % GROUPS
    sums = sums / tl.where(total == 0, 1.0, total)
    tl.store(y + out * WIDTH + d, sums.to(y.dtype.element_ty))


@dataclass(frozen=True)
class Plan:
    """What is launched for a cache: splits, tokens of a step, warps, stages."""

    splits: int
    block: int
    warps: int
    stages: int


#: Tokens of a step, warps, stages by kind and scales along head_dim. Of two scales products are so narrow that several warps
#: would have the same ones. Measured are 16-bit values and FP8; INT8 and INT4 have FP8's.
TILES = {
    ("value", 0): (64, 4, 3), ("fp8", 1): (128, 4, 2), ("int8", 1): (128, 4, 2), ("int4", 1): (128, 4, 2),
    ("int4", 2): (64, 1, 3),
}  # fmt: skip


def plan_of(kind: tuple[str, int], heads: int, room: int) -> Plan:
    """Splits fixed by the room of the cache and by how many key heads there are in all."""
    block, warps, stages = TILES[kind]
    splits = max(1, min(-(-PROGRAMS.get(kind[0], FEW_PROGRAMS) // heads), -(-room // max(FEWEST, block))))
    return Plan(splits, block, warps, stages)


def kind_of(stored: StoredTokens) -> tuple[str, int] | None:
    """How a kernel decodes it, and scales along head_dim; None where none does."""
    if not stored.scheme:
        return ("value", 0) if stored.codes.dtype in (torch.bfloat16, torch.float16) else None
    from reference.schemes.schemes import record_of

    scheme = record_of(stored.scheme)
    kind = KINDS.get(scheme.element)
    if (
        kind is None
        or scheme.zero is not None
        or scheme.scale.storage != "float32"
        or scheme.scale.stored != "decode"
    ):
        return None
    assert stored.scale is not None
    groups = stored.scale.shape[-1]
    return (kind, groups) if groups in ((1, 2) if kind == "int4" else (1,)) else None


def refusal(
    q: torch.Tensor, k: StoredTokens, v: StoredTokens, mask: torch.Tensor | None, softcap: float
) -> str | None:
    """Why no kernel here multiplies these, or None."""
    kinds = kind_of(k), kind_of(v)
    if kinds[0] is None or kinds[0] != kinds[1]:
        return (
            f"no kernel decodes keys in {k.scheme or k.codes.dtype} and values in {v.scheme or v.codes.dtype}"
        )
    if q.dtype not in (torch.bfloat16, torch.float16) or (not k.scheme and k.codes.dtype != q.dtype):
        return f"kernels take 16-bit queries, and a cache of values in their dtype; got {q.dtype}"
    if k.width != v.width or k.width not in WIDTHS:
        return f"kernels take heads of {', '.join(map(str, WIDTHS))} channels, got {k.width} and {v.width}"
    if q.shape[2] * (q.shape[1] // k.shape[1]) > MOST_ROWS:
        return f"{q.shape[2]} queries of each head are prefill"
    if softcap:
        return "kernels have no softcap"
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1):
        return "kernels take a mask of bool, the same for all heads"
    return None


def attention(
    q: torch.Tensor, k: StoredTokens, v: StoredTokens, length: torch.Tensor, mask: torch.Tensor | None, scale: float,
    causal: bool, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """(B, H, T, D), whose memory is (B, T, H, D); operands as `refusal` lets through. plan: for measurements."""
    batch, heads, tokens, width = q.shape
    kv_heads, room = k.shape[1:3]
    found = kind_of(k)
    assert found is not None
    kind, groups = found
    plan = plan_of(found, batch * kv_heads, room) if plan is None else plan
    group = heads // kv_heads
    rows = max(ROWS, power_above(group * tokens))
    y = torch.empty((batch, tokens, heads, width), dtype=q.dtype, device=q.device)
    parts = stats = y
    if plan.splits > 1:
        places = batch * kv_heads * group * tokens * plan.splits
        parts = torch.empty((places, width), dtype=torch.float32, device=q.device)
        stats = torch.empty((places, 2), dtype=torch.float32, device=q.device)
    q = q if q.stride(-1) == 1 else q.contiguous()
    masks: tuple[Any, int, int] = (y, 0, 0)
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        # A sequence's mask serves all where there is one; the same of tokens.
        masks = (
            mask.view(torch.uint8),
            mask.stride(0) if mask.shape[0] > 1 else 0,
            mask.stride(2) if mask.shape[2] > 1 else 0,
        )
    kernel = {"int4": nibble_kernel, "value": value_kernel}.get(kind, byte_kernel)
    codes: tuple[Any, Any] = (k.codes, v.codes)
    scales = codes if k.scale is None or v.scale is None else (k.scale, v.scale)
    codes = codes if kind == "value" else (k.codes.view(torch.int16), v.codes.view(torch.int16))
    has_ptx, options = not interpreted(), {} if interpreted() else {"num_warps": plan.warps}
    kernel[plan.splits, kv_heads, batch](
        q, codes[0], scales[0], codes[1], scales[1], length, masks[0], y, parts, stats, scale * LOG2E, *q.stride()[:3],
        *masks[1:], room, HEADS=heads, GROUPS=group, TOKENS=tokens, WIDTH=width, KIND=kind, K_GROUPS=groups, ROWS=rows,
        BLOCK=plan.block, SPLITS=plan.splits, HAS_MASK=mask is not None, CAUSAL=causal, STAGES=plan.stages,
        HAS_PTX=has_ptx, **options,
    )  # fmt: skip
    if plan.splits > 1:
        combine_kernel[group * tokens, batch * kv_heads](
            parts, stats, length, y, HEADS=heads, GROUPS=group, TOKENS=tokens, WIDTH=width, BLOCK=plan.block,
            SPLITS=plan.splits, CHUNK=min(32, power_above(plan.splits)), **options,
        )  # fmt: skip
    return y.transpose(1, 2)


__all__ = ["Plan", "attention", "kind_of", "plan_of", "refusal"]
