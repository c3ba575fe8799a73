"""Products of many rows and a preshuffled weight on a GPU: what is taken, and what is launched."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.sm90_w4a16_gemm.select import Grid, Schedule, choose, grid_of, ratio_of, scheduled
from fast.kernels.sm90_w4a16_gemm.variants import (
    ATOM,
    KERNEL,
    PANEL,
    Problem,
    Variant,
    Weight,
    with_scales,
)
from fast.kernels.triton_small_m.host import check_row_scales
from fast.kernels.triton_small_m.layout import ArrangedWeight
from fast.launch import cuda
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.cuda import BIAS, GROUP, CudaLaunch, Maps, processors_of
from fast.launch.driver import tensor_map

#: Pointers of a launch; behind them scales of rows, where these have some. x is read through its tensor map alone.
POINTERS = ("x", "codes", "scale", "zero", "bias", "y")
#: Of them those that tensor maps are made of.
MAPPED = (0, 5)
#: Numbers of the source's `Problem`: tokens, features, steps, each, bias_kind, group, cut, whole (two), shares, nibble.
NUMBERS = "11i4x"
#: Four bits, which the kernel is told: no compiler may know them.
NIBBLE = 15


def sm90_w4a16_gemm(
    x: torch.Tensor,
    w: ArrangedWeight,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """x (..., K) times the transpose of what `dequantize` gives of a weight (N, K) in x's dtype, plus bias (N): (..., N).

    Sums are float32 over all of K, in an order that only shapes, dtypes and the device say; the bias is added in float32, and
    the result rounded once to x's dtype. x_scale: float32, one for each row of x, by which its sums are multiplied in float32
    before that: x is then the rows' codes, which are exact in its dtype. Operands are those that the family takes
    (`fast.gemm.families`); None where the variant does not compile or load. key, record: see `dispatch`, of a call without
    x_scale. ValueError for other scales.
    """
    launch = launch_for(x, w, bias, x_scale)
    if launch is None:
        return None
    y: torch.Tensor = call_of(launch, x, w, bias, x_scale).result("y", key, record)
    return y


def launch_for(
    x: torch.Tensor, w: ArrangedWeight, bias: torch.Tensor | None, x_scale: torch.Tensor | None = None
) -> CudaLaunch | None:
    """What multiplies such operands; its pointers are its `names`. None and errors as `sm90_w4a16_gemm`."""
    rows = x.numel() // w.shape[1]
    check_row_scales(x_scale, x, rows, KERNEL.name)
    variant = choose(rows, *w.shape, weight_of(w), processors_of(x.get_device()))
    return launch_of(w, rows, x.dtype, x.get_device(), variant, scaled=x_scale is not None)


def launch_of(
    w: ArrangedWeight, rows: int, dtype: torch.dtype, device: int, variant: Variant, *,
    scaled: bool = False, schedule: Schedule | None = None,
) -> CudaLaunch | None:  # fmt: skip
    """The launch of a variant, scaled: of rows that have scales; None where it does not compile or load. schedule: by default
    what `scheduled` has for it."""
    (features, length), weight = w.shape, weight_of(w)
    problem = Problem(weight, FLOAT_NAMES[dtype])
    one = with_scales(variant, weight) if scaled else variant
    shared = one.shared(weight)
    if not cuda.is_loadable(KERNEL, one, problem, device, shared):
        return None
    grid = grid_of(one, rows, features, cuda.clusters_at_once(KERNEL, one, problem, shared, device))
    cuts = schedule or scheduled(grid, ratio_of(one, weight))
    numbers = (
        rows, features, length // ATOM, (w.group or length) // ATOM or 1, BIAS, GROUP, cuts.cut, *cuts.whole, cuts.shares,
        NIBBLE,
    )  # fmt: skip
    sizes = {"numbers": (NUMBERS, numbers), "behind": ("", ())}
    names = (*POINTERS, "x_scale")
    if not scaled:
        names, sizes = POINTERS, {"numbers": (f"{NUMBERS}Q", (*numbers, 0))}
    maps = Maps(lambda x, y: described(one, rows, length, features, x, y), 1, MAPPED)
    return CudaLaunch(KERNEL, one, problem, names, programs_of(one, grid, cuts), shared, maps=maps, **sizes)


def call_of(
    launch: CudaLaunch,
    x: torch.Tensor,
    w: ArrangedWeight,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
) -> Call:
    """The call whose launch made "y"."""
    scales = {} if x_scale is None else {"x_scale": x_scale}
    call = Call({"x": x, "codes": w.words, "scale": w.scale, "zero": w.zero, "bias": bias, **scales})
    call.allocate("y", (*x.shape[:-1], w.shape[0]), x.dtype)
    call.launch(launch, launch.names)
    return call


def weight_of(w: ArrangedWeight) -> Weight:
    """What the kernel decodes."""
    return Weight(w.element, w.zero is not None, max(1, ATOM // (w.group or ATOM)))


def programs_of(variant: Variant, grid: Grid, schedule: Schedule) -> int:
    """Programs to launch: with splits a cluster for each tile, else at most the clusters that run at once, which persist."""
    tiles = sum(grid.counts(schedule))
    return (tiles if variant.splits > 1 else min(tiles, grid.clusters)) * variant.cluster


def described(one: Variant, tokens: int, length: int, features: int, x: int, y: int) -> bytes:
    """The tensor maps of a variant, of x (tokens, length) and y (tokens, features) at two addresses."""
    result = tensor_map(x, tokens, 2 * length, (one.tokens // one.pair, PANEL))
    result += tensor_map(x, tokens, 2 * length, (one.box, PANEL))
    return result + tensor_map(y, tokens, 2 * features, (min(one.chunk, 256), PANEL))


__all__ = [
    "NUMBERS",
    "POINTERS",
    "call_of",
    "described",
    "launch_for",
    "launch_of",
    "programs_of",
    "sm90_w4a16_gemm",
    "weight_of",
]
