"""Two products of the same inputs by preshuffled weights, and silu of one times the other, for torch tensors."""

from __future__ import annotations

from typing import Any

import torch

from fast.dispatch import run
from fast.layers.swiglu import swiglu
from fast.matmul.preshuffled.linear import linear_small
from fast.matmul.preshuffled.pair_ops import LINEAR_SMALL_PAIR, LINEAR_SMALL_SWIGLU
from reference import Quantized

#: The most rows of inputs that take one launch.
MOST_ROWS = 16


def linear_small_pair(
    x: torch.Tensor, first: Quantized, second: Quantized
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear_small(x, first)`, `linear_small(x, second)`) of x (..., K) and preshuffled weights (N, K) and (M, K).

    On a GPU up to MOST_ROWS rows of bfloat16 or float16 and two weights of one scheme and shape take one launch. Its results
    lie within `reference.linear_error_bound`, like those of `linear_small`, whose sums may be made in another order. Everything
    else is two calls. Arguments and errors are those of `linear`. Differentiable in x.
    """
    if not _alike(first, second):
        return linear_small(x, first), linear_small(x, second)
    made: tuple[torch.Tensor, torch.Tensor] = run(LINEAR_SMALL_PAIR, first.scheme, *_given(x, first, second))
    return made


def linear_small_swiglu(x: torch.Tensor, gate: Quantized, up: Quantized) -> torch.Tensor:
    """`swiglu(linear_small(x, gate), linear_small(x, up))` of x (..., K), bfloat16 or float16, and weights (N, K).

    Both products are rounded to x's dtype, then `reference.swiglu` holds, and that is the dtype of the result. On a GPU up to
    MOST_ROWS rows and two weights of one scheme take one launch, whose sums may be made in another order than those of
    `linear_small`, within the same bound. Everything else is three calls. Errors are those of `linear` and `swiglu`: TypeError
    for other dtypes, ValueError where the weights have other shapes. Differentiable in x.
    """
    if not _alike(gate, up):
        return swiglu(linear_small(x, gate), linear_small(x, up))
    y: torch.Tensor = run(LINEAR_SMALL_SWIGLU, gate.scheme, *_given(x, gate, up))
    return y


def _alike(first: Quantized, second: Quantized) -> bool:
    return first.scheme.key == second.scheme.key and tuple(first.shape) == tuple(second.shape)


def _given(x: torch.Tensor, *weights: Quantized) -> tuple[Any, ...]:
    """Value and operands of a call."""
    stored = (part for w in weights for part in (w.codes, w.scale, w.zero))
    return (tuple(weights[0].shape),), (x, *stored)


__all__ = ["MOST_ROWS", "linear_small_pair", "linear_small_swiglu"]
