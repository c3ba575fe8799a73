"""Which shapes a recipe takes."""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
from torch import nn

from ao_lab.tensor.metadata import DTYPES
from reference.training.linear import multiple_of
from reference.training.recipe import Operand, Recipe

#: What `torch._scaled_mm` asks of every length of 8-bit float products.
STEP = 16


def steps(recipe: Recipe) -> tuple[int, int, int]:
    """What M, N and K are multiples of: what the recipe asks, and whole blocks, though those at the end may be partial."""
    whole = lcm(STEP, *(_length(operand) for operand in recipe.operands))
    m, n, k = (multiple_of(recipe, dim, multiple=whole) for dim in "MNK")
    return m, n, k


def _length(operand: Operand) -> int:
    """Elements of a block along the sum; 1 where it takes any number."""
    block = None if operand.scheme is None else operand.scheme.scale.block
    inner = block[1] if isinstance(block, tuple) else block
    return inner if isinstance(inner, int) and inner > 0 else 1


def unsupported_reason(recipe: Recipe, module: nn.Linear, pad: bool = False) -> str | None:
    """Why a linear layer of these lengths and this dtype cannot train by a recipe; None where it can."""
    if (dtype := getattr(module.weight, "dtype", None)) is not None and dtype not in DTYPES:
        return f"its weight is {dtype}, and recipes take float32, bfloat16, float16 and float64"
    _, n, k = steps(recipe)
    for name, length, step in (
        ("in_features", module.in_features, k),
        ("out_features", module.out_features, n),
    ):
        if length % step and not pad:
            return f"{name} = {length} is no multiple of {step}, as recipe {recipe.name!r} asks"
    return None


def divides(step: int, length: Any) -> bool:
    """Whether, under a tracer, a length is a multiple of a step; False where it is open, so that one program serves all."""
    from torch.fx.experimental.symbolic_shapes import (
        statically_known_true,
    )  # not imported where nothing is traced

    return statically_known_true(length % step == 0)


def padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix with zeros up to multiples of two numbers; itself where there is nothing to add.

    Zeros change no amax, and add nothing to a product or a gradient.
    """
    below, right = -x.shape[0] % rows, -x.shape[1] % columns
    return nn.functional.pad(x, (0, right, 0, below)) if below or right else x
