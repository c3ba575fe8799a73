"""`linear_of_codes` of several rows of 8-bit floats on a GPU: the launches of a shape, by its tiles (`tiles`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.quantize.geometry import ceil_div
from fast.kernels.scaled_mm.kernel import add_parts_kernel, scaled_mm_kernel
from fast.kernels.scaled_mm.tiles import Tile, tile_of
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import CompiledLaunch, DescriptorLaunch, Matrix, interpreted, same_device
from reference import Quantized, Scheme

#: Elements that the kernel takes, and torch's dtypes of them.
ELEMENTS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
#: Descriptors ask that rows are multiples of as many bytes.
STEP = 16
#: Elements of a row whose parts a program adds.
PART = 1024

Launches = tuple[DescriptorLaunch, CompiledLaunch | None]


def linear_of_codes(
    x: Quantized,
    w: Quantized,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    key: Any,
    fast_sums: bool = False,
) -> torch.Tensor | None:
    """The product of rows of codes, or None where the kernel does not take them. key: of the call; see `launch.cache`."""
    (m, _), n = x.shape, w.shape[0]
    given: Mapping[str, torch.Tensor | None] = {
        "x": x.codes, "x_scale": x.scale, "x_zero": None, "codes": w.codes, "scale": w.scale, "bias": bias
    }  # fmt: skip
    launches = launches_for(x.scheme, w.scheme, (m, *w.shape), dtype, fast_sums)
    if launches is None or not same_device(*given.values()):
        return None
    call = Call(given)
    first, second = launches
    if second is None:
        call.allocate("y", (m, n), dtype)
        call.launch(first, ["x", "codes", "x_scale", "scale", "bias", "y", None])
    else:
        call.allocate("parts", (first.grid[1], m, n), torch.float32)
        call.launch(first, ["x", "codes", None, None, None, None, "parts"])
        call.allocate("y", (m, n), dtype)
        call.launch(second, ["parts", "x_scale", "scale", "bias", "y"])
    y: torch.Tensor = call.result("y", key, x.scheme)
    return y


def launches_for(
    x: Scheme, w: Scheme, shape: tuple[int, ...], dtype: torch.dtype, fast_sums: bool = False
) -> Launches | None:
    """The launches of rows of codes times a weight of codes; None where there are none.

    shape: M, N and K. None are lengths that are no multiple of 16, of nothing at all, other elements and other dtypes.
    """
    elements = x.element in ELEMENTS and w.element in ELEMENTS
    if not elements or dtype not in FLOAT_NAMES or not all(shape) or shape[2] % STEP:
        return None
    each = x.scale.block == -1, w.scale.block == -1
    m, n, k = shape
    return _launch(x.element, w.element, each, (m, n, k), FLOAT_NAMES[dtype], fast_sums)


@lru_cache(maxsize=4096)
def _launch(
    x: str, w: str, each: tuple[bool, bool], shape: tuple[int, int, int], dtype: str, fast_sums: bool
) -> Launches:
    """The tiles, and where K is split the sum of its parts."""
    (m, n, _), tile = shape, tile_of(*shape, fast_sums)
    first = _tiles(x, w, each, shape, dtype, tile, fast_sums)
    return first, None if tile.splits == 1 else _parts(each, m, n, dtype, tile)


def _tiles(
    x: str,
    w: str,
    each: tuple[bool, bool],
    shape: tuple[int, int, int],
    dtype: str,
    tile: Tile,
    fast_sums: bool,
) -> DescriptorLaunch:
    m, n, k = shape
    matrices = (
        Matrix(ELEMENTS[x], (m, k), (tile.rows, tile.length)),
        Matrix(ELEMENTS[w], (n, k), (tile.columns, tile.length)),
    )
    # Parts are the same for all scales and dtypes.
    each, dtype = (each, dtype) if tile.splits == 1 else ((False, False), "float32")
    tail = (
        m, n, k, tile.rows, tile.columns, tile.length, tile.splits, tile.swap, not fast_sums, *each,
        dtype, tile.stages, not interpreted(),
    )  # fmt: skip
    grid = (ceil_div(m, tile.rows) * ceil_div(n, tile.columns), tile.splits, 1)
    return DescriptorLaunch(scaled_mm_kernel, grid, tail, tile.warps, matrices, launch_pdl=True)


def _parts(each: tuple[bool, bool], m: int, n: int, dtype: str, tile: Tile) -> CompiledLaunch:
    tail = (m, n, PART, tile.splits, *each, dtype, not interpreted())
    return CompiledLaunch(add_parts_kernel, m * ceil_div(n, PART), tail, 4, launch_pdl=True)
