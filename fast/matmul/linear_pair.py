"""`linear_pair`: two products of the same inputs."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.matmul.linear_pair_ops import LINEAR_PAIR
from fast.matmul.weights import pair_values, parts, require_weights
from reference import Quantized


def linear_pair(x: torch.Tensor, first: Quantized, second: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear(x, first)`, `linear(x, second)`) of x (..., K) and weights (N, K) and (M, K).

    On a GPU one row of inputs and two weights that are stored alike (one scheme, one shape, 4-bit integers or bytes as `linear`
    multiplies them by kernels of one row) take one launch. Its results lie within `reference.linear_error_bound`, like those of
    `linear`, whose sums may be made in another order. Everything else is two calls. Arguments and errors are those of `linear`.
    Differentiable in x.
    """
    require_weights(x, "linear_pair", first, second)
    products: tuple[torch.Tensor, torch.Tensor] = run(
        LINEAR_PAIR, first.scheme, pair_values(first, second), (x, *parts(first, second))
    )
    return products


__all__ = ["linear_pair"]
