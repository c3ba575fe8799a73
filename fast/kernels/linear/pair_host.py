"""`linear_pair` and `linear_swiglu` for CUDA tensors: two products of one row in one launch, by the kernels of `linear`.

A launch has few bytes under way at its beginning and end (times: reports/LOG.md). Two weights of a layer that multiply the same
inputs, a gate and what it gates, lose that once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fast.kernels.linear.gemv_w4a16 import gemv_w4a16_pair_kernel, gemv_w4a16_swiglu_kernel
from fast.kernels.linear.gemv_w8a16 import gemv_w8a16_pair_kernel, gemv_w8a16_swiglu_kernel
from fast.kernels.linear.select import (
    FLOATS,
    W4A16_ROWS,
    Weight,
    gemv_w4a16_launch,
    gemv_w8a16_launch,
    rows_per_program,
    takes_w4a16,
    takes_w8a16,
    weight_of,
)
from fast.kernels.quantize.geometry import ceil_div
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import CompiledLaunch, same_device
from reference import Quantized, Scheme
from reference.quantize.quantize import check_quantized

PARTS = ("codes", "scale", "outer", "zero")


def linear_pair(
    x: torch.Tensor, first: Quantized, second: Quantized, key: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """x (..., K), one row, times the transposes of two weights, or None where no kernel takes them. key: see `launch.cache`."""
    call = _recorded(x, first, second, ("y", "y2"))
    if call is None:
        return None
    made: tuple[torch.Tensor, torch.Tensor] = call.result(("y", "y2"), key, first.scheme)
    return made


def linear_swiglu(x: torch.Tensor, gate: Quantized, up: Quantized, key: Any = None) -> torch.Tensor | None:
    """silu of the first product times the second, or None where no kernel takes them. key: see `launch.cache`."""
    call = _recorded(x, gate, up, ("y",))
    if call is None:
        return None
    made: torch.Tensor = call.result("y", key, gate.scheme)
    return made


def _recorded(x: torch.Tensor, first: Quantized, second: Quantized, made: tuple[str, ...]) -> Call | None:
    """The launch that writes the results of these names, done; None where there is none."""
    launch = launch_for(first.scheme, tuple(first.shape), first.axis, first.packed, x.dtype, len(made) == 1)
    given = {name + end: getattr(w, name) for w, end in ((first, ""), (second, "2")) for name in PARTS}
    if launch is None or not same_device(x, *given.values()):
        return None
    for w in (first, second):
        check_quantized(w)
    call = Call({"x": x, **given}, words=("x", "codes", "codes2"))
    for name in made:
        call.allocate(name, (*x.shape[:-1], first.shape[0]), x.dtype)
    call.launch(launch, [name for name in launch.kernel.arg_names if name in ("x", *given, *made)])
    return call


def launch_for(
    scheme: Scheme, shape: tuple[int, ...], axis: int, packed: bool, dtype: torch.dtype, gated: bool = False
) -> CompiledLaunch | None:
    """The launch for one row of a dtype and two weights that are both stored so; None where there is none.

    gated: of `linear_swiglu`, which is for 16-bit numbers.
    """
    weight = weight_of(scheme, shape, axis, packed)
    taken = dtype in (FLOATS[:2] if gated else FLOATS)
    if weight is None or not taken or not weight.rows:
        return None
    return _launch(weight, FLOAT_NAMES[dtype], gated)


@lru_cache(maxsize=4096)
def _launch(weight: Weight, dtype: str, gated: bool) -> CompiledLaunch | None:
    """Programs of the first weight, then those of the second; gated: of half as many rows of both."""
    if takes_w4a16(weight) and dtype != "float32":
        one, rows = gemv_w4a16_launch(weight, dtype, 2), W4A16_ROWS
        kernels = gemv_w4a16_pair_kernel, gemv_w4a16_swiglu_kernel
    elif takes_w8a16(weight):
        one, rows = gemv_w8a16_launch(weight, dtype, 2), rows_per_program(weight.rows, 2)
        kernels = gemv_w8a16_pair_kernel, gemv_w8a16_swiglu_kernel
    else:
        return None
    programs = ceil_div(weight.rows, rows // 2) if gated else 2 * one.grid[0]
    return CompiledLaunch(kernels[gated], programs, one.tail, one.warps, **one.options)


__all__ = ["launch_for", "linear_pair", "linear_swiglu"]
