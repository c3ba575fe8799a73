"""`fake_quantize_vjp` of torch tensors by kernels; see `reference.fake_quantize` for what the gradients are.

Scales computed from x take the passes of the forward function with a mask at the end. Given ones are parameters: `slopes` makes
their gradients and dx in one pass, and adds up what the parts of large blocks leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fast.kernels.quantize import plan as plans
from fast.kernels.quantize.block_launch import run_plan
from fast.kernels.quantize.geometry import (
    CHUNK,
    Geometry,
    ceil_div,
    columns_geometry,
    flat_geometry,
    power_above,
)
from fast.kernels.quantize.host import checked, given_kind
from fast.kernels.quantize.plan import Problem
from fast.kernels.quantize.scale_grads import part_sums_kernel, slopes_kernel
from fast.kernels.scheme.constants import constants_of
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import CompiledLaunch, interpreted, same_device
from reference import Scales
from reference.arrays.namespace import namespace_of
from reference.formats.rounding import check_mode
from reference.quantize.scales import given_scales, usable
from reference.schemes.schemes import Scheme, scheme_of

Gradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
# Elements of a tile of parts, and of slopes in a thread: two sums and their terms are held at once.
PARTS_TILE = 2048
PER_THREAD = 16
POINTERS = ("x", "g", "words", "scale", "divisor", "outer", "zero", "y", "dscale", "dzero")


def gradient(
    g: torch.Tensor, x: torch.Tensor, record: str | Scheme, axis: int, words: Any = None, scales: Any = None, key: Any = None
) -> Gradients | None:  # fmt: skip
    """(dx, dscale, dzero), or None where the reference has to answer or to refuse. key: of the call, see `launch.cache`."""
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
