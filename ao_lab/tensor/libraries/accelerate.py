"""What accelerate asks of weights: sizes of modules, by which `infer_auto_device_map` fills devices, and FSDP2 of models of
which one rank alone has the weights (`fsdp_cpu_ram_efficient_loading`, its default).

accelerate multiplies a parameter's elements by the bytes of its dtype, which is that of the dense weight: here a quantized
weight has the bytes that are stored. It makes dense tensors on the other ranks and broadcasts into them, which the parts of a
quantized weight do not go into: processes hung or ended in the middle of it. torch's own `set_model_state_dict` does the same
work and knows quantized weights (`ao_lab.tensor.torch_changes.broadcast_state`); models without any go accelerate's way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ao_lab.tensor.quantized_tensor import QuantizedTensor

MODELING, FSDP = "accelerate.utils.modeling", "accelerate.utils.fsdp_utils"


def register() -> None:
    """Put ours in place in the modules that are imported; a second call does nothing, nor do versions without FSDP2."""
    _replace(MODELING, "compute_module_sizes", _stored_sizes)
    _replace(FSDP, "fsdp2_load_full_state_dict", _loaded_shards)


def _replace(module: str, name: str, made_from: Callable[[Any], Any]) -> None:
    """Put what is made from a function in its place, once, and where accelerate offers it besides."""
    plain: Any = getattr(sys.modules.get(module), name, None)
    if plain is None or getattr(plain, "of_ao_lab", False):
        return
    ours: Any = functools.wraps(plain)(made_from(plain))
    ours.of_ao_lab = True
    for place in (sys.modules[module], sys.modules.get("accelerate.utils")):
        if hasattr(place, name):
            setattr(place, name, ours)


def _stored_sizes(plain: Any) -> Any:
    def compute_module_sizes(
        model: nn.Module,
        dtype: Any = None,
        special_dtypes: dict[str, Any] | None = None,
        buffers_only: bool = False,
    ) -> Any:
        sizes = plain(model, dtype, special_dtypes, buffers_only)
        if not buffers_only:
            for name, weight in _quantized(model, special_dtypes or {}):
                more = weight.nbytes - _assumed(weight, dtype)
                parts = name.split(".")
                for end in range(len(parts) + 1):
                    sizes[".".join(parts[:end])] += more
        return sizes

    return compute_module_sizes


def _quantized(model: nn.Module, left_out: dict[str, Any]) -> Iterator[tuple[str, QuantizedTensor]]:
    """Quantized weights, each once, but for those whose size a caller says."""
    for name, weight in model.named_parameters():
        if isinstance(weight, QuantizedTensor) and name not in left_out:
            yield name, weight


def _assumed(weight: QuantizedTensor, dtype: Any) -> int:
    """The bytes that accelerate reckons with: of the dense weight, or of a smaller dtype that was asked for."""
    modeling: Any = sys.modules[MODELING]
    size = modeling.dtype_byte_size(weight.dtype)
    if dtype is not None:
        size = min(size, modeling.dtype_byte_size(modeling._get_proper_dtype(dtype)))
    return int(weight.numel() * size)


def _loaded_shards(plain: Any) -> Any:
    def fsdp2_load_full_state_dict(
        accelerator: Any, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
    ) -> nn.Module:
        if not any(isinstance(getattr(p, "_local_tensor", p), QuantizedTensor) for p in model.parameters()):
            loaded: nn.Module = plain(accelerator, model, full_sd, cpu_offload)
            return loaded
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
        set_model_state_dict(model, dict(full_sd) if accelerator.is_main_process else {}, options=options)
        return model

    return fsdp2_load_full_state_dict


__all__ = ["register"]
