"""`quantize_both`: the rows of a matrix and the rows of its transpose, quantized from one read.

A training step multiplies an activation along its columns in the forward GEMM and along its rows in that of the weight
gradient, and 8-bit GEMMs want both operands contiguous along the summed axis. So the second output is x.T in blocks along
x's rows: codes (K, M), scales of blocks of `n` rows.

Two kinds of schemes have such a kernel: MX with 8-bit floats (16-bit inputs: `mxfp8`), and 8-bit floats under a given scale
for the whole tensor. Everything else is two calls of `quantize`, the same bits from two reads.

A program of the MX kernel takes 32 * WARPS rows and COLUMNS columns. Rows are permuted so that a group of 32 rows lies in the
registers of one warp (and of at most TURNS of its lanes): the maxima over rows need no shared memory, only the transposed codes
pass through it.

Tiled scales of two matrices to plain ones: the second half of `both.mx_both` for plain scales.

A tile of codes has 4 scales in each row, and as many in each column. Written row by row they fill an eighth of a 32-byte sector
of memory (times: reports/LOG.md). In the tiled layout they lie side
by side, and putting them in rows afterwards moves a thirty-second of the bytes, in whole sectors.
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import bits_of, widened
from fast.kernels.quantize.plan import tiled_buffer
from fast.kernels.rowwise_colwise.mxfp8 import inverse_power, mx_pairs_kernel
from fast.kernels.rules.elements import encode
from fast.kernels.rules.scales import floored, loaded_scale, power_scale, scale_place
from fast.kernels.rules.statistics import absmax
from fast.kernels.scheme.constants import SchemeConstants
from fast.kernels.scheme.fast_path_rules import HARDWARE
from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch

# Scales of a program: 128 rows of 8 words.
TILE = 4096
ROWS, WORDS = tl.constexpr(128), tl.constexpr(8)


@triton.jit
def untile_kernel(tiled, plain, tiled2, plain2, rows, words, rows2, words2, first, TILE: tl.constexpr):
    """Scales of `rows` x 4 * `words`, then of the second matrix: `first` programs for the first one, of TILE scales each."""
    program = tl.program_id(0)
    if program < first:
        _untile(tiled, plain, rows, words, program)
    else:
        _untile(tiled2, plain2, rows2, words2, program - first)


@triton.jit
def _untile(tiled, plain, rows, words, program):
    """128 rows of 8 words of four scales; rows are a multiple of 128."""
    across = tl.cdiv(words, WORDS)
    row = program // across * ROWS + tl.arange(0, ROWS)[:, None]
    word = program % across * WORDS + tl.arange(0, WORDS)[None, :]
    inside = word < words
    source = tiled.to(tl.pointer_type(tl.int32), bitcast=True)
    target = plain.to(tl.pointer_type(tl.int32), bitcast=True)
    # Word (row % 32) * 4 + row // 32 of the tile; see `scale_places`.
    at = ((row >> 7) * words + word) * 128 + (row & 31) * 4 + ((row >> 5) & 3)
    tl.store(target + (row * words + word), tl.load(source + at, mask=inside, other=0), mask=inside)


def untile(call: Call, tiled: str, plain: str, tiled2: str, plain2: str) -> None:
    """Fill two plain matrices of scales, sides multiples of 128 and 4, from tiled ones of the same size."""
    (rows, blocks), (rows2, blocks2) = shapes = [call.tensors[name].shape for name in (plain, plain2)]
    programs = [rows // 128 * -(-blocks // 32) for rows, blocks in shapes]
    tail = (rows, blocks // 4, rows2, blocks2 // 4, programs[0], TILE)
    call.launch(CompiledLaunch(untile_kernel, sum(programs), tail, 4), (tiled, plain, tiled2, plain2))


GROUP = tl.constexpr(32)


@triton.jit
def _codes8(y, SCHEME: tl.constexpr):
    """uint8 codes of scaled float32 by the conversion instruction, which the interpreter does not have."""
    if not SCHEME.has_ptx:
        return encode(y, None, SCHEME.element).to(tl.uint8)
    elif SCHEME.fast_path == "e4m3":
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return y.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def mx_both_kernel(
    x, codes, scale, transposed, transposed_scale, rows, columns,
    SCHEME: tl.constexpr, TILED: tl.constexpr, WIDE: tl.constexpr, WARPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """codes (rows, columns) with scales along columns, transposed (columns, rows) with scales along rows.

    TILED: scales lie in the tiles of `reference.quantize.stored`.
    """
    TURNS: tl.constexpr = 512 // COLUMNS
    REGISTERS: tl.constexpr = GROUP // TURNS
    ROWS: tl.constexpr = GROUP * WARPS
    tiles = columns // COLUMNS
    down, across = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i = tl.arange(0, ROWS)
    row = down * ROWS + ((i // TURNS) % WARPS) * GROUP + (i % TURNS) * REGISTERS + i // (TURNS * WARPS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    wide_row = row.to(tl.int64) if WIDE else row
    at = wide_row[:, None] * columns + column[None, :]
    v = widened(tl.load(x + at))

    groups = tl.reshape(v, (ROWS * COLUMNS // GROUP, GROUP))
    code = power_scale(absmax(groups, False, SCHEME.has_ptx), SCHEME.level, True)
    made = _codes8(groups * inverse_power(code), SCHEME)
    tl.store(codes + at, tl.reshape(made, (ROWS, COLUMNS)))
    block = across * (COLUMNS // GROUP) + tl.arange(0, COLUMNS // GROUP)
    place = scale_place(wide_row[:, None], block[None, :], columns // GROUP, TILED)
    tl.store(scale + place, tl.reshape(code, (ROWS, COLUMNS // GROUP)).to(tl.uint8))

    # (registers, warps, lanes, columns) -> (warps, rows of a group, columns): nothing moves.
    w = tl.reshape(
        tl.permute(tl.reshape(v, (REGISTERS, WARPS, TURNS, COLUMNS)), (1, 2, 0, 3)), (WARPS, GROUP, COLUMNS)
    )
    largest = bits_of(tl.reduce(tl.abs(w), 1, _nan_max)) & 0x7FFFFFFF
    code_t = power_scale(largest, SCHEME.level, True)
    made_t = _codes8(w * inverse_power(code_t)[:, None, :], SCHEME)
    made_t = tl.reshape(tl.permute(made_t, (2, 0, 1)), (COLUMNS, ROWS))
    wide_column = column.to(tl.int64) if WIDE else column
    out = wide_column[:, None] * rows + (down * ROWS + tl.arange(0, ROWS))[None, :]
    tl.store(transposed + out, made_t)
    block_t = down * WARPS + tl.arange(0, WARPS)
    place_t = scale_place(wide_column[None, :], block_t[:, None], rows // GROUP, TILED)
    tl.store(transposed_scale + place_t, code_t.to(tl.uint8))


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def given_both_kernel(
    x, codes, transposed, scale, transposed_scale, rows, columns,
    SCHEME: tl.constexpr, ONE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Codes in both layouts, under a given scale each; ONE: it is the same scale. Programs go down a band of rows first."""
    down, across = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), tl.program_id(1)
    row, column = down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)
    wide_row = row.to(tl.int64) if WIDE else row
    wide_column = column.to(tl.int64) if WIDE else column
    at = wide_row[:, None] * columns + column[None, :]
    v = widened(tl.load(x + at))
    made = _codes8(v * _inverse_of(scale, SCHEME), SCHEME)
    tl.store(codes + at, made)
    if not ONE:
        made = _codes8(v * _inverse_of(transposed_scale, SCHEME), SCHEME)
    tl.store(transposed + wide_column[:, None] * rows + row[None, :], tl.trans(made))


