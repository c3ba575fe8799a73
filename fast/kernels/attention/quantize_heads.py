"""Queries, keys and values of attention as 8-bit codes, in the layouts that `prefill` reads: `reference.attention.quantized`.

    q codes (B, H, T', D')     k codes (B, KV, S', D')     v codes (B, KV, Dv', S'), the transpose
    q scale (B, H, T')         k scale (B, KV, S') or (B, KV, S' / 128)     v scale (B, KV, Dv')

T' and S' are the next multiples of 128, D' and Dv' the next powers of two from 64 on; what is filled up is zeros, whose codes
are 0. FP8 operands of the tensor core run along what is summed, so values are transposed here, and their tokens change places
in groups of 16: place 4 t + 2 h + b has token 8 h + 2 t + b. Thread t of a quad has weights of tokens 2 t, 2 t + 1, 2 t + 8
and 2 t + 9 of each group after the first product, and has to have places 4 t to 4 t + 3 for the second: so no weight leaves
its thread.

Launches: sums of keys and largest values by channels (`statistics_kernel`, one for a part of the tokens), the mean key
(`mean_kernel`), codes (`heads_kernel`, `values_kernel`). Codes and scales are those of the block kernel's rules, bit for bit;
the mean is a float32 sum in an order of its own, and is handed back. The same in CUDA C++: `sm90_heads`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of, float_of
from fast.kernels.layers.tiles import outputs, quantize_rows
from fast.kernels.rules.values import element_codes
from fast.kernels.scheme.constants import block_op
from fast.kernels.sm90.bf16x2 import floats
from fast.kernels.tile.scales import choose_scales
from fast.launch.launcher import UNFUSED, interpreted, power_above
from reference.attention.quantized import AttentionRecipe
from reference.layers.hadamard import SIGNS_16
from reference.schemes.schemes import Scheme

#: Tokens to whose multiples lengths are filled up: tiles of `prefill`.
TOKENS = 128
#: Tokens whose sums a program of `statistics_kernel` makes, in steps.
PART, STEP = tl.constexpr(128), 64
#: Parts that are added at a time, and tokens that are counted at a time.
PARTS, COUNTED = tl.constexpr(128), tl.constexpr(1024)
#: Signs of 16 channels as bits, 1 for minus.
NEGATIVE = tl.constexpr(sum(1 << at for at, sign in enumerate(SIGNS_16) if sign < 0))
#: The largest finite float32.
LARGEST_FLOAT = tl.constexpr(float(np.finfo(np.float32).max))


class Heads(NamedTuple):
    """Codes and scales as above, and the mean key (B, KV, 1, D) in float32, None where it is not removed.

    q, q_scale: None where they are not made yet.
    """

    q: torch.Tensor | None
    q_scale: torch.Tensor | None
    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor
    mean: torch.Tensor | None


@triton.jit
def _loaded(
    x,
    place,
    stride,
    token,
    tokens,
    seen,
    seen_batch,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    HAS_PTX: tl.constexpr,
):
    """Tokens of a head in float32, zeros where there are none, and which there are."""
    d = tl.arange(0, D)
    there = token < tokens
    if seen is not None:
        there = there & (tl.load(seen + seen_batch + token, mask=there, other=0) != 0)
    inside = there[:, None] & (d < WIDTH)[None, :]
    v = tl.load(x + place + token.to(tl.int64)[:, None] * stride + d[None, :], mask=inside, other=0.0)
    return floats(v, HAS_PTX), inside


@triton.jit
def statistics_kernel(
    k, v, seen, sums, largest, k_batch, k_head, k_token, v_batch, v_head, v_token, tokens, parts, share,
    HEADS: tl.constexpr, KEY_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_D: tl.constexpr, V_D: tl.constexpr,
    CENTER: tl.constexpr, TILE: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Of PART tokens of a head, TILE at a time: sums of keys times `share`, lest they overflow, and largest values."""
    part, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = pair // HEADS, pair % HEADS
    total, top = tl.zeros((K_D,), tl.float32), tl.zeros((V_D,), tl.int32)
    for start in tl.range(0, PART, TILE):
        token = part * PART + start + tl.arange(0, TILE)
        if CENTER:
            x, _ = _loaded(
                k,
                batch * k_batch + head * k_head,
                k_token,
                token,
                tokens,
                seen,
                batch * tokens,
                KEY_WIDTH,
                K_D,
                HAS_PTX,
            )
            total += tl.sum(x * share, 0)
        x, _ = _loaded(
            v,
            batch * v_batch + head * v_head,
            v_token,
            token,
            tokens,
            seen,
            batch * tokens,
            V_WIDTH,
            V_D,
            HAS_PTX,
        )
        top = tl.maximum(top, tl.max(bits_of(x) & MAGNITUDE, 0))
    if CENTER:
        tl.store(sums + (pair * parts + part) * K_D + tl.arange(0, K_D), total)
    tl.atomic_max(largest + pair * V_D + tl.arange(0, V_D), top)


