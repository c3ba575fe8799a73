"""Attention without a softmax over jagged batches, as HSTU has it (arXiv 2402.17152): weights are SiLU of scores.

    y_i = sum_j SiLU(a q_i . k_j + p[i - j] + t[floor(log2(time_i - time_j))]) v_j / N

A user's tokens stand one after the other, its candidates last: the history is causal, a candidate sees the history and itself.
The same by torch: `experiments.models.hstu.padded_attention`.

A program has some queries of a head of a user. It goes over the keys that all of them see, then over those at the edge with a
mask, and adds each candidate's own key at the end. Weights are rounded to the values' dtype; sums are float32, each tile's
products begin at zero (the form that Triton compiles rightly where weights are in registers, reports/LOG.md). 1 / N is a factor
of the sums.

SiLU(s) = s / 2 (1 + tanh(s / 2)) takes one instruction of the special-function unit for a score (`tanh.approx.f32`, error
2^-11), which bounds the kernel: 16 a clock of a multiprocessor, where 128 channels take two sixteenths of a clock of the tensor
core. exp and a division would take two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fast.launch.launcher import interpreted

#: Queries of a tile without a bias and with one, whose distances take registers; keys of a tile, warps, stages of copies.
ROWS, BIASED_ROWS, KEYS, WARPS, STAGES = 128, 64, 64, 8, 3
#: Widths of heads that tiles take.
WIDTHS = (16, 32, 64, 128)


@triton.jit
def _silu(s, HAS_PTX: tl.constexpr):
    half = s * 0.5
    if HAS_PTX:
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )
        return half + half * t
    else:
        return s * tl.sigmoid(s)


@triton.jit
def _dot(a, b, HAS_PTX: tl.constexpr):
    """Products that begin at zero; the interpreter has none of bfloat16."""
    if HAS_PTX:
        return tl.dot(a, b)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))


@triton.jit
def _bias(distance, seconds, positions, buckets, BUCKETS: tl.constexpr):
    """What a distance and a time between two tokens add to their score; neither is negative."""
    exponent = (tl.maximum(seconds, 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.load(positions + distance) + tl.load(buckets + tl.minimum(exponent, BUCKETS - 1))


@triton.jit
def _tile(
    q, k, v, times, begin, row, place, moment, start, length, past, k_token, v_token, scale, positions, buckets,
    QK: tl.constexpr, V: tl.constexpr, BUCKETS: tl.constexpr, BIAS: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr,
    HAS_PTX: tl.constexpr,
):  # fmt: skip
    """What KEYS keys from `start` on add to the sums."""
    key = start + tl.arange(0, KEYS)
    inside = key < length
    at = begin + key
    keys = tl.load(k + at[None, :] * k_token + tl.arange(0, QK)[:, None], mask=inside[None, :], other=0.0)
    values = tl.load(v + at[:, None] * v_token + tl.arange(0, V)[None, :], mask=inside[:, None], other=0.0)
    s = _dot(q, keys, HAS_PTX) * scale
    if BIAS:
        then = tl.load(times + at, mask=inside, other=0)
        distance = tl.maximum(place[:, None] - key[None, :], 0)
        s += _bias(distance, moment[:, None] - then[None, :], positions, buckets, BUCKETS)
    p = _silu(s, HAS_PTX)
    if MASKED:
        p = tl.where((key[None, :] <= row[:, None]) & (key < past)[None, :], p, 0.0)
    return _dot(p.to(values.dtype), values, HAS_PTX)


@triton.jit
def pointwise_attention_kernel(
    q, k, v, y, starts, lengths, history, times, positions, buckets, q_token, k_token, v_token, y_token, scale, factor,
    QK: tl.constexpr, V: tl.constexpr, BUCKETS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Programs: tile of queries (the last, which see most, first), head, user."""
    head, user = tl.program_id(1), tl.program_id(2)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    length = tl.load(lengths + user).to(tl.int32)
    if first < length:
        begin = tl.load(starts + user).to(tl.int64)
        past = tl.load(history + user).to(tl.int32)
        q, k, v, y = q + head * QK, k + head * QK, v + head * V, y + head * V
        row = first + tl.arange(0, ROWS)
        there = row < length
        at = begin + row
        channel, out = tl.arange(0, QK)[None, :], tl.arange(0, V)[None, :]
        queries = tl.load(q + at[:, None] * q_token + channel, mask=there[:, None], other=0.0)
        # All candidates stand where the first does.
        place = tl.minimum(row, past)
        moment = row
        if BIAS:
            moment = tl.load(times + at, mask=there, other=0)
        sums = tl.zeros((ROWS, V), tl.float32)
        whole = tl.minimum(first, past) // KEYS * KEYS
        for start in range(0, whole, KEYS):
            sums += _tile(
                queries, k, v, times, begin, row, place, moment, start, length, past, k_token, v_token, scale, positions,
                buckets, QK, V, BUCKETS, BIAS, False, KEYS, HAS_PTX,
            )  # fmt: skip
        for start in range(whole, tl.minimum(first + ROWS, past), KEYS):
            sums += _tile(
                queries, k, v, times, begin, row, place, moment, start, length, past, k_token, v_token, scale, positions,
                buckets, QK, V, BUCKETS, BIAS, True, KEYS, HAS_PTX,
            )  # fmt: skip
        if first + ROWS > past:
            own = tl.load(k + at[:, None] * k_token + channel, mask=there[:, None], other=0.0)
            s = tl.sum(queries.to(tl.float32) * own.to(tl.float32), 1) * scale
            if BIAS:
                s += _bias(row * 0, row * 0, positions, buckets, BUCKETS)
            p = tl.where(row >= past, _silu(s, HAS_PTX), 0.0)
            values = tl.load(v + at[:, None] * v_token + out, mask=there[:, None], other=0.0)
            sums += p.to(values.dtype).to(tl.float32)[:, None] * values.to(tl.float32)
        tl.store(y + at[:, None] * y_token + out, (sums * factor).to(y.dtype.element_ty), mask=there[:, None])


