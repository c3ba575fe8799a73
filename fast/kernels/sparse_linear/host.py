"""The host side of `linear_sparse_int4` for CUDA tensors: which launch, and which of its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fast.kernels.launch.call import FLOAT_NAMES, Call
from fast.kernels.launch.launcher import CompiledLaunch, interpreted, same_device
from fast.kernels.quantize.geometry import INT32, ceil_div
from fast.kernels.sparse_linear.dense import GROUPS, TILE, WARPS, dense_kernel
from fast.kernels.sparse_linear.mma_sparse import COLUMNS, ROWS, TURN, mma_sparse_kernel

#: Beyond as many rows of inputs the weight is made dense for the call.
MOST_ROWS = 64
INPUTS = (torch.bfloat16, torch.float16)
#: The most column tiles and row tiles of a program, so that three programs of four warps have a multiprocessor's registers.
MOST_SUMS, MOST_TILES = 4, 2
#: Warps that keep an H200 busy, and the most of a program.
BUSY, MOST_WARPS_K = 1700, 16
#: Multiprocessors of an H200: with fewer programs of two row tiles, one row tile.
FULL = 2 * 132
NAMES = ("x", "codes", "metadata", "scale", "bias", "y")


@dataclass(frozen=True)
class Tiling:
    """Row tiles and column tiles of a program, its warps along K, turns that a warp takes at once, and whether it reads them
    one step before."""

    tiles: int
    sums: int
    warps_k: int
    chunks: int
    ahead: bool = False


def linear_sparse_int4(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
    key: Any = None,
    tiling: Tiling | None = None,
) -> torch.Tensor | None:
    """Operands of `check_operands`; None where the kernel does not take them: other floats, no rows or more than MOST_ROWS.

    tiling: one that was measured to be faster; without one `tiling_of`.
    """
    rows, length = codes.shape[0], 4 * codes.shape[1]
    count = x.numel() // length if length else 0
    if not _served(x, bias) or not same_device(x, codes, metadata, scale, bias):
        return None
    if not 0 < count <= MOST_ROWS or not rows or count * max(rows, length) > INT32:
        return None
    storage = "float32" if scale.dtype == torch.float32 else "bfloat16"
    tiling = tiling or tiling_of(rows, length, group, count)
    launch = launch_of(rows, length, group, count, storage, FLOAT_NAMES[x.dtype], tiling)
    given = (x, codes, metadata, scale, bias)
    call = Call(dict(zip(NAMES, given, strict=False)), words=("x", "codes", "metadata"))
    call.allocate("y", (*x.shape[:-1], rows), x.dtype)
    call.launch(launch, NAMES)
    y: torch.Tensor = call.result("y", key)
    return y


def _served(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return x.dtype in INPUTS and (bias is None or bias.dtype in FLOAT_NAMES) and not interpreted()


def tiling_of(rows: int, length: int, group: int, count: int) -> Tiling:
    """The tiles of a product of `count` rows: as many warps as an H200 keeps busy, two turns at once where K allows."""
    parts = max(1, TURN.value // group)
    sums = next(n for n in (1, 2, MOST_SUMS) if n >= min(MOST_SUMS, ceil_div(count * parts, COLUMNS.value)))
    tiles = MOST_TILES if ceil_div(rows, ROWS.value * MOST_TILES) >= FULL else 1
    chunks = 2 if length % (2 * TURN.value) == 0 and sums == 1 else 1
    programs = ceil_div(rows, ROWS.value * tiles) * ceil_div(count * parts, COLUMNS.value * sums)
    warps_k = 1
    while (
        warps_k < MOST_WARPS_K and programs * warps_k < BUSY and 2 * warps_k * chunks * TURN.value <= length
    ):
        warps_k *= 2
    return Tiling(tiles, sums, warps_k, chunks)


def launch_of(
    rows: int, length: int, group: int, count: int, storage: str, dtype: str, tiling: Tiling
) -> CompiledLaunch:
    """The launch of `mma_sparse_kernel` with these tiles."""
    few = rows < ROWS.value * tiling.tiles
    tiles = 1 if few else tiling.tiles
    columns = tiling.sums * COLUMNS.value // max(1, TURN.value // group)
    grid = (ceil_div(rows, ROWS.value * tiles), ceil_div(count, columns), 1)
    tail = (
        count, rows, length, group, tiling.warps_k, tiling.chunks, tiling.ahead, tiles, tiling.sums, rows < ROWS.value, storage,
        dtype, True,
    )  # fmt: skip
    return CompiledLaunch(mma_sparse_kernel, grid, tail, tiling.warps_k, launch_pdl=True)


def sparse_int4_dense(
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    group: int,
    key: Any = None,
) -> torch.Tensor | None:
    """The dense weight in a 16-bit dtype; None for others and where the kernel does not take the tensors."""
    if dtype not in INPUTS or not codes.numel() or not same_device(codes, metadata, scale):
        return None
    call = Call({"codes": codes, "metadata": metadata, "scale": scale}, words=("metadata",))
    call.allocate("w", (codes.shape[0], 4 * codes.shape[1]), dtype)
    storage = "float32" if scale.dtype == torch.float32 else "bfloat16"
    octets = codes.numel() // GROUPS
    tail = (octets, group // (4 * GROUPS), storage, FLOAT_NAMES[dtype], TILE)
    call.launch(
        CompiledLaunch(dense_kernel, ceil_div(octets, TILE), tail, WARPS),
        ("codes", "metadata", "scale", "w"),
    )
    w: torch.Tensor = call.result("w", key)
    return w


__all__ = ["MOST_ROWS", "Tiling", "launch_of", "linear_sparse_int4", "sparse_int4_dense", "tiling_of"]
