"""`fake_quantize_vjp` of torch tensors by kernels; see `reference.fake_quantize` for what the gradients are.

Scales computed from x take the passes of the forward function with a mask at the end. Scales from outside are parameters: one
pass makes dx and sums over blocks of g * dy/ds and g * dy/dz, as `reference.fake_quantize._parameter_gradients` does. A sum
runs over adjacent pairs, in a binary tree over the block filled with zeros to a power of two. The parts of a block that is
larger than a tile are aligned and powers of two, so each is a branch of that tree: programs leave their sums, and
`part_sums_kernel` goes on from there.

A short last block is filled, as in the reference, with its last element under a gradient of 0: where that element's slope is
not finite the sum is NaN, and a sum of zeros has the sign of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import SIGN, bits_of, canonical, float_of, read, widened
from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.host import checked, given_kind, run_plan
from fast.kernels.quantize.kernel import block_places, in_block
from fast.kernels.quantize.plan import CHUNK, Geometry, Problem, columns_geometry, flat_geometry
from fast.kernels.rules.scales import loaded_scale
from fast.kernels.rules.statistics import MOST_LEVELS, tree_sum
from fast.kernels.rules.values import decoding, element_codes, in_units, passed_on, saturated, unscaled
from fast.kernels.scheme.constants import constants_of
from fast.kernels.tile.quantize import loaded_scales
from fast.launch.launcher import (
    FLOAT_NAMES,
    Call,
    CompiledLaunch,
    ceil_div,
    interpreted,
    power_above,
    same_device,
)
from reference import Scales
from reference.arrays.namespace import namespace_of
from reference.formats.encode import check_mode
from reference.quantize.scales import given_scales, usable
from reference.schemes.schemes import Scheme, scheme_of


@triton.jit
def slopes_kernel(
    x, g, words, scale, divisor, outer, zero, y, dscale, dzero,
    count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column,
    SCHEME: tl.constexpr, MARKING: tl.constexpr, SHAPE: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, TRANSPOSED: tl.constexpr, SPLIT: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """dx of a tile, and the sums of its blocks or, CHUNKED or SPLIT, of its parts of a block.

    MARKING: the rule under which codes show what saturates. TRANSPOSED: blocks are read down their columns (transposed in
    registers before the sums, they had others on a GPU). SPLIT: rectangles that are parts of blocks, of their "rows" or
    "columns". divisor: float32 scales that made the codes, beside the `scale` of their values, where scales are quantized
    themselves; None elsewhere.
    """
    at, inside, block, exists, _ = block_places(
        count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column,
        SHAPE, CHUNKED, MASKED, WIDE, False, SIZE, INNER, P, TRANSPOSED,
    )  # fmt: skip
    near, belongs = at, inside
    if MASKED:
        near, belongs = _filled(
            at,
            block,
            exists,
            columns,
            rows,
            length,
            limit,
            chunks,
            inner_row,
            inner_column,
            SHAPE,
            CHUNKED,
            SIZE,
            INNER,
            P,
            TRANSPOSED,
        )
    part = block
    if CHUNKED:
        part = block * chunks + _chunk(columns, chunks, SHAPE, P)
    elif SPLIT == "rows":
        row, column = block // columns, block % columns
        block = row // chunks * columns + column
        part = block * chunks + row % chunks
    elif SPLIT == "columns":
        block = block // chunks
    v = widened(read(x + near, belongs), SCHEME.signs_nan)
    drawn = None
    if SCHEME.rounding == "stochastic":
        drawn = read(words + near, belongs)
    if divisor is None:
        o = tl.full((), 1.0, tl.float32)
        if SCHEME.has_outer:
            o = loaded_scale(tl.load(outer), SCHEME.outer)
        d, s, o, z = loaded_scales(scale, zero, o, block, exists, SCHEME)
        if SCHEME.codes_from != "exact":
            d = s
    else:
        o = tl.full((), 1.0, tl.float32)
        s, d = canonical(read(scale + block, exists)), canonical(read(divisor + block, exists))
        z = s
    marked = element_codes(v, d, o, z, drawn, MARKING)
    lost = saturated(v, marked, d, o, MARKING)
    dy = read(g + at, inside)
    tl.store(y + at, passed_on(dy, lost, SCHEME.dtype), mask=inside)
    dy = widened(dy)
    value = unscaled(element_codes(v, d, o, z, drawn, SCHEME), z, SCHEME)
    scale_grads = dy * _slope(v, value, lost, s, o, z, SCHEME)
    _leave(dscale, part, exists, tl.where(belongs, scale_grads, 0.0), SCHEME.has_ptx)
    if SCHEME.zero == "value":
        _leave(dzero, part, exists, tl.where(belongs & lost, dy, 0.0), SCHEME.has_ptx)
    elif SCHEME.zero == "code":
        _leave(
            dzero, part, exists, tl.where(belongs & lost, dy * negative_by_product(s), 0.0), SCHEME.has_ptx
        )


@triton.jit
def _chunk(columns, chunks, SHAPE: tl.constexpr, P: tl.constexpr):
    """Which part of its block a program takes; see `kernel.block_places`."""
    program = tl.program_id(0)
    if SHAPE == "columns":
        return program // tl.cdiv(columns, P) % chunks
    else:
        return program % chunks


@triton.jit
def _filled(
    at, block, exists, columns, rows, length, limit, chunks, inner_row, inner_column,
    SHAPE: tl.constexpr, CHUNKED: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(offsets, which belong to a block): a short block goes on with its last element, what lies beyond a block is none."""
    i = in_block(SIZE, INNER, TRANSPOSED)
    if CHUNKED:
        i = i + _chunk(columns, chunks, SHAPE, P) * SIZE
    if SHAPE == "flat":
        return tl.minimum(at, limit - 1), exists & (i < length)
    elif SHAPE == "columns":
        beyond = tl.maximum(block // columns % rows * length + i - (limit - 1), 0)
        return at - beyond.to(at.dtype) * inner_row, exists & (i < length)
    else:
        row, column = block // columns % rows, block % columns
        below = tl.maximum(row * (SIZE // INNER) + i // INNER - (limit - 1), 0)
        right = tl.maximum(column * INNER + i % INNER - (length - 1), 0)
        return at - below.to(at.dtype) * inner_row - right * inner_column, exists & (i < SIZE)


@triton.jit
def negative_by_product(v):
    """-v; Triton's own minus is 0 - v, which makes +0 of +0."""
    return float_of(bits_of(v) ^ SIGN)


@triton.jit
def _slope(v, value, lost, scale, outer, zero, SCHEME: tl.constexpr):
    """dy/ds for values in units of the scale: their difference from x / s, or they themselves where they saturated."""
    slope = value - tl.where(lost, 0.0, in_units(v, scale, outer, zero, SCHEME))
    if SCHEME.stored == "encode":
        # y = v / S: the derivative of 1 / S is -1 / S**2.
        slope = negative_by_product(tl.div_rn(slope, scale * scale))
    if SCHEME.has_outer:
        slope = slope * decoding(outer, SCHEME)
    return slope


@triton.jit
def _leave(sums, part, exists, v, HAS_PTX: tl.constexpr):
    """Store the sums of the rows of (P, SIZE)."""
    tl.store(sums + part, canonical(added(v, HAS_PTX)), mask=exists)


@triton.jit
def added(v, HAS_PTX: tl.constexpr):
    """`tree_sum`; the interpreter's own sum of two -0 is +0, so there the pairs are taken apart."""
    if HAS_PTX:
        v = tree_sum(v)
    else:
        COUNT: tl.constexpr = v.shape[0]
        for _ in tl.static_range(MOST_LEVELS):
            if v.shape[1] > 1:
                even, odd = tl.split(tl.reshape(v, (COUNT, v.shape[1] // 2, 2)))
                v = even + odd
    return v


@triton.jit
def part_sums_kernel(parts, sums, rows, length, HAS_PTX: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr):
    """Sums of rows of `length` elements, or of their parts of SIZE: one part of P rows a program."""
    per_row = tl.cdiv(length, SIZE)
    part = tl.program_id(0) % per_row
    row = tl.program_id(0) // per_row * P + tl.arange(0, P)[:, None]
    i = part * SIZE + tl.arange(0, SIZE)[None, :]
    v = tl.load(parts + row * length + i, mask=(row < rows) & (i < length), other=0.0)
    tl.store(sums + row * per_row + part, canonical(added(v, HAS_PTX)), mask=row < rows)


Gradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
# Elements of a tile of parts, and of gradients of scales in a thread: two sums and their terms are held at once.
PARTS_TILE = 2048
PER_THREAD = 16
POINTERS = ("x", "g", "words", "scale", "divisor", "outer", "zero", "y", "dscale", "dzero")


def gradient(
    g: torch.Tensor, x: torch.Tensor, record: str | Scheme, axis: int, words: Any = None, scales: Any = None, key: Any = None
) -> Gradients | None:  # fmt: skip
    """(dx, dscale, dzero), or None where the reference has to answer or to refuse. key: of the call, see `dispatch`."""
    scheme = scheme_of(record)
    if x.dtype not in FLOAT_NAMES or g.dtype != x.dtype or g.shape != x.shape:
        return None
    check_mode(scheme.rounding, words)
    of, given, tensors = checked(x, scheme, axis, scales, words)
    if of is None or not same_device(x, g):
        return None
    tensors = {"g": g, **tensors}
    if given is None or given.scale is None:
        call = Call(tensors)
        run_plan(call, plans.masking(of, given_kind(given)))
        result: Gradients = call.result(("y", None, None), key, record)
        return result
    return _scale_gradients(tensors, of, given, key, record)


def _scale_gradients(
    tensors: dict[str, Any], of: Problem, given: Scales, key: Any, record: str | Scheme
) -> Gradients | None:
    """Gradients for given scales."""
    tiles = _tiles(of)
    if tiles is None:
        return None
    call, x, scheme = Call(tensors), tensors["x"], of.scheme
    if of.rule.two_level:
        # Its scales are made by torch operations, for this call alone.
        key, scheme = None, plans.first_level(scheme)
        _take_scales_of_two_levels(call, x, of, given)
    names = ["dscale"] if of.scheme.zero is None else ["dscale", "dzero"]
    parts = (tiles.place.blocks, tiles.place.integers[5])
    call.allocate("y", x.shape, x.dtype)
    for name in names:
        call.allocate(name, parts if parts[1] > 1 else of.blocks.scale_shape, torch.float32)
    call.launch(_slopes(of, scheme, tiles), POINTERS)
    totals = [_total(call, name, parts, of.blocks.scale_shape) for name in names]
    result: Gradients = call.result(("y", *totals, None)[:3], key, record)
    return result


def _take_scales_of_two_levels(call: Call, x: torch.Tensor, of: Problem, given: Scales) -> None:
    """The scales as the first level's kernel reads them, in place of the given parts."""
    ns = namespace_of(x)
    chosen = usable(ns, given_scales(ns, given, of.blocks, of.scheme), of.scheme, of.dtype)
    divisor = chosen.exact if of.scheme.codes_from == "exact" else chosen.scale
    stored = {name: call.tensors[name] for name in ("g", "x", "words") if name in call.tensors}
    call.tensors = stored | {"scale": _flat_floats(chosen.scale), "divisor": _flat_floats(divisor)}


def _flat_floats(bits: torch.Tensor) -> torch.Tensor:
    """int32 patterns as a flat float32 tensor."""
    return bits.reshape(-1).contiguous().view(torch.float32)


@dataclass(frozen=True)
class _Tiles:
    """Where blocks lie; whether they are read down their columns; which side of them is cut, if one is."""

    place: Geometry
    transposed: bool = False
    split: str = ""


def _tiles(of: Problem) -> _Tiles | None:
    """Tiles that registers hold; None where a block would be filled with far more than it has."""
    place = of.place
    if place.shape in ("tiles", "strips"):
        return _rectangles(of)
    if place.shape == "flat":
        flat = not place.chunked and place.integers[3] > CHUNK
        return _Tiles(flat_geometry(prod(of.blocks.shape), place.integers[3], CHUNK) if flat else place)
    _, after, rows, size, length, *_ = place.integers
    block = of.blocks.block if isinstance(of.blocks.block, int) else -1
    if block > 4 * power_above(length):
        return None
    # A block that is longer than its axis is filled like any short one.
    return _Tiles(columns_geometry(place.blocks // (rows * after), length, after, max(size, block), CHUNK))


def _rectangles(of: Problem) -> _Tiles:
    """Rectangles; those beyond CHUNK as two, the first elements of a block in its order, and the others."""
    place = of.place
    count, columns, rows, length, limit, _, lead, down, right, *inner = place.integers
    transposed = of.blocks.axis != len(of.blocks.shape) - 1 and 1 < place.inner < place.size
    if place.size <= CHUNK:
        return _Tiles(place, transposed)
    n, width = place.size // CHUNK, place.inner
    if transposed or width == place.size:
        side, columns, right, width = "columns", columns * n, right // n, width // n
    else:
        side, rows, down = "rows", rows * n, down // n
    integers = (count * n, columns, rows, length, limit, n, lead, down, right, *inner)
    cut = replace(place, programs=count * n, integers=integers, size=CHUNK, inner=width, p=1)
    return _Tiles(cut, transposed, side)


def _slopes(of: Problem, scheme: Scheme, tiles: _Tiles) -> CompiledLaunch:
    """The launch that makes dx and the sums of blocks, or of their parts."""
    place, elements = tiles.place, tiles.place.p * tiles.place.size
    tail = (
        *place.integers, constants_of(scheme, of.dtype, of.hardware), constants_of(scheme, of.dtype, of.hardware, True),
        place.shape,
        place.chunked, place.masked, place.wide, tiles.transposed, tiles.split, place.size, place.inner, place.p,
    )  # fmt: skip
    return CompiledLaunch(slopes_kernel, place.programs, tail, max(1, min(16, elements // (32 * PER_THREAD))))


def _total(call: Call, name: str, parts: tuple[int, int], shape: tuple[int, ...]) -> str:
    """The name of the sums of the rows of a float32 matrix, in the order of the tree; their shape is this one."""
    rows, length = parts
    while length > 1:
        size = min(PARTS_TILE, power_above(length))
        p = max(1, min(PARTS_TILE // size, power_above(rows)))
        left = ceil_div(length, size)
        source, name = name, f"{name} of {length}"
        call.allocate(name, (rows, left) if left > 1 else shape, torch.float32)
        tail = (rows, length, not interpreted(), size, p)
        call.launch(CompiledLaunch(part_sums_kernel, ceil_div(rows, p) * left, tail, 4), (source, name))
        length = left
    return name
