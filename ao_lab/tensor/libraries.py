"""What other libraries do with a layer's weight in their own way, where a quantized one needs something else.

Each `register_...` is called once its library is imported (`ao_lab.install.transformers_hook`); a second call does nothing.

* accelerate's `infer_auto_device_map` multiplies a parameter's elements by the bytes of its dtype, which is that of the dense
  weight: here a quantized weight has the bytes that are stored. Its FSDP2 of models of which one rank alone has the weights
  (`fsdp_cpu_ram_efficient_loading`, its default) broadcasts into dense tensors, which the parts of a quantized weight do not go
  into: processes hung or ended in the middle of it. torch's own `set_model_state_dict` does the same work and knows quantized
  weights (`ao_lab.tensor.collectives`); models without any go accelerate's way.
* PEFT's `modules_to_save` trains a copy of a whole module, `trainable_token_indices` copies of rows. A copy of a quantized
  weight would be quantized, and does not train; so the copy is dequantized, as a user who asks to train it expects.
* torch's asynchronous checkpoints (`torch.distributed.checkpoint.async_save`) copy the state to host memory, a storage at a
  time: a tensor with an address is taken to have one. A quantized weight is copied part by part, each as plain tensors are,
  with the memory that torch keeps from one checkpoint to the next.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ao_lab.tensor.quantized_tensor import QuantizedTensor

MODELING, FSDP = "accelerate.utils.modeling", "accelerate.utils.fsdp_utils"
STAGER = "torch.distributed.checkpoint._state_dict_stager"


def register_accelerate() -> None:
    """Put ours in place in the modules that are imported; versions without FSDP2 stay as they are."""
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


def register_peft() -> None:
    """Put dense copies in place."""
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.utils.other import ModulesToSaveWrapper

    _follow(ModulesToSaveWrapper, "update", _copies_of_modules)
    _follow(TrainableTokensLayer, "update_layer", _copies_of_rows)


def _follow(kind: Any, name: str, then: Any) -> None:
    """Let `then(self)` run after a method."""
    method = getattr(kind, name)
    if getattr(method, "of_ao_lab", False):
        return

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        then(self)
        return result

    run.of_ao_lab = True  # type: ignore[attr-defined]
    setattr(kind, name, run)


def _copies_of_modules(wrapper: Any) -> None:
    make_dense(wrapper.modules_to_save)


def _copies_of_rows(layer: Any) -> None:
    make_dense(layer.trainable_tokens_delta)
    originals = layer.trainable_tokens_original
    for name in [*originals.keys()]:
        if isinstance(value := originals[name], QuantizedTensor):
            originals[name] = value.dequantize()


def make_dense(module: nn.Module) -> None:
    """Each quantized parameter below a module becomes a dense one, which requires a gradient if that did; shared ones one."""
    result: dict[int, nn.Parameter] = {}
    for part in module.modules():
        held: Any = part._parameters
        for name, value in held.items():
            if isinstance(value, QuantizedTensor):
                dense = result.setdefault(id(value), nn.Parameter(value.dequantize(), value.requires_grad))
                held[name] = dense


def register_async_checkpoints() -> None:
    """Let torch stage quantized weights by their parts; after `STAGER` is imported."""
    stager: Any = getattr(sys.modules[STAGER], "StateDictStager", None)
    plain: Any = getattr(stager, "_offload_tensor", None)
    if plain is None or hasattr(plain, "of_plain_tensors"):
        return

    @functools.wraps(plain)
    def staged(self: Any, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        if not isinstance(x, QuantizedTensor):
            return plain(self, x, memo, non_blocking=non_blocking)
        # Preshuffled weights are those of a GPU.
        stored = x if x.device.type == "cpu" else x.plain
        result = stored.mapped(
            lambda part: self.deepcopy_with_tensor_offload(part, memo, non_blocking=non_blocking)
        )
        memo[id(x)] = result
        return result

    staged.of_plain_tensors = plain  # type: ignore[attr-defined]
    stager._offload_tensor = staged


__all__ = ["make_dense", "register_accelerate", "register_async_checkpoints", "register_peft"]
