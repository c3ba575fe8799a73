"""Which shapes a recipe takes: every operand's blocks divide its matrix."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from reference.arrays.errors import choice
from reference.training.recipe import PRODUCTS, Operand, Product, Recipe, recipe_of

MEANINGS = {
    "K": "input features",
    "N": "output features",
    "M": "rows of the input, all its axes but the last together",
}
#: (rows, sum) of the operands a and b of each product.
AXES = {
    "output": (("M", "K"), ("N", "K")),
    "input_grad": (("M", "N"), ("K", "N")),
    "weight_grad": (("N", "M"), ("K", "M")),
}


def unsupported_reason(
    recipe: str | Recipe,
    shape_x: Sequence[int] | None,
    shape_w: Sequence[int],
    *,
    products: Sequence[str] = PRODUCTS,
    multiple: int = 1,
) -> str | None:
    """Why a linear layer of these shapes cannot run by a recipe, in words, or None where it can.

    shape_x: (..., K) of the input; None where the number of rows M is not known yet, which then is not looked at. shape_w:
    (N, K) of the weight. products: which of "output", "input_grad" and "weight_grad" are wanted; M counts in the last alone,
    whose sum runs over it. multiple: what a device asks of every sum over quantized operands besides (16 for FP8 tensor cores).

    Rows of zeros below x and g change no other row and add zeros to the weight gradient, so x may be padded to a multiple
    (elements then draw other random bits). Nothing is padded here.
    """
    recipe = recipe_of(recipe)
    lengths = {"N": shape_w[0], "K": shape_w[1]}
    if shape_x is not None:
        lengths["M"] = _product_of(shape_x[:-1])
    wanted = {dim: multiple_of(recipe, dim, products=products, multiple=multiple) for dim in lengths}
    wrong = [
        f"{dim} ({MEANINGS[dim]}) is {lengths[dim]}, not a multiple of {size}"
        for dim, size in wanted.items()
        if lengths[dim] % size
    ]
    return f"recipe {recipe.name}: {'; '.join(wrong)}" if wrong else None


def multiple_of(
    recipe: str | Recipe, dim: str, *, products: Sequence[str] = PRODUCTS, multiple: int = 1
) -> int:
    """What the length of "M", "N" or "K" has to be a multiple of; arguments as in `unsupported_reason`."""
    choice(dim, tuple(MEANINGS), "dim")
    recipe = recipe_of(recipe)
    found = 1
    for which in products:
        record: Product = getattr(recipe, which)
        for operand, (rows, along) in zip((record.a, record.b), AXES[which], strict=True):
            of_rows, of_sum = _blocks(operand)
            quantized = multiple if operand.scheme is not None else 1
            found = lcm(found, of_rows if rows == dim else 1, lcm(of_sum, quantized) if along == dim else 1)
    return found


def _blocks(operand: Operand) -> tuple[int, int]:
    """What divides an operand's rows, and its last axis."""
    mixed = max(operand.hadamard, 1)
    if operand.scheme is None or operand.scheme.scale.partial:
        return 1, mixed
    block = operand.scheme.scale.block
    if isinstance(block, tuple):
        return block[0], lcm(block[1], mixed)
    return 1, lcm(block, mixed) if isinstance(block, int) and block > 0 else mixed


def _product_of(lengths: Sequence[int]) -> int:
    rows = 1
    for length in lengths:
        rows *= length
    return rows
