"""torch's `set_model_state_dict(..., broadcast_from_rank0=True)` for models with quantized weights.

Rank 0 alone has the state there, and tells the others the shape and dtype of each tensor, of which they make dense ones to be
written to: pieces of a quantized weight do not go into these, and processes hung or ended in a collective. What a weight
is made of every rank knows by its own model. So rank 0 sends what its model's weight would take of the state by `copy_`, and
the others receive weights of that kind.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._state_dict_utils as utils


def receive_weights(kind: type) -> None:
    """Broadcast quantized weights (`kind`) part by part; a second call does nothing."""
    plain: Any = utils._broadcast_tensors
    if hasattr(plain, "of_dense_tensors"):
        return

    @functools.wraps(plain)
    def broadcast(
        full: dict[str, Any], local: dict[str, Any], keys: list[str], device: Any, pg: Any = None
    ) -> None:
        ours = [key for key in keys if isinstance(_piece(local.get(key)), kind)]
        for key in ours:
            _broadcast(full, local, key, device, pg)
        dense = [key for key in keys if key not in ours]
        for key in dense:
            if isinstance(full[key], kind):  # a weight for a dense one, which takes its values
                full[key] = full[key].dequantize()
        if dense:
            plain(full, local, dense, device, pg)

    broadcast.of_dense_tensors = plain  # type: ignore[attr-defined]
    module: Any = utils
    module._broadcast_tensors = broadcast


def _piece(value: Any) -> Any:
    """This rank's piece of a DTensor, else the tensor itself."""
    return getattr(value, "_local_tensor", value)


def _broadcast(full: dict[str, Any], local: dict[str, Any], key: str, device: Any, pg: Any) -> None:
    """One weight, in place in `local`, as torch's function does it with dense tensors."""
    group, own = pg or dist.distributed_c10d._get_default_group(), local[key]
    types = group._device_types
    sent_on = device if device.type in {found.type for found in types} else types[0]
    size = full[key].shape if isinstance(full[key], torch.Tensor) else full[key].size
    piece = _piece(own).plain
    if piece.is_meta:  # static scales of inputs too come from rank 0
        piece = piece.mapped(lambda part: torch.zeros_like(part, device=sent_on))
    weight: Any = piece.new_empty(size, device=sent_on)
    if isinstance(full[key], torch.Tensor):  # on rank 0
        weight.copy_(full[key].detach())
    dist.broadcast(weight, src=0, group=group)
    weight = weight.to(device)
    local[key] = (own, weight) if own is not _piece(own) else weight
    utils._distribute_tensors(local, [key], device, group)


__all__ = ["receive_weights"]
