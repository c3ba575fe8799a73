"""Which parameters of a model can be quantized: the weights of linear layers and embeddings, and batched experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(module's name, module, parameter's name, parameter) of all that can be quantized.

    Weights of nn.Linear and nn.Embedding (subclasses too), and floating-point parameters with three axes: batched experts.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = isinstance(module, (nn.Linear, nn.Embedding)) and name == "weight"
            experts = parameter.dim() == 3 and not is_convolution(module)
            if weight or (experts and parameter.is_floating_point()):
                yield path, module, name, parameter


def is_convolution(module: nn.Module) -> bool:
    """Whether the module's weight has three axes without being a batch of matrices."""
    return isinstance(module, nn.modules.conv._ConvNd)


def is_linear(module: nn.Module) -> bool:
    """nn.Linear; not the output of nn.MultiheadAttention, whose fast path reads its weight as plain memory."""
    inside = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return isinstance(module, nn.Linear) and not inside


__all__ = ["candidates", "is_linear"]
