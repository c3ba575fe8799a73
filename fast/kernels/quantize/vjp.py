"""`fake_quantize_vjp` of torch tensors by kernels; see `reference.fake_quantize` for what the gradients are.

Scales computed from x take the passes of the forward function with a mask at the end. Given ones are parameters: `slopes` makes
their gradients and dx in one pass, and adds up what the parts of large blocks leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fast.kernels.launch import plan as passes
from fast.kernels.launch.launcher import Fixed, interpreted, together
from fast.kernels.launch.plan import Asked
from fast.kernels.launch.plans import NAMES
from fast.kernels.launch.replay import Recording, several
from fast.kernels.quantize.geometry import (
    CHUNK,
    Geometry,
    ceil_div,
    columns_geometry,
    flat_geometry,
    power_above,
)
from fast.kernels.quantize.host import (
    PARTS,
    asked_of,
    asked_tensors,
    check_words,
    given_kind,
    inputs,
    prepared,
)
from fast.kernels.quantize.scale_grads import part_sums_kernel, slopes_kernel
from fast.kernels.scheme.constants import rule_of
from reference import Scales
from reference.arrays.namespace import namespace_of
from reference.formats.rounding import check_mode
from reference.quantize.blocks import Blocks
from reference.quantize.provided_scales import check_scales, given_scales, usable
from reference.schemes.schemes import Scheme, scheme_of

Gradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
# Elements of a tile of parts, and of slopes in a thread: two sums and their terms are held at once.
PARTS_TILE = 2048
PER_THREAD = 16
POINTERS = ("x", "g", "words", "scale", "divisor", "outer", "zero", "y", "dscale", "dzero")


def gradient(
    g: torch.Tensor, x: torch.Tensor, asked_scheme: str | Scheme, axis: int, words: Any, scales: Any, key: Any = None
) -> Gradients | None:  # fmt: skip
    """(dx, dscale, dzero), or None where the reference has to answer or to refuse. key: of the call, see `ready`."""
    scheme = scheme_of(asked_scheme)
    if x.dtype not in NAMES or g.dtype != x.dtype or g.shape != x.shape:
        return None
    check_mode(scheme.rounding, words)
    of = asked_of(x, scheme, axis)
    given = check_scales(namespace_of(x), scales, scheme, Blocks.of(tuple(x.shape), scheme.scale, axis))
    check_words(x, scheme, words)
    if of is None or not together(x, g, words, *(getattr(given, part, None) for part in PARTS)):
        return None
    if given is None or given.scale is None:
        return _masked(g, x, of, words, given, key, asked_scheme), None, None
    return _sloped(g, x, of, words, given, key, asked_scheme)


def _masked(
    g: torch.Tensor, x: torch.Tensor, of: Asked, words: Any, given: Scales | None, key: Any, asked_scheme: str | Scheme
) -> torch.Tensor:  # fmt: skip
    """dx for scales from x, or under a given outer scale; answers the next call with this key, if it has one."""
    tensors = {**inputs(x, given, words), "g": g.contiguous()}
    kind = given_kind(given)
    plan = prepared(("mask", of.dtype, of.scheme, of.blocks, kind), lambda: passes.masking(of, kind))
    y = plan(tensors, x.device)["y"]
    asked = {"g": g, **asked_tensors(x, given, words)}
    plan.remember(key, asked_scheme, asked, several("y", None, None))
    return y  # type: ignore[no-any-return]


def _sloped(
    g: torch.Tensor, x: torch.Tensor, of: Asked, words: Any, given: Scales, key: Any, asked_scheme: str | Scheme
) -> Gradients | None:  # fmt: skip
    """Gradients for given scales."""
    tiles = _tiles(of)
    if tiles is None:
        return None
    call, scheme = Recording({"g": g, **asked_tensors(x, given, words)}), of.scheme
    if of.rule.two_level:
        ns = namespace_of(x)
        chosen = usable(ns, given_scales(ns, given, of.blocks, scheme), scheme, of.dtype)
        divisor = chosen.exact if scheme.codes_from == "exact" else chosen.scale
        made = {"scale": _flat_floats(chosen.scale), "divisor": _flat_floats(divisor)}
        scheme = passes.first_level(scheme)
        call.tensors = {
            name: call.tensors[name] for name in ("g", "x", "words") if name in call.tensors
        } | made
    names = ["dscale"] if of.scheme.zero is None else ["dscale", "dzero"]
    parts = (tiles.place.blocks, tiles.place.integers[5])
    call.empty("y", x.shape, x.dtype)
    for name in names:
        call.empty(name, parts if parts[1] > 1 else of.blocks.scale_shape, torch.float32)
    call.launch(_slopes(of, scheme, tiles), POINTERS)
    totals = [_total(call, name, parts, of.blocks.scale_shape) for name in names]
    wanted = ("y", *totals, None)[:3]
    if not of.rule.two_level:
        call.remember(key, asked_scheme, several(*wanted))
    y, dscale, dzero = (None if name is None else call.tensors[name] for name in wanted)
    return y, dscale, dzero  # type: ignore[return-value]


def _flat_floats(bits: torch.Tensor) -> torch.Tensor:
    """int32 patterns as a flat float32 tensor."""
    return bits.reshape(-1).contiguous().view(torch.float32)


@dataclass(frozen=True)
class _Tiles:
    """Where blocks lie; whether they are read down their columns; which side of them is cut, if one is."""

    place: Geometry
    turned: bool = False
    split: str = ""


def _tiles(of: Asked) -> _Tiles | None:
    """Tiles that registers hold; None where a block would be filled with far more than it has."""
    place = of.place
    if place.shape == "tiles":
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


def _rectangles(of: Asked) -> _Tiles:
    """Rectangles; those beyond CHUNK as two, the first elements of a block in its order, and the others."""
    place = of.place
    count, columns, rows, length, limit, _, lead, down, right, *inner = place.integers
    turned = of.blocks.axis != len(of.blocks.shape) - 1 and 1 < place.inner < place.size
    if place.size <= CHUNK:
        return _Tiles(place, turned)
    n, width = place.size // CHUNK, place.inner
    if turned or width == place.size:
        side, columns, right, width = "columns", columns * n, right // n, width // n
    else:
        side, rows, down = "rows", rows * n, down // n
    integers = (count * n, columns, rows, length, limit, n, lead, down, right, *inner)
    cut = replace(place, programs=count * n, integers=integers, size=CHUNK, inner=width, p=1)
    return _Tiles(cut, turned, side)


def _slopes(of: Asked, scheme: Scheme, tiles: _Tiles) -> Fixed:
    """The launch that makes dx and the sums of blocks, or of their parts."""
    place, elements = tiles.place, tiles.place.p * tiles.place.size
    tail = (
        *place.integers, rule_of(scheme, of.dtype, of.hardware), rule_of(scheme, of.dtype, of.hardware, True), place.shape,
        place.chunked, place.masked, place.wide, tiles.turned, tiles.split, place.size, place.inner, place.p,
    )  # fmt: skip
    return Fixed(slopes_kernel, place.programs, tail, max(1, min(16, elements // (32 * PER_THREAD))))


def _total(call: Recording, name: str, parts: tuple[int, int], shape: tuple[int, ...]) -> str:
    """The name of the sums of the rows of a float32 matrix, in the order of the tree; their shape is this one."""
    rows, length = parts
    while length > 1:
        size = min(PARTS_TILE, power_above(length))
        p = max(1, min(PARTS_TILE // size, power_above(rows)))
        left = ceil_div(length, size)
        source, name = name, f"{name} of {length}"
        call.empty(name, (rows, left) if left > 1 else shape, torch.float32)
        tail = (rows, length, not interpreted(), size, p)
        call.launch(Fixed(part_sums_kernel, ceil_div(rows, p) * left, tail, 4), (source, name))
        length = left
    return name
