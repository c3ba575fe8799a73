"""torch's asynchronous checkpoints (`torch.distributed.checkpoint.async_save`) of quantized weights.

Before a checkpoint is written behind the training, torch copies the state to host memory, a storage at a time: a tensor with an
address is taken to have one. A quantized weight has the address of its codes, and no storage of its own. So it is copied here
part by part, each as torch copies plain tensors, with the memory that it keeps from one checkpoint to the next.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from ao_lab.tensor.quantized_tensor import QuantizedTensor

MODULE = "torch.distributed.checkpoint._state_dict_stager"


def register() -> None:
    """Let torch stage quantized weights by their parts; after `MODULE` is imported. A second call does nothing."""
    stager: Any = getattr(sys.modules[MODULE], "StateDictStager", None)
    plain: Any = getattr(stager, "_offload_tensor", None)
    if plain is None or hasattr(plain, "of_plain_tensors"):
        return

    @wraps(plain)
    def staged(self: Any, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        if not isinstance(x, QuantizedTensor):
            return plain(self, x, memo, non_blocking=non_blocking)
        # Preshuffled weights are those of a GPU.
        stored = x if x.device.type == "cpu" else x.plain
        made = stored.mapped(
            lambda part: self.deepcopy_with_tensor_offload(part, memo, non_blocking=non_blocking)
        )
        memo[id(x)] = made
        return made

    staged.of_plain_tensors = plain  # type: ignore[attr-defined]
    stager._offload_tensor = staged


__all__ = ["MODULE", "register"]
