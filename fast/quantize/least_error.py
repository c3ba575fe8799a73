"""`refine_float16_scales` for torch tensors; see `reference.quantize.least_error`."""

from __future__ import annotations

from dataclasses import replace

import torch

from fast.dispatch import require_tensor
from fast.quantize.quantize import choose_scales, dequantize, quantize
from reference import Quantized, Scales, Scheme
from reference.calibration.inputs import tree_sum
from reference.quantize.least_error import (
    COARSE,
    EMPTY,
    STEP,
    errors_decide,
    exact_record,
)
from reference.quantize.scales import rounds_scales_to_float16


def refine_float16_scales(x: torch.Tensor, q: Quantized) -> Quantized:
    """q = quantize(x, scheme) with other scales below 2**-17 and the codes under them: the reference states rule and shapes.

    x has memory: whether a scale is small is read. Of a matrix with blocks along its last axis only rows with small scales are
    quantized again. No gradient. Raises TypeError for anything but a torch tensor, ValueError where x has not the shape of q.
    """
    x = require_tensor(x, "refine_float16_scales").detach()
    if not rounds_scales_to_float16(q.scheme, x.dtype):
        return q
    if tuple(x.shape) != q.shape:
        raise ValueError(f"x of shape {tuple(x.shape)} is not the tensor of q, whose shape is {q.shape}")
    small = q.scale < COARSE
    if not bool(small.any()):
        return q
    if not errors_decide(q):
        above, _ = _neighbours(x, q.scheme, q.axis, q.scale)
        return quantize(x, q.scheme, axis=q.axis, scales=Scales(above), packed=q.packed)
    rows = small.any(1).nonzero().flatten()
    result = _refined_rows(x[rows], q.scheme, q.scale[rows], q.packed)
    codes, scale = q.codes.clone(), q.scale.clone()
    codes[rows], scale[rows] = result.codes, result.scale
    return replace(q, codes=codes, scale=scale)


def _refined_rows(x: torch.Tensor, scheme: Scheme, old: torch.Tensor, packed: bool) -> Quantized:
    """Rows under the neighbour with the smaller error, block by block."""
    above, below = _neighbours(x, scheme, 1, old)
    scale = torch.where(_errors(x, below, scheme) < _errors(x, above, scheme), below, above)
    return quantize(x, scheme, scales=Scales(scale), packed=packed)


def _neighbours(
    x: torch.Tensor, scheme: Scheme, axis: int, old: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The multiples of 2**-24 around the exact scales that are to be refined; the old ones for the others."""
    exact = choose_scales(x, exact_record(scheme), axis=axis).scale
    small = (old < COARSE) & (exact > EMPTY)
    steps = exact / STEP  # exact: a power of two
    above = torch.where(small, steps.ceil() * STEP, old)
    return above, torch.where(small, steps.floor().clamp(min=1) * STEP, old)


def _errors(x: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The squared errors of blocks along rows under given scales, of the shape of these."""
    values = dequantize(quantize(x, scheme, scales=Scales(scale)), torch.float32)
    squares = (values - x.float()).square()
    blocks = scale.shape[1]
    size = int(scheme.scale.block) if scheme.scale.block != -1 else max(x.shape[1], 1)
    padded = torch.nn.functional.pad(squares, (0, blocks * size - x.shape[1]))
    return tree_sum(padded.reshape(len(x), blocks, size))


# Sums of torch tensors in the order that `reference.quantize.scales` states.


__all__ = ["refine_float16_scales"]
