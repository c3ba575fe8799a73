"""Where rows sorted by expert stand once each group is filled up to a multiple of a step: all tables from one launch.

A program has some places and sees all groups: their ends are sums over as many numbers as there are experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fast.kernels.quantize.geometry import ceil_div, power_above
from fast.launch import cache
from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch

#: Places that have one owner: every step is a multiple of it.
GRAIN = 16
#: Comparisons of a program.
COMPARED = 4096
#: Places of a program at least.
FEWEST = 16
#: Places of a program at most.
MOST_PLACES = 1024
#: Groups that a program can see.
MOST_EXPERTS = 4096
WARPS = 4


@triton.jit
def layout_kernel(
    offsets, ends, source, owners, experts, rows, places,
    STEP: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, GRAIN: tl.constexpr,
):  # fmt: skip
    """ends (experts,), source (places,) and owners (places / GRAIN,), as `group_layout` says. EXPERTS: a power of two."""
    expert = tl.arange(0, EXPERTS)
    known = expert < experts
    stop = tl.load(offsets + expert, mask=known, other=0)
    start = tl.load(offsets + expert - 1, mask=known & (expert > 0), other=0)
    filled = (stop - start + (STEP - 1)) // STEP * STEP
    end = tl.cumsum(tl.where(known, filled, 0), 0)
    begin = end - filled
    if tl.program_id(0) == 0:
        tl.store(ends + expert, end, mask=known)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = place[:, None] - begin[None, :] + start[None, :]
    mine = known[None, :] & (place[:, None] >= begin[None, :]) & (row < stop[None, :]) & (row < rows)
    # At most one group has a row here.
    found = tl.max(tl.where(mine, row, -1), axis=1)
    tl.store(source + place, found, mask=place < places)
    grain = tl.program_id(0) * (TILE // GRAIN) + tl.arange(0, TILE // GRAIN)
    before = known[None, :] & (end[None, :] <= grain[:, None] * GRAIN)
    tl.store(owners + grain, tl.sum(before.to(tl.int32), axis=1), mask=grain * GRAIN < places)


def group_layout(
    offsets: torch.Tensor, rows: int, places: int, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ends (E,), source (P,), owners (P / 16,)), int32, of offsets (E,) int32 that end within `rows`.

    ends: the place after each group and its filling. source: the row at each of P = `places`, -1 for none. owners: the group of
    each 16 places, E beyond the last. step: a multiple of 16 that divides P.
    """
    key = cache.key_of("group_layout", "", (rows, places, step), (offsets,))
    call = cache.find(key)
    made = None if call is None else call(offsets)
    if made is None:
        made = _described(offsets, rows, places, step).result(("ends", "source", "owners"), key)
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = made
    return found


def _described(offsets: torch.Tensor, rows: int, places: int, step: int) -> Call:
    experts = offsets.shape[0]
    call = Call({"offsets": offsets})
    for name, size in (("ends", experts), ("source", places), ("owners", places // GRAIN)):
        call.allocate(name, (size,), torch.int32)
    wide = power_above(experts)
    many = min(max(COMPARED // wide, FEWEST), MOST_PLACES)
    tail = (experts, rows, places, step, wide, many, GRAIN)
    grid = max(ceil_div(places, many), 1)
    call.launch(CompiledLaunch(layout_kernel, grid, tail, WARPS), ("offsets", "ends", "source", "owners"))
    return call


__all__ = ["GRAIN", "MOST_EXPERTS", "group_layout"]
