"""`column_sums` for torch tensors: the gradient of a bias, a matrix's columns summed in float32.

No name of `fast` itself: backward passes call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fast.dispatch import Function, execute, is_traced, run
from fast.ops import register

#: Elements of the smallest matrix that kernels sum, others torch: of fewer two launches take longer than one.
LEAST = 1 << 21
#: Rows of such a matrix at least, for the same reason.
FEWEST = 64
#: Columns of such a matrix at least, which fill a program.
SHORTEST = 256
#: Bytes that each of its rows begins at a multiple of: what a thread reads at once.
ALIGNED = 16


def column_sums(g: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Sums (N) of g (..., N) over all axes but the last, in float32, rounded once to dtype, by default g's.

    On a GPU equal inputs have equal bits: large matrices of float32, bfloat16 or float16 by kernels whose order of additions
    and bound `fast.kernels.layers.column_sums` states, others by torch's sum. NaN and infinities go through as in any sum; what
    overflows the dtype is infinite; no rows are +0. Differentiable. TypeError for what is no floating-point tensor, ValueError
    for a tensor without axes.
    """
    dtype = g.dtype if dtype is None else dtype
    if not g.is_floating_point() or not dtype.is_floating_point:
        raise TypeError(
            f"column_sums takes floating-point tensors and gives such, got {g.dtype} and {dtype}; cast it first"
        )
    if not g.dim():
        raise ValueError("column_sums takes a tensor with an axis of columns, got one without axes")
    if not g.is_cuda or not (is_traced(g) or covers(g)):
        return summed(g, dtype)
    result: torch.Tensor = run(COLUMN_SUMS, None, (dtype,), (g,))
    return result


def covers(g: torch.Tensor) -> bool:
    """Whether a matrix is worth the kernels, and rows lie where they read."""
    size, length = g.numel(), g.shape[-1]
    return size >= LEAST and length >= SHORTEST and length % ALIGNED == 0 and size >= FEWEST * length


def summed(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By torch, whose CUDA sums of 16 bits are in float32 too; on a CPU that has to be asked for."""
    if g.is_cuda and g.dtype == dtype:
        return g.reshape(-1, g.shape[-1]).sum(0)
    wide = torch.promote_types(g.dtype, torch.float32)
    return g.reshape(-1, g.shape[-1]).sum(0, dtype=wide).to(dtype)


def column_sums_op(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `column_sums`."""
    result: torch.Tensor = execute(COLUMN_SUMS, None, (dtype,), (g,))
    return result


def _fake(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return g.new_empty((g.shape[-1],), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.shape, ctx.dtype = inputs[0].shape, inputs[0].dtype


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Each row has the sum's gradient."""
    return grad.to(ctx.dtype).expand(ctx.shape), None


def _kernel(record: Any, values: tuple[Any, ...], operands: Sequence[Any], key: Any) -> Any:
    if not covers(operands[0]):
        return None
    from fast.kernels.layers import column_sums as kernels

    return kernels.column_sums(operands[0], values[0], key)


COLUMN_SUMS = Function(
    "column_sums", ("g",),
    lambda r, v, o: summed(o[0], v[0]), lambda r, v, o: COLUMN_SUMS_OP(o[0], v[0]), _kernel, differentiable=True,
)  # fmt: skip
COLUMN_SUMS_OP = register("column_sums", column_sums_op, _fake, _backward, _save, linear_in=(0,))

__all__ = ["COLUMN_SUMS", "column_sums"]
