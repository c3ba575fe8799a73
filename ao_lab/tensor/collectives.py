"""Collectives of `QuantizedTensor`: what DTensor, and torch.distributed by itself, send of a weight.

Parts travel as they are stored, so no rank ever holds more than codes and scales. Tensors that go together are of one recipe
and one shape, as collectives of torch want them of one dtype and one shape. A reduction of codes means nothing: there is none.

A gathered weight is its pieces put together (`ao_lab.tensor.slicing.concatenate`), so scales that hold for every piece have to
be the same on every rank: ValueError, on every rank, where they are not. Tracers have no values; they take them to be the same.

Products take nothing of this file: DTensor runs those of `ao_lab.tensor.matmul_ops` on each rank's piece. A rank that has rows
of the weight (ColwiseParallel) computes its outputs' bits. A rank that has columns (RowwiseParallel) quantizes the slice of the
input that it multiplies: blocks of an input are those of one process, but a scale of a whole row or tensor is then of the
slice, so no coarser than in one process. The output is the ranks' sum, each with its share of the bias.

In torch's `set_model_state_dict(..., broadcast_from_rank0=True)` rank 0 alone has the state, and tells the others the shape and
dtype of each tensor, of which they make dense ones to be written to: pieces of a quantized weight do not go into these, and
processes hung or ended in a collective. What a weight is made of every rank knows by its own model. So rank 0 sends what its
model's weight would take of the state by `copy_`, and the others receive weights of that kind.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # enters _wrap_tensor_autograd
import torch.distributed._state_dict_utils as utils
from torch._C._distributed_c10d import _resolve_process_group

from ao_lab.gemm.operand import forget_arranged
from ao_lab.tensor import slicing
from ao_lab.tensor.fsdp import received, sent
from ao_lab.tensor.metadata import PARTS, PRESHUFFLED
from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.view_ops import stored_as, stored_dim, waited

functional = torch.ops._c10d_functional
c10d = torch.ops.c10d


@operation(functional.all_gather_into_tensor.default)
def _all_gather(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """The pieces of all ranks along axis 0, already waited for."""
    t, ranks, group = args
    return slicing.concatenate(_everywhere(t, ranks, group), stored_dim(t, 0))


@operation(torch.ops._dtensor.shard_dim_alltoall.default)
def _other_axis(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """From a shard of one axis to a shard of another: what gloo does everywhere, gather and slice."""
    t, gathered, sharded, group = args
    group = _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
    ranks, rank = group.size(), group.rank()
    whole = slicing.concatenate(_everywhere(t, ranks, group.group_name), stored_dim(t, gathered))
    return whole.chunk(ranks, sharded)[rank].clone()  # type: ignore[return-value]


@operation(functional.broadcast.default)
def _broadcast(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:

    def everywhere(part: torch.Tensor) -> torch.Tensor:
        return received(func(sent(part), *args[1:], **kwargs), part).reshape(part.shape)

    return args[0].in_rows.mapped(everywhere)  # type: ignore[no-any-return]


@operation(functional.wait_tensor.default, functional._wrap_tensor_autograd.default)
def _wait(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """At once also where torch would wait when a dense tensor is first used."""
    return args[0].mapped(functional.wait_tensor)  # type: ignore[no-any-return]


@operation(c10d.broadcast_.default, c10d.scatter_.default, c10d.allgather_.default)
def _in_place(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A collective into the memory of its first argument, one call for each part; done when this returns."""
    tensors = _flat(args)
    if any(not isinstance(t, QuantizedTensor) or _sent_as(t) != _sent_as(tensors[0]) for t in tensors):
        raise ValueError(f"{func} of {tensors}: all have to be QuantizedTensors of one recipe and one shape")
    work, layouts = None, {id(t): t.plain for t in tensors}
    plain, tensors = _replaced(args, layouts), list(layouts.values())
    for name in PARTS:
        if getattr(tensors[0], name) is None:
            continue
        moved: dict[int, torch.Tensor] = {}
        work = waited(func, [_parts_of(arg, name, moved) for arg in plain], kwargs)
        for t in _flat(plain[:1]):
            part = getattr(t, name)
            if part.data_ptr() != moved[id(t)].data_ptr():
                part.copy_(received(moved[id(t)], part).reshape(part.shape))
    for t in _flat(args[:1]):
        forget_arranged(layouts[id(t)].codes)
        if layouts[id(t)] is not t:  # preshuffled: weights travel plain, as other ranks may have them
            t.copy_(layouts[id(t)])
    return args[0], work


def _everywhere(t: QuantizedTensor, ranks: int, group: Any) -> list[QuantizedTensor]:
    """This weight's piece on every rank."""
    t.check_shaped()
    t = t.in_rows
    parts = {name: part for name, part in t.parts.items() if part is not None}
    known = {name: [part] * ranks for name, part in parts.items() if _traced_scalar(part)}
    for name, part in parts.items():
        if name not in known:
            # One after the other: of several under way at once gloo has lost some.
            gathered = functional.wait_tensor(functional.all_gather_into_tensor(sent(part), ranks, group))
            known[name] = [received(piece, part).reshape(part.shape) for piece in gathered.chunk(ranks)]
    return [t.remade({name: found[rank] for name, found in known.items()}) for rank in range(ranks)]


def _sent_as(t: QuantizedTensor) -> tuple[Any, ...]:
    """What tensors of one collective must have in common."""
    layout = "plain" if t.meta.layout == PRESHUFFLED else t.meta.layout
    return *stored_as(t), layout, [name for name, part in t.parts.items() if part is not None]


def _traced_scalar(part: torch.Tensor) -> bool:
    return part.dim() == 0 and type(part) is not torch.Tensor


def _flat(values: Any) -> list[Any]:
    """The tensors in nested lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _flat(value)]
    return []


def _replaced(value: Any, tensors: dict[int, QuantizedTensor]) -> Any:
    """Nested lists with other tensors in place of these, by their ids."""
    if isinstance(value, QuantizedTensor):
        return tensors[id(value)]
    return [_replaced(item, tensors) for item in value] if isinstance(value, (list, tuple)) else value


def _parts_of(value: Any, name: str, moved: dict[int, torch.Tensor]) -> Any:
    """Nested lists with a part, as it is sent, in place of each tensor; `moved` remembers it by its tensor."""
    if isinstance(value, QuantizedTensor):
        return moved.setdefault(id(value), sent(getattr(value, name)))
    return [_parts_of(item, name, moved) for item in value] if isinstance(value, (list, tuple)) else value


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
            _state_broadcast(full, local, key, device, pg)
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


def _state_broadcast(full: dict[str, Any], local: dict[str, Any], key: str, device: Any, pg: Any) -> None:
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


receive_weights(QuantizedTensor)
