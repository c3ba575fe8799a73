"""Codes of rows under given scales, with a scale for each row: the given one, or NaN where the row holds a NaN.

Integers have no code for NaN, and a scale that comes from outside does not show one. A product that multiplies each row's sum
by that row's scale makes such a row NaN, as it does under scales that are found in the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, NAN, bits_of, float_of, read, widened
from fast.kernels.rules.scaled import element_codes
from fast.kernels.rules.statistics import block_absmax
from fast.kernels.tile.quantize import loaded_scales


# A number of rows gets no kernel of its own for being a multiple of 16, or 1.
@triton.jit(do_not_specialize=["rows"])
def given_rows_kernel(
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
        made = element_codes(v, divisor, one, z, None, SCHEME)
        tl.store(codes + begin + i, made.to(tl.uint8), mask=inside)
        largest = tl.maximum(largest, block_absmax(v, SCHEME.has_ptx))
    tl.store(row_scale + row, float_of(tl.where(largest > INFINITY, NAN, bits_of(s))), mask=exists)
    if row_zero is not None:
        tl.store(row_zero + row, z.to(tl.int8), mask=exists)
