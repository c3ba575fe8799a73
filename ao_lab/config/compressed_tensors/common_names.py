"""What others call a recipe: "W4A16 INT4, group size 128", for pages that people read who do not know our names."""

from __future__ import annotations

from ao_lab.config.recipe import Recipe
from reference import Scheme


def common_name(recipe: Recipe) -> str:
    """Bits of weights and inputs, the elements, and what has a scale, of weights and then of inputs."""
    weight, inputs = recipe.weight, recipe.activation
    told = [f"{short_name(recipe)} {element_name(weight)}", _scaled(weight, "channel")]
    if weight.zero is not None:
        told.append("zero points")
    if inputs is not None:
        other = "" if element_name(inputs) == element_name(weight) else f"{element_name(inputs)} "
        told.append(f"{other}inputs {_scaled(inputs, 'token')}")
    return ", ".join(told)


def short_name(recipe: Recipe) -> str:
    """W4A16: the bits of a weight's and of an input's element; inputs that are not quantized have 16."""
    inputs = 16 if recipe.activation is None else recipe.activation.format.bits
    return f"W{recipe.weight.format.bits}A{inputs}"


def element_name(scheme: Scheme) -> str:
    """INT4, FP8 (E5M2), MXFP4, NVFP4, NF4; other elements by their own names."""
    fmt, scale = scheme.format, scheme.scale
    if fmt.kind == "int" and not fmt.fraction_bits:
        return f"INT{fmt.bits}"
    if fmt.kind != "float":
        return fmt.name.upper()
    if scheme.outer is not None and scale.block == 16 and fmt.bits == 4:
        return "NVFP4"
    micro = "MX" if scale.power_of_two and scale.block == 32 else ""
    kind = f" (E{fmt.exponent_bits}M{fmt.mantissa_bits})" if fmt.name not in DEFAULTS else ""
    return f"{micro}FP{fmt.bits}{kind}"


#: Elements that the width alone names.
DEFAULTS = ("float8_e4m3fn", "float4_e2m1fn")


def _scaled(scheme: Scheme, row: str) -> str:
    """What has a scale of its own."""
    block = scheme.scale.block
    if isinstance(block, tuple):
        return f"per block of {block[0]}x{block[1]}"
    if isinstance(block, str):
        return "per tensor" if block == "tensor" else f"blocks of {block.rpartition(':')[2]}"
    return f"per {row}" if block == -1 else f"group size {block}"


__all__ = ["common_name", "element_name", "short_name"]
