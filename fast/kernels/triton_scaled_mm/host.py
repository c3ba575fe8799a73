"""`linear_of_codes` of several rows on a GPU: the launches of a shape, by its tiles (`tiles`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.triton_scaled_mm.kernel import (
    add_parts_kernel,
    triton_int_scaled_mm_kernel,
    triton_scaled_mm_kernel,
)
from fast.kernels.triton_scaled_mm.tiles import TOGETHER, Tile, int_tile_of, tile_of
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import CompiledLaunch, DescriptorLaunch, Matrix, ceil_div, interpreted, same_device
from reference import Quantized, Scheme

#: Elements that the kernels take, and torch's dtypes of them: 8-bit floats by each other, int8 by int8.
ELEMENTS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "int8": torch.int8}
INTEGER = "int8"
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
    tile: Tile | None = None,
) -> torch.Tensor | None:
    """The product of rows of codes, or None where the kernel does not take them. key: of the call; see `dispatch`.

    fast_sums: of floats; see `tiles.tile_of`. tile: another one than the rule's, to be measured beside it.
    """
    (m, _), n = x.shape, w.shape[0]
    given: Mapping[str, torch.Tensor | None] = {
        "x": x.codes, "x_scale": x.scale, "x_zero": x.zero, "codes": w.codes, "scale": w.scale, "bias": bias
    }  # fmt: skip
    launches = launches_for(x.scheme, w.scheme, (m, *w.shape), dtype, fast_sums, tile)
    if launches is None or not same_device(*given.values()):
        return None
    call = Call(given)
    first, second = launches
    zero = ["x_zero"] if x.scheme.element == INTEGER else []
    if second is None:
        call.allocate("y", (m, n), dtype)
        call.launch(first, ["x", "codes", "x_scale", *zero, "scale", "bias", "y", None])
    else:
        call.allocate("parts", (first.grid[1], m, n), torch.int32 if zero else torch.float32)
        call.launch(first, ["x", "codes", None, *zero, None, None, None, "parts"])
        call.allocate("y", (m, n), dtype)
        call.launch(second, ["parts", "x_scale", "scale", "bias", "y"])
    y: torch.Tensor = call.result("y", key, x.scheme)
    return y


def launches_for(
    x: Scheme,
    w: Scheme,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fast_sums: bool = False,
    tile: Tile | None = None,
) -> Launches | None:
    """The launches of rows of codes times a weight of codes; None where there are none.

    shape: M, N and K. None are lengths that are no multiple of 16, of nothing at all, other elements and other dtypes.
    """
    alike = (
        x.element in ELEMENTS and w.element in ELEMENTS and (x.element == INTEGER) == (w.element == INTEGER)
    )
    if not alike or dtype not in FLOAT_NAMES or not all(shape) or shape[2] % STEP:
        return None
    m, n, k = shape
    each = x.scale.block == -1, w.scale.block == -1
    if x.element == INTEGER:
        return _launches(x.element, w.element, each, (m, n, k), dtype, tile or int_tile_of(m, n, k))
    return _launches(
        x.element, w.element, each, (m, n, k), dtype, tile or tile_of(m, n, k, fast_sums), fast_sums
    )


@lru_cache(maxsize=4096)
def _launches(
    x: str, w: str, each: tuple[bool, bool], shape: tuple[int, int, int], dtype: torch.dtype, tile: Tile,
    fast_sums: bool = True,
) -> Launches:  # fmt: skip
    """The tiles, and where K is split the sum of its parts."""
    (m, n, k), name, use_pdl = shape, FLOAT_NAMES[dtype], not interpreted()
    matrices = (
        Matrix(ELEMENTS[x], (m, k), (tile.rows, tile.length)),
        Matrix(ELEMENTS[w], (n, k), (tile.columns, tile.length)),
    )
    grid = (ceil_div(m, tile.rows) * ceil_div(n, tile.columns), tile.splits, 1)
    kernel = triton_int_scaled_mm_kernel if x == INTEGER else triton_scaled_mm_kernel
    of_kernel = TOGETHER if x == INTEGER else not fast_sums
    # Parts are the same for all scales and dtypes.
    scaled = (*each, name) if tile.splits == 1 or x == INTEGER else (False, False, "float32")
    tail = (
        m, n, k, tile.rows, tile.columns, tile.length, tile.splits, tile.swap, of_kernel, *scaled, tile.stages, use_pdl
    )  # fmt: skip
    first = DescriptorLaunch(kernel, grid, tail, tile.warps, matrices, launch_pdl=True)
    if tile.splits == 1:
        return first, None
    parts = (m, n, PART, tile.splits, *each, name, use_pdl)
    return first, CompiledLaunch(add_parts_kernel, m * ceil_div(n, PART), parts, 4, launch_pdl=True)


__all__ = ["ELEMENTS", "INTEGER", "launches_for", "linear_of_codes"]