@triton.jit
def _inverse_of(scale, SCHEME: tl.constexpr):
    """1 / scale as default schemes divide by a given scale."""
    return tl.div_rn(1.0, floored(loaded_scale(tl.load(scale), SCHEME.level), SCHEME.level))


# The MX kernel of float32, and that of pairs: warps down and across, programs down a band (which write the same lines of the
# transposed codes), registers of a thread by bits of a code (with 80 a multiprocessor has 24 warps; smaller codes take more).
WARPS, COLUMNS = 4, 64
DOWN, ACROSS, BAND = 4, 2, 2
REGISTERS = {8: 80, 6: 96, 4: 128}
# Elements below 8 bits.
SMALLER = ("e2m3", "e3m2", "e2m1")
PLAIN_ROWS, PLAIN_COLUMNS, PLAIN_WARPS, PLAIN_BAND = 64, 64, 2, 4
# Names of scales of rows and of columns, of their tiles, and of all that a caller's pair of scales may have.
SCALES, TILES = ("scale", "transposed_scale"), ("tiles", "transposed_tiles")
GIVEN = ("scale", "outer", "zero", "transposed_scale", "transposed_outer", "transposed_zero")
# Sides beyond this would overflow offsets and the grid of the MX kernels.
LONGEST = 2**22


def covers_mx(x: torch.Tensor, rule: SchemeConstants) -> bool:
    """Whether an MX kernel serves: a scheme of `is_mx`, sides that tiles divide, whole words. x: a matrix, or a batch."""
    height, width = (32 * WARPS, COLUMNS) if x.dtype == torch.float32 else (32 * DOWN, 64)
    whole = x.shape[-2] % height == 0 and x.shape[-1] % width == 0
    whole &= max(prod(x.shape[:-1]), x.shape[-1]) <= LONGEST
    return whole and is_mx(x, rule) and x.data_ptr() % 4 == 0


def is_mx(x: torch.Tensor, rule: SchemeConstants) -> bool:
    """Whether scales are powers of two and elements 8-bit floats, or smaller ones of 16-bit inputs."""
    level = rule.level.value
    paths = (*HARDWARE, *SMALLER) if x.dtype != torch.float32 else HARDWARE
    mx = rule.power_of_two and rule.fast_path.value in paths and level.simple_power
    # From 2**2 on no multiplier is subnormal.
    return bool(mx) and level.target_exponent >= 2


