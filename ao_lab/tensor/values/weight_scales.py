"""The quantized weight of a dense one where its scales are not those of the tensor alone.

Two rules for weights that other programs read. An outer scale may be given: layers that a program joins have one. And scales
that are kept in float16 (`compute="input"`) lose bits below its normal numbers, and vanish below 2**-25, with all weights of
their block. Where float16 keeps fewer bits of a scale than bfloat16 does, below 2**-17, its two neighbours, multiples of 2**-24
and never 0, are tried, and the one with the smaller squared error is taken (the larger one for blocks that are not of a row).
"""

from __future__ import annotations

from dataclasses import replace

import torch

import fast
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.chunked import quantized_by_rows
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from fast.device import is_traced
from reference import Scales, Scheme

#: Scales below have fewer than 8 bits in float16, and the distance of two of them.
COARSE, STEP = 2.0**-17, 2.0**-24
#: Blocks of zeros have smaller scales.
EMPTY = 2.0**-60


def quantized_weight(
    x: torch.Tensor,
    recipe: Recipe,
    *,
    axis: int = -1,
    input_scales: Scales | None = None,
    outer: torch.Tensor | None = None,
) -> QuantizedTensor:
    """A weight in the scheme of a recipe: `quantized`, its tiny scales in float16 as above.

    outer: its outer scale, a float32 scalar; None: that of x.
    """
    result = quantized_by_rows(x, recipe, axis=axis, input_scales=input_scales, outer=outer)
    if not _keeps_scales_in_float16(recipe.weight, x):
        return result
    small = result.scale < COARSE
    if x.numel() == 0 or not bool(small.any()):
        return result
    by_rows = isinstance(recipe.weight.scale.block, int) and axis == -1 and x.dim() == 2
    rows = small.reshape(len(x), -1).any(1).nonzero().flatten() if by_rows else None
    return _with_larger_scales(result, x, axis, rows)


def _keeps_scales_in_float16(scheme: Scheme, x: torch.Tensor) -> bool:
    """Whether scales are rounded to the float16 of a weight whose values can be looked at."""
    scale = scheme.scale
    plain = scheme.outer is None and scheme.zero is None and scale.stored == "decode"
    rounded = scale.compute == "input" and scale.storage == "float32" and x.dtype == torch.float16
    return plain and rounded and not x.is_meta and not is_traced(x)


def _with_larger_scales(
    t: QuantizedTensor, x: torch.Tensor, axis: int, rows: torch.Tensor | None
) -> QuantizedTensor:
    """The weight with other small scales, in these rows (None: in all)."""
    scheme, some = t.scheme, x if rows is None else x[rows]
    old = t.scale if rows is None else t.scale[rows]
    exact = fast.choose_scales(
        some, replace(scheme, scale=replace(scheme.scale, compute="float32")), axis=axis
    ).scale
    small = (old < COARSE) & (exact > EMPTY)
    above = torch.where(small, (exact / STEP).ceil() * STEP, old)
    below = torch.where(small, ((exact / STEP).floor() * STEP).clamp(min=STEP), old)
    scale = (
        above
        if rows is None
        else torch.where(_errors(some, below, scheme) < _errors(some, above, scheme), below, above)
    )
    q = fast.quantize(some, scheme, axis=axis, scales=Scales(scale), packed=scheme.format.bits < 8)
    if rows is None:
        return t.remade({**t.parts, "codes": q.codes, "scale": q.scale})
    codes, scales = t.codes.clone(), t.scale.clone()
    codes[rows], scales[rows] = q.codes, q.scale
    return t.remade({**t.parts, "codes": codes, "scale": scales})


def _errors(rows: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The squared errors of blocks along rows with given scales, of the shape of these."""
    values = fast.dequantize(fast.quantize(rows, scheme, scales=Scales(scale)), torch.float32)
    errors = (values - rows.float()).square()
    given = scheme.scale.block
    block = given if isinstance(given, int) and given > 0 else rows.shape[1]
    padded = torch.nn.functional.pad(errors, (0, scale.shape[-1] * block - rows.shape[1]))
    return padded.reshape(len(rows), -1, block).sum(-1).reshape(scale.shape)


__all__ = ["quantized_weight"]
