"""Gradients that have no derivatives: codes stand between, and gradients of rounded values are straight-through estimates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

REFUSED = (
    "a layer that trains in low precision, with fake-quantized weights or sparse has no second derivatives: its gradient is "
    "computed from codes, or passes rounding by as if it were not there. Compute this loss (a gradient penalty, a product with "
    "the Hessian) with dense layers: leave the layer out by filter_fn, or copy the model before quantize_, "
    "convert_for_training_ or sparsify_; where the first gradient is a constant, call its detach()"
)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `torch.autograd.Function.backward` whose results raise a RuntimeError where they are differentiated (create_graph).

    torch's own decorator takes gradients for constants where the gradient that arrives is one, as that of a sum is: weights and
    inputs, on which they depend, would get no gradient through them, without a word. A compiled program refuses by itself.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return found
        results = found if isinstance(found, tuple) else (found,)
        refusing: Any = torch._C._functions.DelayedError(REFUSED, len(results))
        return refusing(*map(_requiring, results))

    return wrapper


def _requiring(result: Any) -> Any:
    """The same values, which require a gradient: what comes of them then has the refusing function for its origin."""
    return result.detach().requires_grad_() if isinstance(result, torch.Tensor) else result


__all__ = ["once_differentiable"]
