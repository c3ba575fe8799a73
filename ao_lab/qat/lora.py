"""QAT with LoRA on a model: step "prepare" and the merge of step "convert"; `ao_lab.quantize_` is the way in.

Step "prepare" quantizes dense weights as `quantize_` does, with its checks and what it says of interruptions, and then adds
adapters; what would fail by a name, a scheme or a layer's state is found before anything changes.

Adapters of low rank beside frozen, quantized weights: QAT with LoRA (Hu et al., arXiv 2106.09685).

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

The product of inputs with a frozen, quantized weight, for autograd: what adapters are trained beside.

Forward is the product of the converted layer (`ao_lab.gemm.select`), the same bits. Backward: dx = g W where the input did not
saturate, 0 elsewhere, with the weight dequantized again. Kept for backward are the weight's stored parts, which the model has
anyway, and x only where its scheme can saturate.

Eager calls run `FrozenLinear`. What traces a program sees one operator of the weight, and below it one of the weight's parts:
a compiler that saw inside would keep the dense weight of forward for backward.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod, sqrt
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ao_lab.config.base import Config, FqnToConfig
from ao_lab.config.recipe import Recipe
from ao_lab.gemm.select import product
from ao_lab.qat import linear as autograd
from ao_lab.qat.config import LoRA, QATConfig
from ao_lab.qat.layers import ADAPTERS, WRITES, QATLinear, QATModule, count_writes
from ao_lab.qat.linear import cannot_saturate, qat_linear, refuse_dtensor, straight_through
from ao_lab.quantization.api import Call, keep_report, quantize_weights, report_of
from ao_lab.quantization.plan import QuantizationPlan
from ao_lab.quantization.report import ADAPTER, Report, known_reasons
from ao_lab.tensor.chunked import quantized_weight
from ao_lab.tensor.metadata import PARTS, Meta, described, meta_from
from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.training.layers import RAN, mark_run
from ao_lab.transforms.layers import (
    ConvertedModule,
    check_model,
    full_name,
    offloaded,
    quantizable_parameters,
    refuse_offloaded,
    routers,
    tied_layers,
)
from ao_lab.transforms.plan import Device, Filter, selection
from ao_lab.transforms.training_records import warn_of_saved_training
from fast.dispatch import functional_transform, is_traced
from fast.ops import once_differentiable


def needs_input(weight: QuantizedTensor) -> bool:
    """Whether the gradient of x depends on x: whether its scheme can saturate."""
    scheme = weight.recipe.activation
    return scheme is not None and (weight.input_scale is not None or not cannot_saturate(scheme))


def input_gradient(g: torch.Tensor, x: torch.Tensor | None, weight: QuantizedTensor) -> torch.Tensor:
    """dx of rows; x may be left out where `needs_input` says so."""
    dx = torch.mm(g.contiguous(), weight.dequantize(g.dtype))
    scheme = weight.recipe.activation
    return (
        dx
        if x is None or scheme is None
        else straight_through(dx, x, scheme, -1, weight.input_scales, None, None)[0]
    )


class FrozenLinear(torch.autograd.Function):
    """y of rows x; keeps no dense weight."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`product`."""
        ctx.save_for_backward(x if needs_input(weight) else None)
        # The model holds it, and nothing changes it: only a reference is kept.
        ctx.weight = weight
        return product(x, weight.transposed(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None]:
        """`input_gradient`, and a bias's."""
        (g,), (x,), need = grads, ctx.saved_tensors, ctx.needs_input_grad
        return input_gradient(g, x, ctx.weight) if need[0] else None, None, g.sum(0) if need[2] else None


@lru_cache(maxsize=256)
def _text(meta: Meta) -> str:
    return json.dumps(described(meta))


@lru_cache(maxsize=256)
def _meta(text: str) -> Meta:
    return meta_from(json.loads(text))


def _weight(parts: Sequence[torch.Tensor | None], shape: list[int], meta: str) -> QuantizedTensor:
    """The weight of an operator's arguments; schemas have no place for it as a whole."""
    return QuantizedTensor(dict(zip(PARTS, parts, strict=True)), _meta(meta), shape)


@torch.library.custom_op("ao_lab::frozen_parts", mutates_args=())
def frozen_parts_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    input_zero: torch.Tensor | None,
    metadata: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: list[int],
    meta: str,
) -> torch.Tensor:
    """The product, of the weight's parts."""
    weight = _weight((codes, scale, outer, zero, input_scale, input_zero, metadata), shape, meta)
    return product(x, weight.transposed(), bias)


@frozen_parts_op.register_fake
def _fake(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], others[-2][0]))


