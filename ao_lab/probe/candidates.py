"""What a layer could run as, and the errors of its products then: records of `reference.training`, whatever was asked for.

A candidate is a name of `RECIPES` (all three products of training), a scheme by name or record (the weight alone), two of them
as "WEIGHT x INPUT", or a configuration of `quantize_`. A configuration's recipe is one whose gradients stay in high precision.
Errors are those of the operands: products of what they stand for are taken in float64. What a kernel's sums add is measured by
`ao_lab.testing.probe_kernel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ao_lab.config.base import Config, kind_of
from ao_lab.config.recipe import Recipe as LayerRecipe
from ao_lab.config.recipe import named
from ao_lab.training.casts import STREAMS, Matrix, quantize_one, quantize_two, weight_columns
from ao_lab.training.layers import padded_to_multiples
from ao_lab.training.products import values
from reference.quantize.blocks import Blocks
from reference.quantize.scales import scale_groups
from reference.schemes.schemes import Scheme
from reference.training.linear import multiple_of, unsupported_reason
from reference.training.recipe import RECIPES, Operand, Product, Recipe

#: Between a weight's and an input's scheme in the name of a candidate.
BY = " x "
DOUBLE = torch.float64


def candidates_of(given: Any) -> dict[str, Recipe]:
    """Candidates by name; a single one, several, or a mapping of names. ValueError for none and for unknown names."""
    if isinstance(given, Mapping):
        found = {str(name): recipe_of(one) for name, one in given.items()}
    elif isinstance(given, Iterable) and not isinstance(given, str):
        found = {(recipe := recipe_of(one)).name: recipe for one in given}
    else:
        found = {(recipe := recipe_of(given)).name: recipe}
    if not found:
        raise ValueError(
            f"there is no candidate to probe; give a recipe ({', '.join(RECIPES)}), a scheme or a configuration"
        )
    return found


def recipe_of(given: Any) -> Recipe:
    """The record of one candidate."""
    if isinstance(given, Recipe):
        return given
    if isinstance(given, Scheme):
        return _layer(given.name, given, None)
    if isinstance(given, Config):
        if given.observer() is not None:
            raise ValueError(
                f"{type(given).__name__} finds static scales from data, and a probe quantizes each input anew; give it "
                f"act_quant_scale, or a configuration with dynamic scales"
            )
        return _of_layer(given.recipe())
    if isinstance(given, LayerRecipe):
        return _of_layer(given)
    if not isinstance(given, str):
        raise TypeError(
            f"a candidate is a recipe, a scheme, 'WEIGHT x INPUT' or a configuration, got {kind_of(given)}"
        )
    if given in RECIPES:
        return RECIPES[given]
    weight, _, activation = given.partition(BY)
    return _layer(given, _named(weight), _named(activation) if activation else None)


def _named(name: str) -> Scheme | None:
    try:
        return named(name)
    except ValueError as error:
        raise ValueError(f"{error}; recipes of training are {', '.join(RECIPES)}") from error


def _of_layer(recipe: LayerRecipe) -> Recipe:
    return _layer(str(recipe), recipe.weight, recipe.activation, recipe.rotation)


def _layer(name: str, weight: Scheme | None, activation: Scheme | None, rotation: int = 0) -> Recipe:
    """Both operands mixed by a Hadamard transform where the configuration rotates."""
    output = Product(
        a=Operand(scheme=activation, hadamard=rotation), b=Operand(scheme=weight, hadamard=rotation)
    )
    return Recipe(name=name, output=output, note="output alone")


def products_of(recipe: Recipe) -> tuple[str, ...]:
    """Which products of a recipe quantize something, the output first."""
    names = ("output", "input_grad", "weight_grad")
    return tuple(name for name in names if _rounds(getattr(recipe, name)))


def _rounds(product: Product) -> bool:
    return product.a.scheme is not None or product.b.scheme is not None


def reason_against(recipe: Recipe, shape: tuple[int, int]) -> str | None:
    """Why a weight (N, K) cannot run so, with inputs of any number of tokens; None where it can."""
    reason = unsupported_reason(recipe, None, shape, products=products_of(recipe) or ("output",))
    if reason is not None:
        return reason
    try:
        for operand, size in ((recipe.output.a, (1, shape[1])), (recipe.output.b, shape)):
            if operand.scheme is not None:
                _check_blocks(operand.scheme, size)
    except ValueError as error:
        return str(error)
    return None


def _check_blocks(scheme: Scheme, shape: tuple[int, int]) -> None:
    """ValueError where blocks of either level do not divide a matrix: flat ones count its elements, not its columns."""
    blocks = Blocks.of(shape, scheme.scale, -1)
    if scheme.outer is not None and scheme.outer.block != "tensor":
        scale_groups(blocks, scheme.outer, scheme)


def output_operands(
    recipe: Recipe, x: torch.Tensor, w: torch.Tensor, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the output's product multiplies, x (M, K) and w (N, K) as they are read, float64."""
    a, b = recipe.output.a, recipe.output.b
    return (
        wide(quantize_one(x, a, seed, STREAMS["x"])),
        wide(quantize_one(w, b, seed, STREAMS["w"])),
    )


def output_error(recipe: Recipe, x: torch.Tensor, w: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """The output's error (M, N), float64: the product of quantized operands minus x w.T."""
    a, b = output_operands(recipe, x, w, seed)
    return a @ b.T - x.to(DOUBLE) @ w.to(DOUBLE).T


def gradient_errors(
    recipe: Recipe, x: torch.Tensor, w: torch.Tensor | None, g: torch.Tensor, seed: int = 0
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each gradient that is quantized: its error and the exact one, float64. x (M, K), w (N, K), g (M, N); w None leaves
    out the input's."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for which in products_of(recipe):
        if which == "input_grad" and w is not None:
            a = quantize_one(g, recipe.input_grad.a, seed, STREAMS["g"])
            b = weight_columns(w, recipe.output.b, recipe.input_grad.b, seed=seed)
            exact = g.to(DOUBLE) @ w.to(DOUBLE)
        elif which == "weight_grad":
            step = multiple_of(recipe, "M", products=("weight_grad",))
            rows, more = (padded_to_multiples(one, step, 1) for one in (x, g))
            a = quantize_one(more.t(), recipe.weight_grad.a, seed, STREAMS["g.T"])
            b = quantize_two(
                rows, recipe.output.a, recipe.weight_grad.b, seed, (STREAMS["x"], STREAMS["x.T"])
            )[1]
            exact = g.to(DOUBLE).T @ x.to(DOUBLE)
        else:
            continue
        found[which] = (wide(a) @ wide(b).T - exact, exact)
    return found


def wide(matrix: Matrix) -> torch.Tensor:
    """What an operand stands for, float64."""
    return (
        values(matrix, torch.float32).to(DOUBLE)
        if not isinstance(matrix, torch.Tensor)
        else matrix.to(DOUBLE)
    )


__all__ = ["candidates_of"]
