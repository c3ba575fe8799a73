"""Adapters of low rank beside frozen, quantized weights: QAT with LoRA (Hu et al., arXiv 2106.09685).

    quantize_(model, QATConfig(base_config, step="prepare", lora=LoRA(rank=16, alpha=32)))
    train(model)                      # the trainable parameters are lora_a and lora_b
    save(lora_state_dict(model))      # small: adapters alone
    quantize_(model, QATConfig(base_config, step="convert"))

Step "prepare" quantizes the weights that are dense, keeps those that are quantized already (the same scheme; others raise), and
freezes both and their biases: y = q(x) Wq' + b + (alpha / rank) (x A') B'. The first product is that of the converted layer, on
stored codes; x in the second is as it came. A begins random and B zero, so that training begins at the quantized model.
Embeddings, and layers of rank 0, are quantized and frozen alone. The rest of the model (norms, embeddings, biases, what the
configuration does not name) is frozen too, so that adapters alone train, as peft does; `LoRA(freeze_rest=False)` leaves it as
it was.

A model in this state serves: what was trained is what runs, bit for bit, its adapters beside it in bfloat16, as the published
Llama 3.2 models have them. Step "convert" merges: the float32 sum of the dequantized weight and (alpha / rank) B A is quantized
by the same recipe under scales of its own, and layers are plain again. That rounds the sum, so outputs change by as much as
quantizing does; adapters that add nothing leave the codes as they were. Without base_config the sum becomes a dense weight.

`LoRA(rounds="sum")` trains for that: weights stay dense and frozen, and every forward multiplies with what the sum rounds to,
so that step "convert" stores, bit for bit, what training multiplied with. Its price is that of dense QAT (only the optimizer
is smaller), and the dense sum of each layer until its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod, sqrt
from typing import ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ao_lab.config.recipe import Recipe
from ao_lab.qat.autograd import qat_linear, refuse_dtensor
from ao_lab.qat.config import LoRA
from ao_lab.qat.layers import ADAPTERS, WRITES, QATLinear, count_writes
from ao_lab.qat.lora.autograd import frozen_linear
from ao_lab.quantization.modules import check_model
from ao_lab.quantization.report import ADAPTER
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.values.weight_scales import quantized_weight
from ao_lab.training.layers import RAN, mark_run
from fast.device import functional_transform, is_traced


class LoRALinear(nn.Linear):
    """nn.Linear of a frozen quantized weight, with adapters; made by `add_adapters`, in place."""

    preparation: ClassVar[str] = "with adapters"

    lora: LoRA
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """y of the module text; under autocast in its dtype, as F.linear."""
        mark_run(self)
        if not input.dim():
            return nn.functional.linear(input, self.lora_a)  # raises
        refuse_dtensor(self.weight)
        kind = input.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return self._product(input)
        with torch.autocast(kind, enabled=False):
            return self._product(input.to(torch.get_autocast_dtype(kind)))

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        rows = x if x.dim() == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = frozen_linear(rows, self.weight, bias)  # type: ignore[arg-type]
        dropped = self.lora.dropout > 0 and self.training and torch.is_grad_enabled()
        # Dropped inputs would be kept for backward; drawn again from the same state they need not be.
        low = checkpoint(self._down, rows, use_reentrant=False) if dropped else self._down(rows)
        # In place: the frozen product is nobody else's, and no gradient needs its values.
        traced = is_traced(rows) or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        new = traced or functional_transform() is not None
        add = torch.addmm if new else torch.Tensor.addmm_
        y = add(y, low, self.lora_b.to(x.dtype).t(), alpha=self.lora.factor)
        return y if x.dim() == 2 else y.reshape((*x.shape[:-1], self.out_features))

    def _down(self, rows: torch.Tensor) -> torch.Tensor:
        if self.lora.dropout and self.training:
            rows = nn.functional.dropout(rows, self.lora.dropout)
        return nn.functional.linear(rows, self.lora_a.to(rows.dtype))

    def merged(self) -> torch.Tensor:
        """The dense weight that the layer stands for, in float32."""
        product = self.lora_b.detach().float() @ self.lora_a.detach().float()
        result: torch.Tensor = self.weight.detach().dequantize(torch.float32) + self.lora.factor * product  # type: ignore[call-arg]
        return result

    def unsupported_reason(self) -> str | None:
        """None: its weight is quantized."""
        return None

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        return adapter_reason(self.lora, name)

    def extra_repr(self) -> str:
        """torch's own, and the adapters."""
        return f"{super().extra_repr()}, {self.weight.recipe}, rank={self.lora.rank}"  # type: ignore[attr-defined]


