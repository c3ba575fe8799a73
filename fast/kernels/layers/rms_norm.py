"""`rms_norm`, `rms_norm_quantize` and `rms_norm_vjp` for CUDA tensors; see `reference.layers.normalize` for every rounding.

A program holds whole rows in registers, so that x is read once and codes, or the normalized elements, are written once. The sum
of squares is added in the order of the rule: each step adds neighbours, first in a thread, then between threads, then between
warps. Rows too long for registers take two passes: aligned parts of a power of two are whole branches of the tree, so the
first leaves their sums and the second goes on from there.

`rms_norm_vjp`: a program goes through PIECE rows and holds each whole in registers: x and g are read once, dx is written once,
and nothing but x was kept by the forward pass, whose root is made again on the way. The next row is loaded before this one is
reduced. What rows add to the weight's gradient stays in registers until the piece ends; sums of pieces are a float32 matrix of
a sixteenth of the rows, which launches of their own add up, each a part of the tree.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import read
from fast.kernels.layers.tiles import PER_THREAD as PIECE_PER_THREAD
from fast.kernels.layers.tiles import (
    Outputs,
    Pieces,
    Tiles,
    norm_pieces_kernel,
    outputs,
    pieces,
    quantize_rows,
    takes_row_pieces,
    tile_of,
    tiles,
)
from fast.kernels.quantize.plan import LARGEST_TILE
from fast.kernels.rules.statistics import summed, tree_sum
from fast.kernels.sm90.bf16x2 import floats, narrowed, normal, set_aside
from fast.launch.launcher import (
    FLOAT_NAMES,
    INT32,
    Call,
    CompiledLaunch,
    ceil_div,
    interpreted,
    power_above,
    same_device,
)
from reference import Quantized
from reference.layers.normalize import PIECE, checked_inputs
from reference.schemes.schemes import Scheme, scheme_of

# Elements of a program where rows are short, and of a part of a row that is too long.
ELEMENTS = 4096
PART = 8192
# The steps between threads and warps, the root and the divisions cost the same for any number of elements.
PER_THREAD = 64
#: Columns of a short row: with one scale it is of a smaller program, and of more threads (measured).
SHORT = 512
SHORT_ELEMENTS, SHORT_PER_THREAD = 1024, 32
#: Columns of a long row: fewer, larger programs pay off where it has one scale, and more warps where it has many.
LONG = 8192
#: Elements a thread of a long row with one scale.
WHOLE_PER_THREAD = 128
#: Elements a thread of a long row with many scales.
GROUPS_PER_THREAD = 32
#: How the L2 cache keeps x where codes are written, which are to stay for the matmul behind (`tl.load`'s eviction_policy); rows
#: in pieces were not measured and have none.
EVICT = "evict_first"


@triton.jit
def sums_kernel(
    x, residual, sums, rows, length, per_row, column_tiles,
    DTYPE: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Sums of squares of parts of rows: one row, SIZE columns a program."""
    row, column, inside, block, exists = tile_of(
        rows, length, per_row, column_tiles, MASKED, WIDE, ROWS, SIZE, GROUP
    )
    h = floats(summed(x, residual, row * length + column, inside, DTYPE, HAS_PTX, ""), HAS_PTX)
    total = tl.sum(tree_sum(tl.reshape(h * h, (1, SIZE))))
    tl.store(sums + tl.program_id(0), total)


