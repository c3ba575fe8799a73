"""`config.for_layout(layout)`: the configuration whose models a plain reader of that layout computes as they are here.

"compressed-tensors" is read by transformers and vLLM without this library, by their own rules. So zero points go (transformers
reads packed ones with dequantize=True alone), scales of weights are rounded to the weight's dtype (readers hold them in the
model's), and inputs take the reader's own record. `changes` tells what was changed. "ao_lab" holds everything as it is.

Readers multiply dequantized inputs with dequantized weights. Where inputs are quantized and the configuration names no kernel,
the recipe takes kernel "dequantize", which does the same: products that another kernel rounds otherwise put a few inputs of the
next layer on the other side of a rounding, and those differ by a whole step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ao_lab.config.compressed_tensors.activations import activation_as_read, is_as_read
from ao_lab.config.compressed_tensors.formats import format_of
from ao_lab.config.recipe import Recipe, cast_scales, integer_scheme, power_of_two_outer
from reference import Scheme
from reference.arrays.errors import choice

COMPRESSED, OWN = "compressed-tensors", "ao_lab"
LAYOUTS = (COMPRESSED, OWN)


def recipe_for_layout(recipe: Recipe, layout: str) -> Recipe:
    """The recipe of a configuration for a layout; ValueError, with the reason, where it has nothing like that."""
    return recipe if choice(layout, LAYOUTS, "layout") == OWN else recipe_for_readers(recipe)


def recipe_for_readers(recipe: Recipe) -> Recipe:
    """The recipe nearest to one that plain readers compute; ValueError where there is none."""
    activation = recipe.activation
    if activation is not None and not is_as_read(activation):
        activation = activation_as_read(_symmetric(activation))
    kernel = "dequantize" if activation is not None and recipe.kernel == "auto" else recipe.kernel
    result = replace(recipe, weight=weight_for_readers(recipe.weight), activation=activation, kernel=kernel)
    if format_of(result) is None:
        raise ValueError(
            f"compressed-tensors has no format for {recipe}; layout='ao_lab' holds it, and transformers reads that after "
            f"`import ao_lab`"
        )
    return result


def weight_for_readers(scheme: Scheme) -> Scheme:
    """A weight's scheme without zero points, its scales in the weight's dtype or in 16 bits or fewer.

    An outer scale is a power of two: readers keep its reciprocal, and that of another number often is none of float32's.
    """
    plain = _symmetric(scheme)
    if plain.outer is not None:
        return power_of_two_outer(plain)
    if plain.scale.storage != "float32":
        return plain
    return cast_scales(plain)


def _symmetric(scheme: Scheme) -> Scheme:
    """The default integers without zero points in place of those with them; ValueError for one bit, which has none."""
    if scheme.zero is None:
        return scheme
    bits, block = scheme.format.bits, scheme.scale.block
    if bits == 1:
        raise ValueError(
            f"compressed-tensors has no one-bit levels like those of {scheme.name}; layout='ao_lab' has"
        )
    return integer_scheme(bits, block, asymmetric=False)


def changes(before: Recipe, after: Recipe) -> list[str]:
    """What `recipe_for_readers` has changed, a sentence each."""
    told = []
    if before.weight != after.weight:
        why = "readers store scales in the weight's dtype"
        if before.weight.outer is not None:
            why = "readers divide by the reciprocal of the outer scale, which is exact for a power of two"
        if before.weight.zero is not None:
            why = "transformers 5.23 does not load packed zero points without dequantize=True; " + why
        told.append(f"weights: {after.weight.name} in place of {before.weight.name}, because {why}")
    if (
        before.activation is not None
        and after.activation is not None
        and before.activation != after.activation
    ):
        told.append(
            f"inputs: {after.activation.name} in place of {before.activation.name}, because {_why(after.activation)}"
        )
    if before.kernel != after.kernel:
        told.append(
            f"kernel: {after.kernel}: ao_lab dequantizes weights and inputs before each matmul, as transformers does, for the "
            "same bits; this is no faster than dense layers, kernel= names a faster kernel"
        )
    return told


def _why(inputs: Scheme) -> str:
    """How readers quantize inputs."""
    if inputs.scale.power_of_two:
        return "readers round the largest magnitude of a block before they take its exponent"
    if inputs.format.kind == "int":
        return f"readers scale inputs by {inputs.scale.target:g}, without zero points, in the input's dtype"
    return "readers compute the scale in the input's dtype, and divide by it"


def leaf_configs(config: Any) -> list[Any]:
    """A configuration, or those that `FqnToConfig` names."""
    if hasattr(config, "fqn_to_config"):
        return [one for one in config.fqn_to_config.values() if one is not None]
    return [config]


__all__ = [
    "LAYOUTS",
    "OWN",
    "changes",
    "leaf_configs",
    "recipe_for_layout",
    "recipe_for_readers",
    "weight_for_readers",
]
