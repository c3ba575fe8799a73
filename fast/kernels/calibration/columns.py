"""The columns of a block of GPTQ: `fast.calibration.gptq.columns_by_torch` in one launch, with the same bits.

A warp has P rows and the 128 columns of the block in float64 registers, 4 P a lane. Column by column it takes the column's
targets out by a sum in which all others are 0 (exact), rounds them by the record, and adds what that changes to the columns
behind by a row of R_ij / R_jj, which is 0 up to j. Products and sums are rounded one after the other. All lanes round the same
P elements: no exchange, and what is stored leaves by one of them.

Scales come decoded to float32, flat; an element's is number row // HEIGHT * across + column // WIDTH, whatever the shape of
blocks. Codes and values are made as `general_tile` makes those of fake quantization under given scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import read
from fast.kernels.rules.scales import floored
from fast.kernels.rules.values import combined, element_codes, loaded_zero, values
from fast.kernels.scheme.constants import constants_of
from fast.launch.launcher import CompiledLaunch, ceil_div, interpreted

#: Columns of a block.
BLOCK = 128
LARGEST = tl.constexpr(3.4028234663852886e38)
#: Warps that a GPU has room for before rows share one.
WARPS = 1024
#: Rows of a warp at most: eight take all registers, and shared memory.
MOST_ROWS = 4


@triton.jit(do_not_specialize=["rows", "length", "count", "across"])
def columns_kernel(
    moved, weights, ratios, diagonal, order, index, scale, zero, outer, change, targets, loss, rows, length, count, across,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, SCHEME: tl.constexpr,
):  # fmt: skip
    """P rows. moved (rows, SIZE), ratios (SIZE, SIZE): contiguous. weights, change: a block of (rows, length).

    targets (rows, length): in their places. index: of the rows in the matrix whose scales these are.
    """
    row = tl.program_id(0) * P + tl.arange(0, P)[:, None]
    exists = row < rows
    column = tl.arange(0, SIZE)[None, :]
    t = tl.load(moved + row.to(tl.int64) * SIZE + column, mask=exists & (column < count), other=0.0)
    begin = row.to(tl.int64) * length
    first = read(index + row, exists).to(tl.int64) // HEIGHT * across
    g = tl.full((1, 1), 1.0, tl.float32)
    divisor_outer = g
    if SCHEME.has_outer:
        g = tl.load(outer + tl.zeros((1, 1), tl.int32))
        divisor_outer = g
        if SCHEME.block_nan:
            divisor_outer = floored(g, SCHEME.outer)
    total = tl.zeros((P, 1), tl.float64)
    for j in range(0, count):
        place = tl.load(order + j)
        block = first + place // WIDTH
        s = tl.load(scale + block, mask=exists, other=1.0)
        e = s
        if SCHEME.block_nan and not SCHEME.power_of_two:
            e = floored(s, SCHEME.level)
        z = s
        if SCHEME.zero != "":
            z = loaded_zero(read(zero + block, exists), SCHEME)
        w = tl.load(weights + begin + j, mask=exists, other=0.0)
        target = tl.sum(tl.where(column == j, t, 0.0), axis=1, keep_dims=True)
        v = tl.minimum(tl.maximum(target, -LARGEST), LARGEST).to(tl.float32)
        codes = element_codes(v, e, divisor_outer, z, None, SCHEME)
        q = values(codes, combined(s, g, SCHEME, "float32"), z, SCHEME, "float32").to(tl.float64)
        off = w - q
        error = (target - q) * tl.load(diagonal + j)
        total += error * error
        tl.store(change + begin + j, off, mask=exists)
        tl.store(targets + begin + place, v, mask=exists)
        t += off * tl.load(ratios + j * SIZE + column)
    tl.store(loss + row, tl.load(loss + row, mask=exists, other=0.0) + total, mask=exists)


def block_of(sweep: Any, rule: Any, swept: Any) -> Callable[[slice, torch.Tensor], None]:
    """What sweeps the columns of a block, given their targets so far: arguments as in `columns_by_torch`."""
    rows, length = sweep.weights.shape
    height, width = rule.height, rule.width
    scale = rule.nearest.decodes.scale.view(torch.float32)
    constants = constants_of(rule.scheme, "float32", not interpreted())
    each = rows_of_warp(rows)
    launches: dict[int, CompiledLaunch] = {}

    def launch(count: int) -> CompiledLaunch:
        if count not in launches:
            tail = (rows, length, count, rule.across, height, width, each, BLOCK, constants)
            launches[count] = CompiledLaunch(columns_kernel, ceil_div(rows, each), tail, 1)
        return launches[count]

    def run(part: slice, moved: torch.Tensor) -> None:
        count = part.stop - part.start
        padded = moved.contiguous() if count == BLOCK else torch.nn.functional.pad(moved, (0, BLOCK - count))
        ratios = torch.zeros((BLOCK, BLOCK), dtype=torch.float64, device=moved.device)
        ratios[:count, :count] = sweep.ratios[part, part].triu(1)
        pointers = (
            padded, sweep.weights[:, part], ratios, sweep.diagonal[part], sweep.order[part], sweep.rows, scale,
            rule.scales.zero if rule.scheme.zero is not None else None,
            rule.scales.outer if constants.has_outer else None,
            swept.change[:, part], swept.targets, swept.loss,
        )  # fmt: skip
        if rows:
            launch(count).run(pointers, moved.get_device())

    return run


def rows_of_warp(rows: int) -> int:
    """Rows of a warp, a power of two: one where there are few."""
    each = 1
    while each < MOST_ROWS and rows > 2 * each * WARPS:
        each *= 2
    return each


__all__ = ["block_of", "columns_kernel", "rows_of_warp"]
