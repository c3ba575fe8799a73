"""Linear layers whose three matrix products run in low precision: recipes, operands, forward and both gradients."""

from reference.layers.hadamard import hadamard
from reference.training.grouped import grouped_linear, grouped_linear_vjp
from reference.training.linear import training_linear, training_linear_vjp
from reference.training.recipe import RECIPES, Recipe

__all__ = [
    "RECIPES",
    "Recipe",
    "grouped_linear",
    "grouped_linear_vjp",
    "hadamard",
    "training_linear",
    "training_linear_vjp",
]
