"""The parts of a context that programs attended to, added: sums by channel, largest scores, sums of weights.

How many tokens there are is read on the device, so a CUDA graph replays at any length; parts that have no token are left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fast.launch.launcher import interpreted, power_above
from reference.attention.window import Window

#: Warps of a program, and the most parts that it adds at a time.
WARPS, CHUNK = 4, 32


@triton.jit
def stored_tokens(count, RESIDUAL: tl.constexpr, GROUP: tl.constexpr):
    """How many tokens are read as they are stored, sinks included (`reference.attention.window`)."""
    return tl.maximum(tl.minimum(count - RESIDUAL, count - count % GROUP), 0)


@triton.jit
def part_of(tokens, part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """First token of a part and the one behind its last: whole blocks, divided evenly."""
    each = tl.cdiv(tl.cdiv(tokens, BLOCK), PARTS) * BLOCK
    first = part * each
    return first, tl.minimum(first + each, tokens)


@triton.jit
def combine_kernel(
    parts, stats, length, y, HEADS: tl.constexpr, GROUPS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, RESIDUAL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One row of queries: its parts, CHUNK at a time, weighted by the sums of their exponentials."""
    row, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(length).to(tl.int32)
    stored = stored_tokens(count, RESIDUAL, GROUP)
    # Parts that have a token; the first one has those that are read as computed.
    live = tl.maximum(tl.cdiv(stored, tl.maximum(part_of(stored, 1, SPLITS, BLOCK)[0], 1)), 1)
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


def parts_of(y: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Sums by channel, and largest scores with sums of weights, of the parts of y's rows (B, T, H, D); None for one part."""
    if splits == 1:
        return None
    rows = y.numel() // y.shape[-1] * splits
    return tuple(torch.empty((rows, n), dtype=torch.float32, device=y.device) for n in (y.shape[-1], 2))  # type: ignore[return-value]


def combine(
    y: torch.Tensor, parts: torch.Tensor, stats: torch.Tensor, length: torch.Tensor, kv_heads: int, block: int, splits: int,
    window: Window,
) -> None:  # fmt: skip
    """Write y (B, T, H, D): the sums of parts. block: tokens that parts are multiples of."""
    batch, tokens, heads, width = y.shape
    group = heads // kv_heads
    options = {} if interpreted() else {"num_warps": WARPS}
    combine_kernel[group * tokens, batch * kv_heads](
        parts, stats, length, y, HEADS=heads, GROUPS=group, TOKENS=tokens, WIDTH=width, BLOCK=block, SPLITS=splits,
        CHUNK=min(CHUNK, power_above(splits)), RESIDUAL=window.residual, GROUP=window.group, **options,
    )  # fmt: skip


__all__ = ["combine", "combine_kernel", "part_of", "parts_of", "stored_tokens"]
