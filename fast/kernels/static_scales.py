"""`fast.quantize.static_scales` of tensors on a GPU: one launch, whatever the shape.

Codes of rows under static scales, with a scale for each row: the static one, or NaN where the row holds a NaN. Integers have
no code for NaN, and a scale that comes from outside does not show one. A product that multiplies each row's sum by that row's
scale makes such a row NaN, as it does under scales that are found in the row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, NAN, bits_of, float_of, read, widened
from fast.kernels.quantize import host as quantizer
from fast.kernels.quantize.plan import LARGEST_TILE, TILE, Problem
from fast.kernels.rules.statistics import block_absmax
from fast.kernels.rules.values import element_codes
from fast.kernels.sm90_s8_gemm.host import C
from fast.kernels.tile.quantize import loaded_scales
from fast.launch.launcher import INT32, Call, CompiledLaunch, ceil_div, interpreted, power_above
from reference import Quantized, Scales, Scheme
from reference.schemes.schemes import scheme_of


# A number of rows gets no kernel of its own for being a multiple of 16, or 1.
@triton.jit(do_not_specialize=["rows"])
def static_scales_kernel(
    x, scale, zero, codes, row_scale, row_zero, rows,
    LENGTH: tl.constexpr, SIZE: tl.constexpr, P: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr, SCHEME: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """P rows of x (rows, LENGTH), SIZE elements of each at a time. EACH: whether a scale is given for each row, or one in all;
    USE_PDL: the kernel begins while the one in front of it ends, and the product while it runs."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * P + tl.arange(0, P)[:, None]
    exists = row < rows
    one = tl.full((), 1.0, tl.float32)
    s, e, _, z = loaded_scales(scale, zero, one, row if EACH else row * 0, exists, SCHEME)
    divisor = s if SCHEME.codes_from == "exact" else e
    begin = (row.to(tl.int64) if WIDE else row) * LENGTH
    largest = tl.zeros((P, 1), tl.int32)
    for start in tl.static_range(0, LENGTH, SIZE):
        i = start + tl.arange(0, SIZE)[None, :]
        inside = exists & (i < LENGTH)
        v = widened(read(x + begin + i, inside), SCHEME.signs_nan)
        result = element_codes(v, divisor, one, z, None, SCHEME)
        tl.store(codes + begin + i, result.to(tl.uint8), mask=inside)
        largest = tl.maximum(largest, block_absmax(v, SCHEME.has_ptx))
    tl.store(row_scale + row, float_of(tl.where(largest > INFINITY, NAN, bits_of(s))), mask=exists)
    if row_zero is not None:
        tl.store(row_zero + row, z.to(tl.int8), mask=exists)


#: Elements of a warp, 16 a thread; twice as many where there are rows for all multiprocessors.
WARP = 512
#: Warps of a program at most.
MOST_WARPS = 16
POINTERS = ("x", "scale", "zero", "codes", "row_scale", "row_zero")


def quantize_rows(
    x: torch.Tensor, record: str | Scheme, by_rows: Scheme, scales: Scales, key: Any = None
) -> Quantized | None:
    """Codes and scales of rows in the record `by_rows`, or None where the kernel does not take them. key: of the call, see
    `dispatch`. Errors are the reference's."""
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
    output = Quantized("codes", "row_scale", None, zero, (count, length), 1, by_rows, False, False)
    result: Quantized = call.result(output, key, record)
    return result


def _launch(of: Problem, count: int, length: int) -> CompiledLaunch:
    """A program for each row, or for several where they are short. `sm90_s8_gemm`, which multiplies many rows, is not launched
    while the kernel in front of it runs."""
    size = min(power_above(length), LARGEST_TILE)
    together = max(1, min(TILE // size, power_above(count)))
    pdl = count < C.least
    warps = max(1, min(MOST_WARPS, size * together // (WARP if pdl else 2 * WARP)))
    each = of.scheme.scale.block == -1
    wide = count * length > INT32 - size
    tail = (count, length, size, together, each, wide, of.rule, pdl and not interpreted())
    options = {"launch_pdl": True} if pdl else {}
    return CompiledLaunch(static_scales_kernel, ceil_div(count, together), tail, warps, **options)


__all__ = ["quantize_rows"]
