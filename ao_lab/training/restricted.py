"""A recipe of which some products run in low precision, and the others on dense operands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from ao_lab.gemm.choices import tuned
from reference.training.recipe import PRODUCTS, Product, Recipe

#: The choice for a layer none of whose products runs in low precision.
DENSE = "dense"


def restricted(recipe: Recipe, low: Iterable[str]) -> Recipe:
    """The recipe with the products that are not in `low` dense."""
    return _restricted(recipe, tuple(name for name in PRODUCTS if name in set(low)))


@lru_cache(maxsize=256)
def _restricted(recipe: Recipe, low: tuple[str, ...]) -> Recipe:
    dense: dict[str, Any] = {name: Product() for name in PRODUCTS if name not in low}
    return replace(recipe, **dense) if dense else recipe


def tuned_recipe(recipe: Recipe, x: torch.Tensor, w: torch.Tensor) -> Recipe:
    """What `ao_lab.tune` left of a recipe for a layer and a number of rows; the recipe where it was never tuned."""
    (m, k), n = tuple(x.shape), w.shape[0]
    choice = tuned("training", recipe.name, "", (m, n, k), x.dtype, x.device)
    if choice is None:
        return recipe
    return restricted(recipe, () if choice == DENSE else choice.split("+"))
