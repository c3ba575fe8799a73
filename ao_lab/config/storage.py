"""Whether weights can be stored 2:4, compressed, as `Config.sparsity` asks, and whether a kernel wants that: by the recipe
alone."""

from __future__ import annotations

from ao_lab.config.recipe import SPARSE_KERNELS, Recipe
from reference.arrays.errors import choice
from reference.sparsity.stored_codes import unsupported_reason

#: Patterns that have a compressed storage.
PATTERNS = ("2:4",)
#: Kernels that read dense codes, and why they do not take the others.
DENSE_KERNELS = {
    "int8": "torch._int_mm reads every code of a row",
    "scaled_mm": "torch._scaled_mm reads every code of a row",
    "fused": "its kernels decode every code of a row",
}


def unstorable_recipe(recipe: Recipe) -> str | None:
    """Why no weight of a recipe is stored 2:4, whatever its shape, and the way out; None where it can be."""
    if (reason := unsupported_reason(recipe.weight)) is not None:
        return f"2:4 storage does not hold {recipe.weight.name}: {reason}; take symmetric integers or floats, as int8_rowwise"
    if recipe.kernel in DENSE_KERNELS:
        return f"kernel {recipe.kernel!r} does not take 2:4 storage: {DENSE_KERNELS[recipe.kernel]}; use kernel='auto'"
    return None


def check_sparsity(name: str, sparsity: str | None, recipe: Recipe) -> None:
    """ValueError for a `Config.sparsity` that is no pattern, or that the recipe of configuration `name` does not allow; and for
    none beside a kernel that multiplies no other weights."""
    if sparsity is None:
        if recipe.kernel in SPARSE_KERNELS:
            raise ValueError(
                f"{name}: kernel {recipe.kernel!r} multiplies weights in 2:4 storage alone; give sparsity='2:4' with it, or "
                f"take kernel='auto'"
            )
        return
    choice(sparsity, PATTERNS, f"{name}: sparsity")
    if (reason := unstorable_recipe(recipe)) is not None:
        raise ValueError(f"{name}: {reason}")


__all__ = ["DENSE_KERNELS", "PATTERNS", "check_sparsity", "unstorable_recipe"]
