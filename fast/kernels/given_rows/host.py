"""`fast.quantize.given_rows` of tensors on a GPU: one launch, whatever the shape."""

from __future__ import annotations

from typing import Any

import torch

from fast.kernels.given_rows.kernel import given_rows_kernel
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize.geometry import INT32, LARGEST_TILE, TILE, ceil_div, power_above
from fast.kernels.quantize.plan import Problem
from fast.kernels.sm90_s8_gemm.select import LEAST
from fast.launch.call import Call
from fast.launch.launcher import CompiledLaunch, interpreted
from reference import Quantized, Scales, Scheme
from reference.schemes.schemes import scheme_of

#: Elements of a warp, 16 a thread; twice as many where there are rows for all multiprocessors.
WARP = 512
#: Warps of a program at most.
MOST_WARPS = 16
POINTERS = ("x", "scale", "zero", "codes", "row_scale", "row_zero")


def quantize_rows(
    x: torch.Tensor, record: str | Scheme, by_rows: Scheme, scales: Scales, key: Any = None
) -> Quantized | None:
    """Codes and scales of rows in the record `by_rows`, or None where the kernel does not take them. key: of the call, see
    `launch.cache`. Errors are the reference's."""
    scheme = scheme_of(record)
    of, _, tensors = quantizer.checked(x, scheme, -1, scales, None)
    if of is None or not x.numel() or scheme.rounding != "nearest_even" or scheme.format.bits > 8:
        return None
    count, length = x.shape
    call = Call({name: tensors[name] for name in ("x", "scale", "zero")})
    call.allocate("codes", (count, length), torch.uint8)
    call.allocate("row_scale", (count, 1), torch.float32)
    if scheme.zero is not None:
        call.allocate("row_zero", (count, 1), torch.int8)
    call.launch(_launch(of, count, length), POINTERS)
    zero = None if scheme.zero is None else "row_zero"
    made = Quantized("codes", "row_scale", None, zero, (count, length), 1, by_rows, False, False)
    result: Quantized = call.result(made, key, record)
    return result


def _launch(of: Problem, count: int, length: int) -> CompiledLaunch:
    """A program for each row, or for several where they are short. `sm90_s8_gemm`, which multiplies many rows, is not launched
    while the kernel in front of it runs."""
    size = min(power_above(length), LARGEST_TILE)
    together = max(1, min(TILE // size, power_above(count)))
    pdl = count < LEAST
    warps = max(1, min(MOST_WARPS, size * together // (WARP if pdl else 2 * WARP)))
    each = of.scheme.scale.block == -1
    wide = count * length > INT32 - size
    tail = (count, length, size, together, each, wide, of.rule, pdl and not interpreted())
    options = {"launch_pdl": True} if pdl else {}
    return CompiledLaunch(given_rows_kernel, ceil_div(count, together), tail, warps, **options)


__all__ = ["quantize_rows"]
