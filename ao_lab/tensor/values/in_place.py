"""A `QuantizedTensor` changed in place: dequantized, changed as a dense tensor is, and quantized again by its own scheme.

`w.add_(delta)` is `w.copy_(w.dequantize() + delta)`, which is how adapters are merged into weights: scales and zero points are
chosen anew by the rule of the scheme, the recipe and static scales of the layer's input stay. Changes that are small beside
the steps of the scheme are rounded away; where more than half of one is, a UserWarning says so. A weight in 2:4 storage takes
a change that leaves it 2:4.

A weight that requires a gradient is refused: an optimizer's steps are smaller than those of the scheme, and would be lost
without a word.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.values.reads import dense

aten = torch.ops.aten
#: The part of a change that rounding may take before a warning tells of it.
TOLD = 0.5
#: Beside products with a factor, which `ao_lab.tensor.values.scaling` looks at first.
CHANGES = (aten.add_.Tensor, aten.add_.Scalar, aten.sub_.Tensor, aten.sub_.Scalar)


@operation(*CHANGES)
def requantized(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """An operator in place on the dequantized first argument, which is then quantized into it.

    A dense first argument is changed as ever. ValueError for a weight that requires a gradient; nothing has changed then.
    """
    target: torch.Tensor = args[0]
    if not isinstance(target, QuantizedTensor):
        func(target, *dense(args[1:]), **dense(kwargs))
        return target
    if target.requires_grad:
        raise ValueError(
            f"{func} of {target!r}, which requires a gradient: an optimizer's steps would be rounded away. A quantized weight "
            f"does not train: requires_grad_(False) it and train adapters, dequantize() it, or prepare the model with QATConfig"
        )
    before = target.dequantize()
    wanted = func(before.clone(), *dense(args[1:]), **dense(kwargs))
    target.copy_(wanted)
    if type(target.codes) is torch.Tensor and not torch.compiler.is_compiling():
        _tell(func, target, before, wanted)
    return target


def _tell(func: Any, target: QuantizedTensor, before: torch.Tensor, wanted: torch.Tensor) -> None:
    """A UserWarning where rounding has taken more than `TOLD` of a change, once for a scheme."""
    asked = (wanted - before).norm()
    if (target.dequantize() - wanted).norm() > TOLD * asked > 0:
        warnings.warn(
            f"{func} of a weight in {target.scheme.name}: more than half of the change is smaller than its steps and was "
            f"rounded away. Keep an adapter beside the weight instead of merging it, or merge it into the dense model and "
            f"quantize that",
            UserWarning,
            stacklevel=2,
        )


__all__ = ["CHANGES", "requantized"]
