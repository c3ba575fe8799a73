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
every second or fourth channel of the queries; of values they are every second or fourth channel of the result. Channels with
a scale of their own are too. So queries and sums are tuples, by scale and by place, and one kernel serves all caches; a
16-bit value is a word with one place.

Milakov and Gimelshein, arXiv 1805.02867 (softmax of parts); Flash-Decoding (parts of the context).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.attention import sm90_decode
from fast.kernels.attention.append import static_of
from fast.kernels.attention.parts import combine, part_of, parts_of, stored_tokens
from fast.kernels.bits import INFINITY, bits_of, float_of
from fast.launch.launcher import interpreted, power_above
from fast.stored_tokens import StoredTokens
from reference.attention.window import ALL_STORED
from reference.schemes.schemes import record_of

LOG2E = 1.4426950408889634
#: Rows of the tensor core's product.
ROWS = 16
#: Most rows of queries that a program takes: beyond, prefill's attention is the better one.
MOST_ROWS = 64
#: The fewest tokens worth a program.
FEWEST = 128
#: Elements of codes by their format: how a kernel decodes them.
KINDS = {"float8_e4m3fn": "fp8", "int8": "int8", "int4": "int4"}
#: Tokens of a step that are read as computed.
SLOTS_AT_ONCE = tl.constexpr(32)
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
def decoded(words, KIND: tl.constexpr, HAS_PTX: tl.constexpr):
    """float16 of the channels of 16-bit words, exact, the lowest first; of values themselves."""
    if KIND == "value":
        return (words,)
    elif KIND == "int4":
        if HAS_PTX:
            return tl.inline_asm_elementwise(INT4_FOURS, "=r,=r,=r,=r,r", [words], (tl.float16,) * 4, True, 2)
        else:
            return _nibble(words), _nibble(words >> 4), _nibble(words >> 8), _nibble(words >> 12)
    elif HAS_PTX:
        ASM: tl.constexpr = FP8_PAIRS if KIND == "fp8" else INT8_PAIRS
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
    else:
        return _byte(words, KIND), _byte(words >> 8, KIND)


@triton.jit
def _byte(words, KIND: tl.constexpr):
    ELEMENT: tl.constexpr = tl.float8e4nv if KIND == "fp8" else tl.int8
    return (words & 0xFF).to(tl.uint8).to(ELEMENT, bitcast=True).to(tl.float16)


@triton.jit
def _nibble(words):
    return ((words & 15) ^ 8).to(tl.float16) - 8.0


@triton.jit
def _power_below(x):
    """The power of two at or below positive numbers, 0 for 0."""
    return float_of(bits_of(x) & INFINITY)


