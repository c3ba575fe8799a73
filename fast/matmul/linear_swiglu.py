"""`linear_swiglu`: two products of the same inputs, the silu of one times the other."""

from __future__ import annotations

import torch

from fast.device import has_kernels, is_traced
from fast.layers.swiglu import swiglu
from fast.matmul import linear_ops
from fast.matmul.linear_pair import alike, linear_pair, ready_pair
from fast.tensors import require_tensor
from reference import Quantized
from reference.layers.swiglu import DTYPES
from reference.matmul.linear import check_linear


def linear_swiglu(x: torch.Tensor, gate: Quantized, up: Quantized) -> torch.Tensor:
    """`swiglu(linear(x, gate), linear(x, up))` of x (..., K), bfloat16 or float16, and two weights (N, K), in x's dtype.

    Both products are rounded to x's dtype, as `linear` rounds them, then `reference.swiglu` holds: silu correctly rounded, its
    product with up rounded once. On a GPU one row of inputs and two weights that are stored alike (see `linear_pair`) take one
    launch, whose sums may be made in another order than those of `linear`, within the same bound. Everything else is three
    calls. Errors are those of `linear` and `swiglu`; ValueError where the weights have other shapes.
    """
    key, known = ready_pair("linear_swiglu", x, gate, up)
    if known is not None:
        return known  # type: ignore[no-any-return]
    check(x, gate, up)
    if is_traced(x) or is_traced(gate.codes) or is_traced(up.codes):
        return linear_ops.linear_swiglu(x, gate, up)
    x = x.detach()
    if has_kernels(x) and x.numel() == x.shape[-1] and alike(gate, up):
        from fast.kernels.linear import pair_host as kernels

        made = kernels.linear_swiglu(x, gate, up, key)
        if made is not None:
            return made
    return swiglu(*linear_pair(x, gate, up))


def check(x: torch.Tensor, gate: Quantized, up: Quantized) -> None:
    """Raise where the arguments are none of `linear_swiglu`."""
    for w in (gate, up):
        check_linear(x, w, None)
        require_tensor(w.codes, "linear_swiglu")
    if str(x.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(
            f"linear_swiglu takes {' or '.join(DTYPES)}, for which silu has a rule, got {x.dtype}; cast inputs first"
        )
    if tuple(gate.shape) != tuple(up.shape):
        raise ValueError(
            f"linear_swiglu multiplies what two weights make number by number, got weights of {tuple(gate.shape)} and "
            f"{tuple(up.shape)}; linear_pair takes such"
        )


__all__ = ["linear_swiglu"]
