"""What `quantize_` did to each layer and why, and `explain`: what each layer of a model is now."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from ao_lab.gemm.select import most_fused_rows, select_kernel
from ao_lab.quantization.modules import check_model, quantizable_parameters, training_state
from ao_lab.tensor.quantized_tensor import QuantizedTensor

#: Where a model keeps its report.
ATTRIBUTE = "ao_lab_report"


@dataclass(frozen=True)
class Layer:
    """One parameter that can be quantized."""

    #: Full name of the parameter.
    name: str
    #: Class of the module that has it.
    kind: str
    shape: tuple[int, ...]
    #: Schemes as text; "" where it is dense.
    scheme: str
    #: The function that computes with it; "" where that is torch's own.
    kernel: str
    bytes: int
    #: Why it is as it is.
    reason: str

    @property
    def changed(self) -> bool:
        """Whether it is quantized."""
        return bool(self.scheme)


@dataclass(frozen=True)
class Report:
    """Every layer of a model that `quantize_` looked at, in the order of its modules."""

    layers: tuple[Layer, ...] = field(default_factory=tuple)

    @property
    def changed(self) -> tuple[Layer, ...]:
        """Those that are quantized."""
        return tuple(layer for layer in self.layers if layer.changed)

    @property
    def left(self) -> tuple[Layer, ...]:
        """Those that are not."""
        return tuple(layer for layer in self.layers if not layer.changed)

    def __str__(self) -> str:
        lines = [f"{len(self.changed)} of {len(self.layers)} layers quantized"]
        width = max((len(layer.name) for layer in self.layers), default=0)
        for layer in self.layers:
            what = f"{layer.scheme} ({layer.kernel})" if layer.changed else "left"
            lines.append(f"  {layer.name:<{width}}  {what}: {layer.reason}")
        return "\n".join(lines)


def explain(model: nn.Module) -> Report:
    """What every layer of a model is: its schemes, the function that computes with it and why.

    Reasons of layers that were left are those that `quantize_` gave, where it ran on this model.
    """
    check_model(model)
    known = {layer.name: layer.reason for layer in getattr(model, ATTRIBUTE, Report()).layers}
    return Report(tuple(described_layer(*found, known) for found in quantizable_parameters(model)))


def described_layer(
    path: str, module: nn.Module, name: str, parameter: torch.Tensor, reasons: dict[str, str]
) -> Layer:
    """One line of a report."""
    full = f"{path}.{name}" if path else name
    reason = reasons.get(full, "never given to quantize_")
    if (state := training_state(module)) is not None:
        reason = state.parameter_reason(name) or reason
    kind, shape = type(module).__name__, tuple(parameter.shape)
    if not isinstance(parameter, QuantizedTensor):
        return Layer(full, kind, shape, "", "", parameter.nbytes, reason)
    size = sum(part.nbytes for part in parameter.parts.values() if part is not None)
    return Layer(full, kind, shape, str(parameter.recipe), kernel_of(module, parameter), size, reason)


def kernel_of(module: nn.Module, weight: QuantizedTensor) -> str:
    """The function that computes with a weight; experts and linear layers sum along their blocks."""
    if isinstance(module, nn.Embedding):
        return "embedding"
    transposed = weight if weight.block_axis == -2 else weight.transposed()
    name = select_kernel(transposed, weight.dtype)
    if name != "fused":
        return name
    count = most_fused_rows(transposed, weight.dtype)
    return f"fused, up to {count} row{'s' * (count > 1)}"


__all__ = ["Layer", "Report", "explain"]
