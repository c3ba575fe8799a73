"""Sparse squared ReLU in training: `reference.squared_relu_24` with a gradient.

y is the square of the two largest of every four x, by signed value, where they are positive; bits, ties and NaN as the
reference says. The mask is a constant of the gradient: with u an operation rounded to float32,

* kept and positive: 2 u(g x), g the gradient of y; cast to x's dtype once;
* else +0; NaN of x gives NaN.

Kept for backward is x alone; the mask is found again. Finite x and g give no NaN: g x is made first, and what overflows is
infinite. Source: Haziza et al., "Accelerating Transformer Inference and Training with 2:4 Activation Sparsity" (arXiv
2503.16672). The product with the next weight is a dense one of a matrix with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fast.device import functional_transform
from fast.ops import once_differentiable
from reference.sparsity.activation import squared_relu_24


class SquaredReLU24(torch.autograd.Function):
    """Values of `squared_relu_24`, and their gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """The values; x is kept."""
        ctx.save_for_backward(x)
        return activated(x)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        """See the module text."""
        (x,) = ctx.saved_tensors
        mask = activated(x)[1] & ~(x <= 0)
        product = (g.float() * x.float()).mul_(2).to(x.dtype)
        return torch.where(mask, product, torch.zeros((), dtype=x.dtype, device=x.device))


def activated(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and mask of x, as operators."""
    values, mask = torch.ops.ao_lab.squared_relu_24(x)
    return values, mask


@torch.library.custom_op("ao_lab::squared_relu_24", mutates_args=())
def squared_relu_24_op(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.squared_relu_24` of a tensor."""
    result = squared_relu_24(x)
    return result.values, result.mask


@squared_relu_24_op.register_vmap
def _batched(
    info: Any, in_dims: tuple[int], x: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    # The mask is of the last axis: others, a batch's among them, are alike.
    return activated(x.movedim(in_dims[0], 0)), (0, 0)


@squared_relu_24_op.register_fake
def _fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def sparse_squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The squared ReLU of x (..., K), 2:4 along K: shape and dtype of x (float32, bfloat16, float16), with a gradient.

    Rounding and edges as the module says. Raises TypeError for what is no such tensor, ValueError where 4 does not divide K.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"sparse_squared_relu takes a torch tensor, got {type(x).__name__}: {x!r:.60}")
    if not torch.compiler.is_compiling() and functional_transform() is not None:
        kept = activated(x.detach())[1] & (x.detach() > 0) | x.detach().isnan()
        return torch.where(kept, x, 0).square()
    y: torch.Tensor = SquaredReLU24.apply(x)  # type: ignore[no-untyped-call]
    return y


class SparseSquaredReLU(nn.Module):
    """`sparse_squared_relu` as a module, in the place of a squared ReLU between two linear layers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """See `sparse_squared_relu`."""
        return sparse_squared_relu(input)


__all__ = ["SparseSquaredReLU", "sparse_squared_relu"]
