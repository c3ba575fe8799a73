"""Large weights quantized on the host a few rows at a time: the bits of `quantized`, without its working memory.

The reference computes on integers of 32 bits and needs about twenty times the memory of a bfloat16 weight. Rows whose blocks
lie inside them are quantized on their own and put together. A scale over the whole tensor is found first, of its extremes
alone, and given to each piece. Scales that are quantized themselves (NF4's) are found exactly in pieces, and then quantized all
at once. Everything on a GPU is quantized at once: kernels need no such memory.

Of weights that other programs read the scales need not be those of the scheme's rule for the tensor alone. Layers that a
program joins have one outer scale; scales that are stored in float16 (`compute="input"`) are refined where they are tiny
(`reference.quantize.least_error`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

import torch

import fast
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized, quantized
from fast.dispatch import is_traced
from reference import Quantized, Scales, Scheme
from reference.quantize.scales import rounds_scales_to_float16

#: Elements of a piece: its integers fit into a processor's last cache.
PIECE = 2**20
PARTS = ("codes", "scale", "zero")


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
    from fast.quantize.least_error import refine_float16_scales

    q = refine_float16_scales(x, result.stored)
    return (
        result if q is result.stored else result.remade({**result.parts, "codes": q.codes, "scale": q.scale})
    )


def quantized_by_rows(
    x: torch.Tensor,
    recipe: Recipe,
    *,
    axis: int = -1,
    input_scales: Scales | None = None,
    outer: torch.Tensor | None = None,
) -> QuantizedTensor:
    """`quantized`, bit for bit; with `outer`, where it is not None, in place of the tensor's own outer scale."""
    scheme, shape, packed = recipe.weight, tuple(x.shape), recipe.weight.format.bits < 8
    cuts, scales = cuts_of(scheme, shape, axis), None if outer is None else Scales(outer=outer.to(x.device))
    at_once = x.device.type != "cpu" or is_traced(x) or x.numel() <= PIECE
    if scales is None and not at_once and cuts is None and has_scaled_scales(scheme):
        q = _in_two_levels(x, scheme, axis)
    elif scales is None and (at_once or cuts is None):
        return quantized(x, recipe, axis=axis, input_scales=input_scales)
    elif at_once or cuts is None:
        q = fast.quantize(x, scheme, axis=axis, scales=scales, packed=packed)
    else:
        rows = x.reshape(-1, shape[-1]) if cuts.tall else x
        split = torch.split(rows, max(PIECE * len(rows) // x.numel() // cuts.step * cuts.step, cuts.step))
        scales = scales_of_all(split, scheme) if scales is None else scales
        pieces = [fast.quantize(piece, scheme, axis=axis, scales=scales, packed=packed) for piece in split]
        codes, scale, zero = (_joined([getattr(q, name) for q in pieces], shape, cuts) for name in PARTS)
        q = Quantized(codes, scale, pieces[0].outer, zero, shape, axis % len(shape), scheme, packed)
    return from_quantized(q, recipe, x.dtype, input_scales)


def outer_scale(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The outer scale of a tensor in a scheme that has one over its elements, alone."""
    scales = scales_of_all([x], scheme)
    if scales is None or scales.outer is None:
        raise ValueError(f"{scheme.name} has no outer scale")
    outer: torch.Tensor = scales.outer
    return outer


class Cuts(NamedTuple):
    """Where a tensor may be cut: along its first axis, at multiples of `step`."""

    step: int
    #: Whether batched matrices are seen as one tall matrix.
    tall: bool


def cuts_of(scheme: Scheme, shape: tuple[int, ...], axis: int) -> Cuts | None:
    """Cuts that divide no block; None where any may."""
    block, along, rank = scheme.scale.block, axis % max(len(shape), 1), len(shape)
    if rank < 2 or scheme.codes_from != "stored" or (isinstance(block, str) and block != "tensor"):
        return None
    if scheme.outer is not None and (
        scheme.outer.statistic != "absmax_elements" or not isinstance(block, int)
    ):
        return None
    height = block[0] if isinstance(block, tuple) else 1
    if along == rank - 1 and (rank == 2 or shape[-2] % height == 0):
        return Cuts(height, tall=True)
    # Blocks along other axes than the last lie inside one entry of the first.
    return Cuts(1, tall=False) if rank > 2 and along else None


def scales_of_all(pieces: Sequence[torch.Tensor], scheme: Scheme) -> Scales | None:
    """Scales that each piece needs to know of the whole tensor; None where there are none."""
    whole = scheme.scale.block == "tensor"
    if not whole and scheme.outer is None:
        return None
    # Where a block with NaN or infinity becomes NaN, the outer scale is that of the other elements.
    finite = scheme.nan == "block" and not whole
    ends = torch.stack(
        [end for piece in pieces for end in torch.aminmax(_finite(piece) if finite else piece)]
    )
    if whole:
        return fast.choose_scales(ends, scheme)
    sample = ends.new_zeros(max(int(str(scheme.scale.block)), 2))
    sample[:2] = torch.stack(torch.aminmax(ends))
    return Scales(outer=fast.choose_scales(sample, scheme).outer)


def has_scaled_scales(scheme: Scheme) -> bool:
    """Whether blocks are of the flattened tensor, and their scales, the largest magnitudes, are quantized themselves (NF4)."""
    scale, outer = scheme.scale, scheme.outer
    plain = (scale.statistic, scale.target, scale.stored) == ("absmax", 1.0, "decode")
    return bool(scale.flat_size) and plain and outer is not None and scheme.codes_from == "exact"


def _in_two_levels(x: torch.Tensor, scheme: Scheme, axis: int) -> Quantized:
    """Codes and exact scales in pieces; then the scales, as a tensor whose blocks of one are their own largest magnitudes."""
    first = replace(scheme, outer=None, codes_from="stored", scale=replace(scheme.scale, storage="float32"))
    length = scheme.scale.flat_size
    rows = x.reshape(-1, x.shape[-1])
    step = length // gcd(length, rows.shape[1])
    split = torch.split(rows, max(PIECE // rows.shape[1] // step * step, step))
    pieces = [fast.quantize(piece, first, packed=scheme.format.bits < 8) for piece in split]
    exact = torch.cat([piece.scale for piece in pieces]).to(x.dtype)
    scales = fast.choose_scales(exact, replace(scheme, scale=replace(scheme.scale, block="flat:1")))
    codes = torch.cat([piece.codes for piece in pieces]).reshape(*x.shape[:-1], -1)
    parts = codes, scales.scale, scales.outer, scales.zero
    return Quantized(*parts, tuple(x.shape), axis % x.dim(), scheme, pieces[0].packed)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isfinite(), x, 0)


def _joined(parts: list[torch.Tensor | None], shape: tuple[int, ...], cuts: Cuts) -> torch.Tensor | None:
    """A part of all pieces; one number over the whole tensor is in each of them."""
    present = [part for part in parts if part is not None]
    if not present or present[0].dim() == 0:
        return parts[0]
    result = torch.cat(present)
    return result.reshape(*shape[:-2], -1, result.shape[-1]) if cuts.tall else result


__all__ = ["outer_scale", "quantized_by_rows", "quantized_weight"]