@triton.jit
def norm_kernel(
    x, residual, weight, sums, new_residual, y, codes, scale, zero, eps, rows, length, per_row, column_tiles,
    SCHEME: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, SUMS: tl.constexpr, HAS_PTX: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Normalize a tile, and quantize it where there is a SCHEME. SUMS: sums of parts of a row, filled to a power of two."""
    row, column, inside, block, exists = tile_of(
        rows, length, per_row, column_tiles, MASKED, WIDE, ROWS, SIZE, GROUP
    )
    at = row * length + column
    h = summed(x, residual, at, inside, DTYPE, HAS_PTX, EVICT)
    if new_residual is not None:
        tl.store(new_residual + at, h, mask=inside)
    if SUMS > 0:
        parts = tl.arange(0, SUMS)[None, :]
        first = tl.program_id(0) // column_tiles * column_tiles
        total = tree_sum(tl.load(sums + first + parts, mask=parts < column_tiles, other=0.0))
    else:
        wide = floats(h, HAS_PTX)
        total = tree_sum(tl.reshape(wide * wide, (ROWS, SIZE)))
    if ROWS == 1:
        # As a scalar it is in every thread.
        total = tl.sum(total)
    mean = tl.div_rn(total, tl.zeros_like(total) + length)
    r = tl.div_rn(tl.zeros_like(total) + 1.0, tl.sqrt_rn(mean + eps))
    if ROWS > 1:
        r = tl.reshape(tl.broadcast_to(r, (ROWS, SIZE // GROUP)), (ROWS * (SIZE // GROUP), 1))
    # The weight comes from the L2, and later, so that it takes no registers before.
    w = read(weight + column, inside)
    r = tl.broadcast_to(r, h.shape)
    if SCHEME is None:
        tl.store(y + at, normal(h, r, w, DTYPE, False, HAS_PTX), mask=inside)
    else:
        v = normal(h, r, w, DTYPE, True, HAS_PTX)
        quantize_rows(v, codes, scale, zero, at, inside, block, exists, SCHEME, OP)


def rms_norm(
    x: torch.Tensor, weight: Any, eps: float, residual: Any, key: Any = None
) -> tuple[torch.Tensor, Any] | None:
    """`fast.rms_norm` by kernels, or None where the reference has to answer. key: of the call, see `dispatch`."""
    _ns, x, name = checked_inputs(x, weight, residual, eps)
    if x.numel() == 0 or not same_device(x, weight, residual):
        return None
    call = _NormCall(x, weight, residual, eps, name)
    rows, length = x.numel() // x.shape[-1], x.shape[-1]
    call.recording.allocate("y", x.shape, x.dtype)
    if length <= LARGEST_TILE:
        call.launch(_whole_rows(rows, length, length))
    else:
        place = tiles(rows, length, length, size=PART, elements=PART, stride=length, per_thread=PER_THREAD)
        call.leave_sums(place)
        call.launch(place)
    return call.result("y", key)


def rms_norm_quantize(
    x: torch.Tensor, weight: Any, scheme: str | Scheme, eps: float, residual: Any, packed: bool, key: Any = None
) -> tuple[Quantized, Any] | None:  # fmt: skip
    """`fast.rms_norm_quantize` by one kernel, or None where none covers it."""
    _ns, x, name = checked_inputs(x, weight, residual, eps)
    result = outputs(x, name, scheme_of(scheme), packed) if same_device(x, weight, residual) else None
    if result is None or x.shape[-1] > LARGEST_TILE:
        return None
    call = _NormCall(x, weight, residual, eps, name)
    length = x.shape[-1]
    place = _whole_rows(x.numel() // length, length, result.length, *_program(length, result, name))
    for part, buffer in result.buffers.items():
        call.recording.allocate(part, *buffer)
    call.launch(place, result)
    return call.result(result.quantized(), key, scheme)


def _whole_rows(
    rows: int, length: int, block: int, elements: int = ELEMENTS, per_thread: int = PER_THREAD
) -> Tiles:
    return tiles(
        rows, length, block, size=power_above(length), elements=elements, stride=length, per_thread=per_thread
    )


def _program(length: int, made: Outputs, name: str) -> tuple[int, int]:
    """Elements of a program and of a thread; float32 and zero points leave no registers for many."""
    if length <= SHORT and made.length == length:
        return SHORT_ELEMENTS, SHORT_PER_THREAD
    if length <= LONG or length % 16 or name == "float32" or made.problem.scheme.zero is not None:
        return ELEMENTS, PER_THREAD
    return ELEMENTS, WHOLE_PER_THREAD if made.length == length else GROUPS_PER_THREAD


class _NormCall:
    """Checked arguments, what is made of them, and what was launched."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, residual: Any, eps: float, name: str) -> None:
        self.recording = Call({"x": x, "residual": residual, "weight": weight})
        self.shape, self.eps, self.name = tuple(x.shape), float(eps), name
        if residual is not None:
            self.recording.allocate("new_residual", self.shape, x.dtype)

    @property
    def new_residual(self) -> torch.Tensor | None:
        """x + residual, where there is one."""
        return self.recording.tensors.get("new_residual")

    def launch(self, place: Tiles, made: Outputs | None = None) -> None:
        """Normalize all rows into y, or into codes and scales; with the sums of parts of rows, if they are there."""
        rule, do = (None, None) if made is None else (made.rule, made.block_op)
        length, summed_up = self.shape[-1], "sums" in self.recording.tensors
        apart, threads = (None, 0) if summed_up else self.pieces(made)
        if apart is not None:
            per_row = 0 if made is None else length // made.length
            shape = (place.wide, apart.a, apart.b, apart.c, apart.group, threads)
            tail = (self.eps, length, per_row, rule, do, self.name, *shape, not interpreted())
            self._run(norm_pieces_kernel, 8, prod(self.shape) // length, apart.warps, tail)
            return
        parts = power_above(place.column_tiles) if summed_up else 0
        shape, keep = place.constants.values(), "" if made is None else EVICT
        tail = (self.eps, *place.integers, rule, do, self.name, *shape, parts, not interpreted(), keep)
        self._run(norm_kernel, 9, place.programs, place.warps, tail)

    def pieces(self, made: Outputs | None) -> tuple[Pieces | None, int]:
        """The pieces of rows, where those pay off; and a program's threads where a row has one scale, else 0."""
        length = self.shape[-1]
        if made is None or not takes_row_pieces(made):
            return pieces(length, None if made is None else made.length), 0
        if self.new_residual is not None:
            apart = pieces(length, None)
        else:
            # With less to read, a third tree of sums costs more than a mask does (measured).
            apart = pieces(length, None, 2 * PIECE_PER_THREAD)
            apart = apart if apart is None or apart.c == 0 else None
        return apart, 0 if apart is None else 32 * apart.warps

    def leave_sums(self, place: Tiles) -> None:
        """Sums of squares of the parts of long rows."""
        self.recording.allocate("sums", (place.programs,), torch.float32)
        tail = (*place.integers, self.name, *place.constants.values(), not interpreted())
        self._run(sums_kernel, 3, place.programs, place.warps, tail)

    def _run(self, kernel: Any, pointers: int, grid: int, warps: int, tail: Any) -> None:
        """pointers: how many the kernel's arguments start with."""
        self.recording.launch(CompiledLaunch(kernel, grid, tail, warps), kernel.arg_names[:pointers])

    def result(self, first: Any, key: Any, scheme: Any = None) -> tuple[Any, torch.Tensor | None]:
        """The first of the results, and the new residual; see `Call.result`."""
        template = (first, None if self.new_residual is None else "new_residual")
        output: tuple[Any, torch.Tensor | None] = self.recording.result(template, key, scheme)
        return output


#: Elements of a row in a thread.
GRADIENT_PER_THREAD = 16
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
    """`fast.layers.normalize.rms_norm_vjp` by kernels, or None where the reference has to answer."""
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
    warps = max(1, min(MOST_WARPS, size // (32 * GRADIENT_PER_THREAD)))
    launch = CompiledLaunch(norm_gradient_kernel, parts, (float(eps), rows, length, *constants), warps)
    call.launch(launch, ("g", "x", "weight", "more", "dx", "sums"))
    add_pieces(call, parts, length, name, wide, "dweight")
    result: tuple[torch.Tensor, torch.Tensor] = call.result(("dx", "dweight"), key)
    return result


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