class LoRASumLinear(QATLinear):
    """A layer in dense QAT whose weight is a frozen one and the product of its adapters."""

    preparation: ClassVar[str] = "with adapters"

    lora: LoRA
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product with the rounded sum."""
        mark_run(self)
        return qat_linear(input, self.merged(), self.bias, self.given(), self.qat.rule)

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        return adapter_reason(self.lora, name) or super().parameter_reason(name)

    def merged(self) -> torch.Tensor:
        """The sum in the weight's dtype, under autocast too: step "convert" makes it once more, outside.

        One operation, so that a compiler rounds it as eager calls do.
        """
        a, b = (part.to(self.weight.dtype) for part in (self.lora_a, self.lora_b))
        kind = a.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return torch.addmm(self.weight, b, a, alpha=self.lora.factor)
        with torch.autocast(kind, enabled=False):
            return torch.addmm(self.weight, b, a, alpha=self.lora.factor)


def adapter_reason(lora: LoRA, name: str) -> str | None:
    """Why a parameter of a layer with adapters is as it is; None for others than the weight and the adapters."""
    if name == "weight":
        return str(lora)
    return ADAPTER if name in ADAPTERS else None


def add_adapters(layer: nn.Linear, lora: LoRA) -> None:
    """Give a layer of a quantized weight (or in dense QAT) adapters."""
    rows, length = layer.weight.shape
    device = layer.weight.device
    a = torch.empty((lora.rank, length), dtype=torch.float32, device=device)
    nn.init.kaiming_uniform_(a, a=sqrt(5))
    layer.__class__ = LoRASumLinear if isinstance(layer, QATLinear) else LoRALinear
    layer.__dict__.pop(RAN, None)
    layer.lora = lora  # type: ignore[assignment]
    layer.lora_a = nn.Parameter(a.to(lora.dtype))
    layer.lora_b = nn.Parameter(torch.zeros((rows, lora.rank), dtype=lora.dtype, device=device))
    count_writes(layer, layer.lora_b)


def freeze(places: Iterable[tuple[nn.Module, str]]) -> None:
    """What layers have but for adapters does not train."""
    for module, _ in places:
        for name, parameter in module.named_parameters(recurse=False):
            parameter.requires_grad_(name in ADAPTERS)


def freeze_rest(model: nn.Module, configs: Iterable[LoRA]) -> None:
    """Freeze all parameters of a model but adapters, unless one of its configurations says otherwise."""
    if not all(lora.freeze_rest for lora in configs):
        return
    for module in model.modules():
        adapters = ADAPTERS if isinstance(module, (LoRALinear, LoRASumLinear)) else ()
        for name, parameter in module.named_parameters(recurse=False):
            if name not in adapters:
                parameter.requires_grad = False  # of a lazy one too


def drop_adapters(layer: nn.Module) -> None:
    """The layer that it was before."""
    layer.__class__ = QATLinear if isinstance(layer, QATLinear) else nn.Linear
    del layer.__dict__["lora"]
    for name in (RAN, WRITES):
        layer.__dict__.pop(name, None)
    for name in ADAPTERS:
        del layer._parameters[name]


def fold(layer: LoRASumLinear) -> None:
    """A layer in dense QAT of the sum."""
    with torch.no_grad():
        weight = nn.Parameter(layer.merged(), requires_grad=False)
    drop_adapters(layer)
    layer._parameters["weight"] = weight


def merged_weight(layer: LoRALinear, recipe: Recipe | None) -> nn.Parameter:
    """The weight of step "convert": quantized by a recipe, or dense in the weight's dtype where there is none."""
    weight = layer.weight.detach()
    if recipe is None:
        return nn.Parameter(layer.merged().to(weight.dtype))
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"the weight beside adapters is a QuantizedTensor, got {type(weight).__name__}")
    if not weight.is_meta and not (layer.lora_b.detach().float() @ layer.lora_a.detach().float()).any():
        return nn.Parameter(weight.with_recipe(kernel=recipe.kernel), requires_grad=False)
    dense = layer.merged()
    if recipe.weight.scale.compute == "input":
        # Such schemes keep scales in the weight's dtype, which float32 sums do not have.
        dense = dense.to(weight.dtype)
    result = quantized_weight(dense, recipe, input_scales=weight.input_scales)
    return nn.Parameter(result.remade(result.parts, dtype=weight.dtype), requires_grad=False)


def lora_state_dict(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """The adapters of a model by full name; `model.load_state_dict(state, strict=False)` reads them into a prepared one."""
    check_model(model)
    return {
        f"{path}.{name}" if path else name: getattr(layer, name).detach()
        for path, layer in model.named_modules()
        if isinstance(layer, (LoRALinear, LoRASumLinear))
        for name in ADAPTERS
    }


__all__ = [
    "LoRA",
    "LoRALinear",
    "LoRASumLinear",
    "add_adapters",
    "drop_adapters",
    "fold",
    "freeze",
    "freeze_rest",
    "lora_state_dict",
    "merged_weight",
]
