"""`model.save_pretrained(folder)` of transformers for models with quantized weights: a folder in our layout.

transformers' own writer names the file of weights itself, writes tensors that it can take apart no further, and undoes what its
reader has renamed, parts of quantized weights included: what comes out is no model. It has no seam for another writer, so the
method of its base class asks first whether a model has quantized weights. That covers models of `quantize_`, of `HfConfig`,
copies of them, `Trainer` and `push_to_hub`. All other models go the way they always went; of those in training, whose
checkpoints `Trainer` writes so, see `ao_lab.checkpoint.transformers.in_training`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ao_lab.checkpoint.transformers.in_training import as_plain, once, warn_of_adapters, warn_of_training
from ao_lab.checkpoint.transformers.sharded import gathered, holds_quantized, is_sharded
from ao_lab.qat.layers import QATModule
from ao_lab.qat.lora.layer import LoRALinear
from ao_lab.sparsity.training.layers import SparseLinear

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
    """Write a model whose adapters train beside quantized weights; see `ao_lab.checkpoint.transformers.in_training`."""
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
