"""The host side of `linear_sparse_int4` for CUDA tensors: which launch, and which of its tiles."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.sm90_sparse24_w4a16_gemv.host import add_product, launch_for
from fast.kernels.triton_sparse24_small_m import arrange
from fast.kernels.triton_sparse24_small_m.dense import COLUMNS as PAIR
from fast.kernels.triton_sparse24_small_m.dense import STEPS, TILE, WARPS, dense_kernel
from fast.kernels.triton_sparse24_small_m.mma_sparse import (
    COLUMNS,
    WORDS_OF_TURN,
    triton_sparse24_small_m_kernel,
)
from fast.kernels.triton_sparse24_small_m.tilings import Tiling, is_wide, tiling_of
from fast.kernels.triton_sparse24_small_m.weight_reads import ROWS, TURN
from fast.launch.launcher import FLOAT_NAMES, INT32, Call, CompiledLaunch, ceil_div, interpreted, same_device

#: Beyond as many rows of inputs the weight is made dense for the call.
MOST_ROWS = 64
INPUTS = (torch.bfloat16, torch.float16)
WIDE_REGISTERS = 128
NAMES = ("x", "codes", "metadata", "scale", "bias", "y")
OPERANDS = (*NAMES[:5], "zero")


def linear_sparse_int4(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
    key: Any = None,
    tiling: Tiling | None = None,
    zero: torch.Tensor | None = None,
    family: str = "triton_sparse24_small_m",
) -> torch.Tensor | None:
    """Operands of `check_operands`; None where a family does not take them: other floats, no rows or more than MOST_ROWS, zero
    points by this kernel.

    family: of `fast.gemm.choose`. tiling: of this kernel, by default that of `tiling_of`.
    """
    rows, length = codes.shape[0], 4 * codes.shape[1]
    count = x.numel() // length if length else 0
    if not _served(x, bias) or not same_device(x, codes, metadata, scale, bias, zero):
        return None
    if not 0 < count <= MOST_ROWS or not rows or count * max(rows, length) > INT32:
        return None
    gemv = launch_for(x, codes, scale, group, zero=zero) if family == "sm90_sparse24_w4a16_gemv" else None
    if gemv is None and (zero is not None or family != "triton_sparse24_small_m"):
        return None
    given = (x, codes, metadata, scale, bias, zero)
    call = Call(dict(zip(OPERANDS, given, strict=True)), words=NAMES[:3])
    if gemv is not None:
        add_product(call, gemv)
    else:
        by_tiles(call, rows, length, group, count, tiling or tiling_of(rows, length, group, count))
    y: torch.Tensor = call.result("y", key)
    return y


def by_tiles(call: Call, rows: int, length: int, group: int, count: int, tiling: Tiling) -> None:
    """Make y by `triton_sparse24_small_m_kernel`; ValueError where its tiles do not go with the product."""
    x, scale = call.inputs["x"], call.inputs["scale"]
    assert x is not None
    assert scale is not None
    storage = "float32" if scale.dtype == torch.float32 else "bfloat16"
    if tiling.wide and not is_wide(length, group, tiling):
        raise ValueError(
            f"{tiling}: wide reads are of pairs of turns of a K that 256 divides, of groups of at least 64 columns, of "
            f"inputs in place; K is {length}, the group {group}"
        )
    launch = launch_of(rows, length, group, count, storage, FLOAT_NAMES[x.dtype], tiling)
    names = NAMES
    if tiling.arranged:
        arranging, words = arrange_launch_of(length, group, count, launch.grid[1], tiling)
        call.allocate("arranged", (words,), torch.int32)
        call.launch(arranging, ("x", "arranged"))
        names = ("arranged", *NAMES[1:])
    call.allocate("y", (*x.shape[:-1], rows), x.dtype)
    call.launch(launch, names)


def _served(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return x.dtype in INPUTS and (bias is None or bias.dtype in FLOAT_NAMES) and not interpreted()


def launch_of(
    rows: int, length: int, group: int, count: int, storage: str, dtype: str, tiling: Tiling
) -> CompiledLaunch:
    """The launch of `triton_sparse24_small_m_kernel` with these tiles."""
    few = rows < ROWS.value * tiling.tiles
    tiles = 1 if few else tiling.tiles
    columns = tiling.sums * COLUMNS.value // tiling.parts(group)
    grid = (ceil_div(rows, ROWS.value * tiles), ceil_div(count, columns), 1)
    tail = (
        count, rows, length, group, tiling.warps_k, tiling.chunks, tiling.ahead, tiles, tiling.sums, rows < ROWS.value,
        tiling.arranged, tiling.wide, storage, dtype, True,
    )  # fmt: skip
    # Reads of two turns ask for more registers than four programs of four warps have, and need no more.
    limit = {"maxnreg": WIDE_REGISTERS} if tiling.wide and tiles > 1 else {}
    return CompiledLaunch(
        triton_sparse24_small_m_kernel, grid, tail, tiling.warps_k, launch_pdl=True, **limit
    )


def arrange_launch_of(
    length: int, group: int, count: int, programs: int, tiling: Tiling
) -> tuple[CompiledLaunch, int]:
    """The launch of `arrange_kernel` in front of `programs` along rows of X, and the words that it writes."""
    step = TURN.value * tiling.chunks * tiling.warps_k
    turns, columns = ceil_div(length, step) * step // TURN.value, programs * tiling.sums
    launch = CompiledLaunch(
        arrange.arrange_kernel, (turns, columns, 1), (count, length, group, turns, True), arrange.WARPS.value, launch_pdl=True
    )  # fmt: skip
    return launch, turns * columns * WORDS_OF_TURN.value


def sparse_int4_dense(
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    group: int,
    key: Any = None,
    zero: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The dense weight in a 16-bit dtype; None for others and where the kernel does not take the tensors."""
    if dtype not in INPUTS or not codes.numel() or not same_device(codes, metadata, scale, zero):
        return None
    given = {"codes": codes, "metadata": metadata, "scale": scale, "zero": zero}
    call = Call(given)
    call.allocate("w", (codes.shape[0], 4 * codes.shape[1]), dtype)
    storage = "float32" if scale.dtype == torch.float32 else "bfloat16"
    pairs = 4 * codes.numel() // PAIR
    tail = (pairs, group // PAIR, storage, FLOAT_NAMES[dtype], TILE, STEPS)
    call.launch(
        CompiledLaunch(dense_kernel, ceil_div(pairs, TILE * STEPS), tail, WARPS),
        ("codes", "metadata", "scale", "zero", "w"),
    )
    w: torch.Tensor = call.result("w", key)
    return w


__all__ = [
    "MOST_ROWS",
    "Tiling",
    "arrange_launch_of",
    "launch_of",
    "linear_sparse_int4",
    "sparse_int4_dense",
    "tiling_of",
]