@triton.jit
def mean_kernel(
    sums, seen, mean, tokens, parts, HEADS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr
):
    """The mean of a head's keys. Without `seen` parts have been divided by their number."""
    pair = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for first in tl.range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        total += tl.sum(
            tl.load(sums + (pair * parts + part) * TILE + d[None, :], mask=part < parts, other=0.0), 0
        )
    if seen is not None:
        count = tl.zeros((), tl.int32)
        for start in tl.range(0, tokens, COUNTED):
            token = start + tl.arange(0, COUNTED)
            one = tl.load(seen + pair // HEADS * tokens + token, mask=token < tokens, other=0) != 0
            count += tl.sum(one.to(tl.int32), 0)
        # Of sums divided by all tokens.
        total = total * tl.div_rn(tokens.to(tl.float32), tl.maximum(count, 1).to(tl.float32))
    tl.store(mean + pair * WIDTH + d, total, mask=d < WIDTH)


@triton.constexpr_function
def _stages(length):
    return length.bit_length() - 1


@triton.jit
def _mixed(v, factor, LENGTH: tl.constexpr):
    """Rows through Hadamard's transform of blocks of LENGTH channels: `reference.layers.hadamard`.

    Sixteen neighbours, which a thread loads, are sixteen tensors: four stages are arithmetic in registers, each other one asks
    one lane.
    """
    T: tl.constexpr = v.shape[0]
    WORDS: tl.constexpr = v.shape[1] // 16
    d = tl.arange(0, v.shape[1])
    negative = ((d * 0 + NEGATIVE) >> (d % 16)) & 1
    v = float_of(bits_of(v) ^ (negative << 31)[None, :])
    parts = (tl.reshape(v, (T, WORDS, 2, 2, 2, 2)),)
    for s in tl.static_range(4):
        halves = ()
        for i in tl.static_range(2**s):
            halves += _pair(parts[i], 2**s < LENGTH)
        parts = halves
    w = tl.arange(0, WORDS)[None, :]
    stages: tl.constexpr = _stages(LENGTH)
    for s in tl.static_range(4, stages):
        parts = _across(parts, w, s - 4)
    for s in tl.static_range(4):
        halves = ()
        for i in tl.static_range(8 // 2**s):
            halves += (tl.join(parts[2 * i], parts[2 * i + 1]),)
        parts = halves
    return tl.reshape(parts[0], v.shape) * factor


@triton.jit
def _pair(v, MIXES: tl.constexpr):
    """Both halves of the last axis; their sum and difference where a stage mixes them."""
    left, right = tl.split(v)
    if MIXES:
        return left + right, left - right
    else:
        return left, right


@triton.jit
def _across(parts, w, STAGE: tl.constexpr):
    """Sums and differences with the word 2**STAGE away: of the right one p - v, which is p + (-1) v, rounded once."""
    partner = tl.broadcast_to(w ^ (1 << STAGE), parts[0].shape)
    sign = tl.broadcast_to(1.0 - 2.0 * ((w >> STAGE) & 1).to(tl.float32), parts[0].shape)
    mixed = ()
    for i in tl.static_range(16):
        mixed += (tl.fma(sign, parts[i], tl.gather(parts[i], partner, 1)),)
    return mixed


@triton.jit
def heads_kernel(
    x, mean, seen, codes, scale, x_batch, x_head, x_token, tokens, padded, factor,
    SCHEME: tl.constexpr, OP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Codes of TILE tokens of a head. BLOCK: tokens of a scale; LENGTH: channels of the transform, 0 for none."""
    pair = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE
    token = first + tl.arange(0, TILE)
    batch, head = pair // HEADS, pair % HEADS
    v, inside = _loaded(
        x, batch * x_batch + head * x_head, x_token, token, tokens, seen, batch * tokens, WIDTH, D, HAS_PTX
    )
    if mean is not None:
        d = tl.arange(0, D)
        middle = tl.load(mean + pair * WIDTH + d, mask=d < WIDTH, other=0.0)
        less = v - middle[None, :]
        stopped = tl.minimum(tl.maximum(less, -LARGEST_FLOAT), LARGEST_FLOAT)
        v = tl.where(inside, tl.where(tl.abs(v) <= LARGEST_FLOAT, stopped, v), 0.0)
    if LENGTH > 0:
        v = _mixed(v, factor, LENGTH)
    ROWS: tl.constexpr = TILE // BLOCK
    tile = tl.reshape(v, (ROWS, BLOCK * D))
    p, i = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK * D)[None, :]
    at = p * (BLOCK * D) + i
    line = pair * padded + first
    quantize_rows(tile, codes + line * D, scale + line // BLOCK, None, at, at >= 0, p, p >= 0, SCHEME, OP)


@triton.jit
def values_kernel(
    x, largest, seen, codes, scale, x_batch, x_head, x_token, tokens, padded,
    SCHEME: tl.constexpr, OP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Codes of TILE tokens of a head of values, transposed, in the order of places; their scales by the first program."""
    pair = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE
    place = tl.arange(0, TILE)
    token = first + place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2
    batch, head = pair // HEADS, pair % HEADS
    v, _ = _loaded(
        x, batch * x_batch + head * x_head, x_token, token, tokens, seen, batch * tokens, WIDTH, D, HAS_PTX
    )
    d = tl.arange(0, D)[:, None]
    top = tl.load(largest + pair * D + d)
    outer = tl.full((), 1.0, tl.float32)
    writes = (d >= 0) & (first == 0)
    _, s, _, _, _ = choose_scales(top, top, top, outer, scale + pair * D, None, d, writes, 0, SCHEME, OP)
    made = element_codes(tl.trans(v), s, outer, None, None, SCHEME)
    tl.store(codes + (pair * D + d) * padded + first + place[None, :], made.to(tl.uint8))


@lru_cache(maxsize=64)
def _plan(scheme: Scheme, width: int) -> Any:
    """What `outputs` says of float32 blocks of `width` elements, each with one scale; ValueError where no tile has them."""
    row = replace(scheme, name=f"{scheme.name}_row", scale=replace(scheme.scale, block=-1))
    plan = outputs(torch.empty((1, width), dtype=torch.float32, device="meta"), "float32", row, True)
    if plan is None:
        raise ValueError(
            f"no kernel quantizes queries and keys in {scheme.name}; use the recipe 'int8' or 'fp8'"
        )
    return plan


def tokens_of_scale(scheme: Scheme, width: int) -> int | None:
    """Tokens that share a scale of keys or queries, 1 or 128; None for schemes that the kernels do not have."""
    block = scheme.scale.block
    if block == -1 or block == width:
        return 1
    return TOKENS if isinstance(block, tuple) and block[0] == TOKENS and block[1] >= width else None


def quantize_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: AttentionRecipe,
    seen: torch.Tensor | None = None,
) -> Heads:
    """Codes of q (B, H, T, D), k and v (B, KV, S, D), last strides 1. seen: bool (B, S), keys that any query sees."""
    seen = None if seen is None else seen.contiguous().view(torch.uint8)
    mean, largest = _statistics(k, v, recipe.center, seen)
    _, key, value = recipe.schemes
    return Heads(
        *query_codes(q, recipe), *_codes(k, mean, seen, key, recipe.rotate),
        *_values(v, largest, seen, value), mean,
    )  # fmt: skip


def query_codes(q: torch.Tensor, recipe: AttentionRecipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of q (B, H, T, D), last stride 1."""
    return _codes(q, None, None, recipe.schemes[0], recipe.rotate)


def padded(length: int) -> int:
    """The next multiple of a tile."""
    return -(-length // TOKENS) * TOKENS


def width_of(channels: int) -> int:
    """Channels of a head as codes are stored."""
    return max(64, power_above(channels))


def _statistics(
    k: torch.Tensor, v: torch.Tensor, center: bool, seen: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    batch, heads, tokens, width = k.shape
    parts, pairs = -(-tokens // PART.value), batch * heads
    k_d, v_d = width_of(width), width_of(v.shape[-1])
    largest = torch.zeros((pairs, v_d), dtype=torch.int32, device=k.device)
    sums = torch.empty((pairs, parts, k_d) if center else (1,), dtype=torch.float32, device=k.device)
    options = {} if interpreted() else {"num_warps": 4, **UNFUSED}
    statistics_kernel[parts, pairs](
        k, v, seen, sums, largest, *k.stride()[:3], *v.stride()[:3], tokens, parts, 1.0 / max(tokens, 1), heads, width,
        v.shape[-1], k_d, v_d, center, STEP, not interpreted(), **options,
    )  # fmt: skip
    if not center:
        return None, largest
    mean = torch.empty((batch, heads, 1, width), dtype=torch.float32, device=k.device)
    mean_kernel[(pairs,)](sums, seen, mean, tokens, parts, heads, width, k_d, **options | {"num_warps": 8})
    return mean, largest


def _codes(
    x: torch.Tensor, mean: torch.Tensor | None, seen: torch.Tensor | None, scheme: Scheme, rotate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens, width = x.shape
    block, d, room = tokens_of_scale(scheme, width), width_of(width), padded(tokens)
    assert block is not None
    plan = _plan(scheme, block * d)
    codes = torch.empty((batch, heads, room, d), dtype=torch.uint8, device=x.device)
    scale = torch.empty((batch, heads, room // block), dtype=torch.float32, device=x.device)
    tile = max(block, min(TOKENS, 4096 // d))
    length = width & -width if rotate else 0
    factor = float(np.float32(1 / sqrt(max(length, 1))))
    options = {} if interpreted() else {"num_warps": 8 if block > 1 else 4, **UNFUSED}
    heads_kernel[room // tile, batch * heads](
        x, mean, seen, codes, scale, *x.stride()[:3], tokens, room, factor, plan.rule, plan.block_op, heads, width, d, length,
        block, tile, not interpreted(), **options,
    )  # fmt: skip
    return codes, scale


def _values(
    x: torch.Tensor, largest: torch.Tensor, seen: torch.Tensor | None, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens, width = x.shape
    d, room = width_of(width), padded(tokens)
    rule = _plan(scheme, d).rule
    codes = torch.empty((batch, heads, d, room), dtype=torch.uint8, device=x.device)
    scale = torch.empty((batch, heads, d), dtype=torch.float32, device=x.device)
    tile = 64 if d <= 128 else 32
    options = {} if interpreted() else {"num_warps": 4, **UNFUSED}
    values_kernel[room // tile, batch * heads](
        x, largest, seen, codes, scale, *x.stride()[:3], tokens, room, rule, block_op(scales=True), heads, width, d, tile,
        not interpreted(), **options,
    )  # fmt: skip
    return codes, scale


__all__ = ["Heads", "padded", "quantize_heads", "query_codes", "tokens_of_scale", "width_of"]
