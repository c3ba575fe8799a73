"""`rms_norm_vjp` for CUDA tensors; see `reference.layers.normalize` for every rounding and the order of the sums.

A program goes through PIECE rows and holds each whole in registers: x and g are read once, dx is written once, and nothing
but x was kept by the forward pass, whose root is made again on the way. The next row is loaded before this one is reduced. What
rows add to the weight's gradient stays in registers until the piece ends; sums of pieces are a float32 matrix of a sixteenth
of the rows, which launches of their own add up, each a part of the tree.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import read
from fast.kernels.quantize.geometry import INT32, LARGEST_TILE, ceil_div, power_above
from fast.kernels.rules.trees import tree_sum
from fast.kernels.sm90.bf16x2 import floats, narrowed, set_aside
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import CompiledLaunch, interpreted
from reference.layers.normalize import PIECE

#: Elements of a row in a thread.
PER_THREAD = 16
#: Warps of a program at most.
MOST_WARPS = 16
#: Sums of pieces that one program adds.
PARTS = 512
#: Columns of such a program.
COLUMNS = 16
# Rows of which the next one fits registers too.
LARGEST_EARLY = 8192
# Instructions that take elements in pairs want two in each lane.
PAIRS = 64


@triton.jit
def norm_gradient_kernel(
    g, x, weight, more, dx, sums, eps, rows, length,
    DTYPE: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr,
    EARLY: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """dx of PIECE rows, and the sum over them of what they add to the weight's gradient. more: added to dx, or None."""
    first = tl.program_id(0) * PIECE
    column = tl.arange(0, SIZE)[None, :]
    inside = None
    if MASKED:
        inside = column < length
    total = tl.zeros((1, SIZE), tl.float32)
    count = tl.minimum(rows - first, PIECE)
    at = _row(first, length, WIDE) + column
    h, d = read(x + at, inside), read(g + at, inside)
    for i in range(0, count):
        here = _row(first + i, length, WIDE) + column
        next_h, next_d = h, d
        if EARLY:
            # The last row is read twice, which costs less than a branch.
            then = _row(first + tl.minimum(i + 1, count - 1), length, WIDE) + column
            next_h, next_d = read(x + then, inside), read(g + then, inside)
        elif i > 0:
            h, d = read(x + here, inside), read(g + here, inside)
        r = _root(h, eps, length, HAS_PTX)
        # The weight comes from the L1, so that it takes no registers between.
        share = _share(h, d, r, read(weight + column, inside), length, HAS_PTX)
        h, d = set_aside(h, HAS_PTX), set_aside(d, HAS_PTX)
        normal, wide = floats(h, HAS_PTX) * r, floats(d, HAS_PTX)
        total += wide * normal
        scaled = wide * floats(set_aside(read(weight + column, inside), HAS_PTX), HAS_PTX)
        value = r * (scaled - normal * share)
        if more is not None:
            value += floats(read(more + here, inside), HAS_PTX)
        tl.store(dx + here, narrowed(value, DTYPE, HAS_PTX), mask=inside)
        h, d = next_h, next_d
    tl.store(sums + _row(tl.program_id(0), length, WIDE) + column, total, mask=inside)


@triton.jit
def _root(h, eps, length, HAS_PTX: tl.constexpr):
    """The reciprocal of a row's root mean square, a scalar."""
    v = floats(h, HAS_PTX)
    square = tl.sum(tree_sum(v * v))
    mean = tl.div_rn(square, tl.zeros_like(square) + length)
    return tl.div_rn(tl.zeros_like(square) + 1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _share(h, d, r, w, length, HAS_PTX: tl.constexpr):
    """The mean of (d * w) * (h * r) over a row, a scalar."""
    h, d = set_aside(h, HAS_PTX), set_aside(d, HAS_PTX)
    product = (floats(d, HAS_PTX) * floats(w, HAS_PTX)) * (floats(h, HAS_PTX) * r)
    share = tl.sum(tree_sum(product))
    return tl.div_rn(share, tl.zeros_like(share) + length)


@triton.jit
def _row(row, length, WIDE: tl.constexpr):
    """Where a row begins."""
    if WIDE:
        return row.to(tl.int64) * length
    else:
        return row * length


@triton.jit(do_not_specialize=["parts", "column_tiles"])
def add_pieces_kernel(
    sums, out, parts, length, column_tiles,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """PARTS rows of the sums of pieces added as a tree, COLUMNS columns a program."""
    group, tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    row = group * PARTS + tl.arange(0, PARTS)[None, :]
    column = tile * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    inside = (row < parts) & (column < length)
    total = tree_sum(read(sums + (_row(row, length, WIDE) + column), inside))
    to = _row(group, length, WIDE) + column
    tl.store(out + to, narrowed(total, DTYPE, HAS_PTX), mask=column < length)


def rms_norm_vjp(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, more: torch.Tensor | None, key: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:  # fmt: skip
    """`fast.layers.gradients.rms_norm_vjp` by kernels, or None where the reference has to answer."""
    if not _covers(g, x, weight, more):
        return None
    name, length = FLOAT_NAMES[x.dtype], x.shape[-1]
    rows, size = x.numel() // length, power_above(length)
    call = Call({"g": g, "x": x, "weight": weight, "more": more})
    wide = x.numel() + rows * size > INT32
    parts = ceil_div(rows, PIECE)
    call.allocate("dx", x.shape, x.dtype)
    call.allocate("sums", (parts, length), torch.float32)
    has_ptx = not interpreted() and size >= PAIRS
    constants = (name, size != length, wide, size, PIECE, size <= LARGEST_EARLY, has_ptx)
    warps = max(1, min(MOST_WARPS, size // (32 * PER_THREAD)))
    launch = CompiledLaunch(norm_gradient_kernel, parts, (float(eps), rows, length, *constants), warps)
    call.launch(launch, ("g", "x", "weight", "more", "dx", "sums"))
    add_pieces(call, parts, length, name, wide, "dweight")
    made: tuple[torch.Tensor, torch.Tensor] = call.result(("dx", "dweight"), key)
    return made


def add_pieces(call: Call, parts: int, length: int, name: str, wide: bool, made: str) -> None:
    """The sums of pieces added up, PARTS in a launch, rounded to a dtype (`name`) in the last one, which makes `made`."""
    source, tiles = "sums", ceil_div(length, COLUMNS)
    while True:
        left = ceil_div(parts, PARTS)
        last = left == 1
        target = made if last else f"{source}_added"
        call.allocate(target, (length,) if last else (left, length), name if last else "float32")
        size = min(PARTS, power_above(parts))
        shape = (name if last else "float32", wide, size, COLUMNS, False)
        launch = CompiledLaunch(add_pieces_kernel, left * tiles, (parts, length, tiles, *shape), 4)
        call.launch(launch, (source, target))
        if last:
            return
        source, parts = target, left


def _covers(g: Any, x: Any, weight: Any, more: Any) -> bool:
    """Whether the arguments are right, not empty, and rows fit registers; what is wrong with them the reference says."""
    if x.dtype not in FLOAT_NAMES or not x.numel() or x.shape[-1] > LARGEST_TILE:
        return False
    alike = all(t is None or (t.dtype, t.shape, t.device) == (x.dtype, x.shape, x.device) for t in (g, more))
    return alike and (weight.dtype, weight.shape, weight.device) == (x.dtype, x.shape[-1:], x.device)
