"""Which format of compressed-tensors 0.20 stores a recipe's weight, and whether vLLM serves it: rules on recipes, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ao_lab.config.recipe import Recipe
from reference import Scheme


@dataclass(frozen=True)
class StorageFormat:
    """One format: its name in config.json, and the recipes whose weights it stores."""

    name: str
    holds: Callable[[Recipe], bool]
    #: Widths of elements for which vLLM lists kernels.
    served_bits: tuple[int, ...]


def format_of(recipe: Recipe) -> StorageFormat | None:
    """The format that stores a recipe's weight, or None."""
    scale, zero = recipe.weight.scale, recipe.weight.zero
    if scale.stored != "decode" or (scale.partial and isinstance(scale.block, int) and scale.block > 0):
        return None
    if zero is not None and zero.rule != "code":
        return None
    return next((one for one in FORMATS if one.holds(recipe)), None)


def plain_scales(scheme: Scheme) -> bool:
    """Whether scales are on one level, in float32 or bfloat16."""
    return scheme.scale.storage in ("float32", "bfloat16") and scheme.outer is None


def _holds_int(recipe: Recipe) -> bool:
    """8-bit integers beside quantized inputs, as int8 products read them."""
    scheme = recipe.weight
    rows = scheme.scale.block in (-1, "tensor")
    return recipe.activation is not None and scheme.element == "int8" and rows and plain_scales(scheme)


def _holds_packed(recipe: Recipe) -> bool:
    scheme = recipe.weight
    groups = isinstance(scheme.scale.block, int)
    signed = scheme.format.kind == "int" and scheme.format.signed and scheme.format.fraction_bits == 0
    floats = recipe.activation is not None and recipe.activation.format.kind == "float"
    return signed and groups and plain_scales(scheme) and not floats and scheme.format.specials == "none"


def _holds_float(recipe: Recipe) -> bool:
    return recipe.weight.element == "float8_e4m3fn" and plain_scales(recipe.weight)


def _holds_mx(element: str) -> Callable[[Recipe], bool]:
    def holds(recipe: Recipe) -> bool:
        scale = recipe.weight.scale
        return recipe.weight.element == element and scale.power_of_two and scale.block == 32

    return holds


def _holds_nvfp4(recipe: Recipe) -> bool:
    scheme = recipe.weight
    two_levels = scheme.outer is not None and scheme.outer.statistic == "absmax_elements"
    block = scheme.scale.storage == "float8_e4m3fn" and scheme.scale.block == 16
    return scheme.element == "float4_e2m1fn" and block and two_levels and scheme.outer_order != "folded"


FORMATS = (
    StorageFormat("int-quantized", _holds_int, (8,)),
    StorageFormat("pack-quantized", _holds_packed, (4, 8)),
    StorageFormat("float-quantized", _holds_float, (8,)),
    StorageFormat("mxfp8-quantized", _holds_mx("float8_e4m3fn"), (8,)),
    StorageFormat("mxfp6-pack-quantized", _holds_mx("float6_e2m3fn"), ()),
    StorageFormat("mxfp4-pack-quantized", _holds_mx("float4_e2m1fn"), (4,)),
    StorageFormat("nvfp4-pack-quantized", _holds_nvfp4, (4,)),
)

__all__ = ["FORMATS", "StorageFormat", "format_of", "plain_scales"]
