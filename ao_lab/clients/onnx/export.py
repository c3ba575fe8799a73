"""`export_onnx`: a model with quantized linear layers as an ONNX file.

torch's own exporter writes the model; while it runs, each quantized linear layer is a module that stands for operators of ONNX
(`ao_lab.clients.onnx.layers`). The model is as it was afterwards, after an error too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ao_lab.checkpoint.io.files import refuse_folders, staged
from ao_lab.clients.integers import check_float32
from ao_lab.clients.onnx.layers import onnx_layer
from ao_lab.install.extras import needed
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.layers import check_model, full_name

#: DequantizeLinear has blocks since 21.
OPSET = 21


class OnnxFile(NamedTuple):
    """What `export_onnx` wrote: the file, its bytes with those of its data file, and how many nodes of quantization it has."""

    path: Path
    bytes: int
    operators: dict[str, int]


def export_onnx(
    model: nn.Module,
    args: Sequence[Any],
    path: str | Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> OnnxFile:
    """Export a model as an ONNX file (opset 21) for onnxruntime, and for OpenVINO if it has the operators.

    model: float32, in evaluation mode, the weights of its linear layers (N, K) quantized or not. args, kwargs: inputs of one
    call, of any shape and dtype; dynamic_shapes, input_names, output_names: as for `torch.onnx.export`. Weights over 2 GB are
    stored in a second file.

    Integers become MatMulNBits with the same values, scales and zero points, NF4 MatMulBnb4, float8 DequantizeLinear, int8 by
    int8 MatMulInteger or QDQ. Outputs are those of the model up to the order of float32 sums. TypeError for anything but a
    module; ValueError for another scheme, with the layer and what would work, for quantized weights elsewhere, and for other
    dtypes.
    """
    check_model(model)
    check_float32(model)
    onnx, _ = needed("onnx"), needed("onnxscript")
    path = Path(path)
    refuse_folders([path])
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {"input_names": input_names, "output_names": output_names}
    options: dict[str, Any] = {key: value for key, value in names.items() if value is not None}
    with _as_operators(model) as exported, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            exported, tuple(args), kwargs=dict(kwargs or {}), dynamo=True, opset_version=OPSET, verbose=False,
            dynamic_shapes=dynamic_shapes, **options,
        )  # fmt: skip
    with staged(path.parent) as place:
        program.save(str(place / path.name))
        written = onnx.load(str(place / path.name), load_external_data=False)
        sizes = sum(file.stat().st_size for file in place.iterdir())
    kinds = [node.op_type for node in written.graph.node if node.op_type in KINDS]
    return OnnxFile(path, sizes, {kind: kinds.count(kind) for kind in sorted(set(kinds))})


#: Operators of quantized layers.
KINDS = ("MatMulNBits", "MatMulBnb4", "DequantizeLinear", "QuantizeLinear", "MatMulInteger")


@contextmanager
def _as_operators(model: nn.Module) -> Iterator[nn.Module]:
    """The model with modules for ONNX in the places of its quantized linear layers; such a module where the model is one."""
    layers = {
        module: name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), QuantizedTensor)
    }
    _check(model, {full_name(name, "weight") for name in layers.values()})
    made: dict[nn.Module, nn.Module] = {}
    for module, name in layers.items():
        try:
            made[module] = _replacement(module)
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if name else str(error)) from error
    # A layer may stand at several places, of one owner too.
    places = [
        (owner, leaf, module)
        for owner in model.modules()
        for leaf, module in owner._modules.items()
        if module in made
    ]
    try:
        for owner, leaf, module in places:
            setattr(owner, leaf, made[module])
        yield made.get(model, model)
    finally:
        for owner, leaf, module in places:
            setattr(owner, leaf, module)


def _replacement(module: nn.Module) -> nn.Module:
    """The module that stands for a quantized layer; ValueError where the layer computes more than it does."""
    if not isinstance(module, nn.Linear):
        raise ValueError(f"quantized weights of {type(module).__name__} are not exported; leave them dense")
    own = type(module).forward is not nn.Linear.forward or "forward" in vars(module)
    if own or module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(
            f"{type(module).__name__} has {'a forward' if own else 'hooks'} of its own, which the file would not have; "
            f"remove them, or leave the layer dense"
        )
    weight: Any = module.weight
    return onnx_layer(weight.detach(), module.bias)


def _check(model: nn.Module, weights: set[str]) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor) and name not in weights:
            raise ValueError(
                f"{name}: quantized weights are exported in nn.Linear alone; leave this one dense"
            )


__all__ = ["OnnxFile", "export_onnx"]
