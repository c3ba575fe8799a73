"""The block kernel for callers that hand over all inputs before all outputs, as XLA does."""

import triton
import triton.language as tl

from fast.kernels.blocks import blocks_kernel


@triton.jit
def inputs_first(
    x, g, words, statistic, outer_statistic, outer, scale, zero, codes, y,
    count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column, stride,
    RULE: tl.constexpr, JOB: tl.constexpr, SHAPE: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The block kernel with its arrays in an order in which, in every job, what is read comes before what is written."""
    blocks_kernel(
        x, g, words, codes, scale, outer, zero, statistic, outer_statistic, y, count, columns, rows, length, limit, chunks,
        lead_stride, row_stride, column_stride, inner_row, inner_column, stride, RULE, JOB, SHAPE, CHUNKED, MASKED, WIDE,
        SIZE, INNER, P,
    )  # fmt: skip
