"""The host side of `linear_sparse_int4` for CUDA tensors: which launch, and which of its tiles, by a small model that tests
hold to the times of a GPU.

Times are a reading of the weight and, of several rows of X in place, of X: a read of a lane's pairs of eight rows is one of
eight lines of the cache, and a multiprocessor does one line a cycle,

    lines of a multiprocessor = programs on it * turns * column tiles of a program * 16 * min(rows, 8)

which is half of the time of 16 rows by a large weight (times: reports/LOG.md). So

* one to `few_rows` rows: reading the weight is all. Starting and ending a warp takes so long that there are as few as keep the
  memory busy, two a scheduler, but none has more than `most_work` turns of 128 columns by 16 rows. It reads up to `at_once` of
  those at once, in two steps at least.
* more rows in place: two row tiles and all columns in a program, whose lines then are fewest, where such programs are on most
  multiprocessors; else columns, then rows are programs of their own. Four warps, as more bring no line fewer.
  Codes, metadata and scales are 48 lines of a turn and row tile, of which reads of two turns (`weight_reads`) leave 32.
* several rows, arranged (`arrange`): X costs an eighth as much, and the first rule holds, but for columns of sums, which become
  programs of their own as in the second. To arrange is a launch: it pays where rows and weight together are
  as large as four rows of a weight (1024, 4096), and never for one row.
* one row and two row tiles in a program, and two rows where arranging does not pay: a read of the weight is of two turns
  (`weight_reads`), which was slower with other tiles and with more rows.

`reports/gpu/family_times.csv` has the times for the last two, of up to 16 rows and groups of
128; what has none is read in place, one turn at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fast.cost import Coefficients
from fast.kernels.sm90_sparse24_w4a16_gemv.host import add_product, launch_for
from fast.kernels.triton_sparse24_small_m import arrange
from fast.kernels.triton_sparse24_small_m.dense import COLUMNS as PAIR
from fast.kernels.triton_sparse24_small_m.dense import STEPS, TILE, WARPS, dense_kernel
from fast.kernels.triton_sparse24_small_m.mma_sparse import (
    COLUMNS,
    WORDS_OF_TURN,
    triton_sparse24_small_m_kernel,
)
from fast.kernels.triton_sparse24_small_m.weight_reads import ROWS, TURN
from fast.launch.launcher import FLOAT_NAMES, INT32, Call, CompiledLaunch, ceil_div, interpreted, same_device

C = Coefficients("triton_sparse24_small_m")


@dataclass(frozen=True)
class Tiling:
    """Row tiles and column tiles of a program, its warps along K, turns that a warp takes at once, whether it reads them
    one step before, whether X is arranged first, and whether a read of the weight is of two turns (`weight_reads`)."""

    tiles: int
    sums: int
    warps_k: int
    chunks: int
    ahead: bool = False
    arranged: bool = False
    wide: bool = False

    def parts(self, group: int) -> int:
        """Scales of the columns that four lanes read at once: columns of sums that a row of X has."""
        return max(1, TURN.value * (2 if self.wide else 1) // group)


def tiling_of(rows: int, length: int, group: int, count: int) -> Tiling:
    """The tiles of a product of `count` rows of X by a weight (rows, length) with scales of `group` columns."""
    result = in_place(rows, length, group, count)
    if group < TURN.value:
        return result
    if C.arranged[0] <= count <= C.arranged[1] and count * rows * length >= C.arranged_work:
        return arranged_bound(rows, length, group, count)
    wide = count <= C.wide_up_to and (count > 1 or result.tiles > 1)
    return (wide and widened(result, length, group, count)) or result


def in_place(rows: int, length: int, group: int, count: int) -> Tiling:
    """Where X is read as it is."""
    return (weight_bound if count <= C.few_rows else input_bound)(rows, length, group, count)


def arranged_bound(rows: int, length: int, group: int, count: int) -> Tiling:
    """Where X is arranged: reading the weight is all, unless programs of all columns were on few multiprocessors."""
    result = weight_bound(rows, length, group, count)
    programs = ceil_div(rows, ROWS.value * result.tiles) * ceil_div(_columns(group, count), result.sums)
    return replace(result if programs >= C.spread else input_bound(rows, length, group, count), arranged=True)


def widened(tiling: Tiling, length: int, group: int, count: int) -> Tiling | None:
    """The same with reads of two turns, in as many steps; None where K is not whole steps, or the group or the columns of sums
    are not for that."""
    result = replace(tiling, wide=True)
    if tiling.chunks == 1:
        result = replace(result, chunks=2, warps_k=max(1, tiling.warps_k // 2))
    whole = length % (result.warps_k * result.chunks * TURN.value) == 0
    fits = (
        whole
        and is_wide(length, group, result)
        and count * result.parts(group) <= result.sums * COLUMNS.value
    )
    return result if fits else None


def is_wide(length: int, group: int, tiling: Tiling) -> bool:
    """Whether reads of two turns serve: pairs of turns of which all exist or none, at most four scales in one."""
    pairs = length % (2 * TURN.value) == 0 and tiling.chunks % 2 == 0
    return pairs and 2 * group >= TURN.value and not tiling.arranged


def weight_bound(rows: int, length: int, group: int, count: int) -> Tiling:
    """Where reading the weight is all."""
    columns = _columns(group, count)
    tiles = C.most_tiles if ceil_div(rows, ROWS.value * C.most_tiles) >= C.full else 1
    sums = _sums(columns)
    programs = ceil_div(rows, ROWS.value * tiles) * ceil_div(columns, sums)
    turns = ceil_div(length, TURN.value)
    wanted = max(C.busy, programs * tiles * turns // C.most_work)
    warps_k = _warps(programs, turns, wanted, C.most_warps_k)
    # Several column tiles at two turns have more registers than two programs of more warps can.
    most = C.at_once // (tiles * sums) if sums == 1 or warps_k <= C.warps_k else 1
    return Tiling(tiles, sums, warps_k, _chunks(length, warps_k, most, 2))


def input_bound(rows: int, length: int, group: int, count: int) -> Tiling:
    """Where reading X in place takes as long as reading the weight."""
    columns = _columns(group, count)
    sums = _sums(columns)
    # Masks of parts beside four column tiles leave registers for one row tile.
    tiles = 1 if sums == C.most_sums and group < TURN.value else C.most_tiles

    def programs() -> int:
        return ceil_div(rows, ROWS.value * tiles) * ceil_div(columns, sums)

    if programs() < C.spread:
        sums = 1
    if programs() < C.spread:
        tiles = 1
    most, wanted = (C.warps_k, C.warps_k * programs()) if tiles > 1 else (C.most_warps_k, C.busy)
    warps_k = _warps(programs(), ceil_div(length, TURN.value), wanted, most)
    most_chunks = 2 if sums == 1 or (sums < C.most_sums and programs() <= C.full) else 1
    return Tiling(tiles, sums, warps_k, _chunks(length, warps_k, most_chunks, 4))


def _columns(group: int, count: int) -> int:
    """Column tiles of all rows of X."""
    return ceil_div(count * max(1, TURN.value // group), COLUMNS.value)


def _sums(columns: int) -> int:
    return next(n for n in (1, 2, C.most_sums) if n >= min(C.most_sums, columns))


def _warps(programs: int, turns: int, wanted: int, most: int) -> int:
    """Warps of a program, a power of two: so many that all are `wanted`, as far as K and `most` allow."""
    warps = 1
    while warps < most and programs * warps < wanted and 2 * warps <= turns:
        warps *= 2
    return warps


def _chunks(length: int, warps_k: int, most: int, steps: int) -> int:
    """Turns at once: at most `most`, K whole steps of them, `steps` at least."""
    fit = (
        n for n in (4, 2) if n <= most and length % (n * warps_k * TURN.value) == 0
        and length // (n * warps_k * TURN.value) >= steps
    )  # fmt: skip
    return next(fit, 1)


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
    "arranged_bound",
    "in_place",
    "input_bound",
    "is_wide",
    "launch_of",
    "linear_sparse_int4",
    "sparse_int4_dense",
    "tiling_of",
    "weight_bound",
    "widened",
]
