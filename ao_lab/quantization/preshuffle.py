"""The weights of a finished model in the layout that products on its device read best."""

from __future__ import annotations

from typing import Any

from torch import nn

from ao_lab.quantization.modules import training_state
from ao_lab.tensor.preshuffled import for_products
from ao_lab.tensor.quantized_tensor import QuantizedTensor


def preshuffle(model: nn.Module) -> bool:
    """Make of each quantized weight what `ao_lab.tensor.preshuffled.for_products` says; whether any is another one now.

    One after the other, in every place that has it. Tables that are looked up in stay, tied ones
    too, as do weights of layers that train.
    """
    changed = False
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if type(parameter) is QuantizedTensor:
                places.setdefault(id(parameter), []).append((module, name))
    for each in places.values():
        modules = [module for module, _ in each]
        if any(isinstance(m, nn.Embedding) for m in modules) or any(map(training_state, modules)):
            continue
        weight: Any = each[0][0]._parameters[each[0][1]]
        made = for_products(weight)
        if made is not weight:
            parameter = nn.Parameter(made, requires_grad=False)
            for module, name in each:
                module._parameters[name] = parameter
            changed = True
    return changed


__all__ = ["preshuffle"]
