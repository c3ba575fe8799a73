"""The host side of `linear_small`: what it takes, its launches, and its tiles."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fast.kernels.triton_small_m.layout import ArrangedWeight, arrange, filled
from fast.kernels.triton_small_m.product import sum_splits_kernel, triton_small_m_kernel
from fast.kernels.triton_small_m.tilings import Tiling, candidates, tiling_of
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import INT32, CompiledLaunch, ceil_div, interpreted, same_device

#: The most rows of X; beyond, a product with the dense weight is no slower.
MOST_ROWS = 128
INPUTS = (torch.bfloat16, torch.float16)
#: Columns of a row of parts that a program adds.
PART = 512
#: Warps of such a program.
PART_WARPS = 4

Launches = tuple[CompiledLaunch, CompiledLaunch | None]


def linear_small(
    x: torch.Tensor,
    w: ArrangedWeight,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """x (..., K) times the transpose of an arranged weight (N, K), plus bias (N): (..., N) in `dtype`, by default x's.

    x_scale: float32, one for each row of x, by which its sums are multiplied in float32: x is then the rows' codes, which are
    exact in its dtype.

    None where the kernel does not take it, and another one has to: inputs that are not bfloat16 or float16, no rows or more
    than MOST_ROWS, more than 2**31 elements, a dtype that is no float of 16 or 32 bits. The result is within
    `reference.linear_error_bound` of the exact product, the same bits every time for the same tiles. tiling: other tiles than
    the rule's; key, record: see `dispatch`, of a call without x_scale. ValueError for shapes and devices that do not go
    together and for a tiling that is not for the weight.
    """
    n, length = w.shape
    dtype = x.dtype if dtype is None else dtype
    check_operands(x, w, bias)
    count = x.numel() // length
    check_row_scales(x_scale, x, count)
    if x.dtype not in INPUTS or dtype not in FLOAT_NAMES or not 0 < count <= MOST_ROWS:
        return None
    if bias is not None and bias.dtype not in FLOAT_NAMES:
        return None
    chosen = launches_for(w, count, x.dtype, dtype, tiling)
    if chosen is None:
        return None
    scales = {} if x_scale is None else {"x_scale": x_scale}
    call = Call({"x": x, "codes": w.words, "scale": w.scale, "zero": w.zero, **scales, "bias": bias})
    add_product(call, chosen, (*x.shape[:-1], n), dtype, "x")
    y: torch.Tensor = call.result("y", key, record)
    return y


def launches_for(
    w: ArrangedWeight, count: int, inputs: torch.dtype, dtype: torch.dtype, tiling: Tiling | None = None
) -> Launches | None:
    """The launches that multiply `count` rows of inputs by a weight, by the rule's tiles or others; None for more parts of a
    result than 2**31. ValueError for a tiling that is not for the weight."""
    given = tiling or tiling_of(w.rows, w.columns, w.element, w.group, count)
    if not given.fits(w.rows, w.columns, w.element, w.group):
        raise ValueError(
            f"{given} is not for a weight {w.shape}, {w.element} in groups of {w.group}: tiles are whole ones of "
            f"{(w.rows, w.columns)} and a program's stages fit a multiprocessor; take one of `candidates`"
        )
    n, length = w.shape
    if given.splits * count * n > INT32:
        return None
    return _launch(n, length, w.element, w.group, count, FLOAT_NAMES[inputs], FLOAT_NAMES[dtype], given)


def add_product(call: Call, launches: Launches, shape: tuple[int, ...], dtype: torch.dtype, x: str) -> None:
    """Launch a product in a call and allocate its result "y" of this shape and dtype.

    The call has the inputs under the name `x`, and as "codes", "scale", "zero", "x_scale" and "bias" what there is of them.
    """
    first, second = launches
    given = (x, "codes", "scale", "zero")
    if second is None:
        call.allocate("y", shape, dtype)
        call.launch(first, (*given, "x_scale", "bias", "y"))
        return
    call.allocate("parts", (first.grid[1], *first.tail[:2]), torch.float32)
    call.launch(first, (*given, None, None, "parts"))
    call.allocate("y", shape, dtype)
    call.launch(second, ("parts", "x_scale", "bias", "y"))


def check_operands(x: torch.Tensor, w: ArrangedWeight, bias: torch.Tensor | None) -> None:
    """ValueError where shapes or devices of inputs, weight and bias do not go together."""
    n, length = w.shape
    if not x.ndim or x.shape[-1] != length:
        raise ValueError(
            f"linear_small of inputs {tuple(x.shape)} and a weight {w.shape}: the last axes must be the same"
        )
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"linear_small: bias has shape {tuple(bias.shape)}, the weight asks for {(n,)}")
    if not same_device(x, w.words, bias):
        raise ValueError(
            f"linear_small: inputs on {x.device}, the weight on {w.words.device}"
            + ("" if bias is None else f", bias on {bias.device}")
            + "; move them to one device"
        )


def check_row_scales(
    x_scale: torch.Tensor | None, x: torch.Tensor, count: int, name: str = "linear_small"
) -> None:
    """ValueError, of the kernel of this name, where there are scales of inputs that are not one in float32 for each row, beside
    them on their device."""
    if x_scale is None:
        return
    if x_scale.numel() != count or x_scale.dtype != torch.float32 or not same_device(x, x_scale):
        raise ValueError(
            f"{name}: scales {tuple(x_scale.shape)} in {x_scale.dtype} on {x_scale.device} of inputs {tuple(x.shape)} on "
            f"{x.device}: there must be one in float32 for each row, on the same device"
        )


@lru_cache(maxsize=4096)
def _launch(
    n: int, length: int, element: str, group: int, count: int, dtype: str, out: str, tiling: Tiling
) -> Launches:
    """The product, and where K is in parts the sum of them."""
    rows, columns, pdl = filled(n), filled(length), not interpreted()
    tail = (
        count, n, length, rows, columns, group, element, dtype, out, tiling.block_m, tiling.block_n, tiling.block_k,
        tiling.splits, tiling.stages, tiling.early, pdl,
    )  # fmt: skip
    grid = (ceil_div(n, tiling.block_n), tiling.splits, ceil_div(count, tiling.block_m))
    first = CompiledLaunch(
        triton_small_m_kernel, grid, tail, tiling.warps, enable_fp_fusion=True, launch_pdl=True
    )
    if tiling.splits == 1:
        return first, None
    tail = (count, n, tiling.splits, out, PART, pdl)
    return first, CompiledLaunch(
        sum_splits_kernel, (ceil_div(n, PART), count, 1), tail, PART_WARPS, launch_pdl=True
    )


__all__ = [
    "MOST_ROWS", "ArrangedWeight", "Tiling", "add_product", "arrange", "candidates", "check_operands", "launches_for",
    "linear_small", "tiling_of",
]  # fmt: skip
