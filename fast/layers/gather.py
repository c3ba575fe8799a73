"""Rows of a matrix by index as columns: an operator under a tracer, a kernel on GPUs, torch operations elsewhere.

No name of `fast` itself: operands of products of tokens sorted by expert.
"""

from __future__ import annotations

import torch

from fast.dispatch import has_kernels, is_operator


def gather_transposed(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """x (T, C) by source (P,) int32 as (C, P); negative numbers give zeros."""
    if is_operator(x):
        result: torch.Tensor = _gather_op(x, source)
        return result
    return _gather(x, source)


def _gather(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if has_kernels(x):
        from fast.kernels import grouped

        return grouped.gather_transposed(x.detach().contiguous(), source)
    columns = torch.zeros((x.shape[1], source.shape[0]), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        # A choice, no product with 0: NaN of rows that are left out stays out.
        rows = x.detach()[source.clamp(min=0).to(torch.int64)]
        columns = torch.where((source >= 0)[:, None], rows, rows.new_zeros(())).t().contiguous()
    return columns


@torch.library.custom_op("ao_lab::gather_transposed", mutates_args=())
def _gather_op(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _gather(x, source)


@_gather_op.register_fake
def _gather_fake(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[1], source.shape[0]))


__all__ = ["gather_transposed"]