def covers_given(x: torch.Tensor, rule: SchemeConstants) -> bool:
    """Whether the kernel for given scales serves: an 8-bit float, sides that tiles divide."""
    plain = rule.fast_path.value in ("e4m3", "e5m2") and not rule.power_of_two
    whole = x.shape[0] % PLAIN_ROWS == 0 and x.shape[1] % PLAIN_COLUMNS == 0
    return plain and whole and max(x.shape) < LONGEST


def mx_columns(x: torch.Tensor, rule: SchemeConstants) -> Call:
    """Run the kernel of pairs for the transposed codes and their plain scales alone; for a batch those of each matrix, one
    after the other in one matrix."""
    call, (*batch, rows, columns) = Call({"x": x}, words=("x",)), x.shape
    call.allocate("transposed", (prod(batch) * columns, rows), torch.uint8)
    call.allocate("transposed_scale", (prod(batch) * columns, rows // 32), torch.uint8)
    _mx_pairs(call, SCALES, rule, False, both=False)
    return call


def mx_both(x: torch.Tensor, rule: SchemeConstants, tiled: bool = False, **tuning: int) -> Call:
    """Run an MX kernel on a contiguous matrix; it makes codes, scale, transposed and transposed_scale.

    tiled: the scales are flat, in the layout of `reference.quantize.stored`. Plain scales are made of tiled ones where
    tiles have no padding; see `untile`. tuning: see `_mx_floats` and `_mx_pairs`; results do not depend on it.
    """
    call, (rows, columns) = Call({"x": x}, words=("x",)), x.shape
    _allocate_codes(call, x)
    for name, shape in zip(SCALES, ((rows, columns // 32), (columns, rows // 32)), strict=True):
        call.allocate(name, *(tiled_buffer(shape) if tiled else (shape, torch.uint8)))
    launch = _mx_floats if x.dtype == torch.float32 else _mx_pairs
    if tiled or x.shape[0] % 128 or x.shape[1] % 128:
        launch(call, SCALES, rule, tiled, **tuning)
        return call
    for name, tiles in zip(SCALES, TILES, strict=True):
        call.allocate(tiles, call.tensors[name].shape, torch.uint8)
    launch(call, TILES, rule, True, **tuning)
    untile(call, TILES[0], SCALES[0], TILES[1], SCALES[1])
    return call


def _mx_floats(
    call: Call, scales: tuple[str, str], rule: SchemeConstants, tiled: bool, warps: int = WARPS, columns: int = COLUMNS
) -> None:  # fmt: skip
    """float32 in tiles of 32 * warps rows and `columns` columns. scales: names of the tensors that get them."""
    x = call.tensors["x"]
    grid = (x.shape[0] // (32 * warps)) * (x.shape[1] // columns)
    tail = (*x.shape, rule, tiled, x.numel() >= 2**31, warps, columns)
    call.launch(
        CompiledLaunch(mx_both_kernel, grid, tail, warps), ("x", "codes", scales[0], "transposed", scales[1])
    )


def _mx_pairs(
    call: Call,
    scales: tuple[str, str],
    rule: SchemeConstants,
    tiled: bool,
    down: int = DOWN,
    across: int | None = None,
    band: int = BAND,
    registers: int | None = None,
    both: bool = True,
) -> None:
    """16-bit floats in tiles of 32 * down rows and 64 * across columns, down * across warps.

    band: programs that follow each other down the rows, at most. registers: of a thread, at most; else those of `REGISTERS`.
    """
    *batch, height, width = call.tensors["x"].shape
    across = across or gcd(width // 64, ACROSS)
    tall = height // (32 * down)
    band = gcd(tall, band)
    grid = (band, width // (64 * across), tall // band * prod(batch))
    tail = (height, width, rule, tiled, both, down, across, bool(batch))
    registers = registers or REGISTERS[rule.bits]
    kernel = CompiledLaunch(mx_pairs_kernel, grid, tail, down * across, maxnreg=registers)
    call.launch(kernel, ("x", "codes", scales[0], "transposed", scales[1]))


def _allocate_codes(call: Call, x: torch.Tensor) -> None:
    call.allocate("codes", x.shape, torch.uint8)
    call.allocate("transposed", x.shape[::-1], torch.uint8)


def given_both(x: torch.Tensor, rule: SchemeConstants, scales: tuple[Any, Any]) -> Call:
    """Run the kernel for given scales, which may be one tensor; it makes codes and transposed."""
    height, width = x.shape
    tall = height // PLAIN_ROWS
    band = gcd(tall, PLAIN_BAND)
    grid = (band, width // PLAIN_COLUMNS, tall // band)
    call = Call({"x": x, **dict.fromkeys(GIVEN), **dict(zip(SCALES, scales, strict=True))})
    _allocate_codes(call, x)
    # Codes of float32 that leave in both layouts: see `host._shares_codes`.
    one = scales[0] is scales[1] and x.dtype != torch.float32
    tail = (height, width, rule, one, x.numel() >= 2**31, PLAIN_ROWS, PLAIN_COLUMNS)
    pointers = ("x", "codes", "transposed", "scale", "transposed_scale")
    call.launch(CompiledLaunch(given_both_kernel, grid, tail, PLAIN_WARPS), pointers)
    return call
