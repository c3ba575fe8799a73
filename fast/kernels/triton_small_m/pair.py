"""The host side of two products of few rows by arranged weights in one launch.

For few rows a launch has few bytes under way at its beginning and end, and a sum of parts of K costs as much again: weights of
a layer that multiply the same inputs, a gate and what it gates, lose that once, and have tiles enough for all multiprocessors
without parts (times: reports/LOG.md). Large weights are faster apart (`fast.gemm.choose`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from fast.kernels.triton_small_m.host import (
    INPUTS,
    PART,
    PART_WARPS,
    Launches,
    Tiling,
    check_operands,
    tiling_of,
)
from fast.kernels.triton_small_m.layout import FACTORED
from fast.kernels.triton_small_m.product import sum_pair_splits_kernel, triton_small_m_pair_kernel
from fast.launch.launcher import FLOAT_NAMES, INT32, Call, CompiledLaunch, ceil_div, interpreted, same_device
from fast.scale_factors import ArrangedWeight, filled

#: The most rows of X: what a tile of 16 rows holds.
MOST_ROWS = 16
GIVEN = ("x", "codes", "scale", "zero", "codes2", "scale2", "zero2")


def linear_small_pair(
    x: torch.Tensor,
    first: ArrangedWeight,
    second: ArrangedWeight,
    *,
    tiling: Tiling | None = None,
    key: Any = None,
    record: Any = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """x (..., K) times the transposes of two arranged weights (N, K): both (..., N) in x's dtype.

    Each is within `reference.linear_error_bound` of the exact product, the same bits every time for the same tiles. None where
    the kernel does not take them: inputs that are not bfloat16 or float16, no rows or more than MOST_ROWS, weights of two
    shapes or forms, NF4 or with scales that are factors, or of rows or columns that are no multiple of 128, more than 2**31
    elements.
    tiling: other tiles than those of `pair_tiling`; key, record: see `dispatch`. ValueError for shapes and devices that do
    not go together and for a tiling that is not for the weights.
    """
    call = _recorded(x, first, second, ("y", "y2"), tiling)
    if call is None:
        return None
    result: tuple[torch.Tensor, torch.Tensor] = call.result(("y", "y2"), key, record)
    return result


def linear_small_swiglu(
    x: torch.Tensor,
    gate: ArrangedWeight,
    up: ArrangedWeight,
    *,
    tiling: Tiling | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """`reference.swiglu` of the two products of `linear_small_pair`, the bits of that: (..., N) in x's dtype.

    None and errors are those of `linear_small_pair`.
    """
    call = _recorded(x, gate, up, ("y",), tiling)
    if call is None:
        return None
    result: torch.Tensor = call.result("y", key, record)
    return result


def pair_tiling(rows: int, columns: int, element: str, group: int, count: int) -> Tiling:
    """Tiles for two weights of so many rows and columns: those of one weight of twice the rows, 128 rows a tile.

    Codes of 8 bits have four stages, with which two programs share a multiprocessor, and 8 warps, which decode them as fast.
    """
    rule = tiling_of(2 * rows, columns, "int4", group, count)
    return rule if element == "int4" else replace(rule, stages=4, warps=8)


def _recorded(
    x: torch.Tensor,
    first: ArrangedWeight,
    second: ArrangedWeight,
    made: tuple[str, ...],
    tiling: Tiling | None,
) -> Call | None:
    """The launches that write the results of these names, done; None where there are none."""
    for w in (first, second):
        check_operands(x, w, None)
    if not same_device(first.words, second.words) or not _is_taken(x, first, second):
        return None
    (n, length), element, group = first.shape, first.element, first.group
    count = x.numel() // length
    given = tiling or pair_tiling(n, length, element, group, count)
    if given.early or given.block_n < 128 or not given.fits(2 * n, length, element, group):
        raise ValueError(
            f"{given} is not for two weights {first.shape}, {element} in groups of {group}: a tile has 64 rows or more of "
            f"each, tiles are whole ones and nothing is asked for early; take `pair_tiling`"
        )
    if 2 * given.splits * count * n > INT32:
        return None
    product, total = _launch(n, length, element, group, count, FLOAT_NAMES[x.dtype], given)
    call = Call({"x": x, **_parts(first, ""), **_parts(second, "2")})
    if total is not None:
        call.allocate("parts", (given.splits, 2, count, n), torch.float32)
        call.launch(product, (*GIVEN, "parts", None))
    for name in made:
        call.allocate(name, (*x.shape[:-1], n), x.dtype)
    if total is None:
        call.launch(product, (*GIVEN, "y", "y2"))
    else:
        call.launch(total, ("parts", "y", "y2"))
    return call


def _parts(w: ArrangedWeight, end: str) -> dict[str, torch.Tensor | None]:
    return {f"codes{end}": w.words, f"scale{end}": w.scale, f"zero{end}": w.zero}


def _is_taken(x: torch.Tensor, first: ArrangedWeight, second: ArrangedWeight) -> bool:
    """Whether the kernel multiplies these inputs by both weights."""
    forms = [(w.shape, w.element, w.group, w.zero is None) for w in (first, second)]
    n, length = first.shape
    whole = (filled(n), filled(length)) == (n, length)
    plain = first.element not in (*FACTORED, "nf4")
    return (
        forms[0] == forms[1] and whole and plain and x.dtype in INPUTS and 0 < x.numel() <= MOST_ROWS * length
    )


@lru_cache(maxsize=4096)
def _launch(
    n: int, length: int, element: str, group: int, count: int, dtype: str, tiling: Tiling
) -> Launches:
    """The products, and where K is in parts the sums of them."""
    pdl = not interpreted()
    tail = (
        count, n, length, group, element, dtype, tiling.block_m, tiling.block_n, tiling.block_k, tiling.splits,
        tiling.stages, pdl,
    )  # fmt: skip
    grid = (2 * n // tiling.block_n, tiling.splits, ceil_div(count, tiling.block_m))
    product = CompiledLaunch(
        triton_small_m_pair_kernel, grid, tail, tiling.warps, enable_fp_fusion=True, launch_pdl=True
    )
    if tiling.splits == 1:
        return product, None
    total = (count, n, tiling.splits, dtype, PART, pdl)
    return product, CompiledLaunch(
        sum_pair_splits_kernel, (ceil_div(n, PART), count, 1), total, PART_WARPS, launch_pdl=True
    )


__all__ = ["MOST_ROWS", "linear_small_pair", "linear_small_swiglu", "pair_tiling"]
