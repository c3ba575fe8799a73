"""`linear_of_codes` of several rows of int8 codes on a GPU: the launches of a shape, by its tiles (`tiles`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.int_scaled_mm.kernel import add_int_parts_kernel, int_scaled_mm_kernel
from fast.kernels.int_scaled_mm.tiles import TOGETHER, Tile, tile_of
from fast.kernels.quantize.geometry import ceil_div
from fast.kernels.scaled_mm.host import PART, STEP
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import CompiledLaunch, DescriptorLaunch, Matrix, interpreted, same_device
from reference import Quantized, Scheme

Launches = tuple[DescriptorLaunch, CompiledLaunch | None]


def linear_of_codes(
    x: Quantized,
    w: Quantized,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    key: Any,
    tile: Tile | None = None,
) -> torch.Tensor | None:
    """The product of rows of codes, or None where the kernel does not take them. key: of the call; see `launch.cache`.

    tile: another one than the rule's, to be measured beside it.
    """
    (m, _), n = x.shape, w.shape[0]
    given: Mapping[str, torch.Tensor | None] = {
        "x": x.codes, "x_scale": x.scale, "x_zero": x.zero, "codes": w.codes, "scale": w.scale, "bias": bias
    }  # fmt: skip
    launches = launches_for(x.scheme, w.scheme, (m, *w.shape), dtype, tile)
    if launches is None or not same_device(*given.values()):
        return None
    call = Call(given)
    first, second = launches
    if second is None:
        call.allocate("y", (m, n), dtype)
        call.launch(first, ["x", "codes", "x_scale", "x_zero", "scale", "bias", "y", None])
    else:
        call.allocate("parts", (first.grid[1], m, n), torch.int32)
        call.launch(first, ["x", "codes", None, "x_zero", None, None, None, "parts"])
        call.allocate("y", (m, n), dtype)
        call.launch(second, ["parts", "x_scale", "scale", "bias", "y"])
    made: torch.Tensor = call.result("y", key, x.scheme)
    return made


def launches_for(
    x: Scheme, w: Scheme, shape: tuple[int, ...], dtype: torch.dtype, tile: Tile | None = None
) -> Launches | None:
    """The launches of rows of codes times a weight of codes; None where there are none.

    shape: M, N and K. None are lengths that are no multiple of 16, of nothing at all, other elements and other dtypes.
    """
    elements = x.element == w.element == "int8"
    if not elements or dtype not in FLOAT_NAMES or not all(shape) or shape[2] % STEP:
        return None
    m, n, k = shape
    each = x.scale.block == -1, w.scale.block == -1
    return _launch(each, (m, n, k), FLOAT_NAMES[dtype], tile or tile_of(m, n, k))


@lru_cache(maxsize=4096)
def _launch(each: tuple[bool, bool], shape: tuple[int, int, int], dtype: str, tile: Tile) -> Launches:
    """The tiles, and where K is split the sum of its parts."""
    m, n, k = shape
    matrices = (
        Matrix(torch.int8, (m, k), (tile.rows, tile.length)),
        Matrix(torch.int8, (n, k), (tile.columns, tile.length)),
    )
    tail = (
        m, n, k, tile.rows, tile.columns, tile.length, tile.splits, tile.swap, TOGETHER, *each, dtype, tile.stages,
        not interpreted(),
    )  # fmt: skip
    grid = (ceil_div(m, tile.rows) * ceil_div(n, tile.columns), tile.splits, 1)
    first = DescriptorLaunch(int_scaled_mm_kernel, grid, tail, tile.warps, matrices, launch_pdl=True)
    return first, None if tile.splits == 1 else _parts(each, m, n, dtype, tile)


def _parts(each: tuple[bool, bool], m: int, n: int, dtype: str, tile: Tile) -> CompiledLaunch:
    tail = (m, n, PART, tile.splits, *each, dtype, not interpreted())
    return CompiledLaunch(add_int_parts_kernel, m * ceil_div(n, PART), tail, 4, launch_pdl=True)


__all__ = ["launches_for", "linear_of_codes"]
