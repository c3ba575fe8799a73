"""Where learned scales start: at those of the scheme's own rule, or at those that round the weight with the least error.

A rule that maps the largest magnitude of a block onto the largest code never clips. At 8 bits nothing is gained by clipping;
at 3 and 2 bits most of a block lies within a code or two of zero, and scales much below the rule's are far better. Learning
takes hundreds of steps to get there from the rule.
"""

from __future__ import annotations

import torch

import fast
from reference import Scales, Scheme
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks

#: The smallest scale of the default schemes.
SMALLEST = 2.0**-126
#: Parts of the rule's scale that are tried, down to a tenth: two bits go to a quarter, more bits stay far above.
PARTS = tuple(1 - number / 40 for number in range(37))


def first_scales(weight: torch.Tensor, scheme: Scheme, axis: int, start: str = "rule") -> Scales:
    """Scales of the weight as it is, by the scheme's rule or (start="error") with the least error.

    A block with NaN or infinity keeps the rule's NaN: it is as visible as in a model that is quantized at once. A block of
    zeros starts at the largest scale of the others: its own is the smallest that there is, and a weight that leaves zero would
    saturate there, and stay.
    """
    weight = weight.detach()
    scales = fast.choose_scales(weight, scheme, axis=axis)
    if not scales.scale.numel():
        return scales
    if start == "error":
        scales = closest_scales(weight, scheme, axis, scales)
    most = torch.where(scales.scale.isfinite(), scales.scale, 0.0).amax()
    usual = torch.where(most > SMALLEST, most, 1.0)
    return Scales(torch.where(scales.scale <= SMALLEST, usual, scales.scale), None, scales.zero)


def closest_scales(weight: torch.Tensor, scheme: Scheme, axis: int, scales: Scales) -> Scales:
    """Of PARTS of given scales, block by block that with the least sum of squared errors; the larger one of two as good.

    Zero points stay. A block whose error is no number keeps its scale.
    """
    best, least = scales.scale, squared_error(weight, scheme, axis, scales)
    for part in PARTS[1:]:
        tried = torch.clamp(scales.scale * part, min=SMALLEST)
        error = squared_error(weight, scheme, axis, Scales(tried, None, scales.zero))
        better = error < least
        best, least = torch.where(better, tried, best), torch.where(better, error, least)
    return Scales(best, None, scales.zero)


def squared_error(weight: torch.Tensor, scheme: Scheme, axis: int, scales: Scales) -> torch.Tensor:
    """Of every block, in the shape of the scales."""
    result = fast.fake_quantize(weight, scheme, axis=axis, scales=scales)
    error = (result.to(torch.float32) - weight.to(torch.float32)).square()
    blocks, ns = Blocks.of(tuple(weight.shape), scheme.scale, axis), namespace_of(weight)
    summed: torch.Tensor = blocks.expose(blocks.split(ns, error, zeros=True).sum(-1)[..., None], ns)
    return summed


__all__ = ["closest_scales", "first_scales", "squared_error"]
