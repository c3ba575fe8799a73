"""`linear_sparse_int4` for torch tensors; see `reference.linear_sparse_int4` for the layout of the weight."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.sparsity.linear_sparse_int4_ops import LINEAR_SPARSE_INT4


def linear_sparse_int4(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (..., K) times the transpose of a weight (N, K) of 4-bit integers in 2:4 storage, plus bias (N), in x's dtype.

    x: bfloat16 or float16; codes uint8 (N, K/4), metadata uint8 (N, K/8), scale (N, K/g) and, where there are zero points,
    zero int8 (N, K/g) as `reference.linear_sparse_int4` has them, on one device. On a GPU up to 64 rows of x read the weight
    as it is stored, 0.375 bytes an element and the scales, and nothing dense is made: the result is within
    `reference.linear_error_bound` of the exact product with the dense weight, exact where all sums are exact in float32, and
    the same bits in every call. More rows, and zero points on other GPUs than Hopper or of a K that no kernel divides, are
    multiplied by torch with a dense weight in x's dtype that is made for the call. CPU tensors run the reference. Metadata are
    those of `compress`: of other bits the sparse tensor core makes anything. Zero points beyond -8 to 7 give anything, too.

    Errors are those of the reference. Differentiable in x and bias, by products with the dense weight; NotImplementedError
    where scales require a gradient.
    """
    y: torch.Tensor = run(LINEAR_SPARSE_INT4, None, (), (x, codes, metadata, scale, bias, zero))
    return y


__all__ = ["linear_sparse_int4"]
