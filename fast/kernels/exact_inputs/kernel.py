"""Inputs of a product as a scheme represents them, for the tensor core: what 16-bit floats hold exactly.

* `row_codes_kernel`: under one float32 scale for each row, decoded elements less the zero point, and the scales. The product
  multiplies its sums by them.
* `block_values_kernel`: under powers of two, the values themselves: `fake_quantize` of them is exact.

Both begin while the kernel in front of them ends, and let the product begin while they run: it asks for its weight meanwhile.
Scales and elements are chosen by the device functions of the block kernel, so they are `quantize`'s to the bit.
"""

import triton
import triton.language as tl

from fast.kernels.bits import float_of, narrow, read, widened
from fast.kernels.quantize.kernel import all_of, blocks_kernel
from fast.kernels.rules.statistics import block_absmax, bound, value_range
from fast.kernels.rules.values import element_codes, unscaled
from fast.kernels.tile.fast_codes import multiplier, rounded_values
from fast.kernels.tile.scales import choose_scales

# Elements of a row that stay in registers.
LONG = tl.constexpr(16384)


@triton.jit
def _wait(USE_PDL: tl.constexpr):
    """Until the kernel in front has ended; the one behind may begin."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _range_of_rows(tile, inside, SCHEME: tl.constexpr):
    """(pattern of the largest magnitude, minimum, maximum) of each row, as `choose_scales` takes them."""
    if SCHEME.level.statistic == "absmax":
        largest = block_absmax(widened(tile, SCHEME.signs_nan), SCHEME.has_ptx)
        return largest, float_of(largest), float_of(largest)
    else:
        largest, low, high = value_range(tile, inside, SCHEME.signs_nan, SCHEME.with_zero, SCHEME.has_ptx)
        if SCHEME.ranged:
            return largest, float_of(low), float_of(high)
        else:
            return (
                largest,
                bound(low, largest, SCHEME.with_zero, True),
                bound(high, largest, SCHEME.with_zero, False),
            )


@triton.jit
def _elements(tile, e, s, scale_code, prepared, z, SCHEME: tl.constexpr):
    """Decoded elements of a tile less their zero point, before scaling, float32; anything where the scale is NaN."""
    v = widened(tile, SCHEME.signs_nan)
    if SCHEME.fast_path != "":
        return rounded_values(v, multiplier(s, scale_code, prepared, SCHEME), s, z, SCHEME)
    else:
        divisor = e if SCHEME.codes_from == "exact" else s
        return unscaled(element_codes(v, divisor, divisor, z, None, SCHEME), z, SCHEME)


@triton.jit
def row_codes_kernel(
    x, y, scale, LENGTH: tl.constexpr, SIZE: tl.constexpr, SCHEME: tl.constexpr, OP: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """A row of x (M, LENGTH): its elements as y's dtype, and its scale in float32. SIZE: a power of two that holds LENGTH."""
    _wait(USE_PDL)
    row = tl.program_id(0)
    i = tl.arange(0, SIZE)[None, :]
    inside = all_of(SIZE, 1)
    if SIZE != LENGTH:
        inside = i < LENGTH
    at = row * LENGTH + i
    tile = read(x + at, inside)
    largest, low, high = _range_of_rows(tile, inside, SCHEME)
    block = row + tl.zeros((1, 1), tl.int32)
    e, s, scale_code, prepared, z = choose_scales(
        largest, low, high, 1.0, scale, scale, block, block >= 0, 1, SCHEME, OP
    )
    tl.store(scale + block, s)
    if SIZE > LONG or SCHEME.zero != "":
        # Again: a thread of a long row has no registers to keep it in, and a range is taken of other pairs. The store in front
        # keeps the two apart.
        tile = read(x + at, inside)
    value = _elements(tile, e, s, scale_code, prepared, z, SCHEME)
    tl.store(y + at, narrow(value, SCHEME.dtype, False), mask=inside)


@triton.jit
def block_values_kernel(
    x, g, words, statistic, outer_statistic, outer, scale, zero, codes, y,
    count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column, stride,
    SCHEME: tl.constexpr, OP: tl.constexpr, SHAPE: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """`blocks_kernel` between two others."""
    _wait(USE_PDL)
    blocks_kernel(
        x, g, words, statistic, outer_statistic, outer, scale, zero, codes, y,
        count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column, stride,
        SCHEME, OP, SHAPE, CHUNKED, MASKED, WIDE, SIZE, INNER, P,
    )  # fmt: skip
