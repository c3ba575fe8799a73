"""A recipe of which some products run in low precision, and the others on dense operands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ao_lab.gemm.choices import tuned
from ao_lab.gemm.problem import DENSE, SUBSETS
from reference.training.recipe import PRODUCTS, Product, Recipe

#: Recipes cut to each subset, by the recipe's key. Made when a layer is converted: a tracer then finds them.
_cut: dict[str, dict[str, Recipe]] = {}


def prepare(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe cut to each subset."""
    if recipe.key not in _cut:
        _cut[recipe.key] = {choice: _restricted(recipe, choice) for choice in SUBSETS}
    return _cut[recipe.key]


def restricted(recipe: Recipe, low: Iterable[str]) -> Recipe:
    """The recipe with the products that are not in `low` dense."""
    stay = set(low)
    return prepare(recipe)["+".join(name for name in PRODUCTS if name in stay) or DENSE]


def _restricted(recipe: Recipe, choice: str) -> Recipe:
    low = choice.split("+")
    dense: dict[str, Any] = {name: Product() for name in PRODUCTS if name not in low}
    return replace(recipe, **dense) if dense else recipe


def tuned_recipe(recipe: Recipe, x: torch.Tensor, w: torch.Tensor) -> Recipe:
    """What `ao_lab.tune` left of a recipe for a layer, w (N, K), or experts, w (E, N, K), and a number of rows.

    The recipe where it was never tuned.
    """
    k, n = x.shape[-1], w.shape[-2]
    m = x.shape[0] if x.dim() == 2 else x.numel() // max(k, 1)
    experts = w.shape[0] if w.dim() == 3 else 0
    choice = tuned("training", recipe.key, "", (m, n, k), x.dtype, x.device, "", experts)
    return recipe if choice is None else prepare(recipe)[choice]
