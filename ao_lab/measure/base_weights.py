"""The weights of a quantized model beside those of the model that it is compared with: whether they approximate the same ones.

Where scales moved between layers (AWQ, Smooth), channels were rotated or the model was trained, the error of a weight beside
the base's says nothing of rounding; where a folder is of another model, no number beside the base's does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ao_lab.eval import quantized_weights
from ao_lab.tensor.quantized_tensor import QuantizedTensor

#: Of a weight's error beside the base's the share that is left where each row, or each column, has a scale of its own, below
#: which scales of the weight have moved; rounding alone leaves 1 - 1 / elements of a row. Elements that this takes.
LEFT_BY_SCALES, ELEMENTS = 0.85, 32


def scaled_beside(model: nn.Module, base: nn.Module) -> list[str]:
    """Quantized weights whose rows or columns are those of the base times scales of their own, as AWQ and Smooth leave them
    where they move scales between two quantized layers: the error beside the base is then that of the scales, not of rounding.

    Fitted by least squares, against one scale for the whole weight, so that a format that makes all values smaller is none.
    """
    dense = dict(base.named_parameters(remove_duplicate=False))
    return [
        name
        for name, weight in quantized_weights(model)
        if name in dense and dense[name].shape == weight.shape and has_scales(weight, dense[name])
    ]


def has_scales(weight: QuantizedTensor, base: Tensor) -> bool:
    """Whether rows or columns of a weight differ from the base's by scales more than by rounding."""
    ours = weight.dequantize(torch.float32).detach()
    theirs = base.detach().to(ours.device, torch.float32)
    whole = _left(ours, theirs, None)
    return any(
        theirs.shape[axis] >= ELEMENTS and _left(ours, theirs, axis) < LEFT_BY_SCALES * whole
        for axis in (-1, -2)
    )


def _left(ours: Tensor, theirs: Tensor, axis: int | None) -> float:
    """Squares of what is left of a weight beside another times its best scales: one, or one for each vector along an axis."""
    axes = list(range(theirs.ndim)) if axis is None else [axis]
    scale = (ours * theirs).sum(axes, True) / theirs.square().sum(axes, True).clamp_min(1e-30)
    return float((ours - scale * theirs).double().square().sum())


#: Relative difference of an unquantized weight from that of the unquantized model, from which on it is told.
OTHER = 0.1


def other_weights(model: nn.Module, base: nn.Module) -> str:
    """That weights of a folder are others than the unquantized model's, where its unquantized matrices say so; "" else."""
    dense = dict(base.named_parameters(remove_duplicate=False))
    for name, one in model.named_parameters():
        if (
            one.ndim < 2
            or isinstance(one, QuantizedTensor)
            or name not in dense
            or dense[name].shape != one.shape
        ):
            continue
        theirs = dense[name].detach().float()
        far = float((one.detach().float() - theirs).norm() / theirs.norm().clamp_min(1e-30))
        if far > OTHER:
            return (
                f"{name} differs from the unquantized model's by {far:.2g} of its norm: it was trained, scaled or rotated, or "
                "this is another model"
            )
    return ""
