"""`rms_norm` and `rms_norm_quantize` for CUDA tensors; see `reference.layers.normalize` for every rounding.

A program holds whole rows in registers, so that x is read once and codes, or the normalized elements, are written once. The sum
of squares is added in the order of the rule: each step adds neighbours, first in a thread, then between threads, then between
warps. Rows too long for registers take two passes: aligned parts of a power of two are whole branches of the tree, so the
first leaves their sums and the second goes on from there.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import read
from fast.kernels.layers.split_rows import PER_THREAD as PIECE_PER_THREAD
from fast.kernels.layers.split_rows import Pieces, norm_pieces_kernel, pieces
from fast.kernels.layers.tiles import Tiles, quantize_rows, tile_of, tiles
from fast.kernels.quantize.geometry import LARGEST_TILE, power_above
from fast.kernels.quantize.outputs import Outputs, outputs
from fast.kernels.quantize.split_rows import takes_row_pieces
from fast.kernels.rules.trees import summed, tree_sum
from fast.kernels.sm90.bf16x2 import floats, normal
from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch, interpreted, same_device
from reference import Quantized
from reference.layers.normalize import checked_inputs
from reference.schemes.schemes import Scheme, scheme_of

# Elements of a program where rows are short, and of a part of a row that is too long.
ELEMENTS = 4096
PART = 8192
# The steps between threads and warps, the root and the divisions cost the same for any number of elements.
PER_THREAD = 64
#: Columns of a long row: fewer, larger programs pay off where it has one scale, and more warps where it has many.
LONG = 8192
#: Elements a thread of a long row with one scale.
WHOLE_PER_THREAD = 128
#: Elements a thread of a long row with many scales.
GROUPS_PER_THREAD = 32


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
    h = floats(summed(x, residual, row * length + column, inside, DTYPE, HAS_PTX), HAS_PTX)
    total = tl.sum(tree_sum(tl.reshape(h * h, (1, SIZE))))
    tl.store(sums + tl.program_id(0), total)


@triton.jit
def norm_kernel(
    x, residual, weight, sums, new_residual, y, codes, scale, zero, eps, rows, length, per_row, column_tiles,
    SCHEME: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, SUMS: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Normalize a tile, and quantize it where there is a SCHEME. SUMS: sums of parts of a row, filled to a power of two."""
    row, column, inside, block, exists = tile_of(
        rows, length, per_row, column_tiles, MASKED, WIDE, ROWS, SIZE, GROUP
    )
    at = row * length + column
    h = summed(x, residual, at, inside, DTYPE, HAS_PTX)
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
    """`fast.rms_norm` by kernels, or None where the reference has to answer. key: of the call, see `launch.cache`."""
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
    made = outputs(x, name, scheme_of(scheme), packed) if same_device(x, weight, residual) else None
    if made is None or x.shape[-1] > LARGEST_TILE:
        return None
    call = _NormCall(x, weight, residual, eps, name)
    length = x.shape[-1]
    place = _whole_rows(x.numel() // length, length, made.length, _per_thread(length, made, name))
    for part, buffer in made.buffers.items():
        call.recording.allocate(part, *buffer)
    call.launch(place, made)
    return call.result(made.quantized(), key, scheme)


def _whole_rows(rows: int, length: int, block: int, per_thread: int = PER_THREAD) -> Tiles:
    return tiles(
        rows, length, block, size=power_above(length), elements=ELEMENTS, stride=length, per_thread=per_thread
    )


def _per_thread(length: int, made: Outputs, name: str) -> int:
    """Elements of a thread; float32 and zero points leave no registers for many."""
    if length <= LONG or length % 16 or name == "float32" or made.problem.scheme.zero is not None:
        return PER_THREAD
    return WHOLE_PER_THREAD if made.length == length else GROUPS_PER_THREAD


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
        shape = place.constants.values()
        tail = (self.eps, *place.integers, rule, do, self.name, *shape, parts, not interpreted())
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
        made: tuple[Any, torch.Tensor | None] = self.recording.result(template, key, scheme)
        return made