@torch.library.custom_op("ao_lab::pointwise_attention", mutates_args=())
def pointwise_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, history: torch.Tensor,
    longest: int, scale: float, divisor: float, times: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    buckets: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """q, k: (T, heads, QK), v: (T, heads, V) of 16 bits, heads contiguous; the result like v, contiguous.

    starts, lengths, history: (users) int64, of each user its first token, its tokens, those before its candidates. longest: at
    least all lengths. divisor: N. times: (T) int64, ascending for a user, with float tables: positions (distances) and buckets.
    ValueError for widths that are none of WIDTHS, heads that do not lie together, shapes that differ, a part of a bias.
    """
    refused = refusal(q, k, v)
    if refused:
        raise ValueError(refused)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not q.numel():
        return y
    biased = times is not None
    if biased != (positions is not None) or biased != (buckets is not None):
        raise ValueError("times, positions and buckets of a bias come together; leave all three out for none")
    if positions is not None and positions.shape[0] < longest:
        raise ValueError(
            f"positions has {positions.shape[0]} distances, and users have up to {longest} tokens"
        )
    options = {} if interpreted() else {"num_warps": WARPS, "num_stages": STAGES}
    rows = BIASED_ROWS if biased else ROWS
    with torch.cuda.device_of(q):  # Triton launches on the current one
        pointwise_attention_kernel[-(-longest // rows), q.shape[1], len(lengths)](
            q, k, v, y, starts, lengths, history, times, positions, buckets, q.stride(0), k.stride(0), v.stride(0), y.stride(0),
            scale, 1 / divisor, q.shape[2], v.shape[2], len(buckets) if buckets is not None else 1, biased, rows, KEYS,
            not interpreted(), **options,
        )  # fmt: skip
    return y


@pointwise_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, history: torch.Tensor,
    longest: int, scale: float, divisor: float, times: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    buckets: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return v.new_empty(v.shape)


def refusal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why the kernel does not take these; None where it does."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[2] not in WIDTHS:
            return f"{name} is (tokens, heads, width) with a width of {', '.join(map(str, WIDTHS))}, got {tuple(x.shape)}"
        if x.dtype not in (torch.bfloat16, torch.float16) or x.dtype != q.dtype:
            return f"q, k and v are bfloat16 or all float16, got {name} of {x.dtype}"
        if x.stride()[1:] != (x.shape[2], 1):
            return f"heads of {name} lie one after the other, got strides {x.stride()} of {tuple(x.shape)}"
    if k.shape != q.shape or v.shape[:2] != q.shape[:2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        return f"k has the shape of q, and v its tokens and heads, got {shapes}"
    return None


__all__ = ["pointwise_attention", "refusal"]