@torch.library.custom_op("ao_lab::frozen_parts_backward", mutates_args=())
def frozen_parts_backward_op(
    g: torch.Tensor,
    x: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    input_zero: torch.Tensor | None,
    metadata: torch.Tensor | None,
    shape: list[int],
    meta: str,
) -> torch.Tensor:
    """`input_gradient`, of the weight's parts."""
    weight = _weight((codes, scale, outer, zero, input_scale, input_zero, metadata), shape, meta)
    return input_gradient(g, x, weight)


@frozen_parts_backward_op.register_fake
def _fake_backward(g: torch.Tensor, *others: Any) -> torch.Tensor:
    return g.new_empty((g.shape[0], others[-2][1]))


@torch.library.custom_op("ao_lab::frozen_linear", mutates_args=())
def frozen_linear_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of rows with a `QuantizedTensor`, whose table of operations answers instead of this."""
    raise TypeError("frozen_linear takes a QuantizedTensor as weight")


@torch.library.custom_op("ao_lab::frozen_linear_backward", mutates_args=())
def frozen_linear_backward_op(g: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    """`input_gradient`; as above."""
    raise TypeError("frozen_linear takes a QuantizedTensor as weight")


@operation(torch.ops.ao_lab.frozen_linear.default)
def _frozen_linear(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    x, weight, bias = args
    result: torch.Tensor = torch.ops.ao_lab.frozen_parts(
        x, *weight.parts.values(), bias, list(weight.shape), _text(weight.meta)
    )
    return result


@operation(torch.ops.ao_lab.frozen_linear_backward.default)
def _frozen_linear_backward(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    g, x, weight = args
    result: torch.Tensor = torch.ops.ao_lab.frozen_parts_backward(
        g, x, *weight.parts.values(), list(weight.shape), _text(weight.meta)
    )
    return result


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x if needs_input(weight) else None, weight)


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    (x, weight), need = ctx.saved_tensors, ctx.needs_input_grad
    dx = torch.ops.ao_lab.frozen_linear_backward(g, x, weight) if need[0] else None
    return dx, None, g.sum(0) if need[2] else None


frozen_linear_op.register_autograd(_backward, setup_context=_keep)


def frozen_linear(rows: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Rows (M, K) times a frozen weight (N, K), plus a bias; differentiable in rows and bias.

    Under a transform of torch.func the dequantized operands are multiplied. TypeError where the weight is among what is
    transformed: it does not train.
    """
    found: object = weight
    if not isinstance(found, QuantizedTensor) and not is_traced(rows):
        raise TypeError(
            f"LoRA: the frozen quantized weight of shape {tuple(weight.shape)} is among the parameters that "
            f"{functional_transform() or 'a transform'} was given; give it those that train (requires_grad) alone"
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        # It records one operator of the weight, as of layers that are quantized alone.
        return torch.nn.functional.linear(rows, weight, bias)
    if not torch.compiler.is_compiling() and functional_transform() is not None:
        scheme = weight.recipe.activation
        if scheme is not None:
            rows = autograd.transformed_rounding(rows, scheme, -1, weight.input_scales, rows.dtype, None)
        return torch.nn.functional.linear(rows, weight.dequantize(rows.dtype), bias)
    run: Any = torch.ops.ao_lab.frozen_linear if is_traced(rows) else FrozenLinear.apply
    y: torch.Tensor = run(rows, weight, bias)
    return y


class LoRALinear(ConvertedModule, nn.Linear):
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

    def parameter_reason(self, name: str) -> str | None:
        """Why a parameter is as it is, for `explain`."""
        return adapter_reason(self.lora, name)

    def training_record(self) -> dict[str, str]:
        """The adapters, and the recipe of the weight that they train beside."""
        weight: Any = getattr(self.weight, "_local_tensor", self.weight)
        return {
            "LoRA": f"rank {self.lora.rank}, alpha {self.lora.factor * self.lora.rank:g} beside {weight.recipe}"
        }

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

    def training_record(self) -> dict[str, str]:
        """The adapters, and the recipe that rounds the sum."""
        lora = f"rank {self.lora.rank}, alpha {self.lora.factor * self.lora.rank:g}, the sum is rounded"
        return {**super().training_record(), "LoRA": lora}

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
        raise TypeError(f"the weight under adapters is a QuantizedTensor, got {type(weight).__name__}")
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
        full_name(path, name): getattr(layer, name).detach()
        for path, layer in model.named_modules()
        if isinstance(layer, (LoRALinear, LoRASumLinear))
        for name in ADAPTERS
    }


#: A layer by its weight's full name, and what it is to become.
Place = tuple[str, nn.Module, QATConfig]


