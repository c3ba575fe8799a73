"""The quantized weight of a dense one, whose scales need not be those of the scheme's rule for this tensor alone.

Two rules for weights that other programs read. An outer scale may be given: layers that a program joins have one. And scales
that are kept in float16 (`compute="input"`) are refined where they are tiny (`reference.quantize.least_error`).
"""

from __future__ import annotations

import torch

from ao_lab.config.recipe import Recipe
from ao_lab.tensor.chunked import quantized_by_rows
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from fast.device import is_traced
from fast.quantize.least_error import refine_float16_scales
from reference import Scales
from reference.quantize.least_error import rounds_scales_to_float16


def quantized_weight(
    x: torch.Tensor,
    recipe: Recipe,
    *,
    axis: int = -1,
    input_scales: Scales | None = None,
    outer: torch.Tensor | None = None,
) -> QuantizedTensor:
    """A weight in the scheme of a recipe: `quantized`, its tiny scales in float16 refined where its values can be looked at.

    outer: its outer scale, a float32 scalar; None: that of x.
    """
    result = quantized_by_rows(x, recipe, axis=axis, input_scales=input_scales, outer=outer)
    if x.is_meta or is_traced(x) or not rounds_scales_to_float16(recipe.weight, x.dtype):
        return result
    q = refine_float16_scales(x, result.stored)
    return (
        result if q is result.stored else result.remade({**result.parts, "codes": q.codes, "scale": q.scale})
    )


__all__ = ["quantized_weight"]
