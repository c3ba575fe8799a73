"""Whether a model is what its weights say, so that saving them saves it: nothing in training, watched, wrapped or half done.

A layer prepared for quantization-aware training rounds dense weights as it runs, adapters add a product of their own, a
parametrization computes a weight from others: saved as plain tensors, each would be another model when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ao_lab.qat.layers import QATModule
from ao_lab.qat.lora import LoRALinear
from ao_lab.quantization.report import Report
from ao_lab.sparsity.training.layers import SparseLinear
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.transforms.data import watches
from ao_lab.transforms.layers import shorten
from ao_lab.transforms.report import ATTRIBUTE

CONVERT = "call quantize_(model, QATConfig(config, step='convert')) first"
#: How `quantize_` tells of weights that it did not come to.
STOPPED = "quantize_ stopped before it"
#: Hooks that compute a weight from others before each forward, as parametrizations do, and what makes the weight plain.
NORMS: dict[type, str] = {
    WeightNorm: "torch.nn.utils.remove_weight_norm",
    SpectralNorm: "torch.nn.utils.remove_spectral_norm",
}
#: What wrappers put before names.
PREFIXES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's, DistributedDataParallel's and DataParallel's wrappers: the same parameters."""
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    while True:
        inner = model.module if isinstance(model, parallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_finished(model: nn.Module) -> None:
    """ValueError with the names of layers that saving would change or drop, and the step that finishes them."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if (reason := _unfinished(module)) is not None:
            found.setdefault(reason, []).append(name or "the model itself")
    for name, reason in _stopped(model):
        found.setdefault(reason, []).append(name)
    _refuse(found)
    _check_state(model)


def check_program(model: nn.Module) -> None:
    """ValueError with the names of layers in training, whose programs no runtime has, and the step that finishes them."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if (reason := _in_training(module)) is not None:
            found.setdefault(reason, []).append(name or "the model itself")
    _refuse(found)


def check_quantized(model: nn.Module, dense: str) -> None:
    """ValueError for a model without quantized weights. dense: what writes one that is not quantized."""
    if not any(isinstance(p, QuantizedTensor) for p in model.parameters()):
        raise ValueError(
            f"the model has no quantized weights; call quantize_ first ({dense} one that is not quantized, "
            f"after convert_from_training_ one that trains in low precision)"
        )


def _refuse(found: Mapping[str, Sequence[str]]) -> None:
    """ValueError of names of layers by reasons, where there are any."""
    if found:
        told = "; ".join(f"{shorten(names)}: {reason}" for reason, names in found.items())
        raise ValueError(f"the model cannot be saved as it is. {told}")


def _in_training(module: nn.Module) -> str | None:
    """Why a layer is to be converted first; None where it is not in training, nor watched."""
    if isinstance(module, LoRALinear):
        apart = "or ao_lab.save_adapter(model, folder), which writes them alone, as peft does"
        return f"adapters on a frozen weight; step='convert' merges them: {CONVERT}; {apart}"
    if isinstance(module, SparseLinear):
        return "trains with a sparse weight; call finish_sparsity_(model) first"
    if isinstance(module, QATModule):
        return f"prepared for quantization-aware training; step='convert' quantizes it: {CONVERT}"
    if watches(module):
        return "its inputs are watched; finish with quantize_ and step='convert' (or forward_loop=)"
    return None


def _unfinished(module: nn.Module) -> str | None:
    """Why a module's weights are not what it computes with; None where they are."""
    kind = type(module)
    if (reason := _in_training(module)) is not None:
        return reason
    # Of convolutions an architecture may have its own (Wav2Vec2): readers build them too.
    if isinstance(module, (nn.Linear, nn.Embedding)) and (reason := _computed(module)) is not None:
        return reason
    if kind.__module__.partition(".")[0] == "peft":
        return _adapted(module)
    if "FakeQuant" in kind.__name__:
        return f"a {kind.__name__} rounds what passes through it; convert the model with the library that prepared it"
    return None


def _adapted(module: nn.Module) -> str:
    """What makes a layer of peft plain; of a weight in 2:4 storage no merge does."""
    told = f"{type(module).__name__} of peft"
    if any(isinstance(p, SparseQuantizedTensor) for p in module.parameters()):
        return (
            f"{told} on 2:4 storage, into which updates cannot be merged; the adapters' own save_pretrained writes these, "
            f"unload() leaves the model without them"
        )
    return f"{told}; merge_and_unload() merges them, the adapters' own save_pretrained saves only these"


def _computed(module: nn.Module) -> str | None:
    """What computes a weight from parameters of other names; None where nothing does."""
    if is_parametrized(module):
        return "a parametrization computes a weight; remove it with torch.nn.utils.parametrize.remove_parametrizations"
    for hook in module._forward_pre_hooks.values():
        if (remove := next((way for kind, way in NORMS.items() if isinstance(hook, kind)), None)) is not None:
            return f"a {type(hook).__name__} hook computes a weight; {remove} makes it an ordinary weight"
    return None


def _stopped(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Weights to which an interrupted `quantize_` did not come."""
    report = getattr(model, ATTRIBUTE, None)
    # One that was refused before it changed a weight has left the model as it was: that it has no quantized weights says all.
    begun = any(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())
    for layer in report.layers if begun and isinstance(report, Report) else ():
        if layer.reason.startswith(STOPPED) and not _is_quantized(model, layer.name):
            yield layer.name, "quantize_ was interrupted before it; call it again, or quantize a fresh model"


def _is_quantized(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_parameter(name), QuantizedTensor)
    except AttributeError:
        return True  # a layer that is no longer there


def _check_state(model: nn.Module) -> None:
    """ValueError where state_dict() does not have each quantized weight under its own name, whole."""
    state = model.state_dict(keep_vars=True)
    if others := {name: type(x).__name__ for name, x in state.items() if not isinstance(x, torch.Tensor)}:
        raise ValueError(
            f"{shorten(list(others))}: state_dict() holds a {next(iter(others.values()))} there, and safetensors hold tensors; "
            "let get_extra_state return a tensor (torch.frombuffer of bytes, for instance), or keep it in the configuration"
        )
    quantized = [
        name for name, p in model.named_parameters(remove_duplicate=False) if isinstance(p, QuantizedTensor)
    ]
    wrapped = [name for name in state if any(part in PREFIXES for part in name.split("."))]
    if wrapped:
        raise ValueError(
            f"{shorten(wrapped)}: a wrapper inside the model renames weights, so that loaders would not find them; take the "
            "wrappers of torch.compile and FSDP off first (module.compile() and fully_shard rename nothing)"
        )
    if missing := [name for name in quantized if not isinstance(state.get(name), QuantizedTensor)]:
        raise ValueError(
            f"{shorten(missing)}: state_dict() does not hold them under their names; a state_dict hook renames or drops them"
        )
    if sharded := [name for name, value in state.items() if hasattr(value, "full_tensor")]:
        raise ValueError(
            f"{shorten(sharded)} are distributed: gather the full weights into an unsharded model on one rank, and save that"
        )
