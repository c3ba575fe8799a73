"""Attention of many queries in 8 bits: scores by int8 or FP8 `wgmma`, weights in e4m3 from registers by FP8 `wgmma`.

A program has M queries of a head and goes over tiles of N keys: first those that all of its queries see, without a mask, then
those on the edges. Codes come from `quantize_heads`, by TMA. Per tile, in float32 and exponents of base 2:

    s = q k^T                                exact int32, or FP8 sums
    t' = max(t, ceil(max s c))               c: the factor of scores times the query's scale, and the keys' where they share one
    p = e4m3(2^(s c - t' + 8))
    y = y 2^(t - t') + p v                   products of a tile start at zero: chains of N tokens, added in float32
    l = l 2^(t - t') + p 1                   by the tensor core too: the sum of the weights as they are multiplied

and y / l times the values' scales at the end. t is an integer, so that rescaling is exact. Adding a product that starts at zero
is the form of an accumulator that Triton compiles rightly where weights are in registers (reports/LOG.md).

**Budget** of a score at 128 channels, in clocks of a multiprocessor (four of 32 lanes): tensor core 512 operations of 8192 a
clock = 1/16; exponential 1/16 (16 a clock); issue slots: multiply-add, maximum (half rate), integer to float (half rate),
half a conversion to e4m3, the rescaling y (128 channels over N = 128 keys), about 6.5/128 = 1/20. So the exponential takes as
long as both products, and what is not overlapped doubles the time: two programs of 64 queries, or two warp groups, take turns.
Floor: the products alone at 1350 TFLOP/s, the best of FP8 products seen on an H200.

Heads of 128 channels without windows and masks go to the same in CUDA C++ on Hopper (`sm90`), where warp groups take turns.
What is not taken: softcap, biases (`refusal`).

Dao et al., FlashAttention-3, arXiv 2407.08608 (FP8, ping-pong); SageAttention2, arXiv 2411.10958 (int8 and FP8, two levels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fast.kernels.attention import sm90, sm90_heads
from fast.kernels.attention.quantize_heads import (
    TOKENS,
    Heads,
    padded,
    quantize_heads,
    query_codes,
    tokens_of_scale,
    width_of,
)
from fast.kernels.bits import float_of
from fast.kernels.rules.elements import e4m3_value, encode
from fast.kernels.rules.statistics import larger
from fast.kernels.scheme.constants import element_of
from fast.launch.launcher import FLOAT_NAMES, interpreted
from reference.attention.quantized import LOG2E, AttentionRecipe, visible
from reference.formats.formats import FORMATS

#: Exponent of what weights are multiplied by before they are rounded, `reference.attention.attention.PEAK`.
PEAK = tl.constexpr(8.0)
#: The rule by which the interpreter, whose casts are wrong, rounds weights.
E4M3 = element_of(FORMATS["float8_e4m3fn"], hardware=False)
#: Widest head.
WIDEST = 256


@triton.jit
def _operand(codes, KIND: tl.constexpr, HAS_PTX: tl.constexpr):
    """What the first product multiplies."""
    if KIND == "int8":
        return codes
    else:
        return _e4m3(codes, HAS_PTX)


@triton.jit
def _e4m3(codes, HAS_PTX: tl.constexpr):
    """e4m3 as it is; in the interpreter, which gets bytes, their values as float32."""
    if HAS_PTX:
        return codes
    else:
        code = codes.to(tl.int32)
        value = e4m3_value(code & 127)
        return tl.where(code > 127, -value, value)


@triton.jit
def _rounded(p, E: tl.constexpr, HAS_PTX: tl.constexpr):
    """Weights as the second product takes them."""
    if HAS_PTX:
        return p.to(tl.float8e4nv)
    else:
        return e4m3_value(encode(p, None, E))


@triton.jit
def _in_place_order(p, M: tl.constexpr, N: tl.constexpr):
    """Weights by the places of values' tokens (`quantize_heads`): each stays in its thread."""
    return tl.reshape(tl.permute(tl.reshape(p, (M, N // 16, 2, 4, 2)), (0, 1, 3, 2, 4)), (M, N))


@triton.jit
def _tiles(
    y, total, top, q, k, v, k_scale, row_factor, first_key, k_row, v_row, start, end, place, keys, window, mask, mask_token,
    M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, BY_TOKEN: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, E: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Sums over the keys of some tiles. place: of each query among the keys; MASKED: not every query sees every key."""
    n = tl.arange(0, N)
    if HAS_PTX:
        ones = tl.full((N, 16), 0x38, tl.int8).to(tl.float8e4nv, bitcast=True)
    else:
        ones = tl.full((N, 16), 1.0, tl.float32)
    for at in tl.range(start, end, N, num_stages=STAGES):
        keys_of = _operand(k.load([k_row + at, 0]), KIND, HAS_PTX)
        if KIND == "int8":
            scores = tl.dot(q, keys_of.T, out_dtype=tl.int32)
        else:
            scores = tl.dot(q, keys_of.T)
        factor = row_factor
        s = scores.to(tl.float32)
        if BY_TOKEN:
            s = s * tl.load(k_scale + at + n)[None, :]
        else:
            # Of zeros by zeros the least number, or what is hidden would be infinity times 0.
            factor = larger(row_factor * tl.load(k_scale + at // 128), float_of(tl.full((), 1, tl.int32)))
        if MASKED:
            key = at + n
            seen = (key < keys)[None, :]
            if CAUSAL:
                seen = seen & (key[None, :] <= place[:, None])
            if WINDOW:
                seen = seen & (key[None, :] > place[:, None] - window)
            if mask is not None:
                where = mask + mask_token[:, None] + key[None, :]
                seen = seen & (tl.load(where, mask=(key < keys)[None, :], other=0) != 0)
            s = tl.where(seen, s, float("-inf"))
        new_top = tl.maximum(top, tl.ceil(tl.max(s, 1) * factor))
        base = new_top
        if MASKED:
            # Queries that have seen nothing: no difference of infinities.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(s * factor[:, None] - (base - PEAK)[:, None])
        shrink = tl.exp2(top - base)
        weights = _in_place_order(_rounded(p, E, HAS_PTX), M, N)
        values = _e4m3(v.load([v_row, at]), HAS_PTX)
        y = y * shrink[:, None] + tl.dot(weights, values.T)
        total = total * shrink[:, None] + tl.dot(weights, ones)
        top = new_top
    return y, total, top


@triton.jit
def prefill_kernel(
    q, k, v, q_scale, k_scale, v_scale, mask, y, factor, queries, q_room, keys, k_room, offset, window, mask_batch, mask_head,
    mask_row,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, V_D: tl.constexpr, V_WIDTH: tl.constexpr,
    KIND: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, E: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """M queries of a head. q, k, v: descriptors; Q_BLOCK, K_BLOCK: tokens of a scale."""
    KV: tl.constexpr = HEADS // GROUPS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with most keys first
    head, batch = tl.program_id(1), tl.program_id(2)
    first = tile * M
    pair, kv_pair = batch * HEADS + head, batch * KV + head // GROUPS
    row = first + tl.arange(0, M)
    place = row + offset
    row_factor = tl.load(q_scale + pair.to(tl.int64) * (q_room // Q_BLOCK) + row // Q_BLOCK) * factor
    codes = _operand(q.load([pair * q_room + first, 0]), KIND, HAS_PTX)
    end, start, free, free_start = keys, 0, keys // N * N, 0
    if CAUSAL:
        end = tl.minimum(end, first + M + offset)
        free = tl.minimum(free, tl.maximum(first + offset + 1, 0) // N * N)
    if WINDOW:
        start = tl.maximum(first + offset - window + 1, 0) // N * N
        free_start = tl.cdiv(tl.maximum(first + M + offset - window, 0), N) * N
        free = tl.maximum(free, start)
        free_start = tl.minimum(free_start, free)
    scales = k_scale + kv_pair.to(tl.int64) * (k_room // K_BLOCK)
    mask_token = row
    if mask is not None:
        mask += batch.to(tl.int64) * mask_batch + head.to(tl.int64) * mask_head
        mask_token = tl.minimum(row, queries - 1) * mask_row
        free_start, free = start, start
    sums, total = tl.zeros((M, V_D), tl.float32), tl.zeros((M, 16), tl.float32)
    top = tl.full((M,), float("-inf"), tl.float32)
    k_row, v_row = kv_pair * k_room, kv_pair * V_D
    if WINDOW:
        sums, total, top = _tiles(
            sums, total, top, codes, k, v, scales, row_factor, 0, k_row, v_row, start, free_start, place, keys, window, mask,
            mask_token, M, N, KIND, K_BLOCK == 1, True, CAUSAL, WINDOW, STAGES, E, HAS_PTX,
        )  # fmt: skip
    if mask is None:
        sums, total, top = _tiles(
            sums, total, top, codes, k, v, scales, row_factor, 0, k_row, v_row, free_start, free, place, keys, window, mask,
            mask_token, M, N, KIND, K_BLOCK == 1, False, CAUSAL, WINDOW, STAGES, E, HAS_PTX,
        )  # fmt: skip
    sums, total, top = _tiles(
        sums, total, top, codes, k, v, scales, row_factor, 0, k_row, v_row, free, end, place, keys, window, mask, mask_token,
        M, N, KIND, K_BLOCK == 1, True, CAUSAL, WINDOW, STAGES, E, HAS_PTX,
    )  # fmt: skip
    divisor = tl.max(total, 1)  # all columns are the same
    d = tl.arange(0, V_D)
    by_channel = tl.load(v_scale + kv_pair.to(tl.int64) * V_D + d)
    sums = sums * (1.0 / tl.where(divisor == 0, 1.0, divisor))[:, None] * by_channel[None, :]
    out = (batch.to(tl.int64) * queries + row) * HEADS + head
    inside = (row < queries)[:, None] & (d < V_WIDTH)[None, :]
    tl.store(y + out[:, None] * V_WIDTH + d[None, :], sums.to(y.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Plan:
    """Queries and keys of a tile, warps, stages of copies."""

    queries: int = 128
    keys: int = 128
    warps: int = 8
    stages: int = 2


def plan_of(width: int) -> Plan:
    """Of a head's width as codes are stored: of 256 channels two groups of warps have a half each, of the same queries."""
    return Plan(queries=64) if width > 128 else Plan()


def refusal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: AttentionRecipe | None = None
) -> str | None:
    """Why no kernel here multiplies these, or None."""
    if q.dtype not in FLOAT_NAMES or not q.dtype == k.dtype == v.dtype:
        return f"kernels take queries, keys and values of one dtype, float32, bfloat16 or float16; got {q.dtype}, {k.dtype}"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"kernels take heads of up to {WIDEST} channels, got {q.shape[-1]} and {v.shape[-1]}"
    if not q.numel() or not k.numel():
        return "kernels take no empty tensors"
    if recipe is not None and None in [tokens_of_scale(one, q.shape[-1]) for one in recipe.schemes[:2]]:
        return "kernels take queries and keys with a scale for a token, or keys with one for 128"
    return None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: AttentionRecipe,
    *,
    scale: float,
    causal: bool = False,
    offset: int | None = None,
    window: int | None = None,
    mask: torch.Tensor | None = None,
    plan: Plan | sm90.Variant | None = None,
) -> torch.Tensor:
    """As `fast.attention.quantized.quantized_attention`; ValueError for what `refusal` names. plan: for measurements."""
    reason = refusal(q, k, v, recipe)
    if reason is not None:
        raise ValueError(f"attention in 8 bits: {reason}")
    if not scale > 0:
        raise ValueError(f"scale is a positive number, got {scale!r}; negate q for a negative one")
    shape = (*q.shape[:3], k.shape[2])
    visible((1, 1, 1, 1), causal, offset, window, None)  # says what is wrong
    masks = None if mask is None else _mask_of(mask, shape)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if causal:
        # Keys behind the last query, or out of the first one's window, are seen by nobody: they are not read.
        offset = k.shape[2] - q.shape[2] if offset is None else offset
        stop = max(0, min(k.shape[2], offset + q.shape[2]))
        start = 0 if window is None else max(0, min(stop, offset - window + 1))
        if stop == start:
            return q.new_zeros((q.shape[0], q.shape[2], q.shape[1], v.shape[-1])).transpose(1, 2)
        k, v, offset = k[:, :, start:stop], v[:, :, start:stop], offset - start
        masks = None if masks is None else masks[..., start:stop]
    seen = None if masks is None else masks.any(dim=2).any(dim=1).expand(q.shape[0], -1)
    if plan is None and sm90.refusal(q, v, recipe, window, masks) is None:
        plan = sm90.SERVED
    heads = operands(q, k, v, recipe, seen, plan)
    return attended(heads, q, v, recipe, scale, causal, offset, window, masks, k.shape[2], plan)


def operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: AttentionRecipe,
    seen: torch.Tensor | None = None,
    plan: Plan | sm90.Variant | None = None,
) -> Heads:
    """What `attended` multiplies under a plan, by the kernels that it names where they take it; see `quantize_heads`."""
    if (
        isinstance(plan, sm90.Variant)
        and plan.heads
        and seen is None
        and sm90_heads.refusal(k, v, recipe) is None
    ):
        made = sm90_heads.quantized(k, v, recipe, q, plan.token_major)
        if made is not None:
            return made if made.q is not None else _with_queries(made, q, recipe)
    return quantize_heads(q, k, v, recipe, seen)


def _with_queries(heads: Heads, q: torch.Tensor, recipe: AttentionRecipe) -> Heads:
    codes, scale = query_codes(q, recipe)
    return heads._replace(q=codes, q_scale=scale)


def _mask_of(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """bool with four axes, each of its length or 1 but the last, which has its own."""
    if mask.dtype != torch.bool:
        raise ValueError(
            f"the mask of attention in 8 bits is bool, True where a query sees a key, got {mask.dtype}; biases are not taken: "
            "use scaled_dot_product_attention for them"
        )
    try:
        mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"mask broadcasts to (B, H, T, S) = {shape}, got shape {tuple(mask.shape)}"
        ) from None
    mask = mask[(None,) * (4 - mask.dim())].expand(*([-1] * 3), shape[3])
    return mask if mask.stride(-1) == 1 else mask.contiguous()


def attended(
    heads: Heads, q: torch.Tensor, v: torch.Tensor, recipe: AttentionRecipe, scale: float, causal: bool, offset: int | None,
    window: int | None, mask: torch.Tensor | None, keys: int, plan: Plan | sm90.Variant | None = None,
) -> torch.Tensor:  # fmt: skip
    """The product of codes; see `attention`. q, v: for shapes and dtype."""
    if plan is None and sm90.refusal(q, v, recipe, window, mask) is None:
        plan = sm90.SERVED
    if isinstance(plan, sm90.Variant):
        y = sm90.attended(heads, q, recipe, scale, causal, offset, keys, plan)
        if y is not None:
            return y
        plan = None
    assert heads.q is not None
    (batch, count, queries, width), value_width = q.shape, v.shape[-1]
    groups, d, v_d = count // v.shape[1], width_of(width), width_of(value_width)
    plan = plan_of(max(d, v_d)) if plan is None else plan
    y = torch.empty((batch, queries, count, value_width), dtype=q.dtype, device=q.device)
    q_room, k_room = padded(queries), padded(keys)
    masks: tuple[Any, int, int, int] = (None, 0, 0, 0)
    if mask is not None:
        steps = [0 if mask.shape[axis] == 1 else mask.stride(axis) for axis in range(3)]
        masks = (mask.view(torch.uint8), *steps)
    blocks = [tokens_of_scale(scheme, width) for scheme in recipe.schemes[:2]]
    element = torch.int8 if recipe.schemes[0].element == "int8" else _e4m3_dtype()
    descriptors = (
        TensorDescriptor.from_tensor(heads.q.reshape(-1, d).view(element), [plan.queries, d]),
        TensorDescriptor.from_tensor(heads.k.view(element).view(-1, d), [plan.keys, d]),
        TensorDescriptor.from_tensor(heads.v.view(_e4m3_dtype()).view(-1, k_room), [v_d, plan.keys]),
    )
    options = {} if interpreted() else {"num_warps": plan.warps}
    prefill_kernel[-(-queries // plan.queries), count, batch](
        *descriptors, heads.q_scale, heads.k_scale, heads.v_scale, masks[0], y, scale * LOG2E, queries, q_room, keys, k_room,
        keys - queries if offset is None else offset, window or 0, *masks[1:], count, groups, d, v_d, value_width,
        "int8" if element == torch.int8 else "fp8", blocks[0], blocks[1], plan.queries, plan.keys, causal,
        window is not None, plan.stages, E4M3, not interpreted(), **options,
    )  # fmt: skip
    return y.transpose(1, 2)


def _e4m3_dtype() -> torch.dtype:
    """Of codes that kernels multiply; the interpreter decodes bytes."""
    return torch.uint8 if interpreted() else torch.float8_e4m3fn


__all__ = ["TOKENS", "Plan", "attended", "attention", "operands", "plan_of", "refusal"]
