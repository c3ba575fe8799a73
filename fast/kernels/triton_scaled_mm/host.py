"""`linear_of_codes` of several rows on a GPU: which tiles `scaled_mm` and `int_scaled_mm` take for a shape, for which shapes
the first was measured to beat `torch._scaled_mm`, and what is launched.

A weight that few rows are multiplied by is read once, at the speed of the memory if enough of it is under way on
every multiprocessor: tiles have 64 of its rows where these are many, and parts of K besides (split K) where they are
few. torch's products with a scale for each row make tiles of 128 x 128, one for a multiprocessor, along all of K:
what leaves half of the multiprocessors without one is slow, however many rows it has. Of int8, from as many rows on
as give most multiprocessors a tile of 256 x 128, that is the tile: a byte that is read into shared memory serves 171
products there, 128 in squares of 128 (times: reports/LOG.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from fast.cost import Coefficients, holds
from fast.kernels.triton_scaled_mm.kernel import (
    add_parts_kernel,
    triton_int_scaled_mm_kernel,
    triton_scaled_mm_kernel,
)
from fast.launch.cuda import MULTIPROCESSORS
from fast.launch.launcher import (
    FLOAT_NAMES,
    Call,
    CompiledLaunch,
    DescriptorLaunch,
    Matrix,
    ceil_div,
    interpreted,
    same_device,
)
from reference import Quantized, Scheme

C = Coefficients("triton_scaled_mm")


@dataclass(frozen=True)
class Tile:
    """(rows, columns) of the result, and how it is made.

    length: elements along K in a step. splits: parts of K. stages: steps in flight. swap: whether the weight is the tensor
    core's first operand, which has at least 64 rows. together: tiles along M that programs at work at a time have; 1: they have
    a row of tiles each after the other.
    """

    rows: int
    columns: int
    length: int
    splits: int
    stages: int
    warps: int
    swap: bool
    together: int = 1


#: The tile of whole waves of many rows, fast sums: three bytes are read where two squares read four. Precise sums would keep
#: both the tensor core's and their own in registers, which have no room for that.
WIDE = Tile(128, 256, 128, 1, 4, 8, False, 8)


def tile_of(m: int, n: int, k: int, fast_sums: bool) -> Tile:
    """The tile for M, N and K. Sums that are not fast end after 128 elements, and so do steps."""
    few = m <= C.few_rows
    if (
        fast_sums
        and not few
        and ceil_div(m, WIDE.rows) * ceil_div(n, WIDE.columns) >= C.wide * MULTIPROCESSORS
    ):
        return WIDE
    tile = _of_few_rows(m, n, k) if few else _of_many_rows(m, n, k)
    if not fast_sums and tile.length > 128:
        tile = replace(tile, length=128, stages=8)
    return tile


def _of_few_rows(m: int, n: int, k: int) -> Tile:
    """Two programs on a multiprocessor where there are enough, else one with twice as much in flight."""
    rows = next(rows for rows in (16, 32, 64, 128) if m <= rows)
    tiles = -(-n // 64)
    if tiles > MULTIPROCESSORS:
        return Tile(rows, 64, 128, 1, 5, 4, True)
    if rows == 64 and -(-n // 32) <= MULTIPROCESSORS and (tiles >= 32 or k < C.long):
        return Tile(rows, 32, 256, 1, 6, 4, False)
    return Tile(rows, 64, 256, _splits(tiles, k), 4, 4, True)


def _of_many_rows(m: int, n: int, k: int) -> Tile:
    """Squares where these leave less than half of the multiprocessors without one: a quarter fewer bytes are read."""
    if 2 * -(-m // 128) * -(-n // 128) > MULTIPROCESSORS:
        return Tile(128, 128, 128, 1, 5, 8, False)
    return Tile(128, 64, 128, _splits(-(-m // 128) * -(-n // 64), k), 6, 4, False)


def _splits(tiles: int, k: int) -> int:
    """Parts of K, a power of two, so that there is work for every multiprocessor."""
    splits = 1
    while k >= C.long and splits < C.most_splits and 2 * splits * tiles <= MULTIPROCESSORS:
        splits *= 2
    return splits


def is_faster(m: int, n: int, k: int, *, rowwise: bool, fast_sums: bool) -> bool:
    """Whether products of this shape were measured to beat torch's, with a graph of launches and launched one by one.

    rowwise: each row has a scale, of one of the operands at least. With one scale for each matrix torch takes cuBLAS, which
    makes smaller tiles and parts of K of its own, and no shape is known that gains for all rows.
    """
    facts = {
        "rows": m, "n": n, "k": k, "fast_sums": fast_sums, "whole": m % 128 == 0,
        "tiles": ceil_div(m, 128) * ceil_div(n, 128),
    }  # fmt: skip
    measured = k % 256 == 0 and n % 64 == 0 and any(holds(row, facts) for row in C.measured)
    return bool(rowwise) and measured and any(holds(row, facts) for row in C.faster)


#: The tile of many rows.
MANY = Tile(256, 128, 128, 1, 4, 8, False)


#: Tiles along M that programs at work at a time have (`_tile_of` of the kernel).
TOGETHER = 8


def int_tile_of(m: int, n: int, k: int) -> Tile:
    """The tile for M, N and K."""
    if m > C.few_rows and ceil_div(m, MANY.rows) * ceil_div(n, MANY.columns) >= C.many * MULTIPROCESSORS:
        return MANY
    return _of_few_rows(m, n, k) if m <= C.few_rows else _of_many_rows(m, n, k)


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
    of_kernel = (TOGETHER,) if x == INTEGER else (tile.together, not fast_sums)
    # Parts are the same for all scales and dtypes.
    scaled = (*each, name) if tile.splits == 1 or x == INTEGER else (False, False, "float32")
    tail = (
        m, n, k, tile.rows, tile.columns, tile.length, tile.splits, tile.swap, *of_kernel, *scaled, tile.stages, use_pdl
    )  # fmt: skip
    first = DescriptorLaunch(kernel, grid, tail, tile.warps, matrices, launch_pdl=True)
    if tile.splits == 1:
        return first, None
    parts = (m, n, PART, tile.splits, *each, name, use_pdl)
    return first, CompiledLaunch(add_parts_kernel, m * ceil_div(n, PART), parts, 4, launch_pdl=True)


__all__ = ["ELEMENTS", "INTEGER", "int_tile_of", "is_faster", "launches_for", "linear_of_codes", "tile_of"]
