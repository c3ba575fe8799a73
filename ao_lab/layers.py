"""Which parameters of a model can be quantized: the weights of linear layers and embeddings, and batched experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

#: A linear layer of transformers (GPT-2 and its relatives) that keeps its weight as (in, out); known by name, not imported.
CONV1D = ("transformers.pytorch_utils", "Conv1D")


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(module's name, module, parameter's name, parameter) of all that can be quantized.

    Weights of nn.Linear, transformers' Conv1D and nn.Embedding (subclasses too), and floating-point parameters with three
    axes: batched experts.
    """
    for path, module in model.named_modules():
        layer = isinstance(module, (nn.Linear, nn.Embedding)) or is_turned(module)
        for name, parameter in module.named_parameters(recurse=False):
            experts = parameter.dim() == 3 and not is_convolution(module)
            if (layer and name == "weight") or (experts and parameter.is_floating_point()):
                yield path, module, name, parameter


def is_convolution(module: nn.Module) -> bool:
    """Whether the module's weight has three axes without being a batch of matrices."""
    return isinstance(module, nn.modules.conv._ConvNd)


def is_turned(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as (in, out), the other way round than nn.Linear: transformers' Conv1D."""
    return any((kind.__module__, kind.__name__) == CONV1D for kind in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """nn.Linear and transformers' Conv1D; not the output of nn.MultiheadAttention, whose fast path reads its weight as plain
    memory."""
    inside = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return (isinstance(module, nn.Linear) and not inside) or is_turned(module)


__all__ = ["candidates", "is_linear", "is_turned"]
