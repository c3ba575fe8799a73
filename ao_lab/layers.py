"""Which parameters of a model can be quantized: the weights of linear layers and embeddings, and batched experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

#: A linear layer of transformers (GPT-2 and its relatives) that keeps its weight as (in, out); known by name, not imported.
CONV1D = ("transformers.pytorch_utils", "Conv1D")


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(module's name, module, parameter's name, parameter) of all that could be quantized, or that one would expect to be.

    Matrices of nn.Linear, transformers' Conv1D and nn.Embedding (subclasses too), those that a parametrization keeps instead,
    and floating-point parameters with three axes: batched experts. `unusable` says which of them cannot be.
    """
    for path, module in model.named_modules():
        layer = isinstance(module, (nn.Linear, nn.Embedding, ParametrizationList)) or is_turned(module)
        for name, parameter in module.named_parameters(recurse=False):
            experts = parameter.dim() == 3 and parameter.is_floating_point() and not is_no_batch(module)
            if experts or (layer and parameter.dim() >= 2):
                yield path, module, name, parameter


def unusable(module: nn.Module, name: str, parameter: torch.Tensor) -> str | None:
    """Why a candidate cannot be quantized, from what its module does with it; None where it can."""
    if isinstance(module, ParametrizationList):
        return "a parametrization computes the layer's weight from it; remove_parametrizations makes it a plain weight"
    if parameter.dim() == 2 and name != "weight":
        return "it is not the weight that the layer multiplies with"
    if parameter.dim() == 3 and parameter.shape[0] == 1:
        return f"shape {tuple(parameter.shape)} is no batch of experts: it has one entry"
    if isinstance(module, nn.Embedding) and not looks_up(module):
        return f"{type(module).__name__} reads its table otherwise than nn.Embedding does"
    return None


def looks_up(table: nn.Embedding) -> bool:
    """Whether an embedding's forward is that of nn.Embedding, or calls it or torch's lookup; True where no code can be seen."""
    forward = inspect.unwrap(type(table).forward)
    code = getattr(forward, "__code__", None)
    return forward is nn.Embedding.forward or code is None or bool({"super", "embedding"} & {*code.co_names})


def is_no_batch(module: nn.Module) -> bool:
    """Whether the module's weight has three axes without being a batch of matrices that it multiplies with."""
    return isinstance(module, (nn.modules.conv._ConvNd, nn.Bilinear))


def is_turned(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as (in, out), the other way round than nn.Linear: transformers' Conv1D."""
    return any((kind.__module__, kind.__name__) == CONV1D for kind in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """nn.Linear and transformers' Conv1D; not the output of nn.MultiheadAttention, whose fast path reads its weight as plain
    memory."""
    inside = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return (isinstance(module, nn.Linear) and not inside) or is_turned(module)


__all__ = ["candidates", "is_linear", "is_turned", "unusable"]