@triton.jit
def _one_over_power(power):
    """1 / power of a power of two; of 0 2**127."""
    return float_of(0x7F000000 - bits_of(power))


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
            seen = seen & (tl.load(mask + at, mask=at < end, other=0) != 0)[None, :]
        else:
            token = tl.minimum(row // GROUPS, TOKENS - 1)
            where = mask + token[:, None].to(tl.int64) * mask_token + at[None, :]
            seen = seen & (tl.load(where, mask=(at < end)[None, :], other=0) != 0)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _queries(source, valid, PLACES: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """Queries by block and place in a word, in order."""
    queries = ()
    for i in tl.static_range(PLACES * GROUPS):
        at = i // PLACES * PLACES * WORDS + i % PLACES
        queries += (tl.load(source + at, mask=valid[:, None], other=0.0),)
    return queries


@triton.jit
def _divided(queries):
    """float16 of queries over a power of two each, and that power."""
    most = tl.abs(queries[0].to(tl.float32))
    for i in tl.static_range(1, len(queries)):
        most = tl.maximum(most, tl.abs(queries[i].to(tl.float32)))
    power = _power_below(tl.max(most, 1))
    less, halves = _one_over_power(power)[:, None], ()
    for i in tl.static_range(len(queries)):
        halves += ((queries[i].to(tl.float32) * less).to(tl.float16),)
    return halves, power


@triton.jit
def _scaled(weights, scale):
    """Weights times their values' scales over the largest one of the tile as a power of two, float16, and that power.

    Beyond the end they are those of the last token; their weights are 0.
    """
    largest = _power_below(tl.max(scale, 0))
    return (weights * (scale * _one_over_power(largest))[None, :]).to(tl.float16), largest


@triton.jit
def _scores(queries, factors, keys, scales, PLACES: tl.constexpr, SCALES: tl.constexpr, PART: tl.constexpr,
            KIND: tl.constexpr, STATIC: tl.constexpr, HAS_PTX: tl.constexpr):  # fmt: skip
    """Of a tile's tokens; keys, scales: where they lie. STATIC: their scale is among the factors."""
    for b in tl.static_range(SCALES):
        halves = decoded(tl.load(keys + b * PART), KIND, HAS_PTX)
        part = tl.dot(queries[b * PLACES], halves[0].to(queries[0].dtype).T)
        for i in tl.static_range(1, PLACES):
            part = tl.dot(queries[b * PLACES + i], halves[i].T, part)
        part = part * factors
        if KIND != "value" and STATIC == "":
            part = part * tl.load(scales + b)[None, :]
        if b == 0:
            scores = part
        else:
            scores += part
    return scores


@triton.jit
def _scores_by_channel(queries, factor, keys, scales, zeros, d, PLACES: tl.constexpr, KIND: tl.constexpr,
                       HAS_PTX: tl.constexpr):  # fmt: skip
    """Of a group of tokens whose keys have a scale, and perhaps a zero point, a channel: queries take the scales.

    They are rounded to float16 with them; zero points are taken off by the same numbers.
    """
    scaled = ()
    for i in tl.static_range(PLACES):
        scaled += (queries[i].to(tl.float32) * tl.load(scales + d * PLACES + i)[None, :],)
    halves, power = _divided(scaled)
    words = decoded(tl.load(keys), KIND, HAS_PTX)
    scores = tl.dot(halves[0], words[0].T)
    for i in tl.static_range(1, PLACES):
        scores = tl.dot(halves[i], words[i].T, scores)
    if zeros is not None:
        beside = tl.sum(halves[0].to(tl.float32) * tl.load(zeros + d * PLACES).to(tl.float32)[None, :], 1)
        for i in tl.static_range(1, PLACES):
            beside += tl.sum(
                halves[i].to(tl.float32) * tl.load(zeros + d * PLACES + i).to(tl.float32)[None, :], 1
            )
        scores = scores - beside[:, None]
    return scores * (power * factor)[:, None]


@triton.jit
def _seen_by_any(scores):
    """Tokens (tokens, 1) that some row sees."""
    return (tl.max((scores != float("-inf")).to(tl.int32), 0) > 0)[:, None]


@triton.jit
def _added(sums, weights, shrink, values, scales, seen, DTYPE: tl.constexpr, PLACES: tl.constexpr, SCALES: tl.constexpr,
           PART: tl.constexpr, KIND: tl.constexpr, STATIC: tl.constexpr, HAS_PTX: tl.constexpr):  # fmt: skip
    """Sums, shrunk, and the weighted values of a tile; values, scales: where they lie. seen: tokens that some row sees, where a
    mask hides some: others are 0, since of NaN even a weight of 0 makes NaN. DTYPE: of 16-bit values' products. STATIC: their
    scale multiplies the sums at the end.
    """
    more = ()
    for b in tl.static_range(SCALES):
        words = tl.load(values + b * PART)
        if seen is not None:
            words = tl.where(seen, words, 0.0 if KIND == "value" else 0)
        halves = decoded(words, KIND, HAS_PTX)
        if KIND == "value":
            w = weights.to(halves[0].dtype).to(DTYPE)
            more += (tl.dot(w, halves[0].to(DTYPE), sums[0] * shrink[:, None]),)
        elif STATIC != "":
            for i in tl.static_range(PLACES):
                more += (tl.dot(weights.to(tl.float16), halves[i], sums[i] * shrink[:, None]),)
        else:
            scale = tl.load(scales + b)
            if seen is not None:
                scale = tl.where(tl.reshape(seen, (scale.shape[0],)), scale, 0.0)
            w, largest = _scaled(weights, scale)
            for i in tl.static_range(PLACES):
                more += (sums[b * PLACES + i] * shrink[:, None] + tl.dot(w, halves[i]) * largest,)
    return more


@triton.jit
def _of_computed(queries, keys, values, mask, split, count, factor, top, total, sums, PLACES: tl.constexpr,
                 SCALES: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr, HAS_MASK: tl.constexpr, SINKS: tl.constexpr,
                 RING: tl.constexpr, RESIDUAL: tl.constexpr, GROUP: tl.constexpr, HAS_PTX: tl.constexpr):  # fmt: skip
    """Attention of single tokens to what the slots hold, where the part is the first; keys, values: of this head."""
    d, n = tl.arange(0, PART), tl.arange(0, SLOTS_AT_ONCE)
    DTYPE: tl.constexpr = queries[0].dtype if HAS_PTX else tl.float32
    for start in tl.range(0, tl.where(split == 0, SINKS + RING, 0), SLOTS_AT_ONCE):
        slot = start + n
        at = slot
        if RING > 0:
            back = (count - 1 - slot) % RING
            at = tl.where(slot < SINKS, slot, count - 1 - tl.where(back < 0, back + RING, back))
        seen = (
            (slot < SINKS + RING)
            & (at < count)
            & ((slot < SINKS) | (at >= tl.maximum(stored_tokens(count, RESIDUAL, GROUP), SINKS)))
        )
        if HAS_MASK:
            seen = seen & (tl.load(mask + at, mask=seen, other=0) != 0)
        line = slot[:, None] * WIDTH + d[None, :] * PLACES
        scores = tl.zeros((queries[0].shape[0], SLOTS_AT_ONCE), tl.float32)
        for i in tl.static_range(PLACES * SCALES):
            place = line + (i // PLACES * PART * PLACES + i % PLACES)
            held = tl.load(keys + place, mask=seen[:, None], other=0.0)
            scores = tl.dot(queries[i].to(DTYPE), held.to(DTYPE).T, scores)
        scores = tl.where(seen[None, :], scores * factor, float("-inf"))
        weights, top, total, shrink = _weights(scores, top, total)
        more = ()
        for i in tl.static_range(PLACES * SCALES):
            place = line + (i // PLACES * PART * PLACES + i % PLACES)
            held = tl.load(values + place, mask=seen[:, None], other=0.0)
            rounded = weights.to(held.dtype).to(DTYPE)
            more += (tl.dot(rounded, held.to(DTYPE), sums[i] * shrink[:, None]),)
        sums = more
    return top, total, sums


@triton.jit
def attend_kernel(
    q, k, k_scale, v, v_scale, k_computed, v_computed, length, mask, y, parts, stats, factor, q_batch, q_head, q_token,
    mask_batch, mask_token, k_room, room, k_zero, HEADS: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr, PLACES: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr,
    RESIDUAL: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr, STAGES: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """A part of one key head's tokens. factor: of scores, times log2 e; PLACES: channels of a word; SCALES: of a token.

    The first SINKS and the last tokens are read as they were computed, by the first part. GROUP above 1: keys have scales and
    zero points by channel of as many tokens, a step.
    """
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length).to(tl.int32)
    first, end = part_of(stored_tokens(count, RESIDUAL, GROUP), split, SPLITS, BLOCK)
    WORDS: tl.constexpr = WIDTH // PLACES
    PART: tl.constexpr = WORDS // SCALES
    row, d, n = tl.arange(0, ROWS), tl.arange(0, PART), tl.arange(0, BLOCK)
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    pair = (batch * KV_HEADS + kv_head).to(tl.int64)
    k += pair * k_room * WORDS
    v += pair * room * WORDS
    if GROUP > 1:
        k_scale += pair * (k_room // GROUP) * WIDTH
        if k_zero is not None:
            k_zero += pair * (k_room // GROUP) * WIDTH
    elif STATIC == "":
        k_scale += pair * room * SCALES
    if STATIC == "":
        v_scale += pair * room * SCALES
    elif STATIC == "head":
        k_scale += kv_head
        v_scale += kv_head
    if HAS_MASK:
        mask += batch.to(tl.int64) * mask_batch
    valid = row < GROUPS * TOKENS
    head, token = kv_head * GROUPS + row % GROUPS, row // GROUPS
    place = batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + token.to(tl.int64) * q_token
    queries = _queries(q + place[:, None] + PLACES * d[None, :], valid, PLACES, SCALES, PART)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = ()
    for _ in tl.static_range(PLACES * SCALES):
        sums += (tl.zeros((ROWS, PART), tl.float32),)
    if SINKS + RING > 0:
        slots = pair * ((SINKS + RING) * WIDTH)
        top, total, sums = _of_computed(
            queries, k_computed + slots, v_computed + slots, mask, split, count, factor, top, total, sums, PLACES, SCALES, PART,
            WIDTH, HAS_MASK, SINKS, RING, RESIDUAL, GROUP, HAS_PTX,
        )  # fmt: skip
    factors = factor
    if KIND != "value" and GROUP == 1:
        queries, power = _divided(queries)
        factors = (power * factor)[:, None]
        if STATIC != "":
            factors = factors * tl.load(k_scale)
    elif not HAS_PTX and KIND == "value":
        # Triton's interpreter multiplies the bit patterns of bfloat16 as integers.
        queries = (queries[0].to(tl.float32),)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        at = start + n
        inside = tl.minimum(at, end - 1)
        line = inside[:, None] * WORDS + d[None, :]
        if GROUP > 1:
            group = start // GROUP * WIDTH
            zeros = None if k_zero is None else k_zero + group
            scores = _scores_by_channel(
                queries, factor, k + line, k_scale + group, zeros, d, PLACES, KIND, HAS_PTX
            )
        else:
            scores = _scores(
                queries, factors, k + line, k_scale + inside * SCALES, PLACES, SCALES, PART, KIND, STATIC,
                HAS_PTX,
            )  # fmt: skip
        scores = _visible(scores, at, row, end, count, mask, mask_token, GROUPS, TOKENS, HAS_MASK, CAUSAL)
        if SINKS > 0:
            scores = tl.where((at >= SINKS)[None, :], scores, float("-inf"))
        seen = _seen_by_any(scores) if HAS_MASK else None
        weights, top, total, shrink = _weights(scores, top, total)
        sums = _added(sums, weights, shrink, v + line, v_scale + inside * SCALES, seen, queries[0].dtype, PLACES, SCALES, PART,
                      KIND, STATIC, HAS_PTX)  # fmt: skip
    share = tl.load(v_scale) if STATIC != "" else 1.0
    for i in tl.static_range(PLACES * SCALES):
        channel = (i // PLACES * PART + d) * PLACES + i % PLACES
        _store(y, parts, stats, pair, split, batch, token, head, row, valid, channel, top, total, sums[i] * share, HEADS,
               TOKENS, GROUPS * TOKENS, WIDTH, SPLITS)  # fmt: skip


@triton.jit
def _store(y, parts, stats, pair, split, batch, token, head, row, valid, channel, top, total, sums,
           HEADS: tl.constexpr, TOKENS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
           SPLITS: tl.constexpr):  # fmt: skip
    """Some channels of the result, or of a part: sums (pairs, rows, splits, WIDTH), largest scores, sums of weights."""
    if SPLITS == 1:
        out = (batch.to(tl.int64) * TOKENS + token) * HEADS + head
        sums = sums / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(
            y + out[:, None] * WIDTH + channel[None, :], sums.to(y.dtype.element_ty), mask=valid[:, None]
        )
    else:
        place = (pair * COUNT + row) * SPLITS + split
        tl.store(parts + place[:, None] * WIDTH + channel[None, :], sums, mask=valid[:, None])
        tl.store(stats + place * 2, top, mask=valid)
        tl.store(stats + place * 2 + 1, total, mask=valid)


@dataclass(frozen=True)
class Plan:
    """What is launched for a cache: parts of the context for a key head, tokens of a step, warps, stages."""

    splits: int
    block: int
    warps: int
    stages: int


#: Plans by kind and scales of a token, with the programs that keep all multiprocessors of an H200 busy: four of each for 16-bit
#: values, two for codes. Of two scales products are so narrow that several warps would have the same ones. Measured are 16-bit
#: values and FP8; INT8 and INT4 have FP8's.
PLANS = {
    ("value", 1): Plan(528, 64, 4, 3), ("fp8", 1): Plan(264, 128, 4, 2), ("int8", 1): Plan(264, 128, 4, 2),
    ("int4", 1): Plan(264, 128, 4, 2), ("int4", 2): Plan(264, 64, 1, 3),
}  # fmt: skip
#: Tokens of a group of keys with scales by channel: a step's.
GROUPS = (32, 64, 128)


def plan_of(kind: tuple[str, int], heads: int, room: int, group: int = 1) -> Plan:
    """Splits fixed by the room of the cache and by how many key heads there are in all; a step is a group's tokens."""
    most = PLANS[kind] if group == 1 else replace(PLANS[kind], block=group)
    return replace(most, splits=max(1, min(-(-most.splits // heads), -(-room // max(FEWEST, most.block)))))


def kind_of(stored: StoredTokens) -> tuple[str, int] | None:
    """How a kernel decodes it, and scales of a token; None where none does."""
    if not stored.scheme:
        return ("value", 1) if stored.codes.dtype in (torch.bfloat16, torch.float16) else None
    scheme = record_of(stored.scheme)
    plain = scheme.scale.storage == "float32" and scheme.scale.stored == "decode"
    by_channel = stored.axis == 2
    if by_channel:
        plain &= scheme.scale.block in GROUPS and (scheme.zero is None or scheme.zero.rule == "code")
    else:
        plain &= scheme.zero is None
    one = by_channel or stored.static or stored.scale is None
    scales = 1 if one or stored.scale is None else stored.scale.shape[-1]
    kind = KINDS.get(scheme.element, ""), scales
    return kind if plain and kind in PLANS else None


def refusal(
    q: torch.Tensor, k: StoredTokens, v: StoredTokens, mask: torch.Tensor | None, softcap: float
) -> str | None:
    """Why no kernel here multiplies these, or None."""
    kinds = kind_of(k), kind_of(v)
    if kinds[0] is None or kinds[0] != kinds[1]:
        return (
            f"no kernel decodes keys in {k.scheme or k.codes.dtype} and values in {v.scheme or v.codes.dtype}"
        )
    if static_of(k) != static_of(v) or (k.static and k.computed is not None):
        return "kernels take static scales of keys and values both, a head or a tensor, and no tokens as computed beside"
    if v.axis == 2:
        return "no kernel decodes values with scales by channel"
    if q.dtype not in (torch.bfloat16, torch.float16) or (not k.scheme and k.codes.dtype != q.dtype):
        return f"kernels take 16-bit queries, and a cache of values in their dtype; got {q.dtype}"
    if k.width != v.width or k.width not in WIDTHS:
        return f"kernels take heads of {', '.join(map(str, WIDTHS))} channels, got {k.width} and {v.width}"
    if q.shape[2] > 1 and k.computed is not None:
        return f"{q.shape[2]} queries of each head see different tokens as computed"
    if q.shape[2] * (q.shape[1] // k.shape[1]) > MOST_ROWS:
        return f"{q.shape[2]} queries of each head are prefill"
    if softcap:
        return "kernels have no softcap"
    if mask is not None and (
        mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] == 1
    ):
        return "kernels take a mask of bool (B, 1, T, S), the same for all heads"
    return None


def attention(
    q: torch.Tensor, k: StoredTokens, v: StoredTokens, length: torch.Tensor, mask: torch.Tensor | None, scale: float,
    causal: bool, plan: Plan | None = None,
) -> torch.Tensor:  # fmt: skip
    """(B, H, T, D), whose memory is (B, T, H, D); operands as `refusal` lets through. plan: for measurements."""
    batch, heads, tokens, width = q.shape
    kv_heads, room = v.shape[1:3]
    by_channel = k.axis == 2
    described = kind_of(k)
    assert described is not None
    kind, scales_of_token = described
    step = k.window.group if by_channel else 1
    masks = None if mask is None else _mask_bytes(mask, room)
    q = q if q.stride(-1) == 1 else q.contiguous()
    if plan is None and sm90_decode.refusal(q, k) is None:
        made = sm90_decode.attention(q, k, v, length, masks, scale * LOG2E, kind)
        if made is not None:
            return made
    plan = plan_of(described, batch * kv_heads, room, step) if plan is None else plan
    group = heads // kv_heads
    rows = max(ROWS, power_above(group * tokens))
    y = torch.empty((batch, tokens, heads, width), dtype=q.dtype, device=q.device)
    parts, stats = parts_of(y, plan.splits) or (y, y)
    # A sequence's mask serves all where there is one; the same of tokens.
    given: tuple[Any, int, int] = (y, 0, 0) if masks is None else (masks, *mask_strides(masks))
    codes: tuple[Any, Any] = (k.codes, v.codes)
    scales = codes if k.scale is None or v.scale is None else (k.scale, v.scale)
    codes = codes if kind == "value" else (k.codes.view(torch.int16), v.codes.view(torch.int16))
    computed: tuple[Any, Any] = (y, y)
    window = ALL_STORED
    if k.computed is not None and v.computed is not None:
        computed, window = (k.computed, v.computed), k.window
    options = {} if interpreted() else {"num_warps": plan.warps}
    attend_kernel[plan.splits, kv_heads, batch](
        q, codes[0], scales[0], codes[1], scales[1], *computed, length, given[0], y, parts, stats, scale * LOG2E,
        *q.stride()[:3], *given[1:], k.shape[2], room, k.zero, HEADS=heads, GROUPS=group, TOKENS=tokens, WIDTH=width, KIND=kind,
        PLACES=width // codes[0].shape[-1], SCALES=scales_of_token, ROWS=rows, BLOCK=plan.block, SPLITS=plan.splits,
        HAS_MASK=mask is not None, CAUSAL=causal, SINKS=window.sinks, RING=window.ring, RESIDUAL=window.residual,
        GROUP=window.group, STATIC=static_of(k), STAGES=plan.stages, HAS_PTX=not interpreted(), **options,
    )  # fmt: skip
    if plan.splits > 1:
        combine(y, parts, stats, length, kv_heads, plan.block, plan.splits, window)
    return y.transpose(1, 2)


def _mask_bytes(mask: torch.Tensor, room: int) -> torch.Tensor:
    """uint8, the last axis contiguous and as long as the cache has room, since how many tokens there are is not known here."""
    if mask.shape[-1] < room:
        mask = torch.nn.functional.pad(mask, (0, room - mask.shape[-1]))
    return (mask if mask.stride(-1) == 1 else mask.contiguous()).view(torch.uint8)


def mask_strides(mask: torch.Tensor) -> tuple[int, int]:
    """Of sequences and of tokens."""
    return mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(2) if mask.shape[2] > 1 else 0


__all__ = ["Plan", "attention", "kind_of", "plan_of", "refusal"]
