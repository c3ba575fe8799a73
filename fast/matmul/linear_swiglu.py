"""`linear_swiglu`: two products of the same inputs, the silu of one times the other."""

from __future__ import annotations

import torch

from fast.dispatch import require_tensor, run
from fast.matmul.linear_ops import LINEAR_SWIGLU
from fast.matmul.weights import check_weight, pair_values, parts
from reference import Quantized


def linear_swiglu(x: torch.Tensor, gate: Quantized, up: Quantized) -> torch.Tensor:
    """`swiglu(linear(x, gate), linear(x, up))` of x (..., K), bfloat16 or float16, and two weights (N, K), in x's dtype.

    Both products are rounded to x's dtype, as `linear` rounds them, then `reference.swiglu` holds: silu correctly rounded, its
    product with up rounded once. On a GPU one row of inputs and two weights that are stored alike (see `linear_pair`) take one
    launch, whose sums may be made in another order than those of `linear`, within the same bound. Everything else is three
    calls. Errors are those of `linear` and `swiglu`; ValueError where the weights have other shapes. Differentiable in x.
    """
    for w in (gate, up):
        if not isinstance(w, Quantized):
            check_weight(require_tensor(x, "linear_swiglu"), w, None, "linear_swiglu")
    y: torch.Tensor = run(LINEAR_SWIGLU, gate.scheme, pair_values(gate, up), (x, *parts(gate, up)))
    return y


__all__ = ["linear_swiglu"]
