"""accelerate's FSDP2 of models of which one rank alone has the weights (`fsdp_cpu_ram_efficient_loading`, its default).

accelerate makes dense tensors on the other ranks and broadcasts into them, which the parts of a quantized weight do not go
into: processes hung or ended in the middle of it. torch's own `set_model_state_dict` does the same work and knows quantized
weights (`ao_lab.tensor.torch_changes.broadcast_state`); models without any go accelerate's way.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from ao_lab.tensor.quantized_tensor import QuantizedTensor

MODULE, NAME = "accelerate.utils.fsdp_utils", "fsdp2_load_full_state_dict"


def register() -> None:
    """Put it in place; a second call does nothing, nor does one of a version of accelerate without FSDP2."""
    plain: Any = getattr(sys.modules.get(MODULE), NAME, None)
    if plain is None or getattr(plain, "of_ao_lab", False):
        return

    @functools.wraps(plain)
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

    fsdp2_load_full_state_dict.of_ao_lab = True  # type: ignore[attr-defined]
    for module in (sys.modules[MODULE], sys.modules.get("accelerate.utils")):
        if hasattr(module, NAME):
            setattr(module, NAME, fsdp2_load_full_state_dict)


__all__ = ["register"]
