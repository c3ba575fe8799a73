"""Sums of rows of a stored table, bag by bag: `reference.embedding_bag`, decoded where they are read.

On Hopper `sm90_embedding_bag` adds up what it takes; Triton's kernel here has everything else.

A row is cut into pieces of a power of two of elements that have one scale; a program has the same number of pieces of
neighbouring bags, and adds one id after the other, some of them in flight at once. Where a model's tables have bags of
different lengths in turn, neighbours are bags of one table, so that the lanes of a program end together.

Bits. Values are `dequantize`'s: a product with the scale, which stops at the largest float32. Only scales beyond 2**119 can
get there, so the loop leaves that out and notes the largest scale; a program that met one so large begins again, by the rule
itself.

Ids outside of the table read nothing; the program that met one ends in a device-side assertion behind its last store, so that
no load waits for a check.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import read
from fast.kernels.layers import sm90_embedding_bag as sm90
from fast.kernels.rules.elements import load_packed
from fast.kernels.rules.scales import loaded_scale
from fast.kernels.rules.values import combined, loaded_zero, values
from fast.kernels.scheme.constants import constants_of
from fast.kernels.sm90.bf16x2 import narrowed
from fast.kernels.tile.fast_codes import byte_values, load_elements
from fast.launch.launcher import FLOAT_NAMES, UNFUSED, interpreted, same_device
from reference.quantize.quantize import check_quantized
from reference.quantize.stored import Quantized
from reference.schemes.schemes import Scheme

#: Elements of a piece, at least and at most; of a warp; ids in flight, and where fewer than these are left of a bag.
SHORTEST, LONGEST, WARP, TOGETHER, FEW = 16, 128, 512, 4, 2
#: Scales from here on may overflow with a code of 8 bits.
LARGE = tl.constexpr(2.0**119)
OUTSIDE = "embedding_bag: an id is outside of its table; map unknown ids to a row of their own"


@triton.jit
def _read(
    codes, scale, zero, ids, weights, place, end, piece, rows, padding, SCHEME: tl.constexpr, PACKED: tl.constexpr,
    PIECES: tl.constexpr, SCALES: tl.constexpr, SIZE: tl.constexpr, EXACT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """What is stored of pieces of the rows at places of `ids`: (elements or codes (P, SIZE); scales, zero points, weights,
    whether they are used, whether an id is outside (P, 1))."""
    there = place < end
    row = tl.load(ids + place, mask=there, other=0).to(tl.int64)
    used = there & (row.to(tl.uint64, bitcast=True) < rows)
    outside = there & ~used
    if PADDED:
        used = used & (row != padding)
    block = row * PIECES + piece
    at = block * SIZE + tl.arange(0, SIZE)[None, :]
    group = row * SCALES + piece // (PIECES // SCALES)
    s = read(scale + group, used)
    z = s
    if SCHEME.zero != "":
        z = read(zero + group, used)
    w = 1.0
    if weights is not None:
        w = tl.load(weights + place, mask=used, other=0.0).to(tl.float32)
    if SCHEME.fast_values and not EXACT and not PACKED:
        element = tl.load(codes + at, mask=used, other=0)
    elif SCHEME.fast_values and not EXACT:
        element = load_elements(codes, at, used, block, used, SCHEME, PACKED, SIZE)
    elif PACKED:
        element = load_packed(codes, block, used, SIZE, SCHEME.bits)
    else:
        element = read(codes + at, used).to(tl.int32) & ((1 << SCHEME.bits) - 1)
    return element, s, z, w, used, outside


@triton.jit
def _value(element, s, z, SCHEME: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr):
    """(values (P, SIZE), their scale (P, 1)) of what is stored."""
    scale = combined(loaded_scale(s, SCHEME.level), tl.full((), 1.0, tl.float32), SCHEME, "float32")
    point = scale
    if SCHEME.zero != "":
        point = loaded_zero(z, SCHEME)
    if SCHEME.fast_values and not EXACT and not PACKED:
        element = byte_values(element, SCHEME)
        if SCHEME.fraction_bits != 0:
            element = element * (1.0 / (1 << SCHEME.fraction_bits))
    if SCHEME.fast_values and not EXACT:
        if SCHEME.zero == "code":
            element = element - point.to(tl.float32)
        return element * scale, scale
    else:
        return values(element, scale, point, SCHEME, "float32"), scale


@triton.jit
def _added(
    total, count, largest, outside, codes, scale, zero, ids, weights, place, end, piece, rows, padding, SCHEME: tl.constexpr,
    PACKED: tl.constexpr, PIECES: tl.constexpr, SCALES: tl.constexpr, SIZE: tl.constexpr, TOGETHER: tl.constexpr,
    EXACT: tl.constexpr, PADDED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """`_sums` with TOGETHER ids more, from a place on; what is read of all is asked for before the first is added."""
    parts = ()
    for step in tl.static_range(TOGETHER):
        parts = parts + (  # noqa: RUF005 -- Triton unpacks no tuples
            _read(
                codes, scale, zero, ids, weights, place + step, end, piece, rows, padding, SCHEME, PACKED, PIECES, SCALES,
                SIZE, EXACT, PADDED,
            ),
        )  # fmt: skip
    if SCHEME.has_ptx and TOGETHER > 2:
        # Else loads sink to their uses: fewer registers, and one row of a thread in flight.
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
            "=r,r",
            [count],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    for step in tl.static_range(TOGETHER):
        element, s, z, w, used, wrong = parts[step]
        value, c = _value(element, s, z, SCHEME, EXACT, PACKED)
        outside = outside | wrong
        largest = tl.maximum(largest, tl.abs(c))
        if weights is not None:
            value = w * value
        total = tl.where(used, total + value, total)
        if MEAN:
            count += used.to(tl.int32)
    return total, count, largest, outside


@triton.jit
def _sums(
    codes, scale, zero, ids, weights, begin, end, piece, rows, padding, SCHEME: tl.constexpr, PACKED: tl.constexpr,
    PIECES: tl.constexpr, SCALES: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr, TOGETHER: tl.constexpr,
    FEW: tl.constexpr, EXACT: tl.constexpr, PADDED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """(sums (P, SIZE), ids that count (P, 1), largest scale (P, 1), whether an id was outside (P, 1)): TOGETHER ids at a time,
    and FEW where there are not so many any more."""
    total = tl.zeros((P, SIZE), tl.float32)
    count, largest, outside = (
        tl.zeros((P, 1), tl.int32),
        tl.zeros((P, 1), tl.float32),
        tl.zeros((P, 1), tl.int1),
    )
    longest = tl.max(end - begin)
    whole = longest * 0
    if FEW < TOGETHER:
        whole = longest // TOGETHER * TOGETHER
        for first in range(0, whole, TOGETHER):
            total, count, largest, outside = _added(
                total, count, largest, outside, codes, scale, zero, ids, weights, begin + first, end, piece, rows, padding,
                SCHEME, PACKED, PIECES, SCALES, SIZE, TOGETHER, EXACT, PADDED, MEAN,
            )  # fmt: skip
    for first in range(whole, longest, FEW):
        total, count, largest, outside = _added(
            total, count, largest, outside, codes, scale, zero, ids, weights, begin + first, end, piece, rows, padding,
            SCHEME, PACKED, PIECES, SCALES, SIZE, FEW, EXACT, PADDED, MEAN,
        )  # fmt: skip
    return total, count, largest, outside


@triton.jit
def embedding_bag_kernel(
    codes, scale, zero, ids, offsets, weights, out, count, bags, rows, padding, features,
    SCHEME: tl.constexpr, PACKED: tl.constexpr, PIECES: tl.constexpr, SCALES: tl.constexpr, SIZE: tl.constexpr,
    P: tl.constexpr, TOGETHER: tl.constexpr, FEW: tl.constexpr, MEAN: tl.constexpr, PADDED: tl.constexpr, DTYPE: tl.constexpr,
    MESSAGE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """P pieces of SIZE elements: of every `features`-th bag, from one of the first on."""
    INDEX: tl.constexpr = tl.int64 if WIDE else tl.int32
    feature, tile = tl.program_id(0) % features, tl.program_id(0) // features
    line = tile.to(INDEX) * P + tl.arange(0, P)[:, None]
    bag, piece = line // PIECES * features + feature, line % PIECES
    exists = bag < bags
    begin = tl.load(offsets + bag, mask=exists, other=0).to(INDEX)
    end = tl.load(offsets + bag + 1, mask=bag + 1 < bags, other=count).to(INDEX)
    end = tl.where(exists, end, begin)
    total, used, largest, outside = _sums(
        codes, scale, zero, ids, weights, begin, end, piece, rows, padding, SCHEME, PACKED, PIECES, SCALES, SIZE, P,
        TOGETHER, FEW, False, PADDED, MEAN,
    )  # fmt: skip
    if SCHEME.fast_values:  # noqa: SIM102 -- the one is decided when compiling
        # A NaN scale is none that overflows.
        if tl.max(largest) >= LARGE:
            total, used, largest, outside = _sums(
                codes, scale, zero, ids, weights, begin, end, piece, rows, padding, SCHEME, PACKED, PIECES, SCALES,
                SIZE, P, 1, 1, True, PADDED, MEAN,
            )  # fmt: skip
    if MEAN:
        total = tl.div_rn(total, tl.broadcast_to(tl.maximum(used, 1).to(tl.float32), (P, SIZE)))
    at = (bag.to(tl.int64) * PIECES + piece) * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, narrowed(total, DTYPE, SCHEME.has_ptx), mask=exists)
    tl.device_assert(tl.max(outside.to(tl.int32)) == 0, MESSAGE)


@lru_cache(maxsize=256)
def pieces_of(scheme: Scheme, width: int, blocks: int) -> int | None:
    """Elements of a piece of a row with so many scales; None where no power of two of them divides a block."""
    block = width // blocks
    size = min(gcd(block, LONGEST), LONGEST)
    return size if size >= SHORTEST and block * blocks == width else None


def covered(q: Quantized, *others: Any) -> int | None:
    """Elements of a piece where the kernel reads this table, else None."""
    scheme = q.scheme
    if not isinstance(scheme.scale.block, int) or q.axis != 1 or q.outer is not None:
        return None
    bits = scheme.format.bits
    if bits not in (4, 8) or not all(
        part is None or part.is_contiguous() for part in (q.codes, q.scale, q.zero)
    ):
        return None
    if scheme.zero is not None and scheme.zero.rule == "value":
        return None
    return pieces_of(scheme, q.shape[1], q.scale.shape[1]) if same_device(q.codes, *others) else None


def embedding_bag(
    q: Quantized,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    weights: torch.Tensor | None,
    mode: str,
    padding: int,
    dtype: str,
    features: int,
) -> torch.Tensor | None:
    """`fast.embedding_bag` by the kernel, or None where it covers no such table. Shapes are checked, ids are not."""
    check_quantized(q)
    check_shapes(ids, offsets, weights, mode)
    size = covered(q, ids, offsets, weights)
    weighted = weights is None or weights.dtype in FLOAT_NAMES
    if size is None or not weighted or not len(offsets) or not q.shape[0]:
        return None
    out = q.codes.new_empty((len(offsets), q.shape[1]), dtype=getattr(torch, dtype))
    ids, offsets = ids.contiguous(), offsets.contiguous()
    problem = sm90.taken(q, ids, offsets, weights, mode, padding, dtype)
    if problem is not None:
        return sm90.embedding_bag(q, ids, offsets, out, problem)
    factors = None if weights is None else weights.contiguous()
    return _by_triton(q, ids, offsets, factors, mode, padding, features, out, size)


def _by_triton(
    q: Quantized, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, mode: str, padding: int,
    features: int, out: torch.Tensor, size: int,
) -> torch.Tensor:  # fmt: skip
    """Launch Triton's kernel on contiguous tensors; `out` of that."""
    bags, width, dtype = len(offsets), q.shape[1], str(out.dtype).removeprefix("torch.")
    features = features if features > 0 and bags % features == 0 else 1
    together = WARP // size
    programs = -(-(bags // features) * (width // size) // together) * features
    # debug: for the assertion, without Triton's own of overflows.
    options = {} if interpreted() else {"num_warps": 1, "debug": True, "sanitize_overflow": False, **UNFUSED}
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        embedding_bag_kernel[(programs,)](
            q.codes, q.scale, q.zero, ids, offsets, weights, out, len(ids), bags, q.shape[0],
            padding, features, constants_of(q.scheme, "float32", not interpreted()), q.packed and q.scheme.format.bits < 8,
            width // size, q.scale.shape[1], size, together, TOGETHER, min(FEW, TOGETHER), mode == "mean", padding >= 0, dtype,
            OUTSIDE, max(len(ids), bags) * (width // size) >= 1 << 30, **options,
        )  # fmt: skip
    return out


def check_shapes(ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None, mode: str) -> None:
    """TypeError or ValueError as the reference raises them, of what the host knows without waiting."""
    for name, given in (("ids", ids), ("offsets", offsets)):
        if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
            raise TypeError(f"{name} are integers, got {str(given.dtype).removeprefix('torch.')}")
        if given.dim() != 1:
            raise ValueError(f"{name} have one axis, got shape {tuple(given.shape)}")
    if not len(offsets) and len(ids):
        raise ValueError(f"{len(ids)} ids belong to no bag: offsets are empty")
    if weights is not None and mode != "sum":
        raise ValueError("weights are factors of a sum; mode='mean' takes none")
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(f"weights of shape {tuple(weights.shape)} for {len(ids)} ids; each id has one")


__all__ = ["embedding_bag", "embedding_bag_kernel"]
