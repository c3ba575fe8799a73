"""New tokens of a cache: keys mixed, scaled and rounded, values scaled and rounded, all written in place by one launch.

A program has some tokens of one head, keys or values. Codes and scales are those of the block kernel (`tile.quantize`), mixed
keys those of `reference.layers.hadamard`: stages in order, sums and differences in float32, one product, one rounding.

Where tokens go is read on the device, and the number there is raised by the program that comes last: the upper half of the
number counts those that have read it and is 0 again afterwards, so that no memory and no launch is spent on it.
"""

from __future__ import annotations

from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from fast.kernels.layers.tiles import outputs, quantize_rows
from fast.kernels.scheme.constants import block_op
from fast.kernels.sm90.bf16x2 import floats, narrowed, rounded_once
from fast.launch.launcher import FLOAT_NAMES, CompiledLaunch, interpreted, power_above
from fast.stored_tokens import NewTokens, StoredTokens
from reference.attention.window import Window
from reference.layers.hadamard import SIGNS_16
from reference.schemes.schemes import record_of

#: Signs of 16 elements as bits, 1 for minus.
NEGATIVE = tl.constexpr(sum(1 << at for at, sign in enumerate(SIGNS_16) if sign < 0))
#: Elements of a program, and of a thread.
ELEMENTS, PER_THREAD = 1024, 8
#: What a launch does with tokens whose scales are there.
GIVEN = block_op(source="given", codes=True)
#: Tokens of groups of keys by channel.
GROUPS = (32, 64, 128)
#: One program in the upper half of the number of tokens.
ARRIVED = tl.constexpr(1 << 32)


