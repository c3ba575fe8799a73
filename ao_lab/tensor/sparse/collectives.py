"""Collectives of `SparseQuantizedTensor`: those of `ao_lab.tensor.collectives`, with metadata among the parts that travel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives  # enters the operators
from torch._C._distributed_c10d import _resolve_process_group

from ao_lab.gemm.sparse import forget_arranged
from ao_lab.tensor.sparse import slicing
from ao_lab.tensor.sparse.metadata import received, sent
from ao_lab.tensor.sparse.registry import sparse_operation
from ao_lab.tensor.sparse.sparse_tensor import SparseQuantizedTensor
from ao_lab.tensor.view_ops import stored_as

functional = torch.ops._c10d_functional
c10d = torch.ops.c10d


@sparse_operation(functional.all_gather_into_tensor.default)
def _all_gather(func: Any, args: Any, kwargs: Any) -> SparseQuantizedTensor:
    """The pieces of all ranks along axis 0, already waited for."""
    t, ranks, group = args
    return slicing.concatenate(_everywhere(t, ranks, group), 0)


@sparse_operation(torch.ops._dtensor.shard_dim_alltoall.default)
def _other_axis(func: Any, args: Any, kwargs: Any) -> SparseQuantizedTensor:
    """From a shard of one axis to a shard of another: gathered and sliced."""
    t, gathered, sharded, group = args
    group = _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
    whole = slicing.concatenate(_everywhere(t, group.size(), group.group_name), gathered)
    return whole.chunk(group.size(), sharded)[group.rank()].clone()  # type: ignore[return-value]


@sparse_operation(functional.broadcast.default)
def _broadcast(func: Any, args: Any, kwargs: Any) -> SparseQuantizedTensor:
    t: SparseQuantizedTensor = args[0]

    def everywhere(part: torch.Tensor) -> torch.Tensor:
        return received(func(sent(part), *args[1:], **kwargs), part).reshape(part.shape)

    return t.remade({name: None if part is None else everywhere(part) for name, part in t.parts.items()})


@sparse_operation(c10d.broadcast_.default, c10d.scatter_.default, c10d.allgather_.default)
def _in_place(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A collective into the memory of its first argument, one call for each part; done when this returns."""
    tensors = _flat(args)
    if any(not isinstance(t, SparseQuantizedTensor) or _sent_as(t) != _sent_as(tensors[0]) for t in tensors):
        raise ValueError(f"{func} of {tensors}: all have to be 2:4 tensors of one recipe and one shape")
    work = None
    for name, first in tensors[0].parts.items():
        if first is None:
            continue
        moved: dict[int, torch.Tensor] = {}
        _, work = func(*(_parts_of(arg, name, moved) for arg in args), **kwargs)
        work.wait()
        for t in _flat(args[:1]):
            part = t.parts[name]
            if part.data_ptr() != moved[id(t)].data_ptr():
                part.copy_(received(moved[id(t)], part).reshape(part.shape))
    for t in _flat(args[:1]):
        forget_arranged(t.codes)
    return args[0], work


def _everywhere(t: SparseQuantizedTensor, ranks: int, group: Any) -> list[SparseQuantizedTensor]:
    """This weight's piece on every rank."""
    t.check_shaped()
    known: dict[str, list[torch.Tensor]] = {}
    for name, part in t.parts.items():
        if part is None:
            continue
        gathered = functional.wait_tensor(functional.all_gather_into_tensor(sent(part), ranks, group))
        known[name] = [received(piece, part).reshape(part.shape) for piece in gathered.chunk(ranks)]
    return [
        t.remade({**t.parts, **{name: found[rank] for name, found in known.items()}}) for rank in range(ranks)
    ]


def _sent_as(t: SparseQuantizedTensor) -> tuple[Any, ...]:
    """What tensors of one collective must have in common."""
    return *stored_as(t), [name for name, part in t.parts.items() if part is not None]


def _flat(values: Any) -> list[Any]:
    """The tensors in nested lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    return (
        [tensor for value in values for tensor in _flat(value)] if isinstance(values, (list, tuple)) else []
    )


def _parts_of(value: Any, name: str, moved: dict[int, torch.Tensor]) -> Any:
    """Nested lists with a part, in rows, in place of each tensor; `moved` remembers it by its tensor."""
    if isinstance(value, SparseQuantizedTensor):
        part: Any = value.parts[name]
        return moved.setdefault(id(value), sent(part))
    return [_parts_of(item, name, moved) for item in value] if isinstance(value, (list, tuple)) else value
