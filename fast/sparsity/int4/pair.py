"""Two products of the same inputs by weights of 4-bit integers in 2:4 storage, and silu of one times the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fast.dispatch import run
from fast.sparsity.int4.pair_ops import LINEAR_SPARSE_INT4_PAIR, LINEAR_SPARSE_INT4_SWIGLU

#: The most rows of inputs that take one launch.
MOST_ROWS = 16


def linear_sparse_int4_pair(
    x: torch.Tensor, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear_sparse_int4(x, *first)`, `linear_sparse_int4(x, *second)`) of x (..., K) and weights (N, K) and (M, K).

    first, second: codes, metadata and scales of a weight, without zero points. On a Hopper GPU up to MOST_ROWS rows of x and
    two weights with groups of one size and scales of one dtype take one launch. Its results lie within
    `reference.linear_error_bound`, like those of `linear_sparse_int4`, whose sums may be made in another order. Everything else
    is two calls. Errors are those of `linear_sparse_int4`. Differentiable in x.
    """
    made: tuple[torch.Tensor, torch.Tensor] = run(LINEAR_SPARSE_INT4_PAIR, None, (), (x, *first, *second))
    return made


def linear_sparse_int4_swiglu(
    x: torch.Tensor, gate: Sequence[torch.Tensor], up: Sequence[torch.Tensor]
) -> torch.Tensor:
    """`swiglu(linear_sparse_int4(x, *gate), linear_sparse_int4(x, *up))` of x (..., K) and weights (N, K).

    Both products are rounded to x's dtype, then `reference.swiglu` holds, and that is the dtype of the result. On a Hopper GPU
    up to MOST_ROWS rows and two weights with groups of one size and scales of one dtype take one launch, whose sums may be made
    in another order than those of `linear_sparse_int4`, within the same bound. Everything else is three calls. Errors are those
    of `linear_sparse_int4`; ValueError where the weights have other shapes. Differentiable in x.
    """
    y: torch.Tensor = run(LINEAR_SPARSE_INT4_SWIGLU, None, (), (x, *gate, *up))
    return y


__all__ = ["MOST_ROWS", "linear_sparse_int4_pair", "linear_sparse_int4_swiglu"]