def prepare_lora(call: Call) -> Report:
    """Step "prepare" of configurations that have `lora`."""
    model, device = call.model, call.device
    selected, reasons = _select_layers(model, call.config, call.filter_fn)
    refuse_offloaded((name for name, _, _ in selected), offloaded(model))
    dense = {
        name: wanted.base_config
        for name, module, wanted in selected
        if not isinstance(module.weight, QuantizedTensor)
    }
    if dense:
        report = quantize_weights(replace(call, config=FqnToConfig(dense), filter_fn=None, progress=None))
        reasons.update((layer.name, layer.reason) for layer in report.layers if layer.name in dense)
    elif device is not None:
        model.to(device)
    for name, module, wanted in selected:
        if not isinstance(module.weight, QuantizedTensor):
            continue  # its blocks do not divide its shape; the report says so
        module.requires_grad_(False)  # before adapters, which train, are a part of it
        if isinstance(module, nn.Linear) and wanted.lora is not None and wanted.lora.rank:
            add_adapters(module, wanted.lora)
        else:
            reasons[name] = "LoRA: quantized and frozen, without adapters"
    freeze_rest(model, (wanted.lora for _, _, wanted in selected if wanted.lora is not None))
    keep_report(model, QuantizationPlan(reasons=reasons))
    warn_of_saved_training(model, "LoRA")
    return report_of(model)


def _select_layers(
    model: nn.Module, config: Config | FqnToConfig, filter_fn: Filter | None
) -> tuple[list[Place], dict[str, str]]:
    """The layers that a configuration means and can have, and why the others are as they are; ValueError for a bad state."""
    # As `quantize_` does without a filter: adapters belong beside the layers that it quantizes.
    decide = selection(config, filter_fn, routers(model), tied_layers(model))
    selected: list[Place] = []
    reasons = known_reasons(model)
    for slot in quantizable_parameters(model):
        full, module = slot.full, slot.module
        wanted, reason = decide(slot.path, module, full)
        if not isinstance(wanted, QATConfig):
            reasons.setdefault(full, reason)
            continue
        _check_state(full, module, wanted)
        if type(module) in (nn.Linear, nn.Embedding) and slot.name == "weight":
            selected.append((full, module, wanted))
        else:
            kind = type(module).__name__
            reasons[full] = (
                f"LoRA is for nn.Linear and nn.Embedding themselves; a {kind} may compute otherwise"
            )
    decide.check_all_matched(model)
    if not selected:
        told = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:5])
        raise ValueError(f"QATConfig with lora: none of the selected layers can have adapters. {told}")
    return selected, reasons


def _check_state(name: str, module: nn.Module, config: QATConfig) -> None:
    """ValueError for a layer in training, or one that is quantized otherwise."""
    if isinstance(module, LoRALinear):
        raise ValueError(f"{name} has adapters already; train, and call quantize_ with step='convert'")
    if isinstance(module, QATModule):
        raise ValueError(f"{name} is in dense QAT; call quantize_ with step='convert' first, and then lora=")
    weight = getattr(module, "weight", None)
    if not isinstance(weight, QuantizedTensor):
        return
    have, wanted = weight.recipe, config.recipe()
    linear = isinstance(module, nn.Linear)
    if have.weight != wanted.weight or (linear and have.activation != wanted.activation):
        raise ValueError(f"{name} is quantized as {have}, not as {wanted}; give adapters to that")


def check_mergeable(name: str, layer: LoRALinear, config: QATConfig) -> None:
    """ValueError where a layer's weight is quantized for something else; TypeError where it is distributed."""
    if hasattr(layer.weight, "full_tensor"):
        raise TypeError(
            f"{name} is distributed: load its full weights into a prepared model on one rank, and convert that"
        )
    have = layer.weight.recipe  # type: ignore[attr-defined]
    if config.base_config is None:
        return
    wanted = config.recipe()
    if (have.weight, have.activation) != (wanted.weight, wanted.activation):
        raise ValueError(f"{name} was trained on {have}, not {wanted}; convert it to that")


def merge(layer: LoRALinear, config: QATConfig, device: Device) -> tuple[float, float]:
    """Step "convert" of one layer; a weight that was shared with others is the layer's own afterwards. Returns the squares of
    what rounding the sum moved the weight by, and of what the adapters had added; zeros on the meta device."""
    result = merged_weight(layer, None if config.base_config is None else config.recipe())
    lost = _lost(layer, result)
    if device is not None:
        result = nn.Parameter(result.to(device), requires_grad=result.requires_grad)
    drop_adapters(layer)
    layer._parameters["weight"] = result
    return lost


def _lost(layer: LoRALinear, result: torch.Tensor) -> tuple[float, float]:
    """Squares of the difference of a merged weight from the sum that trained, and of the adapters' part of it."""
    if result.is_meta:
        return 0.0, 0.0
    merged, base = layer.merged().float(), layer.weight.detach()
    base = base.dequantize() if isinstance(base, QuantizedTensor) else base
    kept = result.detach().dequantize() if isinstance(result, QuantizedTensor) else result.detach()
    return float((kept.float() - merged).square().sum()), float((merged - base.float()).square().sum())


__all__ = ["lora_state_dict"]
