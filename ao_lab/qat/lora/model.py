"""QAT with LoRA on a model: step "prepare" and the merge of step "convert"; `ao_lab.quantize_` is the way in.

Step "prepare" quantizes dense weights as `quantize_` does, with its checks and what it says of interruptions, and then adds
adapters; what would fail by a name, a scheme or a layer's state is found before anything changes.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ao_lab.config.base import Config
from ao_lab.config.fqn import FqnToConfig
from ao_lab.qat.config import QATConfig
from ao_lab.qat.layers import QATModule
from ao_lab.qat.lora.layer import LoRALinear, add_adapters, drop_adapters, freeze_rest, merged_weight
from ao_lab.quantization.api import Call, keep_report, quantize_weights, report_of
from ao_lab.quantization.modules import offloaded, quantizable_parameters, refuse_offloaded
from ao_lab.quantization.plan import Device, Plan
from ao_lab.quantization.report import Report, known_reasons
from ao_lab.quantization.selection import Filter, selection
from ao_lab.tensor.quantized_tensor import QuantizedTensor

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
    keep_report(model, Plan(reasons=reasons))
    return report_of(model)


def _select_layers(
    model: nn.Module, config: Config | FqnToConfig, filter_fn: Filter | None
) -> tuple[list[Place], dict[str, str]]:
    """The layers that a configuration means and can have, and why the others are as they are; ValueError for a bad state."""
    decide = selection(config, filter_fn)
    selected: list[Place] = []
    reasons = known_reasons(model)
    for path, module, name, _ in quantizable_parameters(model):
        full = f"{path}.{name}" if path else name
        wanted, reason = decide(path, module, full)
        if not isinstance(wanted, QATConfig):
            reasons.setdefault(full, reason)
            continue
        _check_state(full, module, wanted)
        if type(module) in (nn.Linear, nn.Embedding) and name == "weight":
            selected.append((full, module, wanted))
        else:
            kind = type(module).__name__
            reasons[full] = (
                f"LoRA is for nn.Linear and nn.Embedding themselves; a {kind} may compute otherwise"
            )
    decide.check_all_matched(model)
    if not selected:
        told = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:5])
        raise ValueError(f"QATConfig with lora: no layer that it means can have adapters. {told}")
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
        raise ValueError(f"{name} was trained beside {have}, not {wanted}; convert it to that")


def merge(layer: LoRALinear, config: QATConfig, device: Device) -> None:
    """Step "convert" of one layer; a weight that was shared with others is the layer's own afterwards."""
    result = merged_weight(layer, None if config.base_config is None else config.recipe())
    if device is not None:
        result = nn.Parameter(result.to(device), requires_grad=result.requires_grad)
    drop_adapters(layer)
    layer._parameters["weight"] = result


__all__ = ["check_mergeable", "merge", "prepare_lora"]
