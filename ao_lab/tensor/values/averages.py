"""Moving averages of models with quantized weights, in place, as `torch.optim.swa_utils.AveragedModel` takes them.

Beside adapters a quantized weight is frozen: its average with itself stays as it is, bit for bit. Of two that differ the
average is quantized again (`ao_lab.tensor.values.in_place`). Towards dense numbers an optimizer moves its moments: refused.
"""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.values.in_place import requantized

aten = torch.ops.aten
AVERAGES = (aten.lerp_.Scalar, aten.lerp_.Tensor)
LISTS = (aten._foreach_lerp_.Scalar, aten._foreach_lerp_.List, aten._foreach_lerp_.ScalarList)


@operation(*AVERAGES)
def _average(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """`target.lerp_(end, weight)`; a dense target takes the values of a quantized end, as ever."""
    target: torch.Tensor = args[0]
    end = args[1]
    if isinstance(target, QuantizedTensor) and not isinstance(end, QuantizedTensor):
        raise NotImplementedError(
            f"{func} of {target!r} towards dense numbers: it takes the average with another quantized weight, and no "
            f"optimizer's steps, which would be rounded away: freeze it, and train adapters, its dequantize()d copy, or a "
            f"model prepared with QATConfig"
        )
    if isinstance(target, QuantizedTensor) and not torch.compiler.is_compiling() and torch.equal(target, end):
        return target
    made: torch.Tensor = requantized(func, args, kwargs)
    return made


@operation(*LISTS)
def _averages(func: Any, args: Any, kwargs: Any) -> None:
    """Pair by pair: those without a quantized weight in one call, as ever."""
    targets, ends, weights = args
    each = weights if isinstance(weights, (list, tuple)) else [weights] * len(targets)
    pairs = list(zip(targets, ends, each, strict=True))
    plain = [pair for pair in pairs if not any(isinstance(t, QuantizedTensor) for t in pair[:2])]
    for target, end, weight in pairs:
        if any(isinstance(t, QuantizedTensor) for t in (target, end)):
            target.lerp_(end, weight)
    if plain:
        given = [list(column) for column in zip(*plain, strict=True)]
        func(given[0], given[1], given[2] if each is weights else weights)


__all__ = ["AVERAGES", "LISTS"]
