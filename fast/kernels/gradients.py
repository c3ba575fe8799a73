"""`fake_quantize_vjp` of torch tensors by kernels; see `reference.fake_quantize` for what the gradients are.

Scales computed from x take the passes of the forward function with a mask at the end. Given ones are parameters: `slopes` makes
their gradients and dx in one pass, and adds up what the parts of large blocks leave.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fast import ready
from fast.kernels import passes
from fast.kernels.geometry import CHUNK, Geometry, _columns, _flat, ceil_div, power_above
from fast.kernels.launch import interpreted, together
from fast.kernels.passes import Asked
from fast.kernels.plans import NAMES
from fast.kernels.quantizer import (
    PARTS,
    asked_of,
    check_words,
    given_kind,
    inputs,
    prepared,
)
from fast.kernels.replay import picked
from fast.kernels.rule import rule_of
from fast.kernels.slopes import part_sums_kernel, slopes_kernel
from reference import Scales
from reference.arrays import namespace_of
from reference.blocks import Blocks
from reference.given import check_scales, given_scales, usable
from reference.rounding import check_mode
from reference.schemes import Scheme, scheme_of

Gradients = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
# Elements of a tile of parts, and of slopes in a thread: two sums and their terms are held at once.
PARTS_TILE = 2048
PER_THREAD = 16
INPUTS = ("x", "g", "words", "scale", "divisor", "outer", "zero")


def gradient(
    g: torch.Tensor, x: torch.Tensor, asked_scheme: str | Scheme, axis: int, words: Any, scales: Any
) -> Gradients | None:
    """(dx, dscale, dzero), or None where the reference has to answer or to refuse."""
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
        key = ready.gradient_key(g, x, asked_scheme, axis) if words is None and given is None else None
        return _masked(g, x, of, words, given, key, asked_scheme), None, None
    return _sloped(g, x, of, words, given)


def _masked(
    g: torch.Tensor, x: torch.Tensor, of: Asked, words: Any, given: Scales | None, key: Any, asked_scheme: str | Scheme
) -> torch.Tensor:  # fmt: skip
    """dx for scales from x, or under a given outer scale; answers the next call with this key, if it has one."""
    tensors = {**inputs(x, given, words), "g": g.contiguous()}
    kind = given_kind(given)
    plan = prepared(("mask", of.dtype, of.scheme, of.blocks, kind), lambda: passes.masking(of, kind))
    y = plan(tensors, x.device)["y"]
    if key is not None:
        plan.remember(key, asked_scheme, {"g": g, "x": x}, picked("y"))
    return y  # type: ignore[no-any-return]


def _sloped(g: torch.Tensor, x: torch.Tensor, of: Asked, words: Any, given: Scales) -> Gradients | None:
    """Gradients for given scales."""
    tiles = _tiles(of)
    if tiles is None:
        return None
    tensors, scheme = {**inputs(x, given, words), "g": g.contiguous()}, of.scheme
    if of.rule.two_level:
        ns = namespace_of(x)
        chosen = usable(ns, given_scales(ns, given, of.blocks, scheme), scheme)
        divisor = chosen.exact if scheme.codes_from == "exact" else chosen.scale
        tensors.update(scale=_flat_floats(chosen.scale), divisor=_flat_floats(divisor), outer=None, zero=None)
        scheme = passes.first_level(scheme)
    parts = (tiles.place.blocks, tiles.place.integers[5])
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums = [_floats(parts, x) for _ in range(1 if of.scheme.zero is None else 2)]
    with torch.cuda.device_of(x):
        _launch(tensors, (y, *sums, None)[:3], of, scheme, tiles)
        made = [_total(part).reshape(of.blocks.scale_shape) for part in sums]
    return y, made[0], made[1] if len(made) > 1 else None


def _flat_floats(bits: torch.Tensor) -> torch.Tensor:
    """int32 patterns as a flat float32 tensor."""
    return bits.reshape(-1).contiguous().view(torch.float32)


def _floats(shape: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """An array for sums."""
    return torch.empty(shape, dtype=torch.float32, device=x.device)


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
        return _Tiles(_flat(prod(of.blocks.shape), place.integers[3], CHUNK) if flat else place)
    _, after, rows, size, length, *_ = place.integers
    block = of.blocks.block if isinstance(of.blocks.block, int) else -1
    if block > 4 * power_above(length):
        return None
    # A block that is longer than its axis is filled like any short one.
    return _Tiles(_columns(place.blocks // (rows * after), length, after, max(size, block), CHUNK))


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


def _launch(tensors: dict[str, Any], outputs: Any, of: Asked, scheme: Scheme, tiles: _Tiles) -> None:
    """dx and the sums of blocks, or of their parts."""
    place, elements = tiles.place, tiles.place.p * tiles.place.size
    slopes_kernel[(place.programs,)](
        *(tensors.get(name) for name in INPUTS), *outputs, *place.integers, RULE=rule_of(scheme, of.dtype, of.hardware),
        MARKING=rule_of(scheme, of.dtype, of.hardware, True), SHAPE=place.shape, CHUNKED=place.chunked, MASKED=place.masked,
        WIDE=place.wide, TURNED=tiles.turned, SPLIT=tiles.split, SIZE=place.size, INNER=place.inner, P=place.p,
        num_warps=max(1, min(16, elements // (32 * PER_THREAD))), enable_fp_fusion=False,
    )  # fmt: skip


def _total(parts: torch.Tensor) -> torch.Tensor:
    """Sums of the rows of a float32 matrix, in the order of the tree."""
    while parts.shape[1] > 1:
        rows, length = parts.shape
        size = min(PARTS_TILE, power_above(length))
        p = max(1, min(PARTS_TILE // size, power_above(rows)))
        sums = _floats((rows, ceil_div(length, size)), parts)
        part_sums_kernel[(ceil_div(rows, p) * sums.shape[1],)](
            parts, sums, rows, length, NATIVE=not interpreted(), SIZE=size, P=p, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        parts = sums
    return parts
