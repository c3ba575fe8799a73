"""`model.save_pretrained(folder)` of transformers for models with quantized weights: a folder in our layout.

transformers' own writer names the file of weights itself, writes tensors that it can take apart no further, and undoes what its
reader has renamed, parts of quantized weights included: what comes out is no model. It has no seam for another writer, so the
method of its base class asks first whether a model has quantized weights. That covers models of `quantize_`, of `HfConfig`,
copies of them, `Trainer` and `push_to_hub`. All other models go the way they always went; of those in training, whose
checkpoints `Trainer` writes so, see `ao_lab.checkpoint.transformers.saving`.

`model.save_pretrained(folder)` of transformers for models in training: what a loop writes so that it can go on.

Layers in quantization-aware or sparse training have dense weights, which go the way they always went, with learned scales,
masks and counts beside them; layers that share a weight share these, and they are written once, as the weight is.

Adapters beside quantized weights are written with these, in the layout of our own. `Trainer` resumes from it; `from_pretrained`
reads the quantized model that they train beside, and `ao_lab.load_pretrained` refuses it unless a prepared model is given.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.transformers.sharded import gathered, holds_quantized, is_sharded
from ao_lab.qat.layers import ADDED, QATModule
from ao_lab.qat.lora import LoRALinear
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


#: Arguments of transformers' save_pretrained that choose another format, and when they are not used.
OTHER_FORMATS: dict[str, tuple[Any, ...]] = {
    "variant": (None,), "distributed_checkpoint": (False,), "push_to_hub": (False,),
}  # fmt: skip
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def put_in() -> None:
    """Let `PreTrainedModel.save_pretrained` of transformers write quantized models by `saved`; a second call does nothing."""
    from transformers.modeling_utils import PreTrainedModel

    kind: Any = PreTrainedModel
    dense = kind.save_pretrained
    if getattr(dense, "of_ao_lab", False):
        return

    @functools.wraps(dense)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        adapters = getattr(self, "_hf_peft_config_loaded", False)
        if adapters or not any(map(holds_quantized, self.parameters())):
            warn_of_training(self)
            if len(args) < 2 and any(isinstance(m, (QATModule, SparseLinear)) for m in self.modules()):
                state = kwargs.get("state_dict")
                kwargs["state_dict"] = once(self.state_dict() if state is None else state)
            return dense(self, save_directory, *args, **kwargs)
        if any(isinstance(module, LoRALinear) for module in self.modules()):
            return saved_in_training(self, save_directory, *args, **kwargs)
        return saved(self, save_directory, *args, **kwargs)

    save_pretrained.of_ao_lab = True  # type: ignore[attr-defined]
    kind.save_pretrained = save_pretrained


def saved_in_training(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """Write a model whose adapters train beside quantized weights; see `ao_lab.checkpoint.transformers.saving`."""
    warn_of_adapters(model)
    with as_plain(model):
        saved(model, save_directory, *args, **kwargs)


def saved(model: Any, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
    """Write a quantized model in our layout, with its generation settings; see `ao_lab.save_pretrained`.

    Weights that are sharded (`tp_plan`, FSDP2) are gathered, which every rank has to call; of several ranks the first writes.
    `max_shard_size` is understood, and what says nothing about files. ValueError for arguments that ask for another format.
    """
    if args:
        raise ValueError(
            "save_pretrained of a quantized model takes its arguments by name; use ao_lab.save_pretrained"
        )
    for name, unused in OTHER_FORMATS.items():
        if kwargs.get(name, unused[0]) not in unused:
            raise ValueError(
                f"{name}= does not go with quantized weights of ao_lab; save without it, use model.push_to_hub, or "
                "ao_lab.save_pretrained"
            )
    state = kwargs.get("state_dict")
    if state is not None and not is_own(model, state):
        raise ValueError(
            "state_dict= does not go with quantized weights of ao_lab unless it is model.state_dict(); save without it "
            "(sharded weights are gathered), or by ao_lab.save_pretrained"
        )
    from ao_lab.checkpoint.api import save_pretrained

    limit = bytes_of(kwargs.get("max_shard_size", 5 * 10**9))
    with gathered(model) as is_writing:
        if is_main_process and is_writing:
            save_pretrained(model, Path(save_directory), layout="ao_lab", max_shard_bytes=limit)


def is_own(model: Any, state: Mapping[str, Any]) -> bool:
    """Whether a state is what the model's state_dict() gives, over the same memory: accelerate's get_state_dict gives it."""
    own = model.state_dict()
    return own.keys() == state.keys() and all(_memory(own[name]) == _memory(state[name]) for name in own)


def _memory(value: Any) -> object:
    held = getattr(value, "codes", value)
    return held.data_ptr() if isinstance(held, torch.Tensor) and not is_sharded(held) else id(value)


def bytes_of(size: int | str) -> int:
    """A number of bytes, or text as transformers takes it ("5GB", "200KB"); ValueError for other text."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"max_shard_size is a number of bytes, or text such as '5GB'; got {size!r}")
    return max(1, int(float(found[1]) * UNITS[found[2].upper()]))


__all__ = ["bytes_of", "put_in", "saved"]
