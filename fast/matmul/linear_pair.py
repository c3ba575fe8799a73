"""`linear_pair`: two products of the same inputs."""

from __future__ import annotations

import torch

from fast.dispatch import require_tensor, run
from fast.matmul.linear_ops import LINEAR_PAIR
from fast.matmul.weights import check_weight, pair_values, parts
from reference import Quantized


def linear_pair(x: torch.Tensor, first: Quantized, second: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear(x, first)`, `linear(x, second)`) of x (..., K) and weights (N, K) and (M, K).

    On a GPU one row of inputs and two weights that are stored alike (one scheme, one shape, 4-bit integers or bytes as `linear`
    multiplies them by kernels of one row) take one launch. Its results lie within `reference.linear_error_bound`, like those of
    `linear`, whose sums may be made in another order. Everything else is two calls. Arguments and errors are those of `linear`.
    Differentiable in x.
    """
    for w in (first, second):
        if not isinstance(w, Quantized):
            check_weight(require_tensor(x, "linear_pair"), w, None, "linear_pair")
    made: tuple[torch.Tensor, torch.Tensor] = run(
        LINEAR_PAIR, first.scheme, pair_values(first, second), (x, *parts(first, second))
    )
    return made


__all__ = ["linear_pair"]