@triton.jit
def _mixed(v, d, factor, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """Rows (TOKENS, WIDTH) in float32 through Hadamard's transform, not rounded."""
    negative = ((d * 0 + NEGATIVE) >> (d % 16)) & 1
    v = tl.where((negative != 0)[None, :], -v, v)
    stage: tl.constexpr = _stages(WIDTH)
    for s in tl.static_range(stage):
        # The element 2**s away, which is another lane's: by split and join a lane would end with the whole row.
        other = tl.gather(v, tl.broadcast_to((d ^ (1 << s))[None, :], (TOKENS, WIDTH)), 1)
        v = tl.where(((d >> s) & 1)[None, :] == 0, v + other, other - v)
    return v * factor


@triton.constexpr_function
def _stages(width):
    return width.bit_length() - 1


@triton.jit
def _slot(at, SINKS: tl.constexpr, RING: tl.constexpr):
    """The slot of a position (`reference.attention.window`)."""
    if RING == 0:
        return at
    else:
        return tl.where(at < SINKS, at, SINKS + (at - SINKS) % RING)


@triton.jit
def _write(
    x, codes, scale, zero, computed, place, row_stride, pair, head, first, position, tokens, room, factor,
    STATIC: tl.constexpr, SCHEME: tl.constexpr, OP: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr,
    ROTATE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr,
    DTYPE: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of a head of keys or of values. BYTES: of codes of a token; GROUP: elements of a block. STATIC: "" for
    scales of tokens, "tensor" or "head" for those that are there.
    """
    t, d = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    there = (first + t < tokens) & (position + first + t < room)
    v = tl.load(
        x + place + (first + t).to(tl.int64)[:, None] * row_stride + d[None, :],
        mask=there[:, None],
        other=0.0,
    )
    line = pair * room + position + first
    as_computed = v
    if ROTATE or SCHEME is not None:
        v = floats(v, HAS_PTX)
    if ROTATE:
        v = rounded_once(_mixed(v, d, factor, WIDTH, TOKENS), DTYPE, HAS_PTX)
        as_computed = narrowed(v, DTYPE, HAS_PTX)
    if computed is not None:
        at = position + first + t
        # Of tokens that share a slot the last one is written.
        there_too = there & ((at < SINKS) | (at >= position + tokens - RING))
        slot = pair * (SINKS + RING) + _slot(at, SINKS, RING)
        tl.store(computed + slot[:, None] * WIDTH + d[None, :], as_computed, mask=there_too[:, None])
    if codes is None:
        pass  # groups along tokens are written when they are full
    elif SCHEME is None:
        tl.store(codes + line * WIDTH + t[:, None] * WIDTH + d[None, :], as_computed, mask=there[:, None])
    else:
        PER: tl.constexpr = WIDTH // GROUP
        tile = tl.reshape(v, (TOKENS * PER, GROUP))
        p, i = tl.arange(0, TOKENS * PER)[:, None], tl.arange(0, GROUP)[None, :]
        token, group = p // PER, p % PER
        exists = (first + token < tokens) & (position + first + token < room)
        inside = exists & (i < GROUP)
        at = token * WIDTH + group * GROUP + i
        block = p
        if STATIC == "":
            scale += line * PER
        else:
            block = p * 0
            if STATIC == "head":
                scale += head
        if zero is not None:
            zero += line * PER
        quantize_rows(tile, codes + line * BYTES, scale, zero, at, inside, block, exists, SCHEME, OP)


@triton.jit
def append_kernel(
    k, v, k_codes, k_scale, k_zero, k_computed, v_codes, v_scale, v_zero, v_computed, length, k_batch, k_head, k_token, v_batch,
    v_head, v_token, tokens, room, factor, STATIC: tl.constexpr,
    K_SCHEME: tl.constexpr, K_OP: tl.constexpr, K_GROUP: tl.constexpr, K_BYTES: tl.constexpr, V_SCHEME: tl.constexpr,
    V_OP: tl.constexpr, V_GROUP: tl.constexpr, V_BYTES: tl.constexpr, HEADS: tl.constexpr, ROTATE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, TOKENS: tl.constexpr, SINKS: tl.constexpr, RING: tl.constexpr,
    DTYPE: tl.constexpr, HAS_PTX: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Programs: head of a sequence, tile of tokens, keys or values. USE_PDL: programmatic dependent launch."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(length) & 0xFFFFFFFF
    tl.device_assert(
        position + tokens <= room, "a KV cache has no room for these tokens: give it a larger max_length"
    )
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // HEADS, pair % HEADS
    first = tl.program_id(1) * TOKENS
    if tl.program_id(2) == 0:
        _write(
            k, k_codes, k_scale, k_zero, k_computed, batch * k_batch + head * k_head, k_token, pair, head, first, position,
            tokens, room, factor, STATIC, K_SCHEME, K_OP, K_GROUP, K_BYTES, ROTATE, K_WIDTH, TOKENS, SINKS, RING, DTYPE,
            HAS_PTX,
        )  # fmt: skip
    else:
        _write(
            v, v_codes, v_scale, v_zero, v_computed, batch * v_batch + head * v_head, v_token, pair, head, first, position,
            tokens, room, factor, STATIC, V_SCHEME, V_OP, V_GROUP, V_BYTES, False, V_WIDTH, TOKENS, SINKS, RING, DTYPE, HAS_PTX,
        )  # fmt: skip
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    before = tl.atomic_add(length, ARRIVED, sem="acq_rel")
    if (before >> 32) == programs - 1:
        tl.store(length, position + tokens)


@triton.jit
def group_kernel(
    computed, scratch, codes, scale, zero, length, room,
    SCHEME: tl.constexpr, OP: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, SINKS: tl.constexpr,
    RING: tl.constexpr, CHANNELS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """The group that the last token has filled, quantized by channel; a program has some channels of a head.

    scratch: (pairs, GROUP, WIDTH) bytes, for codes before they are packed. USE_PDL: programmatic dependent launch.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(length)
    if (count % GROUP == 0) & (count > 0):
        pair, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS
        c, t = first + tl.arange(0, CHANNELS)[:, None], tl.arange(0, GROUP)[None, :]
        slot = pair * (SINKS + RING) + _slot(count - GROUP + t, SINKS, RING)
        tile = tl.load(computed + slot * WIDTH + c).to(tl.float32)
        line = pair * (room // GROUP) + count // GROUP - 1
        inside = tl.full((CHANNELS, GROUP), 1, tl.int1)
        scale += line * WIDTH
        if zero is not None:
            zero += line * WIDTH
        out = codes + (pair * room + count - GROUP) * (WIDTH * BITS // 8)
        scratch += pair * (GROUP * WIDTH)
        quantize_rows(tile, scratch, scale, zero, t * WIDTH + c, inside, c, c >= 0, SCHEME, OP)
        tl.debug_barrier()
        PER: tl.constexpr = 8 // BITS
        b, n = tl.arange(0, CHANNELS // PER)[None, :], tl.arange(0, GROUP)[:, None]
        packed = tl.zeros((GROUP, CHANNELS // PER), tl.uint8)
        for i in tl.static_range(PER):
            code = tl.load(scratch + n * WIDTH + first + b * PER + i)
            packed |= (code & ((1 << BITS) - 1)) << (i * BITS)
        tl.store(out + n * (WIDTH * BITS // 8) + first // PER + b, packed)


def static_of(stored: StoredTokens) -> str:
    """Whose scale is the same for all tokens: "head", "tensor", or "" for none."""
    if not stored.static or stored.scale is None:
        return ""
    return "tensor" if stored.scale.numel() == 1 else "head"


@lru_cache(maxsize=64)
def _group_plan(scheme: str, dtype: torch.dtype) -> Any:
    """What `outputs` says of a group's tokens as a row, codes not packed; None where no tile has them."""
    record = record_of(scheme)
    if record.format.bits not in (2, 4, 8) or record.scale.block not in GROUPS:
        return None
    like = torch.empty((1, record.scale.block), dtype=dtype, device="meta")
    return outputs(like, FLOAT_NAMES[dtype], record, False)


@lru_cache(maxsize=64)
def _plan(scheme: str, dtype: torch.dtype, width: int) -> Any:
    """What `outputs` says of rows of this width, or None where no tile has their blocks."""
    like = torch.empty((1, width), dtype=dtype, device="meta")
    plan = outputs(like, FLOAT_NAMES[dtype], record_of(scheme), True)
    return plan if plan is not None and plan.length & (plan.length - 1) == 0 else None


def append(new: NewTokens) -> bool:
    """Write new tokens, and raise the number of those that are there; whether the kernel covers them, else nothing is done."""
    keys, values, k, v, length, rotate = new
    window = (keys if keys.scheme else values).window
    launch = _append_launch(
        _tokens_of(k, keys), _tokens_of(v, values), values.codes.shape[2], window, rotate, interpreted()
    )
    if launch is None:
        return False
    by_channel = keys.axis == 2
    written = (None, None, None) if by_channel else (keys.codes, keys.scale, keys.zero)
    stored = (*written, keys.computed, values.codes, values.scale, values.zero, values.computed)
    launch.run((k, v, *stored, length), k.get_device())
    if by_channel:
        _append_group(keys, length, k)
    return True


class Tokens(NamedTuple):
    """New keys or values and where they go, as far as a launch depends on it: (B, heads, n, width) with strides and dtype; the
    scheme ("": none) and its axis; whose scale all tokens have (`static_of`); dtype of codes, and how many a token has."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    scheme: str
    axis: int
    static: str
    codes: torch.dtype
    bytes: int

    @property
    def is_covered(self) -> bool:
        """Whether the kernel writes them."""
        width = self.shape[-1]
        if (
            self.dtype not in FLOAT_NAMES
            or width & (width - 1)
            or not 64 <= width <= 256
            or self.strides[-1] != 1
        ):
            return False
        if not self.scheme:
            return self.codes == self.dtype
        if self.dtype == torch.float32:
            return False
        if self.axis == 2:
            # A prompt's groups along tokens are written by operations of torch.
            return self.shape[2] == 1 and _group_plan(self.scheme, self.dtype) is not None
        return _plan(self.scheme, self.dtype, width) is not None

    def arguments(self) -> tuple[Any, Any, int, int]:
        """Scheme, its operation, group and bytes, as the kernel takes them; groups along tokens have a kernel of their own."""
        if not self.scheme or self.axis == 2:
            return None, None, 0, 0
        plan = _plan(self.scheme, self.dtype, self.shape[-1])
        return plan.rule, GIVEN if self.static else plan.block_op, plan.length, self.bytes


def _tokens_of(x: torch.Tensor, stored: StoredTokens) -> Tokens:
    codes = stored.codes
    return Tokens(
        x.shape,
        x.stride(),
        x.dtype,
        stored.scheme,
        stored.axis,
        static_of(stored),
        codes.dtype,
        codes.shape[-1],
    )


def _covers(k: Tokens, v: Tokens) -> bool:
    """Whether the kernel writes both at once."""
    if v.axis == 2 or k.static != v.static or k.dtype != v.dtype or k.shape[:3] != v.shape[:3]:
        return False
    return 0 not in k.shape and k.is_covered and v.is_covered


@lru_cache(maxsize=256)
def _append_launch(
    k: Tokens, v: Tokens, room: int, window: Window, rotate: bool, on_cpu: bool
) -> CompiledLaunch | None:
    """The kernel for such tokens: Triton's own call of it takes the host five times as long. on_cpu: by the interpreter. None
    where it does not cover them."""
    if not _covers(k, v):
        return None
    batch, heads, tokens, k_width = k.shape
    v_width = v.shape[-1]
    tile = max(1, min(ELEMENTS // max(k_width, v_width), power_above(tokens)))
    warps = max(1, min(8, tile * max(k_width, v_width) // (32 * PER_THREAD)))
    factor, has_ptx = float(np.float32(1 / sqrt(k_width))), not on_cpu
    tail = (
        *k.strides[:3], *v.strides[:3], tokens, room, factor, k.static, *k.arguments(), *v.arguments(), heads, rotate, k_width,
        v_width, tile, window.sinks, window.ring, FLOAT_NAMES[k.dtype], has_ptx, has_ptx,
    )  # fmt: skip
    # debug: for the assertion, without Triton's own of overflows.
    return CompiledLaunch(
        append_kernel, (batch * heads, -(-tokens // tile), 2), tail, warps, debug=True, sanitize_overflow=False, launch_pdl=True
    )  # fmt: skip


def _append_group(keys: StoredTokens, length: torch.Tensor, k: torch.Tensor) -> None:
    """Quantize the group of keys that a token has filled, if it has; `length` counts it already."""
    batch, heads, _, width = k.shape
    group = keys.window.group
    scratch = torch.empty((batch * heads, group, width), dtype=torch.uint8, device=k.device)
    launch = _group_launch(
        keys.scheme, k.dtype, batch * heads, width, keys.codes.shape[2], keys.window, interpreted()
    )
    launch.run((keys.computed, scratch, keys.codes, keys.scale, keys.zero, length), k.get_device())


@lru_cache(maxsize=256)
def _group_launch(
    scheme: str, dtype: torch.dtype, pairs: int, width: int, room: int, window: Window, on_cpu: bool
) -> CompiledLaunch:
    record, plan, group = record_of(scheme), _group_plan(scheme, dtype), window.group
    channels = max(16, min(width, ELEMENTS // group))
    tail = (
        room, plan.rule, plan.block_op, group, width, record.format.bits, window.sinks, window.ring, channels, not on_cpu
    )  # fmt: skip
    warps = channels * group // (32 * PER_THREAD)
    return CompiledLaunch(group_kernel, (pairs, width // channels, 1), tail, warps, launch_pdl=True)


__all__ = ["append", "static_of"]
