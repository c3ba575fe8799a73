"""`gather_transposed`: rows of a matrix, by index, as columns; one read, one write, no index on the host."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from fast.launch.launcher import CompiledLaunch

#: Rows and columns of a tile: 128 bytes of a row read at a time, as many of a column written.
TILE = (64, 64)
WARPS = 4


@triton.jit
def gather_transposed_kernel(x, source, out, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[c, p] = x[source[p], c], or 0 where source[p] is negative. count: of p; width: of c."""
    p = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(source + p, mask=p < count, other=-1).to(tl.int64)
    inside = (row >= 0)[:, None] & (c < width)[None, :]
    values = tl.load(x + row[:, None] * width + c[None, :], mask=inside, other=0.0)
    target = c[:, None] * count + p[None, :]
    tl.store(out + target, tl.trans(values), mask=(c < width)[:, None] & (p < count)[None, :])


def gather_transposed(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """x (T, C), contiguous, and source (P,) int32, negative for a row of zeros: (C, P) in x's dtype."""
    count, width = source.shape[0], x.shape[1]
    out = torch.empty((width, count), dtype=x.dtype, device=x.device)
    if count and width:
        _launch(count, width).run((x, source, out), x.get_device())
    return out


@lru_cache(maxsize=4096)
def _launch(count: int, width: int) -> CompiledLaunch:
    rows, columns = TILE
    grid = (-(-count // rows), -(-width // columns), 1)
    return CompiledLaunch(gather_transposed_kernel, grid, (count, width, rows, columns), WARPS)


__all__ = ["gather_transposed"]
