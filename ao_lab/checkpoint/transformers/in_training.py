"""`model.save_pretrained(folder)` of transformers for models in training: what a loop writes so that it can go on.

Layers in quantization-aware or sparse training have dense weights, which go the way they always went, with learned scales,
masks and counts beside them; layers that share a weight share these, and they are written once, as the weight is.

Adapters beside quantized weights are written with these, in the layout of our own. `Trainer` resumes from it; `from_pretrained`
reads the quantized model that they train beside, and `ao_lab.load_pretrained` refuses it unless a prepared model is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ao_lab.qat.layers import ADDED, QATModule
from ao_lab.qat.lora.layer import LoRALinear
from ao_lab.sparsity.training.layers import ADDED as SPARSE_ADDED
from ao_lab.sparsity.training.layers import SparseLinear

#: Names of what layers in training have beside their weights.
STATE = (*ADDED, *SPARSE_ADDED)
WEIGHTS = "model.safetensors"


def warn_of_training(model: Any) -> None:
    """A UserWarning where dense weights are written of layers in training, which compute with other values."""
    prepared = [name for name, m in model.named_modules() if isinstance(m, (QATModule, LoRALinear))]
    sparse = [name for name, m in model.named_modules() if isinstance(m, SparseLinear)]
    if prepared:
        _warn(
            f"{len(prepared)} layers ({prepared[0]}, ...) are prepared for quantization-aware training, and the folder holds "
            f"their dense training weights, without the rounding: prepare the model again after loading to go on training, or "
            f"call quantize_(model, QATConfig(config, step='convert')) and save to keep the quantized model{_state(model)}"
        )
    elif sparse:
        _warn(
            f"{len(sparse)} layers ({sparse[0]}, ...) train sparse, and the folder holds their weights without their masks "
            f"applied: call sparsify_ again after loading to go on training, or finish_sparsity_(model) and save to keep the "
            f"sparse model{_state(model)}"
        )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)


def _state(model: Any) -> str:
    """What else is in the folder, and how it is read."""
    leaves = {name.rpartition(".")[2] for name in model.state_dict()}
    found = [name for name in STATE if name in leaves]
    return (
        f". from_pretrained leaves {', '.join(found)} out: load {WEIGHTS} by load_state_dict(..., strict=False) into the model "
        f"that is prepared again to go on with them"
        if found
        else ""
    )


def once(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state_dict in which the state of layers that share a weight is under the first of its names alone."""
    seen: set[tuple[object, ...]] = set()
    result = {}
    for name, value in state.items():
        if name.rpartition(".")[2] in STATE and not value.is_meta and value.numel():
            key = (value.device, value.data_ptr(), value.shape)
            if key in seen:
                continue
            seen.add(key)
        result[name] = value
    return result


@contextmanager
def as_plain(model: nn.Module) -> Iterator[None]:
    """Layers with adapters as linear layers that have two parameters more, which is what their folder says of them."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoRALinear)]
    kinds = [type(layer) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = nn.Linear  # type: ignore[assignment]
        yield
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind


def warn_of_adapters(model: Any) -> None:
    """A UserWarning that says which file of a model with adapters holds what."""
    adapted = [name for name, m in model.named_modules() if isinstance(m, LoRALinear)]
    _warn(
        f"{len(adapted)} layers ({adapted[0]}, ...) have adapters in training: the folder has these beside the quantized "
        f"weights, and from_pretrained leaves them out. Trainer resumes from it; to go on otherwise, keep "
        f"ao_lab.lora_state_dict(model), and load that by load_state_dict(..., strict=False) into a model that is prepared in "
        f"the same way. To keep one quantized model, call quantize_(model, QATConfig(config, step='convert')), which merges, "
        f"and save"
    )


__all__ = ["as_plain", "once", "warn_of_adapters", "warn_of_training"]
