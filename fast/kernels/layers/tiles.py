"""Tiles of a matrix whose rows are normalized, gated and quantized: device side and host side of where they lie.

A program takes ROWS rows of SIZE columns as a tile of shape (ROWS * SIZE / GROUP, GROUP): the blocks of the quantizer, each a
row of the tile. A matrix wider than SIZE has several column tiles; neighbouring programs take neighbours.

Rows of RMSNorm that are no power of two go as two or three pieces that are: 14336 = 8192 + 4096 + 2048. Nothing is masked and
nothing is read beyond the row. The pieces are branches of the tree in which squares are added (of the row filled with zeros to
a power of two), as they are aligned to their own length; a sum with the zeros beyond the last one is the sum. Where scales
belong to blocks that divide the smallest piece, one piece after the other is normalized and quantized; a row under one scale
is normalized whole before (`quantize_row`). A mask over 16384 elements would let an eighth of all threads compute for nothing.
Each thread finds the largest magnitude of what it has of all pieces, so that threads wait for one another once for a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of
from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.plan import LARGEST_TILE, Buffer, Problem
from fast.kernels.rules.statistics import larger, summed, tree_sum
from fast.kernels.scheme.constants import BlockOp, SchemeConstants, block_op
from fast.kernels.sm90.bf16x2 import floats, normal
from fast.kernels.tile.fast_codes import multiplier, store_codes
from fast.kernels.tile.quantize import quantize_tile
from fast.kernels.tile.scales import choose_scales
from fast.launch.launcher import INT32, ceil_div, interpreted, power_above
from reference import Quantized
from reference.formats.encode import check_mode
from reference.formats.storage import packed_shape
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Scheme


@triton.jit
def tile_of(
    rows, length, per_row, column_tiles, MASKED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """(row, column, which elements exist, block index, which blocks exist); rows and blocks are (P, 1)."""
    PER: tl.constexpr = SIZE // GROUP
    program = tl.program_id(0)
    first, start = program // column_tiles * ROWS, program % column_tiles * SIZE
    if WIDE:
        first, start = first.to(tl.int64), start.to(tl.int64)
    p = tl.arange(0, ROWS * PER)[:, None]
    i = tl.arange(0, GROUP)[None, :]
    row = first + p // PER
    group = start // GROUP + p % PER
    column = group * GROUP + i
    inside = tl.full((ROWS * PER, GROUP), 1, tl.int1)
    exists = tl.full((ROWS * PER, 1), 1, tl.int1)
    if MASKED:
        exists = (row < rows) & (group * GROUP < length)
        inside = exists & (column < length)
    return row, column, inside, row * per_row + group, exists


@triton.jit
def quantize_rows(v, codes, scale, zero, at, inside, block, exists, SCHEME: tl.constexpr, OP: tl.constexpr):
    """Codes and scales of a tile of float32 values that have the precision of the rule's dtype."""
    quantize_tile(
        v,
        None,
        None,
        codes,
        scale,
        None,
        zero,
        None,
        None,
        None,
        at,
        inside,
        block,
        exists,
        True,
        0,
        SCHEME,
        OP,
    )


WARP_PAIRS = 64


@dataclass(frozen=True)
class Tiles:
    """A matrix of `rows` x `length` as tiles, with `per_row` blocks of the quantizer in a row; see `tile_of`."""

    rows: int
    length: int
    per_row: int
    column_tiles: int
    masked: bool
    wide: bool
    tile_rows: int
    size: int
    group: int
    warps: int

    @property
    def programs(self) -> int:
        """How many programs a launch has."""
        return ceil_div(self.rows, self.tile_rows) * self.column_tiles

    @property
    def elements_per_thread(self) -> int:
        """Elements of a tile for each thread."""
        return self.tile_rows * self.size // (32 * self.warps)

    @property
    def integers(self) -> tuple[int, ...]:
        """What `tile_of` takes first."""
        return (self.rows, self.length, self.per_row, self.column_tiles)

    @property
    def arguments(self) -> dict[str, Any]:
        """All of these by name."""
        return (
            dict(zip(("rows", "length", "per_row", "column_tiles"), self.integers, strict=True))
            | self.constants
        )

    @property
    def constants(self) -> dict[str, Any]:
        """What `tile_of` takes at compile time."""
        return {
            "MASKED": self.masked, "WIDE": self.wide, "ROWS": self.tile_rows, "SIZE": self.size, "GROUP": self.group
        }  # fmt: skip


