"""Attention of a few queries over a stored cache: split over the context, one program for a key head and a part of its tokens.

The queries of all heads that share a key head are rows of one product, so that codes are read and decoded once: 16 rows at
least, as the tensor core's instruction has them. Codes become 16-bit floats in registers, exactly: bfloat16 caches are
multiplied as they are, 8-bit and 4-bit codes as float16, beside queries that are divided by a power of two each. A key's scale
multiplies its score, in float32; a value's scale its weight, before that is rounded to 16 bits, over the largest one of the
tile as a power of two, so that neither overflows or is lost. Everything else is float32; exponentials have base 2.

How many tokens there are is read on the device. The number of parts is fixed by the room of the cache, and tokens that are
there are divided among the parts, so that a CUDA graph replays and all multiprocessors have work at any length.
`combine_kernel` adds the parts, in order; where there is one, it is not launched.

Four-bit codes lie two in a byte along head_dim. A score is a sum over channels, so those of low and of high nibbles are two
products, by the queries' even and odd channels; values of low and of high nibbles are even and odd channels of the result.

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
#: Programs that keep all multiprocessors of an H200 busy, and the fewest tokens worth one.
PROGRAMS, FEWEST = 528, 128
#: Elements of codes by their format: how a kernel decodes them.
KINDS = {"float8_e4m3fn": "fp8", "int8": "int8", "int4": "int4"}
#: Widths of heads.
WIDTHS = (64, 128, 256)


@triton.jit
def _decoded(codes, KIND: tl.constexpr):
    """16-bit floats of a tile of codes; exact."""
    if KIND == "fp8":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif KIND == "int8":
        return codes.to(tl.int8, bitcast=True).to(tl.float16)
    else:
        return codes


@triton.jit
def _nibbles(codes):
    """float16 of the low and of the high nibbles of bytes, two's complement: 1024 + (code ^ 8) - 1032."""
    low = (((codes & 15) ^ 8).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    high = (((codes >> 4) ^ 8).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    return low, high


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
def decode_kernel(
    q, k, k_scale, v, v_scale, length, mask, y, parts, stats, factor, q_batch, q_head, q_token, mask_batch, mask_token, room,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    K_GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A part of one key head's tokens, codes of 8 or 16 bits with one scale a token. factor: of scores, times log2 e."""
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length).to(tl.int32)
    first, end = _part_of(count, split, SPLITS, BLOCK)
    row, d, n = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    pair = (batch * KV_HEADS + kv_head).to(tl.int64)
    k += pair * room * WIDTH
    v += pair * room * WIDTH
    if KIND != "value":
        k_scale += pair * room
        v_scale += pair * room
    if HAS_MASK:
        mask += batch.to(tl.int64) * mask_batch
    valid = row < GROUPS * TOKENS
    head, token = kv_head * GROUPS + row % GROUPS, row // GROUPS
    place = batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + token.to(tl.int64) * q_token
    queries = tl.load(q + place[:, None] + d[None, :], mask=valid[:, None], other=0.0)
    if KIND != "value":
        power = _power_below(tl.max(tl.abs(queries.to(tl.float32)), 1))
        queries = (queries.to(tl.float32) * _one_over_power(power)[:, None]).to(tl.float16)
        factors = power * factor
    if WIDEN:
        queries = queries.to(tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        at = start + n
        inside = tl.minimum(at, room - 1)
        keys = _decoded(tl.load(k + inside[:, None] * WIDTH + d[None, :]), KIND)
        if WIDEN:
            keys = keys.to(tl.float32)
        scores = tl.dot(queries, keys.T)
        if KIND != "value":
            scores = scores * factors[:, None] * tl.load(k_scale + inside)[None, :]
        else:
            scores = scores * factor
        scores = _visible(scores, at, row, end, count, mask, mask_token, GROUPS, TOKENS, HAS_MASK, CAUSAL)
        weights, top, total, shrink = _weights(scores, top, total)
        values = _decoded(tl.load(v + inside[:, None] * WIDTH + d[None, :]), KIND)
        if KIND != "value":
            s = tl.load(v_scale + inside)
            # Scales beyond the end may be anything finite; their weights are 0.
            largest = _power_below(tl.max(s, 0))
            weights = weights * (s * _one_over_power(largest))[None, :]
            sums = sums * shrink[:, None] + tl.dot(weights.to(tl.float16), values) * largest
        elif WIDEN:
            sums = tl.dot(
                weights.to(values.dtype).to(tl.float32), values.to(tl.float32), sums * shrink[:, None]
            )
        else:
            sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None])
    if SPLITS == 1:
        sums = sums / tl.where(total == 0, 1.0, total)[:, None]
        out = (batch.to(tl.int64) * TOKENS + token) * HEADS + head
        tl.store(y + out[:, None] * WIDTH + d[None, :], sums.to(y.dtype.element_ty), mask=valid[:, None])
    else:
        _store_part(
            parts, stats, pair, split, row, valid, d, top, total, sums, GROUPS * TOKENS, WIDTH, SPLITS
        )


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
    CAUSAL: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The same of four-bit codes, with K_GROUPS (1 or 2) scales along head_dim."""
    split, kv_head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(length).to(tl.int32)
    first, end = _part_of(count, split, SPLITS, BLOCK)
    BYTES: tl.constexpr = WIDTH // 2 // K_GROUPS
    row, d, n = tl.arange(0, ROWS), tl.arange(0, BYTES), tl.arange(0, BLOCK)
    KV_HEADS: tl.constexpr = HEADS // GROUPS
    pair = (batch * KV_HEADS + kv_head).to(tl.int64)
    k += pair * room * (WIDTH // 2)
    v += pair * room * (WIDTH // 2)
    k_scale += pair * room * K_GROUPS
    v_scale += pair * room * K_GROUPS
    if HAS_MASK:
        mask += batch.to(tl.int64) * mask_batch
    valid = row < GROUPS * TOKENS
    head, token = kv_head * GROUPS + row % GROUPS, row // GROUPS
    place = batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + token.to(tl.int64) * q_token
    source = q + place[:, None] + 2 * d[None, :]
    e0 = tl.load(source, mask=valid[:, None], other=0.0).to(tl.float32)
    o0 = tl.load(source + 1, mask=valid[:, None], other=0.0).to(tl.float32)
    largest_q = tl.maximum(tl.max(tl.abs(e0), 1), tl.max(tl.abs(o0), 1))
    if K_GROUPS == 2:
        e1 = tl.load(source + 2 * BYTES, mask=valid[:, None], other=0.0).to(tl.float32)
        o1 = tl.load(source + 2 * BYTES + 1, mask=valid[:, None], other=0.0).to(tl.float32)
        largest_q = tl.maximum(largest_q, tl.maximum(tl.max(tl.abs(e1), 1), tl.max(tl.abs(o1), 1)))
    power = _power_below(largest_q)
    less = _one_over_power(power)[:, None]
    factors = power * factor
    e0, o0 = (e0 * less).to(tl.float16), (o0 * less).to(tl.float16)
    sums_e0 = tl.zeros((ROWS, BYTES), tl.float32)
    sums_o0 = tl.zeros((ROWS, BYTES), tl.float32)
    if K_GROUPS == 2:
        e1, o1 = (e1 * less).to(tl.float16), (o1 * less).to(tl.float16)
        sums_e1 = tl.zeros((ROWS, BYTES), tl.float32)
        sums_o1 = tl.zeros((ROWS, BYTES), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=STAGES):
        at = start + n
        inside = tl.minimum(at, room - 1)
        line = inside[:, None] * (WIDTH // 2) + d[None, :]
        low, high = _nibbles(tl.load(k + line))
        scores = tl.dot(o0, high.T, tl.dot(e0, low.T)) * tl.load(k_scale + inside * K_GROUPS)[None, :]
        if K_GROUPS == 2:
            low, high = _nibbles(tl.load(k + line + BYTES))
            scores += tl.dot(o1, high.T, tl.dot(e1, low.T)) * tl.load(k_scale + inside * 2 + 1)[None, :]
        scores = scores * factors[:, None]
        scores = _visible(scores, at, row, end, count, mask, mask_token, GROUPS, TOKENS, HAS_MASK, CAUSAL)
        weights, top, total, shrink = _weights(scores, top, total)
        s = tl.load(v_scale + inside * K_GROUPS)
        largest = _power_below(tl.max(s, 0))
        w = (weights * (s * _one_over_power(largest))[None, :]).to(tl.float16)
        low, high = _nibbles(tl.load(v + line))
        sums_e0 = sums_e0 * shrink[:, None] + tl.dot(w, low) * largest
        sums_o0 = sums_o0 * shrink[:, None] + tl.dot(w, high) * largest
        if K_GROUPS == 2:
            s = tl.load(v_scale + inside * 2 + 1)
            largest = _power_below(tl.max(s, 0))
            w = (weights * (s * _one_over_power(largest))[None, :]).to(tl.float16)
            low, high = _nibbles(tl.load(v + line + BYTES))
            sums_e1 = sums_e1 * shrink[:, None] + tl.dot(w, low) * largest
            sums_o1 = sums_o1 * shrink[:, None] + tl.dot(w, high) * largest
    if SPLITS == 1:
        over = 1.0 / tl.where(total == 0, 1.0, total)[:, None]
        out = ((batch.to(tl.int64) * TOKENS + token) * HEADS + head) * WIDTH
        where = y + out[:, None] + 2 * d[None, :]
        kept = valid[:, None]
        tl.store(where, (sums_e0 * over).to(y.dtype.element_ty), mask=kept)
        tl.store(where + 1, (sums_o0 * over).to(y.dtype.element_ty), mask=kept)
        if K_GROUPS == 2:
            tl.store(where + 2 * BYTES, (sums_e1 * over).to(y.dtype.element_ty), mask=kept)
            tl.store(where + 2 * BYTES + 1, (sums_o1 * over).to(y.dtype.element_ty), mask=kept)
    else:
        COUNT: tl.constexpr = GROUPS * TOKENS
        _store_part(parts, stats, pair, split, row, valid, 2 * d, top, total, sums_e0, COUNT, WIDTH, SPLITS)
        _store_part(
            parts, stats, pair, split, row, valid, 2 * d + 1, top, total, sums_o0, COUNT, WIDTH, SPLITS
        )
        if K_GROUPS == 2:
            _store_part(
                parts,
                stats,
                pair,
                split,
                row,
                valid,
                2 * (d + BYTES),
                top,
                total,
                sums_e1,
                COUNT,
                WIDTH,
                SPLITS,
            )
            _store_part(
                parts,
                stats,
                pair,
                split,
                row,
                valid,
                2 * (d + BYTES) + 1,
                top,
                total,
                sums_o1,
                COUNT,
                WIDTH,
                SPLITS,
            )


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


#: Tokens of a step, warps, stages by kind.
TILES = {"value": (64, 4, 3), "fp8": (64, 4, 3), "int8": (64, 4, 3), "int4": (64, 4, 2)}


def plan_of(kind: str, pairs: int, room: int, width: int) -> Plan:
    """Splits fixed by the room of the cache and by how many key heads there are in all."""
    block, warps, stages = TILES[kind]
    splits = max(1, min(-(-PROGRAMS // pairs), -(-room // max(FEWEST, block))))
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
    plan = plan_of(kind, batch * kv_heads, room, width) if plan is None else plan
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
    kernel = nibble_kernel if kind == "int4" else decode_kernel
    scales = (k.codes, v.codes) if k.scale is None or v.scale is None else (k.scale, v.scale)
    # Triton's interpreter multiplies the bit patterns of bfloat16 as integers.
    widen, options = interpreted(), {} if interpreted() else {"num_warps": plan.warps}
    kernel[plan.splits, kv_heads, batch](
        q, k.codes, scales[0], v.codes, scales[1], length, masks[0], y, parts, stats, scale * LOG2E, *q.stride()[:3],
        *masks[1:], room, HEADS=heads, GROUPS=group, TOKENS=tokens, WIDTH=width, KIND=kind, K_GROUPS=groups, ROWS=rows,
        BLOCK=plan.block, SPLITS=plan.splits, HAS_MASK=mask is not None, CAUSAL=causal, STAGES=plan.stages,
        WIDEN=widen, **options,
    )  # fmt: skip
    if plan.splits > 1:
        combine_kernel[group * tokens, batch * kv_heads](
            parts, stats, length, y, HEADS=heads, GROUPS=group, TOKENS=tokens, WIDTH=width, BLOCK=plan.block,
            SPLITS=plan.splits, CHUNK=min(32, power_above(plan.splits)), **options,
        )  # fmt: skip
    return y.transpose(1, 2)


__all__ = ["Plan", "attention", "kind_of", "plan_of", "refusal"]
