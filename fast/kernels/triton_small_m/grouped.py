"""The host side of the product of rows sorted by expert and the experts' arranged weights."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fast.cost import first_row
from fast.kernels.triton_small_m.host import BITS, INPUTS, C, block_m_of
from fast.kernels.triton_small_m.product import triton_small_m_experts_kernel
from fast.launch.launcher import FLOAT_NAMES, INT32, Call, CompiledLaunch, ceil_div, interpreted, same_device
from fast.scale_factors import ArrangedWeight, filled

#: The most rows of X that a program takes at once.
MOST_TILE = 64
#: Rows and columns of a program's tile of the weight, stages and warps.
Tile = tuple[int, int, int, int]


def grouped_linear_small(
    x: torch.Tensor,
    experts: ArrangedWeight,
    ends: torch.Tensor,
    *,
    tile: Tile | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """x (T, K), sorted by expert, times the transpose of each expert's weight (N, K): (T, N) in x's dtype.

    experts: an arranged weight whose parts have an axis of experts in front; `shape` is that of one of them. ends: int32 (E,),
    on x's device: the row after each expert's last one; rows behind the last end are undefined, as torch's `_grouped_mm` leaves
    them. None where the kernel does not take it: inputs that are not bfloat16 or float16, NF4, no rows, more than 2**31
    elements. tile: another one than the rule's; key, record: see `dispatch`. ValueError for shapes and devices that do not
    go together. Each row has the bits it has by `linear_small` with one part of K and these tiles, within
    `reference.linear_error_bound`.
    """
    (n, length), count = experts.shape, x.shape[0]
    check_experts(x, experts, ends)
    if x.dtype not in INPUTS or experts.element == "nf4" or not count or count * max(n, length) > INT32:
        return None
    rows = rows_at_once(count, len(ends))
    tile = tile or tile_of(experts.rows, experts.columns, experts.element, count, len(ends))
    launch = _launch(
        n, length, len(ends), experts.element, experts.group, rows, FLOAT_NAMES[x.dtype], count, tile
    )
    call = Call({"x": x, "codes": experts.words, "scale": experts.scale, "zero": experts.zero, "ends": ends})
    call.allocate("y", (count, n), x.dtype)
    call.launch(launch, ("x", "codes", "scale", "zero", "ends", "y"))
    y: torch.Tensor = call.result("y", key, record)
    return y


def rows_at_once(count: int, experts: int) -> int:
    """Rows of X that a program takes at once: twice those of an expert on average, as they are not divided evenly."""
    return block_m_of(min(MOST_TILE, ceil_div(2 * count, experts)))


def tile_of(rows: int, columns: int, element: str, count: int, experts: int) -> Tile:
    """The tile of a program, a rule of what was fastest (`reports/gpu/family_times.csv`).

    rows, columns: of an expert's arranged weight; count: rows of X.
    """
    facts = {
        "at_once": rows_at_once(count, experts), "bits": BITS[element], "busy": count >= experts,
        "programs": min(count, experts) * (rows // 64), "wide": columns % 256 == 0,
    }  # fmt: skip
    block_n, block_k, stages, warps = first_row(C.expert_tiles, **facts)["tile"]
    return block_n, block_k, stages, warps


def check_experts(x: torch.Tensor, experts: ArrangedWeight, ends: torch.Tensor) -> None:
    """ValueError for shapes, dtypes and devices that do not go together."""
    if x.dim() != 2 or x.shape[1] != experts.shape[1]:
        raise ValueError(
            f"grouped_linear_small of inputs {tuple(x.shape)} and experts' weights {experts.shape}: inputs must be rows (T, K) "
            f"of the same K"
        )
    if ends.dtype != torch.int32 or ends.shape != experts.words.shape[:1]:
        raise ValueError(
            f"grouped_linear_small: ends must be int32 of one number for each of {experts.words.shape[0]} experts, got "
            f"{ends.dtype} of shape {tuple(ends.shape)}"
        )
    if not same_device(x, experts.words, ends):
        raise ValueError(
            f"grouped_linear_small: inputs on {x.device}, the weights on {experts.words.device}, ends on {ends.device}; move "
            f"them to one device"
        )


@lru_cache(maxsize=4096)
def _launch(
    n: int, length: int, experts: int, element: str, group: int, rows: int, dtype: str, count: int, tile: Tile
) -> CompiledLaunch:
    """Tiles of the weight by experts."""
    block_n, block_k, stages, warps = tile
    filled_n, filled_k = filled(n), filled(length)
    blocks = ceil_div(filled_k, group) if group else 1
    tail = (
        count, n, length, filled_n, filled_k, group, blocks, element, dtype, dtype, rows, block_n, block_k, stages,
        not interpreted(),
    )  # fmt: skip
    grid = (ceil_div(n, block_n), experts, 1)
    return CompiledLaunch(
        triton_small_m_experts_kernel, grid, tail, warps, enable_fp_fusion=True, launch_pdl=True
    )


def stacked(experts: list[ArrangedWeight]) -> ArrangedWeight:
    """Arranged weights of one shape and scheme as `grouped_linear_small` takes them; ValueError for others."""
    kinds = {(w.shape, w.element, w.group, w.zero is None) for w in experts}
    if len(kinds) != 1:
        raise ValueError(
            f"experts must have one shape, scheme and kind of zero point, got {sorted(map(str, kinds))}"
        )
    first = experts[0]
    zero = None if first.zero is None else torch.stack([w.zero for w in experts if w.zero is not None])
    words, scale = (torch.stack([getattr(w, part) for w in experts]) for part in ("words", "scale"))
    return ArrangedWeight(words, scale, zero, first.shape, first.element, first.group)


__all__ = [
    "ArrangedWeight",
    "Tile",
    "check_experts",
    "grouped_linear_small",
    "rows_at_once",
    "stacked",
    "tile_of",
]
