"""`export_executorch`: a model with quantized linear layers as an ExecuTorch program for XNNPACK.

ExecuTorch's XNNPACK partitioner knows torchao's `IntxUnpackedToInt8Tensor`: integer weights, and inputs rounded to 8 bits with
a zero point for each token. A weight of ours becomes that tensor, codes and scales as they are, while the export runs. Only
what XNNPACK was seen to compute is let through: with executorch 1.5.1 it takes weight-only integers and int8 in groups without
an error, and returns numbers of no meaning.

Its kernels round 4-bit groups' scales to bfloat16 and find the inputs' scales in their own way: outputs agree to about the step
of an input.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.io.files import file_to_write, staged
from ao_lab.clients.programs import check_exported, without_cache
from ao_lab.config.recipe import Recipe, numerics
from ao_lab.install.extras import needed
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.transforms.layers import check_model
from reference import SCHEMES
from reference.quantize.quantize import unpacked

WAY_OUT = (
    "XNNPACK computes Int8DynamicActivationIntxWeightConfig with torch.int4 in groups of 32 or more or in rows "
    "(PerAxis(0)) of a multiple of 32, and with torch.int8 in rows"
)


def export_executorch(model: nn.Module, args: Sequence[Any], path: str | Path) -> Path:
    """Export a model as a program (.pte) that ExecuTorch runs on a CPU with XNNPACK.

    model: float32, in evaluation mode; linear layers, all or some, symmetric int4 (groups of a multiple of 32, or per
    channel) or int8 (per channel) with dynamic int8 activations with a zero point per token. args: inputs of one call, of the
    shapes and dtypes that the program takes.

    TypeError for anything but a module; ValueError, with the layer and what would work, for any other quantized weight, for
    other dtypes, for a model in training or without quantized weights, and for a path in no folder.
    """
    check_model(model)
    path = file_to_write(path)
    check_exported(model, "to_edge_transform_and_lower of executorch writes")
    xnnpack = needed("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    exir = needed("executorch.exir")
    with _as_torchao(model), without_cache(model), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, tuple(args))
        lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
        content = lowered.to_executorch().buffer
    with staged(path.parent) as place:
        (place / path.name).write_bytes(content)
    return path


@contextmanager
def _as_torchao(model: nn.Module) -> Iterator[None]:
    """The model with torchao's tensors in the places of ours."""
    layers: dict[nn.Module, Any] = {}
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, QuantizedTensor):
                continue
            try:
                if not isinstance(module, nn.Linear) or leaf != "weight":
                    raise ValueError(
                        f"quantized weights of {type(module).__name__} are not exported; {WAY_OUT}"
                    )
                layers[module] = torchao_tensor(parameter.detach())  # type: ignore[arg-type]
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
    ours: dict[nn.Module, Any] = {module: module.weight for module in layers}
    try:
        for module, weight in layers.items():
            module.weight = nn.Parameter(weight, requires_grad=False)
        yield
    finally:
        for module, weight in ours.items():
            module.weight = weight


def torchao_tensor(weight: QuantizedTensor) -> torch.Tensor:
    """torchao's tensor with the codes and scales of a weight (N, K); ValueError where XNNPACK would compute something else."""
    tensors: Any = needed("torchao.quantization")
    weight = weight.plain
    q = unpacked(weight.quantized)
    if (reason := _unsupported(weight, weight.recipe)) is not None:
        raise ValueError(f"{weight.recipe}: {reason}; {WAY_OUT}")
    bits = q.scheme.format.bits
    codes = q.codes.to(torch.int16)
    codes = torch.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes).to(torch.int8)
    scale = q.scale.float()
    size, zero = q.shape[1] // scale.shape[1], torch.zeros_like(scale, dtype=torch.int8)
    result: torch.Tensor = tensors.IntxUnpackedToInt8Tensor(
        codes, scale, zero, getattr(torch, f"int{bits}"), (1, size), torch.float32, "int8_asym_per_token"
    )
    return result


def _unsupported(weight: QuantizedTensor, recipe: Recipe) -> str | None:
    scheme, inputs = recipe.weight, recipe.activation
    if isinstance(weight, SparseQuantizedTensor) or weight.meta.transposed or weight.block_axis != -1:
        return "only plain matrices with blocks along K are exported"
    if recipe.rotation:
        return "inputs are not rotated there"
    static = weight.input_scale is not None
    if static or inputs is None or numerics(inputs) != numerics(SCHEMES["int8_rowwise_asymmetric"]):
        return "inputs are int8 with a zero point for each token there"
    block = scheme.scale.block
    decoded = scheme.scale.storage == "float32" and scheme.scale.stored == "decode"
    if scheme.zero is not None or scheme.outer is not None or not decoded:
        return "weights are symmetric integers with float32 scales there"
    if scheme.element == "int8" and block == -1:
        return None
    group = weight.shape[1] if block == -1 else block
    if scheme.element == "int4" and isinstance(group, int) and group % 32 == 0:
        return None
    return "its blocks and widths are not computed there"


__all__ = ["export_executorch"]
