"""Quantized weights of models that transformers shards while it reads them (`tp_plan`, `DistributedConfig`), and their saving.

transformers makes DTensors of a model's parameters, reads of each tensor in the files the slice that belongs to this rank, and
wraps what it has read. Slices of codes, scales and zero points are not those of a weight, and scales of a slice are not those
of the whole. So tensors of quantized weights are read whole, and of the whole weight each rank keeps its shard: the codes and
scales of one process. A weight whose blocks the plan would cut in two is a ValueError that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.tensor.quantized_tensor import QuantizedTensor

#: What an error about a slice says to do, which is nothing that one can do here.
WAY_OUT = re.compile(r"[;,] (or )?dequantize\(\) first$")


class ShardedReading:
    """The quantized weights (by their names) of a model that is being read.

    To be made before transformers shards the model; `shards` and `close` do nothing where it does not.
    """

    def __init__(self, model: Any, changes: Callable[[str], bool]) -> None:
        self.model = model
        self.error: ValueError | None = None
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if changes(name):
                parameter.requires_grad_(False)

        def whole(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for name, value in state.items():
                if is_sharded(value) and changes(name):
                    state[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")

        # transformers asks state_dict() which of the tensors that it reads are sharded.
        self._hook = model.register_state_dict_post_hook(whole)

    def shards(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's shards of whole weights, those that are sharded. After an error nothing: `close` raises it."""
        result = {}
        for name, weight in weights.items():
            try:
                result[name] = self._shard(name, weight)
            except ValueError as error:
                self.error = self.error or error
        return {} if self.error else result

    def _shard(self, name: str, weight: Any) -> Any:
        placed = self.model.get_parameter(name)
        if not isinstance(weight, QuantizedTensor) or not is_sharded(placed):
            return weight
        return nn.Parameter(shard_of(name, weight, placed), requires_grad=False)

    def close(self) -> None:
        """Leave the model as it was found; the first error, if there was one."""
        self._hook.remove()
        if self.error is not None:
            raise self.error


def is_sharded(value: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def shard_of(name: str, weight: QuantizedTensor, placed: Any) -> QuantizedTensor:
    """This rank's piece of a weight, placed as the DTensor `placed`; ValueError where that cuts a block in two."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    try:
        piece: Any = DtensorShardOperation(placed).shard_tensor(weight)
    except ValueError as error:
        reason, ranks = WAY_OUT.sub("", str(error)), placed.device_mesh.size()
        raise ValueError(
            f"{shown(name)} in {weight.scheme.name} is not sharded as {list(placed.placements)} over {ranks} processes: "
            f"{reason}; leave the layer dense, quantize it by a scheme whose blocks are not cut, or choose another number of "
            "processes or another tp_plan"
        ) from error
    # Of its own memory, so that the whole weight can be freed, in rows, as collectives send it.
    return piece.mapped(lambda part: part.clone(memory_format=torch.contiguous_format))  # type: ignore[no-any-return]


def full_weight(parameter: Any) -> Any:
    """The whole of a parameter, gathered where it is sharded: every rank has to call this."""
    return parameter.full_tensor() if is_sharded(parameter) else parameter


def placed_as(name: str, weight: nn.Parameter, placed: Any) -> nn.Parameter:
    """A whole quantized weight sharded as the DTensor `placed`; itself where that is none."""
    if not is_sharded(placed):
        return weight
    whole: Any = weight
    return nn.Parameter(_placed(shard_of(name, whole.detach(), placed), placed), requires_grad=False)


def dense(weight: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """The values of a quantized weight, sharded as it is."""
    if not is_sharded(weight):
        return QuantizedTensor.dequantize(weight, dtype)
    return _placed(weight._local_tensor.dequantize(dtype), weight)


def _placed(piece: torch.Tensor, like: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    options: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    made: torch.Tensor = DTensor.from_local(piece, like.device_mesh, like.placements, **options)
    return made


def holds_quantized(parameter: Any) -> bool:
    """Whether a parameter is a quantized weight, or this rank's shard is one of."""
    return isinstance(getattr(parameter, "_local_tensor", parameter), QuantizedTensor)


@contextmanager
def gathered(model: nn.Module) -> Iterator[bool]:
    """Whole weights in place of sharded ones, which every rank has to ask for; yields whether this rank is to write them."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:  # FSDP2 leaves the root's weights whole after a forward
            reshard()
    places = [
        (module, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if is_sharded(p)
    ]
    known: dict[int, nn.Parameter] = {}
    for _, _, p in places:
        if id(p) not in known:
            known[id(p)] = nn.Parameter(full_weight(p).detach(), requires_grad=False)
    try:
        for module, name, p in places:
            module._parameters[name] = known[id(p)]
        yield not _in_group() or torch.distributed.get_rank() == 0
    finally:
        for module, name, p in places:
            module._parameters[name] = p
        if places:
            torch.distributed.barrier()


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


__all__ = ["ShardedReading", "dense", "full_weight", "gathered", "holds_quantized", "is_sharded", "placed_as"]
