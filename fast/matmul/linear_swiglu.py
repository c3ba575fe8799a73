"""`linear_swiglu`: two products of the same inputs, the silu of one times the other."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.matmul.linear_swiglu_ops import LINEAR_SWIGLU
from fast.matmul.weights import pair_values, parts, require_weights
from reference import Quantized


def linear_swiglu(x: torch.Tensor, gate: Quantized, up: Quantized) -> torch.Tensor:
    """`swiglu(linear(x, gate), linear(x, up))` of x (..., K), bfloat16 or float16, and two weights (N, K), in x's dtype.

    Both products are rounded to x's dtype, as `linear` rounds them, then `reference.swiglu` holds: silu correctly rounded, its
    product with up rounded once. On a GPU one row of inputs and two weights that are stored alike (see `linear_pair`) take one
    launch, whose sums may be made in another order than those of `linear`, within the same bound. Everything else is three
    calls. Errors are those of `linear` and `swiglu`; ValueError where the weights have other shapes. Differentiable in x.
    """
    require_weights(x, "linear_swiglu", gate, up)
    y: torch.Tensor = run(LINEAR_SWIGLU, gate.scheme, pair_values(gate, up), (x, *parts(gate, up)))
    return y


__all__ = ["linear_swiglu"]