def tiles(
    rows: int, length: int, block: int | None, *, size: int, elements: int, stride: int, per_thread: int
) -> Tiles:
    """Tiles of `size` columns and about `elements` elements, `per_thread` of them in a thread.

    block: elements of a quantizer's block, None for none. stride: the largest distance of rows.
    """
    # Instructions that take elements in pairs want two in each lane.
    tile_rows = max(1, WARP_PAIRS // size, min(elements // size, power_above(rows)))
    group, per_row = (size, 1) if block is None or block == length else (block, length // block)
    masked = rows % tile_rows != 0 or length % size != 0
    wide = rows * max(stride, length) > INT32 - 2 * LARGEST_TILE
    warps = max(1, min(16, tile_rows * size // (32 * per_thread)))
    return Tiles(rows, length, per_row, ceil_div(length, size), masked, wide, tile_rows, size, group, warps)


# Neighbours that a thread has: as many as it stores bytes at a time.
TOGETHER = tl.constexpr(16)


@triton.jit
def quantize_row(
    a, b, c, codes, scale, start, row, SCHEME: tl.constexpr, OP: tl.constexpr, C: tl.constexpr, THREADS: tl.constexpr
):  # fmt: skip
    """Codes and scale of a row that begins at `start`: float32 pieces of shape (1, length), C the last one's or 0."""
    A: tl.constexpr = a.shape[1]
    B: tl.constexpr = b.shape[1]
    top = tl.maximum(_largest_of_threads(a, THREADS), _largest_of_threads(b, THREADS))
    if C > 0:
        top = tl.maximum(top, _largest_of_threads(c, THREADS))
    largest = tl.max(tl.reshape(top, (1, THREADS)), axis=1, keep_dims=True)
    exists = tl.full((1, 1), 1, tl.int1)
    block = row + tl.zeros((1, 1), tl.int32)
    outer = tl.full((), 1.0, tl.float32)
    _, s, scale_code, prepared, z = choose_scales(
        largest, largest, largest, outer, scale, None, block, exists, 0, SCHEME, OP
    )
    inv_scale = multiplier(s, scale_code, prepared, SCHEME)
    _store(a, codes, start, 0, block, inv_scale, s, z, SCHEME, OP)
    _store(b, codes, start, A, block, inv_scale, s, z, SCHEME, OP)
    if C > 0:
        _store(c, codes, start, A + B, block, inv_scale, s, z, SCHEME, OP)


@triton.jit
def _largest_of_threads(v, THREADS: tl.constexpr):
    """Patterns of the largest magnitudes that the threads have of a piece, (THREADS,)."""
    MANY: tl.constexpr = v.shape[1] // THREADS
    EACH: tl.constexpr = MANY if MANY < TOGETHER else TOGETHER
    top = tl.reduce(tl.reshape(tl.abs(v), (MANY // EACH, THREADS, EACH)), 2, larger)
    return bits_of(tl.reduce(top, 0, larger)) & MAGNITUDE


@triton.jit
def _store(v, codes, start, offset, block, inv_scale, s, z, SCHEME: tl.constexpr, OP: tl.constexpr):
    at = start + offset + tl.arange(0, v.shape[1])[None, :]
    inside, exists = tl.full(v.shape, 1, tl.int1), tl.full((1, 1), 1, tl.int1)
    store_codes(codes, at, inside, block, exists, v, inv_scale, s, z, SCHEME, OP.packed)


def takes_row_pieces(made: Outputs) -> bool:
    """Whether rows may be quantized in pieces: to 8-bit floats, which leave in the layout in which 16-bit floats came.

    Integers move through shared memory on their way, and so the pieces cost more than a mask does (measured).
    """
    rule, scale = made.rule, made.problem.scheme.scale
    one = made.length == made.problem.blocks.shape[-1] and scale.statistic == "absmax"
    return one and rule.fast_path.value in ("e4m3", "e5m2") and not rule.power_of_two and not made.packed


# The smallest piece, and the largest: more of a row does not fit registers.
LEAST, MOST = 512, 8192
PER_THREAD = 32


@triton.jit
def norm_pieces_kernel(
    x, residual, weight, new_residual, y, codes, scale, zero, eps, length, per_row,
    SCHEME: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, GROUP: tl.constexpr, THREADS: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """A row: A elements, B and, unless it is 0, C; blocks of GROUP, or as many as divide the smallest piece.

    THREADS: those of a program where the row has one scale, or 0.
    """
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    start = row * length
    # A row under one scale is a row of each piece.
    a = _piece(x, residual, new_residual, start, A, A if THREADS > 0 else GROUP, DTYPE, HAS_PTX)
    b = _piece(x, residual, new_residual, start + A, B, B if THREADS > 0 else GROUP, DTYPE, HAS_PTX)
    rest = _squares(b, HAS_PTX)
    if C > 0:
        c = _piece(x, residual, new_residual, start + (A + B), C, C if THREADS > 0 else GROUP, DTYPE, HAS_PTX)
        rest += _squares(c, HAS_PTX)
    total = _squares(a, HAS_PTX) + rest
    mean = tl.div_rn(total, tl.zeros_like(total) + length)
    r = tl.div_rn(tl.zeros_like(total) + 1.0, tl.sqrt_rn(mean + eps))
    if THREADS > 0:
        v, w = _normal_row(a, r, weight, 0, DTYPE, HAS_PTX), _normal_row(b, r, weight, A, DTYPE, HAS_PTX)
        u = w
        if C > 0:
            u = _normal_row(c, r, weight, A + B, DTYPE, HAS_PTX)
        quantize_row(v, w, u, codes, scale, start, row, SCHEME, OP, C, THREADS)
    else:
        first = row * per_row
        _finish(a, r, weight, y, codes, scale, zero, start, 0, first, SCHEME, OP, DTYPE, GROUP, HAS_PTX)
        _finish(b, r, weight, y, codes, scale, zero, start, A, first, SCHEME, OP, DTYPE, GROUP, HAS_PTX)
        if C > 0:
            _finish(
                c, r, weight, y, codes, scale, zero, start, A + B, first, SCHEME, OP, DTYPE, GROUP, HAS_PTX
            )


@triton.jit
def _columns(SIZE: tl.constexpr, GROUP: tl.constexpr):
    """Elements of a piece as (blocks, GROUP)."""
    return tl.arange(0, SIZE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def _piece(
    x, residual, new_residual, start, SIZE: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr
):  # fmt: skip
    """SIZE elements from `start` on, with the residual, which is written."""
    at = start + _columns(SIZE, GROUP)
    h = summed(x, residual, at, None, DTYPE, HAS_PTX, "")
    if new_residual is not None:
        tl.store(new_residual + at, h)
    return h


@triton.jit
def _squares(h, HAS_PTX: tl.constexpr):
    """The sum of squares of a piece, a scalar."""
    wide = floats(h, HAS_PTX)
    return tl.sum(tree_sum(tl.reshape(wide * wide, (1, h.shape[0] * h.shape[1]))))


@triton.jit
def _normal_row(h, r, weight, offset, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """A piece of shape (1, length) that begins at `offset`, normalized, as float32."""
    w = tl.load(weight + offset + tl.arange(0, h.shape[1])[None, :])
    return normal(h, tl.zeros_like(floats(h, HAS_PTX)) + r, w, DTYPE, True, HAS_PTX)


@triton.jit
def _finish(
    h, r, weight, y, codes, scale, zero, start, offset, first, SCHEME: tl.constexpr, OP: tl.constexpr, DTYPE: tl.constexpr,
    GROUP: tl.constexpr, HAS_PTX: tl.constexpr,
):  # fmt: skip
    """Normalize a piece that begins at `offset`, and quantize it where there is a SCHEME; first: the row's first block."""
    COUNT: tl.constexpr = h.shape[0]
    column = offset + _columns(COUNT * GROUP, GROUP)
    # The weight comes from the L2, and late, so that it takes no registers before.
    w = tl.load(weight + column)
    by = tl.zeros_like(floats(h, HAS_PTX)) + r
    if SCHEME is None:
        tl.store(y + start + column, normal(h, by, w, DTYPE, False, HAS_PTX))
    else:
        v = normal(h, by, w, DTYPE, True, HAS_PTX)
        block = first + offset // GROUP + tl.arange(0, COUNT)[:, None]
        inside, exists = tl.full(h.shape, 1, tl.int1), tl.full((COUNT, 1), 1, tl.int1)
        quantize_rows(v, codes, scale, zero, start + column, inside, block, exists, SCHEME, OP)


@dataclass(frozen=True)
class Pieces:
    """A row's pieces, C = 0 where there are two, the blocks in which they lie, and the warps of a program."""

    a: int
    b: int
    c: int
    group: int
    warps: int


def pieces(length: int, block: int | None, per_thread: int = PER_THREAD) -> Pieces | None:
    """Pieces for rows of this length in blocks of `block` (None: no blocks), or None where they do not serve.

    per_thread: elements of the largest piece in a thread; the others add up to three quarters of it.
    """
    powers = [1 << i for i in reversed(range(length.bit_length())) if length >> i & 1]
    if len(powers) not in (2, 3) or powers[-1] < LEAST or powers[0] > MOST:
        return None
    group = powers[-1] if block is None else block
    if powers[-1] % group:
        return None
    warps = max(1, powers[0] // (32 * per_thread))
    return Pieces(powers[0], powers[1], powers[2] if len(powers) == 3 else 0, group, warps)


# What a kernel that makes a tensor and quantizes it at once writes: codes and scales, and whether it can.


@dataclass(frozen=True)
class Outputs:
    """Buffers for the codes and scales of a tensor in blocks of `length` along the last axis."""

    problem: Problem
    length: int
    packed: bool
    block_op: BlockOp
    buffers: dict[str, Buffer]

    @property
    def rule(self) -> SchemeConstants:
        """The constants of the scheme."""
        return self.problem.rule

    def quantized(self) -> Quantized:
        """The result, with the names of its tensors."""
        blocks, zero = self.problem.blocks, "zero" if "zero" in self.buffers else None
        return Quantized(
            "codes", "scale", None, zero, blocks.shape, blocks.axis, self.problem.scheme, self.packed
        )


def outputs(like: torch.Tensor, dtype: str, scheme: Scheme, packed: bool) -> Outputs | None:
    """Outputs for a tensor of the shape and device of `like`, or None where it is quantized by a pass of its own.

    That is so unless a block is a row, or a power of two that divides rows, and unless its scale depends on nothing else.
    """
    if packed:
        packed_shape(tuple(like.shape), scheme.format)  # refuses a 0-d tensor
    check_mode(scheme.rounding, None)
    blocks = Blocks.of(tuple(like.shape), scheme.scale, -1)
    of = plans.problem_of(dtype, scheme, blocks, not interpreted())
    length = _block_length(scheme, tuple(like.shape))
    if of is None or length is None or of.rule.two_level or of.rule.has_outer:
        return None
    sub_byte = packed and scheme.format.bits < 8
    if sub_byte and not plans.packs(of):
        return None
    do = block_op(codes=True, scales=True, packed=sub_byte)
    return Outputs(
        of, length, packed, do, {"codes": plans.code_buffer(of, sub_byte), **plans.scale_buffers(of)}
    )


def _block_length(scheme: Scheme, shape: tuple[int, ...]) -> int | None:
    """Elements of a block along the last axis, or None where a kernel over rows does not cover them."""
    block = scheme.scale.block
    if not isinstance(block, int) or not shape:
        return None
    length = shape[-1] if block == -1 else min(block, shape[-1])
    if length == 0 or shape[-1] % length or (length & (length - 1) and length != shape[-1]):
        return None
    return length
