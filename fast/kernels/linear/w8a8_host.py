"""`linear_of_codes` for CUDA tensors: which weights the kernel takes, and how many of their rows a program."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fast.kernels.linear.gemv_w8a8 import gemv_w8a8_kernel
from fast.kernels.linear.select import FLOATS, WARP_BYTES, rows_per_program, warps_along_k
from fast.kernels.quantize.geometry import INT32, ceil_div
from fast.launch.call import FLOAT_NAMES, Call
from fast.launch.launcher import CompiledLaunch, interpreted, same_device
from reference import Quantized, Scheme

#: What the kernel calls the elements.
KINDS = {"int8": "int", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
#: Codes that a lane takes at once: rows begin at multiples of these.
LANE = 16


def linear_of_codes(
    x: Quantized, w: Quantized, bias: torch.Tensor | None, dtype: torch.dtype, key: Any
) -> torch.Tensor | None:
    """The product of one row of codes, or None where the kernel does not take them. key: of the call; see `launch.cache`.

    Several rows are `scaled_mm.host`'s.
    """
    launch = launch_for(x.scheme, w.scheme, tuple(w.shape), dtype)
    given = {
        "x": x.codes, "x_scale": x.scale, "x_zero": x.zero, "codes": w.codes, "scale": w.scale, "bias": bias
    }  # fmt: skip
    if launch is None or not same_device(*given.values()):
        return None
    call = Call(given, words=("x", "codes"))
    call.allocate("y", (1, w.shape[0]), dtype)
    call.launch(launch, list(launch.kernel.arg_names[: len(given) + 1]))
    y: torch.Tensor = call.result("y", key, x.scheme)
    return y


def launch_for(x: Scheme, w: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> CompiledLaunch | None:
    """The launch that multiplies one row of codes by a weight of some shape, both as `check_codes` allows; None where there is
    none: rows whose length is no multiple of 16, no rows, other dtypes."""
    rows, length = shape
    if dtype not in FLOATS or not rows or not length or length % LANE or interpreted():
        return None
    return _launch(KINDS[x.element], KINDS[w.element], w.scale.block == -1, rows, length, FLOAT_NAMES[dtype])


@lru_cache(maxsize=4096)
def _launch(inputs: str, kind: str, each: bool, rows: int, length: int, dtype: str) -> CompiledLaunch:
    """Four rows of the weight a program where there are many, else two, and warps along K until there are enough in all."""
    taken = rows_per_program(rows)
    warps_k = warps_along_k(ceil_div(rows, taken), ceil_div(length, WARP_BYTES))
    wide = rows * length > INT32 - length
    tail = (rows, length, each, inputs, kind, taken, warps_k, wide, dtype, True)
    return CompiledLaunch(gemv_w8a8_kernel, ceil_div(rows, taken), tail, warps_k, launch_pdl=True)
