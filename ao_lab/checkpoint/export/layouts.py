"""`config.for_layout(layout)`: the configuration whose models a plain reader of that layout computes as they are here.

"compressed-tensors" is read by transformers and vLLM without this library, by their own rules. So zero points go (transformers
reads packed ones with dequantize=True alone), scales of weights are rounded to the weight's dtype (readers hold them in the
model's), and inputs take the reader's own record. `changes` tells what was changed. "ao_lab" holds everything as it is.

Readers multiply dequantized inputs with dequantized weights. Where inputs are quantized and the configuration names no kernel,
the recipe takes kernel "dequantize", which does the same: products that another kernel rounds otherwise put a few inputs of the
next layer on the other side of a rounding, and those differ by a whole step.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ao_lab.checkpoint.export.activations import activation_as_read, is_as_read
from ao_lab.checkpoint.export.compressed_tensors import export_of
from ao_lab.config.recipe import Recipe, cast_scales, integer_scheme, power_of_two_outer
from reference import Scheme
from reference.arrays.errors import choice

if TYPE_CHECKING:
    from ao_lab.config.base import Config
    from ao_lab.config.fqn import FqnToConfig

COMPRESSED, OWN = "compressed-tensors", "ao_lab"
LAYOUTS = (COMPRESSED, OWN)
C = TypeVar("C", bound="Config")


def config_for_layout(config: C, layout: str) -> C:
    """A configuration of the same class for a layout; ValueError, with the reason, where it has nothing like that."""
    if choice(layout, LAYOUTS, "layout") == OWN:
        return config
    base: Any = getattr(config, "base_config", None)
    if base is not None:
        return replace(config, base_config=config_for_layout(base, layout))  # type: ignore[call-arg]
    recipe = config.recipe()
    wanted = recipe_for_readers(recipe)
    changed: dict[str, Any] = {}
    if wanted.weight != recipe.weight:
        changed["weight_config" if hasattr(config, "weight_config") else "scheme"] = wanted.weight
    if wanted.activation != recipe.activation:
        inputs = "activation_config" if hasattr(config, "activation_config") else "activation_scheme"
        changed[inputs] = wanted.activation
    if wanted.kernel != recipe.kernel:
        changed["kernel"] = wanted.kernel
    return replace(config, **changed, **_static(config, recipe))


def fqn_for_layout(config: FqnToConfig, layout: str) -> FqnToConfig:
    """Each configuration of an `FqnToConfig` for a layout."""
    made = {}
    for name, one in config.fqn_to_config.items():
        try:
            made[name] = None if one is None else config_for_layout(one, layout)
        except ValueError as error:
            raise ValueError(f"FqnToConfig {name!r}: {error}") from error
    return replace(config, fqn_to_config=made)


def recipe_for_readers(recipe: Recipe) -> Recipe:
    """The recipe nearest to one that plain readers compute; ValueError where there is none."""
    activation = recipe.activation
    if activation is not None and not is_as_read(activation):
        activation = activation_as_read(_symmetric(activation))
    kernel = "dequantize" if activation is not None and recipe.kernel == "auto" else recipe.kernel
    made = replace(recipe, weight=weight_for_readers(recipe.weight), activation=activation, kernel=kernel)
    if export_of(made) is None:
        raise ValueError(
            f"compressed-tensors has no format for {recipe}; layout='ao_lab' holds it, and transformers reads that after "
            f"`import ao_lab`"
        )
    return made


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
    """The house's integers without zero points in place of those with them; ValueError for one bit, which has none."""
    if scheme.zero is None:
        return scheme
    bits, block = scheme.format.bits, scheme.scale.block
    if bits == 1:
        raise ValueError(
            f"compressed-tensors has no one-bit levels like those of {scheme.name}; layout='ao_lab' has"
        )
    return integer_scheme(bits, block, asymmetric=False)


def _static(config: Any, recipe: Recipe) -> dict[str, Any]:
    """Given static scales of inputs as readers in bfloat16 still have them; ValueError for a given zero point."""
    if getattr(config, "act_quant_zero_point", None) is not None:
        raise ValueError(
            f"{type(config).__name__}: readers of compressed-tensors add act_quant_zero_point before they round; give a "
            f"symmetric act_quant_scale, or use layout='ao_lab'"
        )
    scale = getattr(config, "act_quant_scale", None)
    if scale is None:
        return {}
    return {"act_quant_scale": torch.as_tensor(scale).detach().to(torch.bfloat16).to(torch.float32)}


def changes(before: Recipe, after: Recipe) -> list[str]:
    """What `recipe_for_readers` has changed, a sentence each."""
    told = []
    if before.weight != after.weight:
        why = "scales in the weight's dtype, which readers keep"
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
            f"kernel: {after.kernel}, because readers multiply dequantized operands; kernel= names a faster one"
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
    if any(field.name == "fqn_to_config" for field in fields(config)):
        return [one for one in config.fqn_to_config.values() if one is not None]
    return [config]


__all__ = [
    "LAYOUTS",
    "changes",
    "config_for_layout",
    "fqn_for_layout",
    "leaf_configs",
    "recipe_for_readers",
    "weight_for_readers",
]
