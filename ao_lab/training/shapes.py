"""Which shapes a recipe takes."""

from __future__ import annotations

import torch
from torch import nn

from reference.training.recipe import Operand, Recipe

#: What `torch._scaled_mm` asks of every length of 8-bit float products.
STEP = 16


def block_length(operand: Operand) -> int:
    """What an operand's length along the sum is a multiple of."""
    if operand.scheme is None:
        return max(operand.hadamard, 1)
    block = operand.scheme.scale.block
    inner = block[1] if isinstance(block, tuple) else block if isinstance(block, int) and block > 0 else STEP
    return max(inner, operand.hadamard, STEP)


def steps(recipe: Recipe) -> tuple[int, int, int]:
    """What M, N and K are multiples of; all blocks are powers of two, so the largest decides."""
    output, grad, weight = recipe.output, recipe.input_grad, recipe.weight_grad
    return (
        max(block_length(weight.a), block_length(weight.b)),
        max(block_length(grad.a), block_length(grad.b)),
        max(block_length(output.a), block_length(output.b)),
    )


def unsupported_reason(recipe: Recipe, module: nn.Module, pad: bool = False) -> str | None:
    """Why a module cannot train by a recipe; None where it can."""
    kind = type(module).__name__
    if type(module) is not nn.Linear:
        return f"recipes train nn.Linear itself; a {kind} may compute otherwise"
    _, n, k = steps(recipe)
    for name, length, step in (
        ("in_features", module.in_features, k),
        ("out_features", module.out_features, n),
    ):
        if length % step and not pad:
            return f"{name} = {length} is no multiple of {step}, as recipe {recipe.name!r} asks"
    return None


def padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix with zeros up to multiples of two numbers; itself where there is nothing to add.

    Zeros change no amax, and add nothing to a product or a gradient.
    """
    below, right = -x.shape[0] % rows, -x.shape[1] % columns
    return nn.functional.pad(x, (0, right, 0, below)) if below or right else x
